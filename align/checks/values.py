"""What the draft's weights hold: a NaN, or a tensor of zeros, loads everywhere and drafts nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft, DraftError
from eyas.align.verdict import Finding

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 4


def check_values(subject: Subject) -> list[Finding]:
    """Every float tensor of the checkpoint is read once. Raises DraftError for files that end early."""
    draft = subject.draft
    if draft is None or not draft.tensors:
        return []
    broken, zero, count = [], [], 0
    for name, tensor in _float_tensors(draft):
        count += 1
        if not bool(tensor.isfinite().all()):
            broken.append(name)
        elif not name.endswith(".bias") and not bool(tensor.any()):  # biases may be trained to nothing
            zero.append(name)
    if not broken and not zero:
        return [Finding(check="draft values", status="ok", found=f"{count} tensors: no NaN or Inf, none all zeros")]
    found = "; ".join(
        f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''} {what}"
        for names, what in ((broken, "hold NaN or Inf"), (zero, "are all zeros"))
        if names
    )
    return [
        Finding(
            check="draft values",
            status="mismatch",
            found=found,
            expected="finite numbers, not all zeros",
            consequence="every engine loads them, and no token is accepted",
            mend="take an earlier checkpoint of the training; this one diverged or was not written whole",
        )
    ]


def _float_tensors(draft: Draft) -> Iterator[tuple[str, Tensor]]:
    import torch
    from safetensors import SafetensorError, safe_open

    for file in sorted({tensor.file for tensor in draft.tensors.values()}):
        names = [name for name, tensor in draft.tensors.items() if tensor.file == file]
        try:
            if file.endswith(".safetensors"):
                with safe_open(draft.path / file, framework="pt") as opened:
                    values = ((name, opened.get_tensor(name)) for name in names)
                    yield from ((name, value) for name, value in values if value.is_floating_point())
            else:
                state = torch.load(draft.path / file, weights_only=True, map_location="cpu", mmap=True)
                yield from ((name, state[name]) for name in names if state[name].is_floating_point())
        except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            raise DraftError(f"{draft.path / file}: unreadable ({str(error).splitlines()[0]})") from error
