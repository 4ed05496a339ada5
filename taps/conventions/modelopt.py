"""NVIDIA ModelOpt, a trainer for Hugging Face and Megatron models, whose ids are outputs of layers.

Read in nvidia-modelopt 0.35.0 (modelopt/torch/speculative/plugins/transformers.py) and 0.47.0
(plugins/hf_eagle.py: forward hooks on layer k; plugins/megatron_eagle.py: layer_number - 1). ``[]``, the default of
speculative/eagle/default_config.py, means 1, L//2-1, L-4. Ids outside 0 to L-1 are never met, in silence.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_OUTPUT_OF_LAYER = Numbering(
    says="k is after:k", offset=1, lowest=0, highest=-1, outside="there is no such layer, so it is never met"
)

CONVENTION = System(
    name="modelopt",
    entries=(
        Entry(
            versions=("0.35.0", "0.47.0"),
            rule=single(_OUTPUT_OF_LAYER),
            default_taps=default_taps,
            source="modelopt/torch/speculative/plugins/hf_eagle.py",
        ),
    ),
    readers=(
        Reader(
            versions=("0.35.0", "0.47.0"),
            places=("eagle_config.eagle_aux_hidden_state_layer_ids",),
            empty_is_default=True,
            source="modelopt/torch/speculative/eagle/default_config.py",
        ),
    ),
)
