"""TensorRT-LLM: ids are outputs of layers, kept as a set and sorted; -1 is the final norm's output and goes last.

Read in NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/speculative/eagle3.py (``Eagle3SpecMetadata``: default 1, L//2-1, L-4;
sorted, a leading -1 moved to the end), save_hidden_state.py beside it and llmapi/llm_args.py (-1 is the post-norm
output), in several revisions of 2025 and 2026; no release is tied to them. ``Eagle3OneModelSpecMetadata`` sorts without
moving -1.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_OUTPUT_OF_LAYER = Numbering(
    says="k is after:k, -1 is final",
    offset=1,
    lowest=0,
    highest=-1,
    final=(-1,),
    outside="there is no such layer, so it is never met",
)

CONVENTION = System(
    name="trtllm",
    entries=(
        Entry(
            versions=None,
            rule=single(_OUTPUT_OF_LAYER),
            default_taps=default_taps,
            source="tensorrt_llm/_torch/speculative/eagle3.py",
        ),
    ),
    readers=(
        Reader(
            versions=None,
            places=("speculative_config.eagle3_layers_to_capture",),
            source="tensorrt_llm/llmapi/llm_args.py",
        ),
    ),
)
