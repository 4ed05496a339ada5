"""SGLang: unknown tensors are dropped in silence, missing ones stay random, the embeddings are always the target's.

Read in 0.5.2, 0.5.3, 0.5.6, 0.5.9 to 0.5.23 (post releases 0.5.12.post1 and 0.5.13.post1 too):

    srt/models/llama_eagle3.py      up to 0.5.11 one layer, three taps, no norm switch, and ``layers.0.*`` fits nothing
                                    (the layer is ``midlayer``); from 0.5.12 fc_norm (or use_aux_norm), norm_output,
                                    any number of taps; from 0.5.17 norm_before_fc. No release has norm_before_residual:
                                    the residual is always taken before hidden_norm. qkv never has a bias.
    srt/models/kimi_k25_eagle3.py   MLA drafts, from 0.5.12; fc_norm and norm_output from 0.5.13
    srt/models/llama.py             rope_parameters from 0.5.10 on; before, rope_theta and rope_scaling alone
    srt/speculative/eagle_worker.py, eagle_worker_v2.py   ``set_embed`` always; ``set_embed_and_head`` where
                                    draft_vocab_size is null; without d2t a draft id is taken for a target id

``config.draft_vocab_size`` is read as an attribute in llama_eagle3.py: a config without the key fails, null is a value.
"""

from eyas.align.loaders.base import ABSENT, TOP, Flag, Loader

_NESTED_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
_LLAMA = frozenset({"LlamaForCausalLMEagle3"})
_MLA = frozenset({"Eagle3DeepseekV2ForCausalLM"})
_FC_NORM = Flag(places=("fc_norm", "use_aux_norm"))
_NORM_BEFORE_FC = Flag(places=("eagle_config.norm_before_fc", "norm_before_fc"))
_NO_FLAGS = {"norm_before_residual": ABSENT, "norm_before_fc": ABSENT, "fc_norm": ABSENT, "norm_output": ABSENT}
_LEGACY_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def _llama(first: str, last: str, **differences: object) -> Loader:
    table: dict[str, object] = {
        "system": "sglang",
        "versions": (first, last),
        "source": "srt/models/llama_eagle3.py",
        "family": "llama",
        "architectures": _LLAMA,
        "prefixes": ("", "model."),
        "layer_names": ("midlayer.", "layers.{i}."),
        "renames": _LEGACY_NAMES,
        "num_taps_places": ("num_aux_hidden_states", _NESTED_IDS),
        "flags": {**_NO_FLAGS, "fc_norm": _FC_NORM, "norm_output": TOP["norm_output"]},
        "reads_rope_parameters": True,
        "reads_attention_bias": False,
        "later_layer_norm": "hidden_norm",
        "unknown_tensors": "dropped",
        "dropped": (),
        "embeddings": "target",
        "missing_head": "random",
        "head_without_draft_vocab": "target",
        "needs_draft_vocab_key": True,
    }
    return Loader(**{**table, **differences})  # type: ignore[arg-type]


def _kimi(first: str, last: str, **flags: Flag) -> Loader:
    return _llama(
        first,
        last,
        source="srt/models/kimi_k25_eagle3.py",
        family="deepseek",
        architectures=_MLA,
        prefixes=("",),
        layer_names=("midlayer.", "layers.0."),
        renames={},
        max_layers=1,
        num_taps_places=(_NESTED_IDS, "eagle_aux_hidden_state_layer_ids"),
        flags={**_NO_FLAGS, **flags},
        needs_draft_vocab_key=False,
    )


_FIRST = {"layer_names": ("midlayer.",), "renames": {}, "max_layers": 1, "num_taps_places": (), "flags": _NO_FLAGS}

LOADERS = (
    _llama("0.5.2", "0.5.9", **_FIRST, reads_rope_parameters=False),
    _llama("0.5.10", "0.5.11", **_FIRST),
    _llama("0.5.12", "0.5.16"),
    _llama(
        "0.5.17",
        "0.5.23",
        flags={**_NO_FLAGS, "fc_norm": _FC_NORM, "norm_output": TOP["norm_output"], "norm_before_fc": _NORM_BEFORE_FC},
    ),
    _kimi("0.5.12", "0.5.12.post1"),
    _kimi("0.5.13", "0.5.23", fc_norm=_FC_NORM, norm_output=TOP["norm_output"]),
)
