"""EAGLE, the original code (SafeAILab/EAGLE): three layers written into the target's forward.

Read in 3.0.0 (setup.py; commit cb7e0841): eagle/model/modeling_llama_kv.py, eagle/model/modeling_qwen3_kv.py and
eagle/traineagle3/modeling_llama_kv.py keep the input of layers 2, L//2 and L-3. No config is read: another choice is
another edit of that line, which counts layers in the same way.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_INPUT_OF_LAYER = Numbering(
    says="k is after:k-1, 0 is embed",
    offset=0,
    lowest=0,
    highest=-1,
    outside="it keeps inputs of layers, and there is no layer L",
)

CONVENTION = System(
    name="eagle",
    entries=(
        Entry(
            versions=("3.0.0", "3.0.0"),
            rule=single(_INPUT_OF_LAYER),
            default_taps=default_taps,
            source="eagle/model/modeling_llama_kv.py",
        ),
    ),
    readers=(Reader(versions=("3.0.0", "3.0.0"), places=(), source="eagle/model/modeling_llama_kv.py"),),
)
