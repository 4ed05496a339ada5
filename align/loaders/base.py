"""What a loader module holds: a table of how one system, in some releases, builds and fills an EAGLE-3 draft.

Shapes: H the draft's hidden size, W the width of a tap (the target's hidden size), A taps, V the target's vocabulary,
D the draft's. A draft's tensors are named here as ``layers.0.self_attn.q_proj.weight``, ``fc.weight``,
``lm_head.weight`` and so on, whatever prefix or alias a checkpoint uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.align.draft import Draft, DraftConfig
from eyas.taps.conventions.entry import Versions, label, look_up

Family = Literal["llama", "qwen3", "deepseek"]
# The vocabulary maps have checks of their own; rotary caches follow from the config, and every engine drops them.
_NO_LOSS = ("d2t", "t2d", "rotary_emb.", "rotary_pos_emb.")
# Copies of the target's tensors that a trainer needs and the draft's forward does not: no loss where they are dropped.
_TRAINERS_OWN = ("verifier_norm.", "verifier_lm_head.")

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Where a system reads a switch of the draft's forward; with no place it has none, and does ``default``."""

    places: tuple[str, ...] = ()  # dotted keys; the first that is set counts
    default: bool = False

    def read(self, config: Mapping[str, Any]) -> bool:
        values = [look_up(config, place) for place in self.places]
        return bool(next((value for value in values if value is not None), self.default))


ABSENT = Flag()  # the system's forward has no such part
TOP = {name: Flag(places=(name,)) for name in FLAGS}


def _raw(config: DraftConfig) -> Mapping[str, Any]:
    return config.raw


def _first_architecture(config: DraftConfig) -> str | None:
    return config.architecture


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How one system, in some releases, reads the config and the tensors of drafts of one family."""

    system: str
    versions: Versions
    source: str  # file of the system
    family: Family
    architectures: frozenset[str]  # names it knows this family by
    view: Callable[[DraftConfig], Mapping[str, Any]] = _raw  # the config as the system's model code sees it
    architecture: Callable[[DraftConfig], str | None] = _first_architecture  # the name it looks up
    prefixes: tuple[str, ...] = ("",)  # before any tensor's name but lm_head's
    layer_names: tuple[str, ...]  # e.g. "midlayer." for layer 0, "layers.{i}."
    renames: Mapping[str, str] = field(default_factory=dict)
    max_layers: int | None = None
    num_taps_places: tuple[str, ...] = ()  # where it finds how many taps fc takes: a number or a list; else 3
    flags: Mapping[str, Flag]
    reads_rope_parameters: bool | None  # else rope_theta and rope_scaling alone; None: not known
    reads_attention_bias: bool
    later_layer_norm: str  # which norm layers after the first have before attention
    unknown_tensors: Literal["dropped", "refused"]
    dropped: tuple[str, ...]  # parts of names that it drops without a word, whatever it does with unknown ones
    embeddings: Literal["target", "own"]  # own: the checkpoint's if there, else the target's
    missing_head: Literal["target", "random"]  # what lm_head is where the checkpoint has none and a draft vocabulary
    head_without_draft_vocab: Literal["own", "target"]  # whose lm_head counts where draft_vocab_size is null
    needs_draft_vocab_key: bool = False  # it fails where the key is missing (null is a value)
    full_vocab_d2t: Literal["used", "refused"] = "used"  # a d2t where the draft has the target's vocabulary

    @property
    def label(self) -> str:
        return label(self.system, self.versions)

    @property
    def cite(self) -> str:
        """System, release and file, as a finding's source."""
        return f"{self.label}, {self.source}"


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What a system makes of one draft checkpoint."""

    loader: Loader
    num_taps: int  # that fc takes
    flags: Mapping[str, bool]
    expected: Mapping[str, tuple[int, ...]]  # parameter -> shape
    taken: Mapping[str, str]  # parameter -> the checkpoint's name for it
    unknown: tuple[str, ...]  # tensors that no parameter takes
    dropped: tuple[str, ...]  # tensors that it drops without a word

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that the checkpoint does not fill, heads and embeddings (which have rules of their own) aside."""
        own = ("embed_tokens.weight", "lm_head.weight")
        return tuple(name for name in self.expected if name not in self.taken and name not in own)


