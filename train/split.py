"""Which samples are held out for validation: a share of them, by a hash of the sample's id.

The same sample is on the same side in every run, whatever the seed, the shards or the number of samples around it, so
that no validation sample of one run is a training sample of the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eyas.taps.errors import UsageError

_KEY = 0x65796173  # "eyas": a split made by the bare ids would not be independent of this one


def mix64(values: npt.NDArray[np.uint64], key: int = 0) -> npt.NDArray[np.uint64]:
    """A hash of each value: splitmix64's finalizer (Steele, Lea, Flood 2014) over value + key * golden ratio.

    Ours and not numpy's generators, whose streams may change between releases: orders and splits must not.
    """
    with np.errstate(over="ignore"):
        z = values + np.uint64((key * 0x9E3779B97F4A7C15) & (2**64 - 1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def validation_mask(ids: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Which of the samples ``ids`` (uint64 [N]) are held out: bool [N], about ``share`` of them.

    At least one where ``share`` is above 0, and never all. Raises UsageError where there is nothing left to train on.
    """
    if share == 0:
        return np.zeros(len(ids), dtype=np.bool_)
    if len(ids) < 2:
        raise UsageError(f"--validation {share:g}: the dataset has {len(ids)} samples; give --validation 0")
    hashes = mix64(ids, _KEY)
    held_out = hashes < np.uint64(min(int(share * 2**64), 2**64 - 1))
    if not held_out.any():
        held_out[np.argmin(hashes)] = True
    if held_out.all():
        held_out[np.argmax(hashes)] = False
    return np.asarray(held_out, dtype=np.bool_)
