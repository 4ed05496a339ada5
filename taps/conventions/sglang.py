"""SGLang: each model class has its own ``set_eagle3_layers_to_capture``; most add 1, then keep inputs of layers.

Read in srt/models/ of 0.5.1, 0.5.2, 0.5.3, 0.5.6 and every release from 0.5.9 to 0.5.23 but 0.5.10.post1 and
0.5.15.post1 (0.4.7 takes no ids at all):

    llama.py, qwen2.py, qwen3.py, ...     k is after:k; L-1 marks a layer L that is never met, in silence
    llama.py, deepseek_v2.py, gpt_oss.py  -1 marks layer 0, which has no residual yet: a TypeError in 0.5.9, with
                                          llama.py still in 0.5.14; qwen2.py takes the embedding there. Refused here
    qwen2_moe.py, qwen3_moe.py,           k is after:k; L-1 is an IndexError
        qwen3_next.py
    gemma3_causal.py, gemma4_causal.py    k is after:k, L-1 included
    deepseek_v2.py (DeepSeek, Kimi)       to 0.5.12.post1 k is after:k; from 0.5.13 on (PR 25454) only if the first id
    glm4_moe_lite.py                      is 1, else k is after:k-1 and 0 is embed: after:0 as first tap has no id
    gpt_oss.py                            to 0.5.16 k is after:k; from 0.5.17 on (PR 32334) ids are boundaries (k is
                                          after:k-1) if the largest is L, else k is after:k and -1 is embed
    minimax_m3_vl.py                      k is after:k, and its default too gets the +1: after:2, after:L//2, after:L-3
    kimi_k25.py                           hands ids to its language model (a DeepseekV3ForCausalLM) from 0.5.10 on;
                                          0.5.9 has the language model's reading but no way to it from a config

A class that inherits from these reads ids as they do. Everything else is unknown here. With pipeline parallelism the
setters do nothing but on the last stage, and ids keep counting layers of the whole model: layers of other stages are
missing. DFlash drafts go through ``set_dflash_layers_to_capture`` (k is after:k on all of these, from
``dflash_config.target_layer_ids``), which is not read here.

The draft's config: model_executor/model_runner.py, later model_executor/model_runner_components/
spec_aux_hidden_state.py, look up ``eagle_config.eagle_aux_hidden_state_layer_ids`` and nothing else; without it the
inputs of layers 2, L//2 and L-3 are kept. ``[]`` is taken as it is: nothing is captured.
"""

from collections.abc import Sequence

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, Rule, single
from eyas.taps.notation import Tap, after, default_taps

_LAST_READ = "0.5.23"

_AFTER_SILENT = Numbering(
    says="k is after:k",
    offset=1,
    lowest=0,
    highest=-2,
    outside="it marks layer k+1: there is no residual before layer 0 (it fails, or takes the embedding, by release and "
    "model), and layer L is never met, in silence",
)
_AFTER_FAILS = Numbering(
    says="k is after:k",
    offset=1,
    lowest=0,
    highest=-2,
    outside="it marks layer k+1: what is taken before layer 0 was not read, and there is no layer L to mark: it fails",
)
_AFTER_LOST = Numbering(
    says="k is after:k",
    offset=1,
    lowest=0,
    highest=-2,
    outside="it marks layer k+1, and there is no layer L",
)
_AFTER_ALL = Numbering(
    says="k is after:k", offset=1, lowest=0, highest=-1, outside="there is no such layer, so it is never met"
)
_AFTER_AND_EMBED = Numbering(
    says="k is after:k, -1 is embed", offset=1, lowest=-1, highest=-1, outside="it is never met"
)
_INPUT_OF_LAYER = Numbering(
    says="k is after:k-1, 0 is embed",
    offset=0,
    lowest=0,
    highest=-1,
    outside="it keeps inputs of layers, and layer L is never met, in silence",
)
_BOUNDARY = Numbering(
    says="k is after:k-1, 0 is embed", offset=0, lowest=0, highest=0, outside="it is never met, in silence"
)


def _after_if_first_is_1(ids: Sequence[int], num_layers: int) -> int:
    return 0 if ids[0] == 1 else 1


def _boundaries_if_largest_is_num_layers(ids: Sequence[int], num_layers: int) -> int:
    return 1 if max(ids) == num_layers else 0


_FIRST_IS_1 = Rule(
    says="k is after:k if the first id is 1, else after:k-1",
    numberings=(_AFTER_SILENT, _INPUT_OF_LAYER),
    choose=_after_if_first_is_1,
)
_LARGEST_IS_L = Rule(
    says="k is after:k-1 if the largest id is L, else after:k",
    numberings=(_AFTER_AND_EMBED, _BOUNDARY),
    choose=_boundaries_if_largest_is_num_layers,
)


