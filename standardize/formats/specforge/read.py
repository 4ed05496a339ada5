"""Reads SpecForge's offline features.

Read in sgl-project/SpecForge at a6b6b023 (2026-08-08): scripts/prepare_hidden_states.py,
specforge/offline_capture/sglang_backend/capture.py, specforge/data/utils.py, specforge/algorithms/eagle3/data.py; and
the first of them at 3234e24a (0.1.0), cd32229d (2025-11-12) and 7c7ef547 (2026-02-04)::

    rows_0-2000/data_0.ckpt[.gz]   input_ids int64 [N], loss_mask int64 [N], aux_hidden_state [1, N, A*H],
                                   hidden_state [1, N, H]

``hidden_state`` is what SGLang hands its logits processor, ``final``: the trainer's target head is lm_head alone. A
folder holds 5000 rows in 0.1.0, and files are compressed on request since 7c7ef547; the keys never changed.

Length. Before cd32229d a sample is saved as long as it is. Since then the collator pads a batch to its longest row with
id 0 and mask 0 first, the target runs over the padding as well, and nothing in the file says where it begins. So what
is trailing and has id 0 and mask 0 is cut. Where a conversation truly ends so, those tokens are cut too: no target is
lost by that, and in a causal target no other row depends on them. Files of eyas' own writer say how long they are.

Mask. Their parser (specforge/data/parse.py) marks the assistant's own tokens, as eyas does. Files and masks are not
shifted against each other; what the trainer then does with the mask is in write.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.standardize.formats.base import ForeignFileError, ForeignSample, Layout
from eyas.standardize.formats.torch_files import TorchFilesReader, require, rows, token_ids, zeros_and_ones

SUFFIXES = (".ckpt", ".ckpt.gz")
KEYS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
NUM_TOKENS = "num_tokens"  # int64 [], in files that eyas wrote: nothing in them is padding


def open_reader(folder: Path, layout: Layout) -> TorchFilesReader:
    """A reader of ``folder``, whose layout detect() found."""
    return TorchFilesReader(folder, layout, SUFFIXES, _sample)


def padded(contents: Mapping[str, Any]) -> bool:
    """Whether a file ends in padding, as far as its last token shows."""
    return NUM_TOKENS not in contents and not contents["input_ids"].flatten()[-1:].any()


def _sample(where: str, contents: Mapping[str, Any], layout: Layout) -> ForeignSample:
    require(where, contents, KEYS, "SpecForge")
    assert layout.hidden_size is not None
    ids = token_ids(where, contents["input_ids"])  # [N]
    mask = zeros_and_ones(where, contents["loss_mask"], len(ids))
    A, H, N = layout.num_taps, layout.hidden_size, len(ids)
    features = rows(where, "aux_hidden_state", contents["aux_hidden_state"], N, A * H, layout.dtype)
    last_hidden = rows(where, "hidden_state", contents["hidden_state"], N, H, layout.dtype)
    T = N
    if NUM_TOKENS not in contents:
        real = (ids.ne(0) | mask.ne(0)).nonzero()
        T = int(real[-1]) + 1 if len(real) else 0
    if T == 0:
        raise ForeignFileError(where, f"all {N} tokens have id 0 and mask 0: it is padding alone")
    return ForeignSample(
        where=where,
        input_ids=ids[:T],
        loss_mask=mask[:T],
        features=features[:T].view(T, A, H),
        last_hidden=last_hidden[:T],
    )
