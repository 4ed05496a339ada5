"""SpecForge (sgl-project/SpecForge), a trainer whose ids are outputs of layers.

Read in 0.2.0: specforge/algorithms/model_providers.py ``resolve_eagle_capture_layers`` takes
``eagle_config.eagle_aux_hidden_state_layer_ids`` of the draft's config, else 1, L//2-1, L-4, and insists on exactly
three; specforge/offline_capture/sglang_backend/capture.py hands them to SGLang, whose own reading of the target
(taps/conventions/sglang.py) decides what is captured.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_OUTPUT_OF_LAYER = Numbering(says="k is after:k", offset=1, lowest=0, highest=-1, outside="there is no such layer")

CONVENTION = System(
    name="specforge",
    entries=(
        Entry(
            versions=("0.2.0", "0.2.0"),
            rule=single(_OUTPUT_OF_LAYER, num_ids=3),
            default_taps=default_taps,
            source="specforge/algorithms/model_providers.py",
        ),
    ),
    readers=(
        Reader(
            versions=("0.2.0", "0.2.0"),
            places=("eagle_config.eagle_aux_hidden_state_layer_ids",),
            source="specforge/algorithms/model_providers.py",
        ),
    ),
)
