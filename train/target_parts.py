"""The parts of a target that training needs, read from its safetensors files without loading the target.

Its embedding, its lm_head (or the rows of the draft vocabulary), its final norm, and how its logits follow. Which
tensors they are is told by their names' last part and by their shapes; vision towers, layers and multi-token-prediction
modules are left out. Only the files that hold them are opened (or downloaded).

Shapes: V vocab_size, Vd rows asked for, H hidden_size, N rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.taps.errors import EyasError
from eyas.taps.target import language_configs

if TYPE_CHECKING:
    from eyas.shards.identity import TargetIdentity

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings", "embedding")
_HEADS = ("lm_head", "embed_out", "output", "output_layer")
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "ln_out")
# Parts of a name that belong to no language model's ends.
_ELSEWHERE = (
    "layers", "h", "blocks", "vision_tower", "vision_model", "visual", "vision_encoder", "audio_tower", "audio_encoder",
    "mm_projector", "multi_modal_projector", "mtp", "encoder", "talker", "token2wav", "code2wav", "position_embeddings",
)  # fmt: skip
_PLAIN = {"BF16", "F16", "F32", "F64"}
# Final norms that multiply by 1 + weight, in transformers 5.24 (each model's modeling file).
_OFFSET_NORMS = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "t5gemma", "t5gemma2", "qwen3_next",
    "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "minimax_m3_vl", "minimax_m3_vl_text",
    "step3p7", "step3p7_text", "muse_spark", "muse_spark_text", "muse_glimmer", "muse_glimmer_text",
}  # fmt: skip
_LAYER_NORMS = {"cohere", "cohere2", "gpt_neox", "gpt2", "phi", "falcon", "stablelm", "starcoder2", "bloom", "mpt"}
_EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon", "rms_norm_epsilon")

NormKind = Literal["rms", "rms_offset", "layer"]


class TargetPartsError(EyasError):
    """The target's files lack a part, hold it in a form that is not supported, or leave open which tensor it is."""


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """Frozen tensors of the target, and its way from last hidden state to logits:
    ``softcap(scale * (head @ norm(hidden) + bias))``, softcap(x) = cap * tanh(x / cap)."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H], or [Vd, H] where rows were asked for; the embedding's own memory where tied and whole
    head_bias: Tensor | None  # [V] or [Vd]
    norm_weight: Tensor  # [H], float32
    norm_bias: Tensor | None  # [H], float32
    norm_kind: NormKind  # rms: * weight; rms_offset: * (1 + weight), Gemma's; layer: LayerNorm
    norm_eps: float
    logit_scale: float
    softcap: float | None

    def as_captured(self, target: TargetIdentity) -> TargetParts:
        """With what a capture found on the running model instead of what its config suggests: models apply the same
        keys in different ways."""
        return dataclasses.replace(
            self,
            norm_eps=self.norm_eps if target.final_norm_eps is None else target.final_norm_eps,
            logit_scale=target.logit_scale,
            softcap=target.logit_softcap,
        )

    def final(self, hidden: Tensor) -> Tensor:
        """Tap ``after:{L-1}`` [N, H] -> tap ``final`` [N, H]: the target's final norm, in float32 at least."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.norm_kind == "layer":
            bias = None if self.norm_bias is None else self.norm_bias.to(wide.dtype)
            return F.layer_norm(wide, wide.shape[-1:], self.norm_weight.to(wide.dtype), bias, self.norm_eps).to(
                hidden.dtype
            )
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
        if self.norm_kind == "rms_offset":
            return (normed * (1 + self.norm_weight)).to(hidden.dtype)
        return self.norm_weight.to(hidden.dtype) * normed.to(hidden.dtype)

    def logits(self, final: Tensor) -> Tensor:
        """Tap ``final`` [N, H] -> logits of ``head``'s rows [N, V or Vd], in its dtype as the target gives them."""
        bias = None if self.head_bias is None else self.head_bias.to(final.dtype)
        logits = F.linear(final, self.head.to(final.dtype), bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def rows(self, ids: Tensor) -> TargetParts:
        """With the rows ``ids`` int64 [Vd] of a whole lm_head."""
        bias = None if self.head_bias is None else self.head_bias[ids.to(self.head_bias.device)]
        return dataclasses.replace(self, head=self.head[ids.to(self.head.device)], head_bias=bias)


def load_target_parts(
    target: Path | str,
    *,
    rows: Tensor | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> TargetParts:
    """Read the parts of ``target``, a folder or a hub repository.

    rows: int64 [Vd], the draft vocabulary's ids: lm_head's rows to keep; None: all of the vocabulary (rows that pad it
    are cut off). Raises TargetPartsError.
    """
    files = _Files(str(target), revision)
    outer = files.json("config.json")
    if outer is None:
        raise TargetPartsError(f"--target {target}: no config.json there, expected a target's folder or repository")
    configs = language_configs(outer)
    config = {**_defaults(configs[-1]), **configs[-1]}
    hidden_size, vocab_size = (_number(files, config, key) for key in ("hidden_size", "vocab_size"))
    names = files.names()
    embedding_name = files.find(names, _EMBEDDINGS, "weight", "token embedding", (vocab_size, hidden_size))
    norm_name = files.find(names, _NORMS, "weight", "final norm", (0, hidden_size))
    assert embedding_name is not None
    assert norm_name is not None
    head_name = None
    if not _is_tied(configs):
        head_name = files.find(names, _HEADS, "weight", "lm_head", (vocab_size, hidden_size), needed=False)
        packed = [name for name in names if name.rpartition(".")[0].rpartition(".")[2] in _HEADS]
        if head_name is None and packed:
            raise TargetPartsError(f"--target {target}: lm_head is quantized ({packed[0]}), expected plain weights")
    embedding = files.read(embedding_name, dtype)[:vocab_size]
    whole = embedding if head_name is None else files.read(head_name, dtype)[:vocab_size]  # [V, H]
    bias_name = None if head_name is None else f"{head_name.rpartition('.')[0]}.bias"
    bias = files.read(bias_name, dtype)[:vocab_size] if bias_name in names else None  # [V]
    norm_bias_name = f"{norm_name.rpartition('.')[0]}.bias"
    norm_bias = files.read(norm_bias_name, torch.float32) if norm_bias_name in names else None
    if rows is not None:
        if len(rows) and int(rows.max()) >= len(whole):
            raise TargetPartsError(
                f"--target {target}: id {int(rows.max())} of the draft vocabulary is beyond lm_head's {len(whole)} rows"
            )
        whole = whole[rows.cpu()]
        bias = None if bias is None else bias[rows.cpu()]
    placed = embedding.to(device)
    return TargetParts(
        embedding=placed,
        head=placed if whole is embedding else whole.to(device),
        head_bias=None if bias is None else bias.to(device),
        norm_weight=files.read(norm_name, torch.float32).to(device),
        norm_bias=None if norm_bias is None else norm_bias.to(device),
        norm_kind=_norm_kind(config, has_bias=norm_bias is not None),
        norm_eps=_norm_eps(config),
        logit_scale=_logit_scale(config),
        softcap=_softcap(config),
    )


@dataclass(frozen=True, kw_only=True)
class TargetConstants:
    """The numbers of TargetParts that config.json and the checkpoint's headers say, without reading a tensor."""

    norm_kind: NormKind
    norm_eps: float
    logit_scale: float
    softcap: float | None
    head_bias: bool
    head_rows: int  # at least the vocabulary: some checkpoints pad


def read_target_constants(target: Path | str, *, revision: str | None = None) -> TargetConstants:
    """Of ``target``, a folder or a hub repository. Where no safetensors are at hand, the head counts as plain.

    Raises TargetPartsError.
    """
    files = _Files(str(target), revision)
    outer = files.json("config.json")
    if outer is None:
        raise TargetPartsError(f"--target {target}: no config.json there, expected a target's folder or repository")
    configs = language_configs(outer)
    config = {**_defaults(configs[-1]), **configs[-1]}
    hidden_size, vocab_size = (_number(files, config, key) for key in ("hidden_size", "vocab_size"))
    head_bias, norm_bias, head_rows = False, False, vocab_size
    if Path(target).is_dir() and (files.path(_INDEX) or files.path(_SINGLE)):
        names = files.names()
        norm = files.find(names, _NORMS, "weight", "final norm", (0, hidden_size), needed=False)
        norm_bias = norm is not None and f"{norm.rpartition('.')[0]}.bias" in names
        lasts = _EMBEDDINGS if _is_tied(configs) else _HEADS
        head = files.find(names, lasts, "weight", "lm_head", (vocab_size, hidden_size), needed=False)
        if head is not None:
            head_rows = files.shape(head)[0]
            head_bias = not _is_tied(configs) and f"{head.rpartition('.')[0]}.bias" in names
    return TargetConstants(
        norm_kind=_norm_kind(config, has_bias=norm_bias),
        norm_eps=_norm_eps(config),
        logit_scale=_logit_scale(config),
        softcap=_softcap(config),
        head_bias=head_bias,
        head_rows=head_rows,
    )


def _norm_eps(config: Mapping[str, Any]) -> float:
    return next((float(config[key]) for key in _EPS_KEYS if config.get(key) is not None), 1e-6)


def _softcap(config: Mapping[str, Any]) -> float | None:
    return float(cap) if (cap := config.get("final_logit_softcapping")) else None


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers takes keys for that config.json leaves out: it writes no defaults inside multimodal configs."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    return CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}


def _is_tied(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether lm_head is the embedding, if the checkpoint holds both: the innermost config that says so counts."""
    said = [part["tie_word_embeddings"] for part in configs if "tie_word_embeddings" in part]
    return bool(said[-1]) if said else False


def _norm_kind(config: Mapping[str, Any], *, has_bias: bool) -> NormKind:
    kind = config.get("model_type")
    if has_bias or kind in _LAYER_NORMS:
        return "layer"
    return "rms_offset" if kind in _OFFSET_NORMS else "rms"


def _logit_scale(config: Mapping[str, Any]) -> float:
    """Cohere and HyperCLOVA X multiply, Granite divides (transformers' modeling files); ``as_captured`` overrules."""
    if scale := config.get("logit_scale") or config.get("lm_head_multiplier"):
        return float(scale)
    if scaling := config.get("logits_scaling"):
        return float(scaling) if config.get("model_type") == "hyperclovax" else 1 / float(scaling)
    return 1.0


def _number(files: _Files, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key, config.get({"hidden_size": "n_embd"}.get(key, "")))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TargetPartsError(f"--target {files.target}: config.json has no {key} (found {value!r})")
    return value


class _Files:
    """A target's files by name, downloaded one by one where it is a hub repository."""

    def __init__(self, target: str, revision: str | None) -> None:
        self.target, self._revision = target, revision
        self._files: dict[str, str] = {}  # tensor -> its file

    def path(self, name: str) -> Path | None:
        from transformers.utils import cached_file

        try:
            found = cached_file(self.target, name, revision=self._revision, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise TargetPartsError(f"--target {self.target}: no {name} there: {error}") from error
        return None if found is None else Path(found)

    def json(self, name: str) -> dict[str, Any] | None:
        path = self.path(name)
        if path is None:
            return None
        try:
            value = json.loads(path.read_bytes())
        except ValueError as error:
            raise TargetPartsError(f"{path}: unreadable ({error})") from error
        if not isinstance(value, dict):
            raise TargetPartsError(f"{path}: expected a JSON object")
        return value

    def names(self) -> list[str]:
        """Every tensor of the checkpoint, by the index where there is one."""
        index = self.json(_INDEX)
        if index is not None and isinstance(weight_map := index.get("weight_map"), dict):
            if bad := [name for name in weight_map.values() if Path(str(name)).name != name]:
                raise TargetPartsError(f"--target {self.target}: {_INDEX}: {bad[0]!r} is no file of this folder")
            self._files = {str(tensor): str(file) for tensor, file in weight_map.items()}
            return list(self._files)
        path = self.path(_SINGLE)
        if path is None:
            raise TargetPartsError(
                f"--target {self.target}: neither {_INDEX} nor {_SINGLE} there: save the target as safetensors"
            )
        with _opened(path) as file:
            self._files = dict.fromkeys(file.keys(), _SINGLE)
        return list(self._files)

    def find(
        self,
        names: list[str],
        lasts: tuple[str, ...],
        kind: str,
        what: str,
        shape: tuple[int, int],
        *,
        needed: bool = True,
    ) -> str | None:
        """The tensor ``*.last.kind`` of shape [at least V, H] or [H] (V == 0), outside of layers and towers."""
        candidates = []
        for name in names:
            *outer, last, own = name.split(".") if "." in name else ("", "", name)
            if own == kind and last in lasts and not set(outer) & set(_ELSEWHERE):
                found = self.shape(name)
                if found == (shape[1],) if shape[0] == 0 else found[1:] == (shape[1],) and found[0] >= shape[0]:
                    candidates.append(name)
        if len(candidates) == 1:
            return candidates[0]
        if not candidates and not needed:
            return None
        wanted = f"[{shape[1]}]" if shape[0] == 0 else f"[{shape[0]} or more, {shape[1]}]"
        raise TargetPartsError(
            f"--target {self.target}: expected one {what} of shape {wanted} "
            f"({', '.join(f'*.{last}.{kind}' for last in lasts[:3])}, ...), found {', '.join(candidates) or 'none'}"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        with _opened(self._file(name)) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        path = self._file(name)
        with _opened(path) as file:
            if (stored := file.get_slice(name).get_dtype()) not in _PLAIN:
                raise TargetPartsError(
                    f"{path}: {name} is {stored}, expected one of {', '.join(sorted(_PLAIN))}: "
                    f"quantized embeddings and lm_heads are not read"
                )
            return file.get_tensor(name).to(dtype)  # type: ignore[no-any-return]

    def _file(self, name: str) -> Path:
        path = self.path(self._files[name])
        if path is None:
            raise TargetPartsError(f"--target {self.target}: {self._files[name]}, which holds {name}, is missing")
        return path


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TargetPartsError(f"{path}: unreadable ({error})") from error