def load(loader: Loader, draft: Draft) -> Loading:
    """Follow ``loader`` through ``draft``'s config and tensor names."""
    config, view = draft.config, loader.view(draft.config)
    num_taps = _num_taps(loader, view)
    flags = {name: loader.flags[name].read(view) for name in FLAGS}
    expected = _parameters(loader, config, num_taps, flags, bias=bool(view.get("attention_bias")))
    taken: dict[str, str] = {}
    unknown, dropped = [], []
    for name in draft.tensors:
        parameter = _parameter(loader, name)
        if parameter in expected:
            taken[parameter] = name
        elif any(part in name for part in _NO_LOSS):
            continue
        elif any(part in name for part in loader.dropped):
            dropped.append(name)
        elif loader.unknown_tensors != "dropped":
            unknown.append(name)
        elif not name.startswith(_TRAINERS_OWN):
            dropped.append(name)
    return Loading(
        loader=loader,
        num_taps=num_taps,
        flags=flags,
        expected=expected,
        taken=taken,
        unknown=tuple(unknown),
        dropped=tuple(dropped),
    )


def _num_taps(loader: Loader, view: Mapping[str, Any]) -> int:
    for place in loader.num_taps_places:
        value = look_up(view, place)
        if isinstance(value, list) and value:
            return len(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 3


def _parameter(loader: Loader, name: str) -> str:
    """The parameter that a checkpoint's tensor of this name fills, if there is one of that name."""
    for old, new in loader.renames.items():
        name = name.replace(old, new)
    if name.startswith("lm_head."):
        return name
    prefix = next((p for p in sorted(loader.prefixes, key=len, reverse=True) if name.startswith(p)), None)
    if prefix is None:
        return f"?{name}"
    name = name[len(prefix) :]
    if not name.startswith(("midlayer.", "layers.")):
        return name
    for template in loader.layer_names:
        pattern = re.escape(template).replace(re.escape("{i}"), r"(?P<i>\d+)")
        if match := re.match(pattern, name):
            return f"layers.{match.groupdict().get('i', 0)}.{name[match.end() :]}"
    return f"?{name}"


def _parameters(
    loader: Loader, config: DraftConfig, num_taps: int, flags: Mapping[str, bool], *, bias: bool
) -> dict[str, tuple[int, ...]]:
    H, W = config.hidden_size, config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, num_taps * W), "norm.weight": (H,)}
    if flags["norm_before_fc"]:
        shapes["input_norm.weight"] = (num_taps * W,)
    if flags["fc_norm"]:
        shapes |= {f"fc_norm.{tap}.weight": (W,) for tap in range(num_taps)}
    for layer in range(config.num_layers):
        shapes |= _layer(loader, config, layer, bias=bias and loader.reads_attention_bias)
    shapes["embed_tokens.weight"] = (config.vocab_size, H)
    shapes["lm_head.weight"] = (config.draft_vocab_size or config.vocab_size, H)
    return shapes


def _layer(loader: Loader, config: DraftConfig, layer: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    H, F = config.hidden_size, config.intermediate_size
    width = 2 * H if layer == 0 else H  # the first layer takes the token's embedding beside the hidden state
    prefix = f"layers.{layer}"
    norms = ("hidden_norm", "input_layernorm") if layer == 0 else (loader.later_layer_norm,)
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.{norm}.weight": (H,) for norm in norms}
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (H,)
    shapes |= {f"{prefix}.mlp.{part}_proj.weight": (F, H) for part in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj.weight"] = (H, F)
    attention = _mla(config, width) if loader.family == "deepseek" else _gqa(config, width, bias=bias)
    if loader.family == "qwen3":
        attention |= {f"{part}_norm.weight": (config.head_dim,) for part in ("q", "k")}
    return shapes | {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}


def _gqa(config: DraftConfig, width: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (size, width) for part, size in rows.items()}
    if bias:
        shapes |= {f"{part}_proj.bias": (size,) for part, size in rows.items()}
    return shapes | {"o_proj.weight": (config.hidden_size, queries)}


def _mla(config: DraftConfig, width: int) -> dict[str, tuple[int, ...]]:
    sizes = {key: int(config.layer.get(key) or 0) for key in _MLA_SIZES}
    q_rank, kv_rank, nope, rope, value = sizes.values()
    heads = config.num_heads
    return {
        "q_a_proj.weight": (q_rank, width),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": (kv_rank + rope, width),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "o_proj.weight": (config.hidden_size, heads * value),
    }


_MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
