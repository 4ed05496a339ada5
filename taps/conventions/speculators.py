"""speculators (vllm-project/speculators), a trainer that captures through vLLM.

Read in 0.3.0, 0.4.0, 0.5.0, 0.7.0 and 0.9.0. From 0.5.0 on (models/utils.py ``resolve_target_layer_ids``,
models/eagle3/config.py) ids go to vLLM as they are, so they count as vLLM's: 0 to L, where L is the last layer's
output before the norm (0.9.0 checks that range; the trainer applies the verifier's norm itself). Its default is
2, L//2, L-3, and the draft's config holds them at the top level.

DFlash drafts (models/dflash/config.py, read in 0.9.0) keep their ids in ``aux_hidden_state_layer_ids``, in the same
numbering; vLLM's converter takes them raw and gives the draft's own code ``dflash_config.target_layer_ids``, one less.

Up to 0.4.0 data generation had a forward of its own (data_generation/custom_worker.py) which kept the *output* of layer
k, under ids that look like vLLM's (data_generation/vllm_hidden_states_generator.py: 2, L//2, L-3, and L-1 for the last
hidden state). Data made by it are one layer later than vLLM feeds a draft with the same ids.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import Tap, after, default_taps

_OUTPUT_OF_LAYER = Numbering(
    says="k is after:k", offset=1, lowest=0, highest=-1, outside="there is no such layer, so it is never met"
)
_BOUNDARY = Numbering(
    says="k is after:k-1, 0 is embed, L is after:L-1 (pre-norm)",
    offset=0,
    lowest=0,
    highest=0,
    outside="it refuses such ids",
)


def _old_default_taps(num_layers: int) -> tuple[Tap, ...]:
    return after(2), after(num_layers // 2), after(num_layers - 3)


CONVENTION = System(
    name="speculators",
    entries=(
        Entry(
            versions=("0.3.0", "0.4.0"),
            rule=single(_OUTPUT_OF_LAYER),
            default_taps=_old_default_taps,
            source="data_generation/custom_worker.py",
        ),
        Entry(
            versions=("0.5.0", "0.9.0"),
            rule=single(_BOUNDARY),
            default_taps=default_taps,
            source="models/utils.py",
        ),
    ),
    readers=(
        Reader(
            versions=("0.3.0", "0.4.0"),
            variant="data_config.json",
            places=("hidden_states.layer_ids",),
            source="data_generation/config_generator.py",
        ),
        Reader(
            versions=("0.5.0", "0.7.0"),
            places=("eagle_aux_hidden_state_layer_ids",),
            source="models/eagle3/config.py",
        ),
        Reader(
            versions=("0.9.0", "0.9.0"),
            places=("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
            source="models/eagle3/config.py",
        ),
    ),
)
