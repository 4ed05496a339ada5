"""What diagnoses are made from: stored rows beside the replayed taps, and the noise they are measured in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eyas.align.defects.kinds import Diagnosis
from eyas.align.forward import Replayed, ReplayTarget
from eyas.align.noise import Noise, measure_noise, rounding_errors, row_errors
from eyas.align.rows import MIN_SHARE, Found, search_rows
from eyas.align.stored import Slot, StoredSample

if TYPE_CHECKING:
    from torch import Tensor

_OWN_NOISE_RUNS = 3
_MAX_AROUND = 24  # further samples that are replayed to find rows in


class Evidence:
    """Samples of which ``target`` is replayed up to ``max_tokens`` tokens each.

    proven: whether the states are known to come from the weights that are replayed, by their checksum.
    """

    def __init__(
        self,
        target: Replayed,
        slots: Sequence[Slot],
        samples: Sequence[StoredSample],
        noise: Noise,
        *,
        compute_dtype: str,
        max_tokens: int | None,
        proven: bool,
        neighbours: Callable[[StoredSample], list[StoredSample]],
    ) -> None:
        self.target, self.slots, self.samples, self.noise = target, slots, samples, noise
        self.compute_dtype = compute_dtype
        self.proven = proven
        self._max_tokens, self._neighbours = max_tokens, neighbours
        self.ids = [sample.input_ids[:max_tokens] for sample in samples]
        self.index = {tap: index for index, tap in enumerate(target.all_taps)}
        self.own_noise: dict[int, Noise] = {}
        self._around: dict[str, Tensor] = {}  # further samples that rows are searched in, by name
        self._asked: set[int] = set()
        self._token_noise: dict[int, list[Tensor]] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}

    def rows(self, sample: int, slot: int) -> Tensor:
        """The stored rows in the replayed window, [T, H]: dead ones as NaN, and NaN where files hold fewer rows."""
        import torch

        if (sample, slot) not in self._rows:
            num_tokens = len(self.ids[sample])
            stored = self.samples[sample].slots[slot][:num_tokens]
            rows = torch.full((num_tokens, stored.shape[1]), torch.nan, dtype=stored.dtype)
            rows[: len(stored)] = stored
            rows[(rows == 0).all(-1)] = torch.nan
            self._rows[sample, slot] = rows
        return self._rows[sample, slot]

    def pair(self, sample: int, slot: int) -> tuple[Tensor, Tensor]:
        """Stored rows [T, H'] and taps [L+2, T, H'], of the channels that hold something if not all do."""
        rows, stack = self.rows(sample, slot), self.target.taps(self.ids[sample])
        dead = (self.samples[sample].slots[slot] == 0).all(0)
        if not bool(dead.any()) or bool(dead.all()):
            return rows, stack
        return rows[:, ~dead], stack[:, :, (~dead).to(stack.device)]

    def errors(self, d: Diagnosis, tap: int) -> Tensor:
        """Of each row from ``tap``: float32 [T]."""
        rows, stack = self.pair(d.sample, d.slot)
        return row_errors(rows, stack[tap])

    def alive(self, sample: int, slot: int) -> Tensor:
        return self.rows(sample, slot).isfinite().all(-1)

    def declared(self, slot: int) -> int | None:
        declared = self.slots[slot].declared
        return None if declared is None else self.index[declared]

    def explained(self, index: int) -> float:
        return max(self.noise.explained(index), 1e-4)

    def noise_of(self, sample: int) -> Noise:
        """The noise of one sample, where that of the few it was measured on may be too small for it."""
        if not isinstance(self.target, ReplayTarget):
            return self.noise
        if sample not in self.own_noise:
            self.own_noise[sample] = measure_noise(
                self.target, [self.ids[sample]] * _OWN_NOISE_RUNS, self.compute_dtype
            )
        return self.own_noise[sample]

    def token_noise(self, sample: int, num_runs: int) -> Tensor:
        """How far rounding throws each token of one sample, the farthest of ``num_runs`` runs: float32 [L+2, T]."""
        import torch

        assert isinstance(self.target, ReplayTarget)
        runs = self._token_noise.setdefault(sample, [])
        for seed in range(len(runs), num_runs):
            errors = rounding_errors(self.target, self.ids[sample], self.compute_dtype, seed)[1]
            runs.append(errors.nan_to_num(0))
        return torch.stack(runs[:num_runs]).amax(0)

    def drop(self, sample: int, slot: int, rows: Tensor) -> None:
        """Compare ``rows`` (bool [T]) of a slot no more: what is wrong with them has been said."""
        self.rows(sample, slot)[rows] = float("nan")

    def search(self, sample: int, slot: int, rows: Tensor, taps: Sequence[int] | None = None) -> Found | None:
        """Search ``rows`` (bool [T]) of a slot among the replayed samples, then among those stored around it too."""
        found = self._search_known(sample, slot, rows, taps)
        unfound = found is None or found.share < MIN_SHARE
        if unfound and sample not in self._asked and len(self._around) < _MAX_AROUND:
            self._asked.add(sample)
            known = {stored.name for stored in self.samples}
            for near in self._neighbours(self.samples[sample]):
                if near.name not in known:
                    self._around[near.name] = near.input_ids[: self._max_tokens]
            found = self._search_known(sample, slot, rows, taps)
        return found

    def _search_known(self, sample: int, slot: int, rows: Tensor, taps: Sequence[int] | None) -> Found | None:
        among = [*self.ids, *self._around.values()]
        return search_rows(self.target, self.rows(sample, slot), rows, sample, among, self.noise, taps=taps)

    def name(self, index: int) -> str:
        return [*(stored.name for stored in self.samples), *self._around][index]
