"""TensorRT-LLM: ids are outputs of layers, kept as a set and sorted; -1 is the final norm's output.

Read in NVIDIA/TensorRT-LLM, in several revisions of 2025 and 2026 (no release is tied to them):

    tensorrt_llm/_torch/speculative/eagle3.py   default 1, L//2-1, L-4 (an error up to 5 layers). With two models
                                        (``Eagle3SpecMetadata``) a leading -1 is moved behind the sorted ids; with one
                                        (``Eagle3OneModelSpecMetadata``) it stays in front, and ``final`` becomes the
                                        first slot
    tensorrt_llm/_torch/speculative/save_hidden_state.py   what it saves for trainers: as with two models; its default
                                        has -1 behind the three
    tensorrt_llm/_torch/models/modeling_speculative.py   ``SpecDecOneEngineForCausalLM`` gives the model's output, which
                                        is normed, the layer index -1
    tensorrt_llm/llmapi/llm_args.py     where the ids stand: eagle3_layers_to_capture, when it is started
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_FINAL_LAST = Numbering(
    says="k is after:k, -1 is final",
    offset=1,
    lowest=0,
    highest=-1,
    final=(-1,),
    outside="there is no such layer, so it is never met",
)
_FINAL_FIRST = Numbering(
    says="k is after:k, -1 is final and goes first",
    offset=1,
    lowest=0,
    highest=-1,
    outside="-1 is sorted to the front, so that final would be the first slot; no other such id is ever met",
)


def _entry(numbering: Numbering, variant: str) -> Entry:
    return Entry(
        versions=None,
        rule=single(numbering),
        default_taps=default_taps,
        source="tensorrt_llm/_torch/speculative/eagle3.py",
        variant=variant,
    )


CONVENTION = System(
    name="trtllm",
    entries=(_entry(_FINAL_LAST, "two models"), _entry(_FINAL_FIRST, "one model")),
    readers=(
        Reader(
            versions=None,
            places=("speculative_config.eagle3_layers_to_capture",),
            source="tensorrt_llm/llmapi/llm_args.py",
        ),
    ),
)
