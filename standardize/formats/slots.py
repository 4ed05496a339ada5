"""The taps of a sample and its last hidden state as one tensor of slots, in memory that is used again.

Shapes: T tokens, A taps, H hidden size, S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.shards.sample import Sample


class Slots:
    """A buffer of one thread: what stack() gave is overwritten by its next call.

    A fresh buffer for each sample would cost as much as filling it: the kernel hands out zeroed pages.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def stack(self, sample: Sample, hidden_size: int) -> Tensor:
        """[T, S, H]: the A taps, then last_hidden where there is one."""
        import torch

        T, H = sample.num_tokens, hidden_size
        A = sample.features.shape[1] // H
        S = A + (sample.last_hidden is not None)
        num_bytes = T * S * H * sample.features.itemsize
        if self._memory.size < num_bytes:
            self._memory = np.empty(num_bytes, np.uint8)
        states_TSH = torch.from_numpy(self._memory[:num_bytes]).view(sample.features.dtype).view(T, S, H)
        states_TSH[:, :A] = sample.features.view(T, A, H)
        if sample.last_hidden is not None:
            states_TSH[:, A] = sample.last_hidden
        return states_TSH