def _minimax_m3_vl_default_taps(num_layers: int) -> tuple[Tap, ...]:
    return after(2), after(num_layers // 2), after(num_layers - 3)


# First release read with the class in it, and the classes (and their model types) that share a reading.
_SILENT = {
    "0.5.1": {
        "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM", "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration", "Qwen3ForCausalLM",
        "llama", "mistral", "phi3", "internlm3", "llama4", "llama4_text", "qwen3",
    },
    "0.5.2": {"Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text"},
    "0.5.3": {"ApertusForCausalLM", "apertus"},
    "0.5.6": {
        "Glm4MoeForCausalLM", "LongcatFlashForCausalLM", "MiniMaxM2ForCausalLM", "TeleFLMForCausalLM",
        "glm4_moe", "longcat_flash", "minimax_m2",
    },
    "0.5.9": {
        "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ExaoneMoEForCausalLM", "Ministral3ForCausalLM",
        "IQuestCoderForCausalLM", "bailing_moe", "bailing_moe_v2", "exaone_moe", "ministral3",
    },
    "0.5.10": {"SarvamMoEForCausalLM"},
    "0.5.20": {"Glm5NextForConditionalGeneration"},
}  # fmt: skip
_FAILS = {
    "0.5.1": {"Qwen3MoeForCausalLM", "qwen3_moe"},
    "0.5.2": {"Qwen2MoeForCausalLM", "qwen2_moe"},
    "0.5.9": {"Qwen3NextForCausalLM", "qwen3_next"},
}
# L-1 is never met at first, and marked on a layer that does not exist from 0.5.22 on.
_QWEN3_VL = {
    "0.5.11": {
        "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text",
    },
    "0.5.12": {
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5", "qwen3_5_moe",
    },
    "0.5.22": {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "qwen3_5_text", "qwen3_5_moe_text"},
}  # fmt: skip
_GEMMA = frozenset(
    {
        "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
        "gemma3", "gemma3_text", "gemma4", "gemma4_text",
    }
)  # fmt: skip
_DEEPSEEK_V2 = frozenset(
    {
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiK25ForConditionalGeneration",
        "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM",
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa",
    }
)  # fmt: skip
_GLM4_MOE_LITE = frozenset({"Glm4MoeLiteForCausalLM", "glm4_moe_lite"})
_GPT_OSS = frozenset({"GptOssForCausalLM", "gpt_oss"})
_MINIMAX_M3 = frozenset({"MiniMaxM3SparseForCausalLM"})
_MINIMAX_M3_VL = frozenset({"MiniMaxM3SparseForConditionalGeneration"})


def _table(
    numbering: Numbering, first_releases: dict[str, set[str]], source: str, last: str = _LAST_READ
) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            versions=(first, last),
            models=frozenset(models),
            rule=single(numbering),
            default_taps=default_taps,
            source=source,
        )
        for first, models in first_releases.items()
    )


CONVENTION = System(
    name="sglang",
    entries=(
        *_table(_AFTER_SILENT, _SILENT, "srt/models/llama.py"),
        *_table(_AFTER_FAILS, _FAILS, "srt/models/qwen3_moe.py"),
        *_table(_AFTER_LOST, _QWEN3_VL, "srt/models/qwen3_vl.py"),
        Entry(
            versions=("0.5.12", _LAST_READ),
            models=_GEMMA,
            rule=single(_AFTER_ALL),
            default_taps=default_taps,
            source="srt/models/gemma3_causal.py",
        ),
        Entry(
            versions=("0.5.6", "0.5.12.post1"),
            models=_DEEPSEEK_V2,
            rule=single(_AFTER_SILENT),
            default_taps=default_taps,
            source="srt/models/deepseek_v2.py",
        ),
        Entry(
            versions=("0.5.13", _LAST_READ),
            models=_DEEPSEEK_V2,
            rule=_FIRST_IS_1,
            default_taps=default_taps,
            source="srt/models/deepseek_v2.py",
        ),
        # Up to 0.5.12 it inherits the setter from deepseek_v2.py.
        Entry(
            versions=("0.5.9", "0.5.12.post1"),
            models=_GLM4_MOE_LITE,
            rule=single(_AFTER_SILENT),
            default_taps=default_taps,
            source="srt/models/glm4_moe_lite.py",
        ),
        Entry(
            versions=("0.5.13", _LAST_READ),
            models=_GLM4_MOE_LITE,
            rule=_FIRST_IS_1,
            default_taps=default_taps,
            source="srt/models/glm4_moe_lite.py",
        ),
        Entry(
            versions=("0.5.1", "0.5.16"),
            models=_GPT_OSS,
            rule=single(_AFTER_SILENT),
            default_taps=default_taps,
            source="srt/models/gpt_oss.py",
        ),
        Entry(
            versions=("0.5.17", _LAST_READ),
            models=_GPT_OSS,
            rule=_LARGEST_IS_L,
            default_taps=default_taps,
            source="srt/models/gpt_oss.py",
        ),
        Entry(
            versions=("0.5.16", "0.5.22"),
            models=_MINIMAX_M3,
            rule=single(_AFTER_SILENT),
            default_taps=default_taps,
            source="srt/models/minimax_m3.py",
        ),
        Entry(
            versions=("0.5.23", "0.5.23"),
            models=_MINIMAX_M3,
            rule=single(_AFTER_ALL),
            default_taps=default_taps,
            source="srt/models/minimax_m3.py",
        ),
        Entry(
            versions=("0.5.18", "0.5.22"),
            models=_MINIMAX_M3_VL,
            rule=single(_AFTER_SILENT),
            default_taps=_minimax_m3_vl_default_taps,
            source="srt/models/minimax_m3_vl.py",
        ),
        Entry(
            versions=("0.5.23", "0.5.23"),
            models=_MINIMAX_M3_VL,
            rule=single(_AFTER_ALL),
            default_taps=_minimax_m3_vl_default_taps,
            source="srt/models/minimax_m3_vl.py",
        ),
    ),
    readers=(
        Reader(
            versions=("0.5.1", _LAST_READ),
            places=("eagle_config.eagle_aux_hidden_state_layer_ids",),
            source="srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
        ),
    ),
)
