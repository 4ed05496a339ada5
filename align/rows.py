"""Which token's row a stored row is: a search over all rows of all replayed samples, at every tap.

Finds rows stored at another place (shifted by one, a prefix cut away, reversed) and rows of another sample.

Shapes: T stored rows, U replayed rows, L+2 taps, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.align.forward import Replayed
    from eyas.align.noise import Noise

MAX_SEARCHED_ROWS = 128
MIN_RUN = 4  # rows in one piece that are no accident
_LEAST_BEFORE = 0.3  # of the rows before a shift begins must be seen to be right: routers may have thrown the rest
MIN_SHARE = 0.7  # of the searched rows must be found, for one pattern to explain a slot


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where the searched rows were found, at one tap. Vectors of length R, over the searched rows."""

    tap: int  # index of Replayed.all_taps
    rows: Tensor  # int64, which stored rows were searched
    sample: Tensor  # int64, index of the replayed sample that row's states belong to; -1 where not found
    token: Tensor  # int64, which token of that sample
    error: Tensor  # float32, relative L2
    num_tokens: int  # of the sample that the searched rows are stored for

    @property
    def share(self) -> float:
        return float((self.sample >= 0).float().mean())

    def shift(self, own: int) -> int | None:
        """k where most found rows t hold token t + k of sample ``own``, those beyond the end wrapped around
        (torch.roll); None where there is no such k."""
        mine = self.sample == own
        offsets = (self.token - self.rows)[mine]
        if len(offsets) < MIN_SHARE * len(self.rows):
            return None
        around = offsets % self.num_tokens
        agree = around == around.mode().values
        if float(agree.float().mean()) < MIN_SHARE:
            return None
        return int(offsets[agree].mode().values)

    def shift_from(self, own: int) -> tuple[int, int] | None:
        """(k, row): rows up to some row hold their own tokens, and row t holds token t + k from there on; None where
        they do not."""
        mine = self.sample == own
        offsets = self.token - self.rows
        moved = mine & (offsets != 0)
        if not bool(moved.any()):
            return None
        k = int(offsets[moved].mode().values)
        first = int(self.rows[moved & (offsets == k)].min())
        before = self.rows < first
        if bool(before.any()) and float((mine & (offsets == 0))[before].float().mean()) < _LEAST_BEFORE:
            return None
        right = mine & ((self.rows < first) & (offsets == 0) | (self.rows >= first) & (offsets == k))
        return (k, first) if float(right[mine].float().mean()) >= MIN_SHARE else None

    def other_sample(self, own: int) -> int | None:
        """Index of the other sample that most rows belong to; None where there is none."""
        others = self.sample[(self.sample >= 0) & (self.sample != own)]
        if len(others) < MIN_SHARE * len(self.rows):
            return None
        return int(others.mode().values)


def search_rows(
    target: Replayed,
    stored: Tensor,
    alive: Tensor,
    own: int,
    samples: Sequence[Tensor],
    noise: Noise,
    *,
    taps: Sequence[int] | None = None,
) -> Found | None:
    """Search rows of ``stored`` [T, H] (where ``alive`` [T]; row 0 left out) among all rows of ``samples`` (ids, int
    [U] each), at every tap or at ``taps``. Returns the tap that most rows were found at; None where none was.

    A row counts as found within the noise's excluded band. Its own token of sample ``own`` is preferred, then its own
    sample, since at shallow taps the same token of several samples is nearly the same row.
    """
    import torch

    rows = torch.nonzero(alive).flatten()
    rows = rows[rows > 0]
    if not len(rows):
        return None
    if len(rows) > MAX_SEARCHED_ROWS:
        # Whole runs rather than every n-th row: neighbours tell a shift from repeated tokens.
        rows = rows[:MAX_SEARCHED_ROWS]
    chosen = tuple(range(target.num_layers + 2)) if taps is None else tuple(taps)
    shape = len(chosen), len(rows)
    best = torch.full(shape, torch.inf)
    sample, token = torch.full(shape, -1), torch.full(shape, -1)
    limits = torch.tensor([max(noise.excluded(index), 1e-3) for index in chosen])
    # Own sample first; a later one replaces only what is not found yet, or fits much better.
    for b in [own, *(b for b in range(len(samples)) if b != own)]:
        stack = target.taps(samples[b])
        x = stored[rows].to(stack.device).float()  # [R, H]
        for n, index in enumerate(chosen):
            r = stack[index].float()  # [U, H]
            distance = torch.cdist(x, r) / r.norm(dim=-1).clamp_min(1e-20)  # [R, U]
            error, where = distance.cpu().min(dim=1)
            if b == own:
                inside = rows < len(r)
                at_own = torch.full_like(error, torch.inf)
                at_own[inside] = distance.cpu()[inside, rows[inside]]
                keep = at_own <= limits[n]
                error, where = torch.where(keep, at_own, error), torch.where(keep, rows, where)
            better = (error < best[n]) & ~(best[n] <= limits[n]) | (error < 0.25 * best[n])
            best[n] = torch.where(better, error, best[n])
            sample[n] = torch.where(better, torch.tensor(b), sample[n])
            token[n] = torch.where(better, where, token[n])
    found = best <= limits[:, None]
    shares = found.float().mean(1)
    if not float(shares.max()) > 0:
        return None
    # Among taps at which about as many rows are found, the one they fit best, in units of its own noise.
    near = shares >= shares.max() - 0.05
    fit = torch.where(near, (best / limits[:, None]).median(dim=1).values, torch.inf)
    n = int(fit.argmin())
    return Found(
        tap=chosen[n],
        rows=rows,
        sample=torch.where(found[n], sample[n], -1),
        token=token[n],
        error=best[n],
        num_tokens=len(samples[own]),
    )
