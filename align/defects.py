"""Names what is wrong with stored states, from the shape of their error against the replayed target.

Each slot of each replayed sample is examined alone. What matches a tap within rounding (align/noise.py) is that tap.
For the rest hypotheses are tried, cheap ones first, and one is accepted only where it explains the rows down to
rounding: a scale, rows of another place or sample (align/rows.py), a layer's pieces and partial sums
(align/pieces.py), another layout of the slots, permuted channels, a context that was cut. What is still a tap, but
farther from it than rounding, is other weights or a quantization (align/weights.py). Nothing is named on a guess: what
no hypothesis explains is "undecided" inside the noise's band between, and "no tap of this target" outside it.

Shapes: T rows, H hidden_size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from eyas.align.noise import EXPLAINED, STRAY_ERROR, Noise, measure_noise, median_error, row_errors
from eyas.align.pieces import explain_by_pieces
from eyas.align.rows import MIN_SHARE, Found, search_rows
from eyas.align.storage import coarser_grid, scan_rows
from eyas.align.stored import Slot, StoredSample
from eyas.align.weights import Projection, project
from eyas.taps.match import MAX_ERROR, MIN_MARGIN, Match, match_taps

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.align.forward import ReplayTarget

Kind = Literal[
    "scaled", "shifted rows", "prefix missing", "cut off at the end", "rows of another sample", "rows out of order",
    "partial sum", "part of a layer", "normed", "interleaved slots", "permuted channels", "missing channels",
    "context cut", "drifts with position", "quantized target", "other weights", "altered rows", "coarser values",
    "dead", "constant", "not finite", "missing rows", "other tokens", "no tap of this target", "undecided",
]  # fmt: skip

_MAX_WEIGHT_ERROR = 0.8  # beyond it, rows have nothing left of the tap they are nearest to
_OWN_NOISE_RUNS = 3
_SCALED_SHARE = 0.8  # of the rows that a scale must explain
_FOLLOWED = 0.2  # by how much rows must be more alike their own token's than another's, in cosine
_MAX_AROUND = 24  # further samples that are replayed to find rows in
_LOST_ERROR = 0.8  # of a row that has nothing of its tap
_MIN_RUN = 4  # rows at an end of a sample that count as one piece
_PROFILE_ROOM = 1.5  # times the difference of two samples' channel profiles at one tap


@dataclass(frozen=True)
class Defect:
    """What is wrong, in a form that is equal for equal defects of several slots and samples."""

    kind: Kind
    text: str  # what was found, without the numbers of one sample
    certain: bool = True


OTHER_WEIGHTS = Defect(
    "other weights", "rows are near their tap, and farther from it than rounding goes, growing with depth"
)
ALTERED = Defect(
    "altered rows",
    "rows are near their tap and farther from it than rounding goes, and deeper slots are right: they were changed "
    "after the target computed them",
)
NO_TAP = "no tap, no other row and no part of a layer fits"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One slot of one sample. ``tap`` is the index in ReplayTarget.all_taps of what it is, None where it is none."""

    slot: int
    sample: int
    tap: int | None
    match: Match  # of the rows as they stand
    defects: tuple[Defect, ...]
    rearranged: bool = False  # ``tap`` comes from a hypothesis, and the rows as they stand are not it
    ragged: bool = False  # most rows are ``tap``, and too many deviate from it

    @property
    def explained(self) -> bool:
        """A tap within rounding, with nothing worse about it than a warning."""
        return self.tap is not None and not any(defect.certain or defect.kind == "undecided" for defect in self.defects)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Everything that was found, and what it was measured in."""

    diagnoses: tuple[Diagnosis, ...]
    projections: tuple[Projection, ...]  # on quantization schemes, best first; empty where nothing called for them

    def of_slot(self, slot: int) -> list[Diagnosis]:
        return [diagnosis for diagnosis in self.diagnoses if diagnosis.slot == slot]


class Examiner:
    """Examines samples of which ``target`` is replayed up to ``max_tokens`` tokens each."""

    def __init__(
        self,
        target: ReplayTarget,
        slots: Sequence[Slot],
        samples: Sequence[StoredSample],
        noise: Noise,
        *,
        compute_dtype: str,
        max_tokens: int | None,
        neighbours: Callable[[StoredSample], list[StoredSample]],
    ) -> None:
        self.target, self.slots, self.samples, self.noise = target, slots, samples, noise
        self._compute_dtype = compute_dtype
        self._max_tokens, self._neighbours = max_tokens, neighbours
        self._ids = [sample.input_ids[:max_tokens] for sample in samples]
        self._around: dict[str, Tensor] = {}  # further samples that rows are searched in, by name
        self._asked: set[int] = set()
        self._own_noise: dict[int, Noise] = {}
        self._index = {tap: index for index, tap in enumerate(target.all_taps)}
        self._rows: dict[tuple[int, int], Tensor] = {}

    def examine(self) -> Examination:
        """Examine every slot of every sample."""
        found = [self._match(slot, sample) for sample in range(len(self.samples)) for slot in range(len(self.slots))]
        found = self._structures(found)
        return self._weights(found)

    # What a slot's rows look like beside the replay.

    def rows(self, sample: int, slot: int) -> Tensor:
        """The stored rows in the replayed window, [T, H]: dead ones as NaN, and NaN where files hold fewer rows."""
        import torch

        if (sample, slot) not in self._rows:
            num_tokens = len(self._ids[sample])
            stored = self.samples[sample].slots[slot][:num_tokens]
            rows = torch.full((num_tokens, stored.shape[1]), torch.nan, dtype=stored.dtype)
            rows[: len(stored)] = stored
            rows[(rows == 0).all(-1)] = torch.nan
            self._rows[sample, slot] = rows
        return self._rows[sample, slot]

    def _pair(self, sample: int, slot: int) -> tuple[Tensor, Tensor]:
        """Stored rows [T, H'] and taps [L+2, T, H'], of the channels that hold something if not all do."""
        rows, stack = self.rows(sample, slot), self.target.taps(self._ids[sample])
        dead = (self.samples[sample].slots[slot] == 0).all(0)
        if not bool(dead.any()) or bool(dead.all()):
            return rows, stack
        return rows[:, ~dead], stack[:, :, (~dead).to(stack.device)]

    def _errors(self, d: Diagnosis, tap: int) -> Tensor:
        """Of each row from ``tap``: float32 [T]."""
        rows, stack = self._pair(d.sample, d.slot)
        return row_errors(rows, stack[tap])

    def _alive(self, sample: int, slot: int) -> Tensor:
        return self.rows(sample, slot).isfinite().all(-1)

    def _declared(self, slot: int) -> int | None:
        declared = self.slots[slot].declared
        return None if declared is None else self._index[declared]

    def _match(self, slot: int, sample: int) -> Diagnosis:
        """The tap within rounding, if there is one, and what the rows show by themselves."""
        defects = self._storage(slot, sample)
        match = match_taps(*self._pair(sample, slot), self.target.all_taps)
        if match.best is not None and (lost := self._lost(slot, sample, match)) is not None:
            defects = (*defects, lost)
            match = match_taps(*self._pair(sample, slot), self.target.all_taps)
        fitting = [index for index, error in enumerate(match.errors) if error <= self._explained(index)]
        tap = min(fitting, key=lambda index: match.errors[index]) if fitting else None
        declared = self._declared(slot)
        if declared in fitting:
            tap = declared
        diagnosis = Diagnosis(slot=slot, sample=sample, tap=tap, match=match, defects=defects)
        return diagnosis if tap is None else self._strays(diagnosis)

    def _explained(self, index: int) -> float:
        return max(self.noise.explained(index), 1e-4)

    def _storage(self, slot: int, sample: int) -> tuple[Defect, ...]:
        stored = self.samples[sample]
        rows = stored.slots[slot]
        defects: list[Defect] = []
        if len(rows) != stored.num_tokens:
            defects.append(Defect("missing rows", f"the files hold {len(rows)} rows for {stored.num_tokens} tokens"))
        if not len(rows):
            return tuple(defects)
        scan = scan_rows(rows)
        if bool(scan.zero.all()):
            return (*defects, Defect("dead", "every row is zero"))
        if scan.constant:
            return (*defects, Defect("constant", "every row is the same"))
        if bool(scan.nonfinite.any()):
            defects.append(Defect("not finite", f"{_some(scan.nonfinite)} hold NaN or Inf"))
        if bool(scan.zero.any()):
            first, last = bool(scan.zero[0]), bool(scan.zero[-1])
            kind: Kind = "prefix missing" if first else "cut off at the end" if last else "missing rows"
            defects.append(Defect(kind, f"{_some(scan.zero)} are zero"))
        if float(scan.repeated.float().mean()) > 0.05 and self._more_repeats_than_tokens(scan.repeated, sample):
            defects.append(Defect("missing rows", f"{_some(scan.repeated)} are copies of the row before"))
        if float(scan.dead_channels.float().mean()) > 0.01:
            defects.append(Defect("missing channels", f"{_some(scan.dead_channels, 'channels')} are zero in every row"))
        grid = coarser_grid(rows[scan.alive])
        # Halved mantissas of float32 cost nothing, and say something only where float32 was computed; eight bits are
        # half of what the engine feeds.
        if grid is not None and ("8" in grid or self._compute_dtype == "float32"):
            stored_as = str(rows.dtype).removeprefix("torch.")
            defects.append(Defect("coarser values", f"{grid} values stored as {stored_as}", certain="8" in grid))
        return tuple(defects)

    def _more_repeats_than_tokens(self, repeated: Tensor, sample: int) -> bool:
        """Whether more rows repeat than tokens do: embeddings of equal tokens are equal."""
        ids = self.samples[sample].input_ids[: len(repeated)]
        return int(repeated.sum()) > 2 * int((ids[1:] == ids[:-1]).sum())

    def _strays(self, diagnosis: Diagnosis) -> Diagnosis:
        """Single rows of a matched slot that are not their token's."""
        assert diagnosis.tap is not None
        sample, slot, tap = diagnosis.sample, diagnosis.slot, diagnosis.tap
        errors = self._errors(diagnosis, tap)
        stray = errors > STRAY_ERROR
        stray[0] = False
        if int(stray.sum()) > 2 * self.noise.strays[tap] * len(stray):
            if (moved := self._moved(sample, slot, tap, stray)) is not None:
                return replace(diagnosis, defects=(*diagnosis.defects, moved))
            if (cut := self._cut(diagnosis, errors)) is not None:
                return _as(diagnosis, tap, cut)
        return self._ragged(diagnosis)

    def _lost(self, slot: int, sample: int, match: Match) -> Defect | None:
        """Rows at an end of a sample that are not its own, while the rest are: compared no more from here on."""
        import torch

        assert match.best is not None
        tap = self._index[match.best]
        probe = Diagnosis(slot=slot, sample=sample, tap=tap, match=match, defects=())
        errors = self._errors(probe, tap)
        run = _run_at_an_end(errors)
        if run is None:
            return None
        rows = torch.zeros(len(errors), dtype=torch.bool)
        rows[run] = True
        if not median_error(errors, ~rows) <= self._explained(tap) or self._cut(probe, errors) is not None:
            return None
        defect = self._moved(sample, slot, tap, rows)
        if defect is None:
            kind: Kind = "prefix missing" if run.start <= 1 else "cut off at the end"
            defect = Defect(kind, f"{_some(rows)} are no token's states")
        self.rows(sample, slot)[rows] = float("nan")
        return defect

    def _moved(self, sample: int, slot: int, tap: int, stray: Tensor) -> Defect | None:
        """Where rows that are not their token's come from, if they are found."""
        found = self._search(sample, slot, stray, taps=[tap])
        if found is None or found.share < 0.5:
            return None
        hit = found.sample >= 0
        if self.target.has_routers and int(hit.sum()) < _MIN_RUN:
            return None  # a token that was sent elsewhere may come to be like another
        others = hit & (found.sample != sample)
        if int(others.sum()) >= 0.5 * int(hit.sum()):
            whose = self._name(int(found.sample[others].mode().values))
            return Defect("rows of another sample", f"{_some(stray)} are those of sample {whose}")
        return Defect("rows out of order", f"{_some(stray)} are other rows of the same sample")

    def _ragged(self, d: Diagnosis) -> Diagnosis:
        allowed = 0.2 if self.target.has_routers else 0.1
        off = self._off(d)
        if float(off.float().mean()) <= allowed or int(off.sum()) < _MIN_RUN:
            return d
        # A second look, by the sample's own noise.
        allowed += 3 * self._noise_of(d.sample).strays[d.tap or 0] if self.target.has_routers else 0
        return replace(d, ragged=float(self._off(d).float().mean()) > allowed)

    def _off(self, d: Diagnosis) -> Tensor:
        """Rows of a matched slot that deviate more than rounding, bool [T]."""
        assert d.tap is not None
        tail = max(noise.tail[d.tap] for noise in (self.noise, self._own_noise.get(d.sample, self.noise)))
        off = self._errors(d, d.tap) > max(self.noise.excluded(d.tap), EXPLAINED * tail, 1e-3)
        off[0] = False
        return off

    def _noise_of(self, sample: int) -> Noise:
        """The noise of one sample, where that of the few it was measured on may be too small for it."""
        if sample not in self._own_noise:
            self._own_noise[sample] = measure_noise(
                self.target, [self._ids[sample]] * _OWN_NOISE_RUNS, self._compute_dtype
            )
        return self._own_noise[sample]

    def _search(self, sample: int, slot: int, rows: Tensor, taps: Sequence[int] | None = None) -> Found | None:
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
        among = [*self._ids, *self._around.values()]
        return search_rows(self.target, self.rows(sample, slot), rows, sample, among, self.noise, taps=taps)

    def _name(self, index: int) -> str:
        return [*(stored.name for stored in self.samples), *self._around][index]

    # Hypotheses on what no tap explains.

    def _structures(self, found: list[Diagnosis]) -> list[Diagnosis]:
        done = [d if _settled(d) else self._one(d) for d in self._noisy(found)]
        done = self._layouts(done)
        for slot in range(len(self.slots)):
            done = self._pieces(slot, done)
        done = [d if _settled(d) else self._last_resorts(d, done) for d in done]
        return [self._undecided(d) if d.ragged and not d.rearranged else d for d in done]

    def _undecided(self, d: Diagnosis) -> Diagnosis:
        off = self._off(d)
        text = f"{_some(off)} deviate from {self.target.all_taps[d.tap or 0]} more than rounding, and the rest do not"
        return replace(d, defects=(*d.defects, Defect("undecided", text, certain=False)))

    def _noisy(self, found: list[Diagnosis]) -> list[Diagnosis]:
        """Samples that are noisier than the rest, at the tap their slot has in most samples."""
        done = []
        for d in found:
            taps = [other.tap for other in found if other.slot == d.slot and other.tap is not None]
            tap = max(set(taps), key=taps.count) if taps else None
            usual = tap is not None and taps.count(tap) > len(self.samples) / 2
            if not _settled(d) and usual and tap is not None and d.match.best == self.target.all_taps[tap]:
                noise = self._noise_of(d.sample)
                room = max(noise.excluded(tap), self.noise.excluded(tap)) * (2 if self.target.has_routers else 1)
                d = self._strays(replace(d, tap=tap)) if d.match.best_error <= room else d
            done.append(d)
        return done

    def _one(self, d: Diagnosis) -> Diagnosis:
        """Hypotheses on one slot of one sample: a scale, rows of another place or sample."""
        rows = self.rows(d.sample, d.slot)
        stack = self.target.taps(self._ids[d.sample])
        alive = self._alive(d.sample, d.slot)
        scaled = self._scaled(rows, stack, alive)
        if scaled is not None:
            tap, text = scaled
            return _as(d, tap, Defect("scaled", text))
        found = self._search(d.sample, d.slot, alive)
        if found is None:
            return d
        defect: Defect | None = None
        if (k := found.shift(d.sample)) is not None and k != 0:
            lost = any(defect.kind in ("missing rows", "cut off at the end") for defect in d.defects)
            if k > 1 or (k == 1 and lost):
                text = f"the first {k} row{'s are' if k > 1 else ' is'} missing: row t holds token t{k:+d}"
                defect = Defect("prefix missing", text)
            else:
                text = f"row t holds token t{k:+d}"
                if k < -1:
                    text += f", as if {-k} tokens had been put in front"
                defect = Defect("shifted rows", text)
        elif (other := found.other_sample(d.sample)) is not None:
            defect = Defect("rows of another sample", f"the rows are those of sample {self._name(other)}")
        elif found.share >= 0.7:
            mine = found.sample == d.sample
            if bool(((found.sample >= 0) & ~mine).float().mean() > 0.1):
                whose = self._name(int(found.sample[(found.sample >= 0) & ~mine].mode().values))
                defect = Defect("rows of another sample", f"part of the rows are those of sample {whose}")
            elif float((mine & (found.token != found.rows)).float().mean()) > 0.1:
                defect = Defect("rows out of order", "the rows are this sample's in another order")
        if defect is None:
            return d
        return _as(replace(d, defects=_unless_explained(d.defects, defect)), found.tap, defect)

    def _scaled(self, rows: Tensor, stack: Tensor, alive: Tensor) -> tuple[int, str] | None:
        """One factor on all rows, or one a row, that makes them a tap."""

        alive = alive.clone()
        alive[0] = False
        if int(alive.sum()) < 3:
            return None
        x = rows[alive].float().to(stack.device)
        best: tuple[float, int, str] | None = None
        for index in range(len(stack)):
            r = stack[index][alive.to(stack.device)].float()
            factors = (x * r).sum(-1) / (r * r).sum(-1).clamp_min(1e-30)  # [R]
            factor = float(factors.median())
            # Not the median: half of the rows being right is another defect.
            one = float(row_errors(x, factor * r).quantile(_SCALED_SHARE))
            each = float(row_errors(x, factors[:, None] * r).quantile(_SCALED_SHARE))
            limit = max(self.noise.excluded(index), 1e-4)
            if one <= limit and abs(factor - 1) > 3 * max(one, self._explained(index)):
                text = f"{self.target.all_taps[index]} times {factor:.3g}"
                best = min(best or (one / limit, index, text), (one / limit, index, text))
            elif each <= limit and one > 2 * limit:
                text = f"{self.target.all_taps[index]} with each row scaled on its own (a norm without weights?)"
                best = min(best or (1 + each / limit, index, text), (1 + each / limit, index, text))
        return None if best is None else best[1:]

    def _layouts(self, found: list[Diagnosis]) -> list[Diagnosis]:
        """Features whose slots were laid out in another order in memory: tap after tap, or channel by channel."""
        for tensor in dict.fromkeys(slot.tensor for slot in self.slots):
            features = [n for n, slot in enumerate(self.slots) if slot.tensor == tensor]
            if len(features) > 1:
                found = self._layout(features, found)
        return found

    def _layout(self, features: Sequence[int], found: list[Diagnosis]) -> list[Diagnosis]:
        import torch

        done = list(found)
        for sample in range(len(self.samples)):
            bad = [d for d in done if d.sample == sample and d.slot in features and not _settled(d)]
            if len(bad) < len(features) - 1 or not bad:
                continue
            slots = [self.samples[sample].slots[n] for n in features]
            if len({len(slot) for slot in slots}) > 1 or len(slots[0]) != self.samples[sample].num_tokens:
                continue
            whole = torch.stack(slots, 1)  # [T, A, H]
            num_tokens, num_slots, width = whole.shape
            layouts = {
                "one tap after the other over all tokens ([A, T, H] written where [T, A*H] belongs)": whole.reshape(
                    num_slots, num_tokens, width
                ),
                "channel by channel ([T, H, A] written where [T, A*H] belongs)": whole.reshape(
                    num_tokens, width, num_slots
                ).permute(2, 0, 1),
            }
            stack = self.target.taps(self._ids[sample])
            window = len(self._ids[sample])
            for text, taken in layouts.items():
                matches = [match_taps(slot[:window], stack, self.target.all_taps) for slot in taken]
                errors = [min(enumerate(match.errors), key=lambda pair: pair[1]) for match in matches]
                if all(error <= self.noise.excluded(index) for index, error in errors):
                    for n, (index, _) in zip(features, errors, strict=True):
                        at = next(i for i, d in enumerate(done) if (d.sample, d.slot) == (sample, n))
                        done[at] = _as(done[at], index, Defect("interleaved slots", text))
                    break
        return done

    def _pieces(self, slot: int, found: list[Diagnosis]) -> list[Diagnosis]:
        """Parts of layers, on all unexplained samples of a slot together; of ragged ones, on the rows that deviate."""
        open_ = [d for d in found if d.slot == slot and (d.ragged or not _settled(d))]
        if not open_:
            return found
        stored, nearest = [], []
        for d in open_:
            searched = self._off(d) if d.ragged else self._alive(d.sample, slot)
            index = self._index[d.match.best] if d.match.best is not None else 0
            nearest.append(median_error(self._errors(d, index), searched))
            stored.append((self._ids[d.sample], self.rows(d.sample, slot), searched))
        piece = explain_by_pieces(self.target, stored, self.noise, sorted(nearest)[len(nearest) // 2])
        if piece is None:
            return found
        kinds: dict[str, Kind] = {
            "combination": "part of a layer",
            "intermediate": "normed" if "norm" in piece.text else "part of a layer",
            "partial": "partial sum",
            "some partial": "partial sum",
        }
        defect = Defect(kinds[piece.what], piece.text, certain=piece.what != "some partial" or piece.error < 0.3)
        named = {d.sample for d in open_}
        return [_as(d, piece.layer + 1, defect) if d.slot == slot and d.sample in named else d for d in found]

    def _last_resorts(self, d: Diagnosis, found: Sequence[Diagnosis]) -> Diagnosis:
        """A context that was cut, permuted channels, other tokens; else the nearest tap, if one is near."""
        nearest = None if d.match.best is None else self._index[d.match.best]
        declared = self._declared(d.slot)
        for tap in dict.fromkeys(index for index in (declared, nearest) if index is not None):
            errors = self._errors(d, tap)
            if (cut := self._cut(replace(d, tap=tap), errors)) is not None:
                return _as(d, tap, cut)
        if (permuted := self._permuted(d)) is not None:
            tap, text = permuted
            return _as(d, tap, Defect("permuted channels", text))
        if nearest is not None:
            alike = [other for other in found if other.slot == d.slot and other.match.best == d.match.best]
            if sum(self._near(other, nearest) for other in alike) > len(self.samples) / 2:
                return replace(d, tap=nearest)  # and _weights says why it is so far
        deeper_right = any(self._right_deeper(other, d) for other in found)
        if not deeper_right and (followed := self._follows_its_tokens(d)) is not None:
            return _as(d, followed, OTHER_WEIGHTS)
        profile = self._profile(d)
        if profile is not None:
            text = f"channels are those of {self.target.all_taps[profile]}, rows are of no token that was replayed"
            return _as(d, profile, Defect("other tokens", text))
        if any(defect.kind == "missing channels" for defect in d.defects):
            return d
        return replace(d, defects=(*d.defects, Defect("no tap of this target", NO_TAP)))

    def _right_deeper(self, other: Diagnosis, d: Diagnosis) -> bool:
        """Whether ``other`` is a slot of the same sample that is right, at a tap that depends on that of ``d``."""
        declared = self._declared(d.slot) if d.tap is None else d.tap
        return (
            other.sample == d.sample
            and other.explained
            and other.tap is not None
            and declared is not None
            and other.tap > declared
            and other.match.errors[other.tap] <= self._explained(other.tap)
            and other.match.errors[other.tap] < 0.5 * d.match.best_error  # what other weights do grows with depth
        )

    def _follows_its_tokens(self, d: Diagnosis) -> int | None:
        """The tap whose rows these are like, each more than any other token's: the right tokens in other weights."""
        import torch

        alive = self._alive(d.sample, d.slot).clone()
        alive[0] = False
        candidates = (self._declared(d.slot), None if d.match.best is None else self._index[d.match.best])
        if int(alive.sum()) < 12:
            return None
        x = self.rows(d.sample, d.slot)[alive].float()
        x = torch.nn.functional.normalize(x - x.mean(0), dim=-1)
        for tap in dict.fromkeys(index for index in candidates if index is not None):
            r = self.target.taps(self._ids[d.sample])[tap].cpu()[alive].float()
            r = torch.nn.functional.normalize(r - r.mean(0), dim=-1)
            own = float((x * r).sum(-1).median())
            others = max(float((x * r.roll(k, 0)).sum(-1).median()) for k in (-2, -1, 1, 2))
            if own > others + _FOLLOWED:
                return tap
        return None

    def _near(self, d: Diagnosis, tap: int) -> bool:
        """Whether rows are a tap's beyond doubt, whatever their deviation is."""
        match = d.match
        if match.best_error <= MAX_ERROR and match.margin >= MIN_MARGIN:
            return True
        if match.best_error <= self.noise.excluded(tap):
            return True
        return tap == self._declared(d.slot) and match.best_error <= _MAX_WEIGHT_ERROR

    def _cut(self, d: Diagnosis, errors: Tensor) -> Defect | None:
        """Rows that are right up to some token and wrong from there on: computed without the tokens before it?"""
        import torch

        assert d.tap is not None
        limit = max(self.noise.excluded(d.tap), 1e-3)
        wrong = torch.nan_to_num(errors, nan=torch.inf)[1:] > limit
        if len(wrong) < 6 or not bool(wrong.any()):
            return None
        # The split that most rows agree with: right before it, wrong after it.
        right_before = torch.cumsum((~wrong).int(), 0)
        wrong_after = int(wrong.sum()) - torch.cumsum(wrong.int(), 0)
        agree = right_before + wrong_after
        begin = int(agree.argmax()) + 2  # the first wrong token
        if begin >= len(errors) - 2 or float(agree.max()) < 0.85 * len(wrong) or begin < 3:
            return None
        ids = self._ids[d.sample]
        alone = self.target.run(ids[begin:])[d.tap]
        rows = self.rows(d.sample, d.slot)[begin:]
        if median_error(row_errors(rows, alone)) <= limit:
            text = f"rows from token {begin} on were computed without the {begin} tokens before them"
            return Defect("context cut", text)
        return None

    def _permuted(self, d: Diagnosis) -> tuple[int, str] | None:
        import torch

        rows = self.rows(d.sample, d.slot)
        alive = self._alive(d.sample, d.slot).clone()
        alive[0] = False
        if int(alive.sum()) < 16:
            return None
        stack = self.target.taps(self._ids[d.sample])
        x = rows[alive].float().to(stack.device)
        declared = self._declared(d.slot)
        for index in range(len(stack)) if declared is None else [declared]:
            r = stack[index][alive.to(stack.device)].float()
            distance = torch.cdist(x.T.contiguous(), r.T.contiguous())  # [H, H]
            place = distance.argmin(0)  # for each true channel, where it is stored
            if len(set(place.tolist())) < len(place):
                continue
            if median_error(row_errors(x[:, place], r), torch.ones(len(x), dtype=torch.bool)) <= self._explained(index):
                moved = int((place != torch.arange(len(place), device=place.device)).sum())
                if not moved:  # every channel in its place: what deviates is something else
                    continue
                jumps = int((place.diff() != 1).sum())
                text = f"{moved} of {len(place)} channels of {self.target.all_taps[index]} stand in another place"
                if jumps < len(place) // 2:
                    text += f", in {jumps + 1} blocks (tensor-parallel parts joined in another order?)"
                return index, text
        return None

    def _profile(self, d: Diagnosis) -> int | None:
        """The tap whose root mean square per channel, over tokens, these rows have: states of other tokens."""
        import torch

        alive = self._alive(d.sample, d.slot).clone()
        alive[0] = False
        if int(alive.sum()) < 16 or len(self.samples) < 2:
            return None

        def rms(rows: Tensor) -> Tensor:
            unit = rows.float() / rows.float().norm(dim=-1, keepdim=True).clamp_min(1e-20)
            size: Tensor = rows.float().norm(dim=-1).median(-1).values
            profile: Tensor = unit.square().mean(-2).sqrt() * size[..., None]
            return profile

        own = rms(self.target.taps(self._ids[d.sample])[:, 1:].cpu())  # [L+2, H]
        others = [
            rms(self.target.taps(ids)[:, 1:].cpu())
            for n, ids in enumerate(self._ids)
            if n != d.sample and len(ids) >= 16
        ]
        if not others:
            return None
        mine = rms(self.rows(d.sample, d.slot)[alive])
        room = torch.stack([(other - own).norm(dim=-1) / own.norm(dim=-1) for other in others]).amax(0)  # [L+2]
        distance = (mine - own).norm(dim=-1) / own.norm(dim=-1)
        index = int(distance.argmin())
        return (
            index if float(distance[index]) <= _PROFILE_ROOM * float(room[index]) and float(room[index]) < 0.5 else None
        )

    # Deviations of what is a tap.

    def _weights(self, found: list[Diagnosis]) -> Examination:
        """Quantization or other weights, judged over all slots and samples that are near a tap."""
        near = [d for d in found if d.tap is not None and not d.rearranged]
        typical = {  # per slot: a change of weights shows in every sample
            slot: sorted(ratios)[len(ratios) // 2]
            for slot in range(len(self.slots))
            if (ratios := [self._ratio(d) for d in near if d.slot == slot])
        }
        projections: list[Projection] = []
        if max(typical.values(), default=0.0) > 1.0:
            chosen = sorted({d.sample for d in near})[:2]
            stored = [
                (self._ids[a], {d.tap: self.rows(a, d.slot) for d in near if d.sample == a and d.tap is not None})
                for a in chosen
            ]
            projections = project(self.target, stored)
        quantized = next((p for p in projections if p.fits), None)
        done = [self._deviation(d, typical[d.slot], quantized, found) if d in near else d for d in found]
        return Examination(diagnoses=tuple(_follow(done, len(self.samples))), projections=tuple(projections))

    def _deviation(
        self, d: Diagnosis, typical: float, quantized: Projection | None, found: Sequence[Diagnosis]
    ) -> Diagnosis:
        """``d`` with what its deviation from the tap is, given that of the slot in most samples, in multiples of the
        noise. A reason that is certain stands for rows that could not be decided, too."""
        reason = self._reason(d, typical, quantized)
        if reason is None:
            return d
        if reason == OTHER_WEIGHTS and any(self._right_deeper(other, d) for other in found):
            reason = ALTERED
        kept = tuple(defect for defect in d.defects if defect.kind != "undecided" or not reason.certain)
        return replace(d, defects=(*kept, reason))

    def _reason(self, d: Diagnosis, typical: float, quantized: Projection | None) -> Defect | None:
        assert d.tap is not None
        error = d.match.errors[d.tap]
        if quantized is not None and d.tap != 0:
            return Defect("quantized target", quantized.scheme)
        if error <= self._explained(d.tap) or any(defect.kind == "coarser values" for defect in d.defects):
            return None
        beyond = self.noise.excluded(d.tap) / max(self.noise.level[d.tap] * self.noise.share, 1e-6)
        within = self._explained(d.tap) / max(self.noise.level[d.tap] * self.noise.share, 1e-6)
        if typical > within and (drift := self._drift(d)) is not None:
            return drift
        far = error > self.noise.excluded(d.tap)
        if typical <= beyond and far:
            # This sample and not the others: another worker's weights, or a sample that is noisier than they are.
            far = error > 2 * self._noise_of(d.sample).excluded(d.tap) and not self.target.has_routers
        if far:
            return OTHER_WEIGHTS
        if typical > within or (not self.target.has_routers and error > self._noise_of(d.sample).explained(d.tap)):
            text = "rows deviate more than rounding, and less than what only other weights would do"
            return Defect("undecided", text, certain=False)
        return None

    def _ratio(self, d: Diagnosis) -> float:
        assert d.tap is not None
        return d.match.errors[d.tap] / max(self.noise.level[d.tap] * self.noise.share, 1e-6)

    def _drift(self, d: Diagnosis) -> Defect | None:
        """Deviations that begin at rounding and grow along the sample: positions, not weights."""
        assert d.tap is not None
        errors = self._errors(d, d.tap)
        if len(errors) < 32:
            return None
        quarter = len(errors) // 4
        early, late = median_error(errors[:quarter]), median_error(errors[-quarter - 1 :])
        if early <= self._explained(d.tap) and late > self.noise.excluded(d.tap) and late > 4 * early:
            return Defect("drifts with position", "rows are right at the start and ever farther off along the sample")
        return None


def _run_at_an_end(errors: Tensor) -> slice | None:
    """Rows at the beginning or the end, not more than half, that have nothing of their tap."""
    lost = (errors > _LOST_ERROR).tolist()
    first, last = 1, len(lost)  # row 0 is never compared
    while first < len(lost) and lost[first]:
        first += 1
    while last > first and lost[last - 1]:
        last -= 1
    for run in (slice(last, len(lost)), slice(1, first)):
        if _MIN_RUN <= run.stop - run.start <= len(lost) / 2:
            return run
    return None


# What is said of rows for want of a better reason.
_DEVIATIONS: tuple[Kind, ...] = ("other weights", "altered rows", "undecided")
# What drives other slots of the sample beyond recognition, the likeliest first.
_CAUSES: tuple[Kind, ...] = (
    "context cut", "shifted rows", "prefix missing", "rows of another sample", "interleaved slots", "other weights",
    "other tokens",
)  # fmt: skip


def _follow(found: Sequence[Diagnosis], num_samples: int) -> list[Diagnosis]:
    """Slots of which nothing is left follow what can be recognized: the other slots of their sample, since other
    weights and other tokens show at shallow taps what they are and drive deep ones beyond recognition; or their slot
    in most other samples."""
    weak = ("no tap of this target", "other tokens")
    of_sample: dict[int, Defect] = {}
    for kind in _CAUSES:
        for d in found:
            for defect in d.defects:
                if defect.kind == kind:
                    of_sample.setdefault(d.sample, defect)
    of_slot: dict[int, Defect] = {}
    for slot in {d.slot for d in found}:
        strong = [x for d in found if d.slot == slot for x in d.defects if x.kind not in weak]
        kinds = [x.kind for x in strong]
        usual = max(kinds, key=kinds.count, default=None)
        if usual is not None and kinds.count(usual) > num_samples / 2:
            of_slot[slot] = next(x for x in strong if x.kind == usual)

    def followed(d: Diagnosis, defect: Defect) -> Defect:
        in_sample, in_slot = of_sample.get(d.sample), of_slot.get(d.slot)
        if defect.kind in _DEVIATIONS:
            if in_sample is not None and in_sample.kind not in (*_DEVIATIONS, *weak):
                return in_sample
            return in_slot or defect
        if defect.kind not in weak:
            return defect
        if in_sample is None or in_sample.kind == "other tokens":
            return in_slot or in_sample or defect
        return in_sample

    done = []
    for d in found:
        defects = tuple(dict.fromkeys(followed(d, defect) for defect in d.defects))
        for defect in defects:
            defects = _unless_explained(defects, defect)
        # A tap that was read off a channel profile is not one that other weights leave to be read.
        done.append(d if defects == d.defects else replace(d, tap=None, defects=defects))
    return done


def _as(d: Diagnosis, tap: int, defect: Defect) -> Diagnosis:
    """``d`` with its rows found to be ``tap`` after all, but for ``defect``."""
    return replace(d, tap=tap, defects=(*d.defects, defect), rearranged=True)


def _settled(d: Diagnosis) -> bool:
    """Explained by a tap or a hypothesis, or with nothing in it to explain."""
    return d.tap is not None or not d.match.num_tokens or any(x.kind in ("dead", "constant") for x in d.defects)


def _unless_explained(defects: tuple[Defect, ...], by: Defect) -> tuple[Defect, ...]:
    """Rows missing at the end follow from rows cut at the beginning."""
    if by.kind not in ("prefix missing", "shifted rows"):
        return defects
    return tuple(defect for defect in defects if defect.kind not in ("missing rows", "cut off at the end"))


def _some(flags: Tensor, what: str = "rows") -> str:
    """Where flags [N] are set, in words that are short: "rows 0-31" or "rows 3, 17 and 40 more"."""
    import torch

    places = torch.nonzero(flags).flatten().tolist()
    if len(places) == len(flags):
        return f"all {what}"
    if len(places) > 1 and places[-1] - places[0] == len(places) - 1:
        return f"{what} {places[0]} to {places[-1]} of {len(flags)}"
    if len(places) == 1:
        return f"{what.removesuffix('s')} {places[0]} of {len(flags)}"
    shown = ", ".join(str(place) for place in places[:3])
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return f"{what} {shown}{more} of {len(flags)}"
