"""TorchSpec (lightseekorg/TorchSpec), a trainer whose ids are outputs of layers, whatever captures them.

Read at commit 6f21829c (2026-04-28; no release is tied to it):

    torchspec/models/target/eagle3_target_model.py   transformers: hooks the output of layer k, refuses ids out of range
    torchspec/inference/engine/vllm_engine.py   vLLM: adds 1 to ids below L, and appends L for the last hidden state
    torchspec/inference/engine/sgl_engine.py    SGLang: as they are, to ``set_eagle3_layers_to_capture`` of the patched
                                        0.5.8.post1 or 0.5.10.post1, Kimi's and DeepSeek's too; both are from before PR
                                        25454, so k is after:k. L-1 is never met there
    torchspec/utils/misc.py             default 1, L//2-1, L-4
    tools/convert_to_hf.py              an export for vLLM adds 1 for kimi_k2, and for no other model

The ids stand in the training config (torchspec/config/inference_config.py), not in the draft's.
"""

from eyas.taps.conventions.entry import Entry, Reader, System
from eyas.taps.conventions.numbering import Numbering, single
from eyas.taps.notation import default_taps

_OUTPUT_OF_LAYER = Numbering(says="k is after:k", offset=1, lowest=0, highest=-1, outside="it refuses such ids")
_INPUT_OF_NEXT = Numbering(
    says="k is after:k",
    offset=1,
    lowest=0,
    highest=-2,
    outside="SGLang marks layer k+1, and there is no layer L",
)


def _entry(numbering: Numbering, variant: str, source: str) -> Entry:
    return Entry(versions=None, rule=single(numbering), default_taps=default_taps, source=source, variant=variant)


CONVENTION = System(
    name="torchspec",
    entries=(
        _entry(_OUTPUT_OF_LAYER, "through transformers or vLLM", "torchspec/models/target/eagle3_target_model.py"),
        _entry(_INPUT_OF_NEXT, "through SGLang", "torchspec/inference/engine/sgl_engine.py"),
    ),
    readers=(
        Reader(
            versions=None,
            places=("aux_hidden_states_layers", "inference.aux_hidden_states_layers"),
            source="torchspec/config/inference_config.py",
        ),
    ),
)
