"""TorchSpec (lightseekorg/TorchSpec), a trainer whose ids are outputs of layers.

Read at commit 6f21829c (2026-04-28; no release is tied to it): torchspec/models/target/eagle3_target_model.py hooks the
output of layer k and refuses ids out of range; torchspec/inference/engine/vllm_engine.py adds 1 for vLLM;
torchspec/utils/misc.py has the default 1, L//2-1, L-4. The ids stand in the training config
(torchspec/config/inference_config.py), not in the draft's.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_OUTPUT_OF_LAYER = Numbering(says="k is after:k", offset=1, lowest=0, highest=-1, outside="it refuses such ids")

CONVENTION = System(
    name="torchspec",
    entries=(
        Entry(
            versions=None,
            rule=single(_OUTPUT_OF_LAYER),
            default_taps=default_taps,
            source="torchspec/models/target/eagle3_target_model.py",
        ),
    ),
    readers=(
        Reader(
            versions=None,
            places=("aux_hidden_states_layers", "inference.aux_hidden_states_layers"),
            source="torchspec/config/inference_config.py",
        ),
    ),
)
