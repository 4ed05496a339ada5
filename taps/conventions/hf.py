"""Hugging Face transformers: index k of ``hidden_states``.

Read in transformers 4.40.0 (models/llama/modeling_llama.py: the input of each layer is appended, then the normed
output) and 5.24.0 (utils/output_capturing.py, ``capture_outputs``: the last entry is replaced by
``last_hidden_state``). So there is no index for ``after:{L-1}``: ``hidden_states[L]`` is ``final``.
transformers reads no draft config.
"""

from eyas.taps.conventions.entry import Entry, System
from eyas.taps.conventions.numbering import Numbering, single

_HIDDEN_STATES = Numbering(
    says="k is after:k-1, 0 is embed, L or -1 is final",
    offset=0,
    lowest=0,
    highest=-1,
    final=("L", -1),
    outside="hidden_states has L+1 entries, and the last is already normed",
)

CONVENTION = System(
    name="hf",
    entries=(
        Entry(
            versions=("4.40.0", "5.24.0"),
            rule=single(_HIDDEN_STATES),
            default_taps=None,
            source="utils/output_capturing.py",
        ),
    ),
    readers=(),
)
