"""The live check: what an engine feeds a draft, slot by slot, against the columns of a dataset.

Every tap of the same forward is at hand too, from hooks that know nothing of the engine's layer ids, so that both what
is fed and what is stored are named by what they are (taps/match.py). Two runs of one engine differ by the rounding of
their batches; other engines in 16 bits by 1 to 5 %, and other taps by far more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from eyas.align.checks.shapes import compare_hidden_size
from eyas.align.checks.taps import FED
from eyas.align.draft import read_draft
from eyas.align.engine import Engine
from eyas.align.live import CannotFeed, LiveEngine, LiveStates, open_live
from eyas.align.noise import median_error, row_errors
from eyas.align.readings import describe_fragments, read_config
from eyas.align.stored import LAST_HIDDEN, DatasetSource, Slot, StoredSample, format_slots
from eyas.align.verdict import RECAPTURE, Finding
from eyas.capture.engines import installed_version
from eyas.capture.engines.transformers.load import read_outline
from eyas.capture.self_test import TOLERANCES, join_samples
from eyas.shards.sample import TokenSample
from eyas.taps.match import MIN_MARGIN, Match, match_taps
from eyas.taps.notation import FINAL, Tap, all_taps, format_taps
from eyas.taps.target import TargetFacts

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.capture.engines.base import EngineSettings
    from eyas.shards.dataset import Dataset
    from eyas.shards.identity import DatasetIdentity

NUM_SAMPLES = 4
MAX_TOKENS = 128  # of each: the first ones, whose states do not depend on those that follow


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A stored column beside what the engine feeds in its place."""

    slot: Slot
    held: Match  # of the stored rows, with every tap of the engine's forward
    fed: Match | None  # of the rows that the engine feeds; None where it feeds none here
    error: float  # relative L2 of the stored rows to those that are fed, median over tokens


def live_findings(
    dataset: Dataset, system: str, settings: EngineSettings, draft: Path, *, num_samples: int = NUM_SAMPLES
) -> list[Finding]:
    """Start ``system`` as ``settings`` say (their taps are all of the target's), and compare ``num_samples`` samples.

    Raises TargetError where it does not start, and UsageError for options that it refuses.
    """
    source = DatasetSource(dataset)
    samples = source.pick(num_samples)
    outline = read_outline(settings.target, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    facts = TargetFacts.from_config(outline.config.to_dict(), where=settings.target)
    described = read_draft(draft)
    identity = dataset.identity
    if not samples:
        return [Finding(check="live", status="unknown", found="no sample of at least 4 tokens to run")]
    if identity.hidden_size != outline.hidden_size or identity.target.vocab_size != outline.vocab_size:
        return [
            Finding(
                check="live",
                status="mismatch",
                found=f"states of width {identity.hidden_size}, {identity.target.vocab_size} token ids",
                expected=f"{outline.hidden_size} and {outline.vocab_size}, as {settings.target} has",
                consequence="these are not this target's states",
                mend="give the target that was captured: --target",
            )
        ]
    fits = compare_hidden_size(described, outline.hidden_size, "the target's hidden size")
    if fits.status == "mismatch":  # no engine feeds such a draft, whatever layer ids its config names
        return [replace(fits, check="live slots")]
    try:
        with open_live(system, settings, outline, draft) as live:
            cut = [_cut(sample, min(MAX_TOKENS, live.max_tokens or MAX_TOKENS)) for sample in samples]
            states = [live.states(sample) for sample in cut]
            engine = _Ran(live, cut)
    except CannotFeed as error:
        unread = [
            reading for reading in read_config(described.config.raw, _here(system), facts) if reading.taps is None
        ]
        why = "".join(f"; {reading.label} {reading.outcome}" for reading in unread)
        return [_cannot_feed(f"{error}{why}", system, identity, facts)]
    columns = _columns(source.slots, samples, cut, states)
    readings = read_config(described.config.raw, engine.engine, facts)
    variant = engine.label.partition(", ")[2]
    own = [reading for reading in readings if not variant or reading.label.endswith(variant)]
    as_read = bool(own) and all(reading.taps == identity.taps for reading in own)
    return [engine.finding(settings), *_slot_findings(engine, columns, states, identity, facts, as_read=as_read)]


def _here(system: str) -> Engine:
    """The installed release of ``system``."""
    try:
        return Engine(system, Version(installed_version(system)))
    except InvalidVersion:
        return Engine(system, None)


class _Ran:
    """The engine that ran, by name."""

    def __init__(self, live: LiveEngine, samples: Sequence[TokenSample]) -> None:
        self.label, self._path, self._samples = live.label, live.path, samples
        try:
            release: Version | None = Version(live.release)
        except InvalidVersion:
            release = None
        self.engine = Engine(live.label.partition(" ")[0], release)

    def finding(self, settings: EngineSettings) -> Finding:
        longest = max(sample.num_tokens for sample in self._samples)
        return Finding(
            check="live engine",
            status="ok",
            found=f"{self.label} ran {len(self._samples)} samples of up to {longest} tokens in {settings.dtype}. "
            f"{self._path}",
        )


def _cut(sample: StoredSample, num_tokens: int) -> TokenSample:
    import numpy as np

    ids = sample.input_ids[:num_tokens].numpy().astype(np.int32)  # [T]
    return TokenSample(sample_id=sample.name, input_ids=ids, loss_mask=np.ones(len(ids), dtype=np.uint8))


def _columns(
    slots: Sequence[Slot], samples: Sequence[StoredSample], cut: Sequence[TokenSample], states: Sequence[LiveStates]
) -> list[_Column]:
    taps = list(states[0].taps)
    every = [join_samples([state.taps[tap] for state in states]) for tap in taps]
    num_fed = len(states[0].slots)
    columns = []
    for n, slot in enumerate(slots):
        stored = join_samples([s.slots[n][: c.num_tokens] for s, c in zip(samples, cut, strict=True)])
        fed: Tensor | None = None
        if slot.name != LAST_HIDDEN and n < num_fed:
            fed = join_samples([state.slots[n] for state in states])
        columns.append(
            _Column(
                slot=slot,
                held=match_taps(stored, every, taps),
                fed=None if fed is None else match_taps(fed, every, taps),
                error=float("nan") if fed is None else median_error(row_errors(stored, fed)),
            )
        )
    return columns


def _slot_findings(
    ran: _Ran,
    columns: Sequence[_Column],
    states: Sequence[LiveStates],
    identity: DatasetIdentity,
    facts: TargetFacts,
    *,
    as_read: bool,
) -> list[Finding]:
    allowed = TOLERANCES[identity.dtype]
    findings, wrong = [], []
    features = [column for column in columns if column.slot.name != LAST_HIDDEN]
    for column in features:
        if _same(column, allowed):
            findings.append(_right(ran, column))
        else:
            wrong.append(column)
    num_fed = len(states[0].slots)
    if wrong or num_fed != len(features):
        findings.append(_wrong(ran, wrong, num_fed, len(features), identity, facts, as_read=as_read))
    findings += [_last_hidden(ran, column, allowed) for column in columns if column.slot.name == LAST_HIDDEN]
    return findings


def _same(column: _Column, allowed: float) -> bool:
    """Whether the engine feeds what is stored, and that is the tap it is called, as far as taps can be told apart."""
    if column.fed is None or not column.error <= allowed:
        return False
    fed = column.fed.best
    others = [error for tap, error in zip(_taps(column), column.held.errors, strict=True) if tap != fed]
    return fed == column.slot.declared and column.error <= (1 - MIN_MARGIN) * min(others)


def _taps(column: _Column) -> Sequence[Tap]:
    return all_taps(len(column.held.errors) - 2)


def _right(ran: _Ran, column: _Column) -> Finding:
    assert column.fed is not None
    tap, held = column.fed.best, column.held
    next_tap, next_error = (held.runner_up, held.runner_up_error) if held.best == tap else (held.best, held.best_error)
    return Finding(
        check=f"live {column.slot.name}",
        status="ok",
        found=f"{ran.label} feeds {tap}: {column.error:.2%} away from what is stored, next {next_tap} at "
        f"{next_error:.0%}",
    )


def _wrong(
    ran: _Ran,
    wrong: Sequence[_Column],
    num_fed: int,
    num_stored: int,
    identity: DatasetIdentity,
    facts: TargetFacts,
    *,
    as_read: bool,
) -> Finding:
    """What does not match, with what mends it: the draft's config, the dataset, or neither of them."""
    texts = [_fed_and_held(column) for column in wrong]
    if num_fed != num_stored:
        texts.insert(0, f"{num_fed} slots, where {num_stored} are stored")
    stored_as_declared = all(_is(column.held, column.slot.declared) for column in wrong)
    other_tap = num_fed != num_stored or any(not _is(c.fed, c.slot.declared) for c in wrong)
    consequence, mend = FED, _config_mend(ran, identity, facts)
    if not stored_as_declared:
        consequence = "the dataset does not hold the taps that it says it does: " + FED
        mend = RECAPTURE if not other_tap else f"{mend}\n{RECAPTURE}"
    elif not other_tap:
        consequence = "the taps are the same and their states are not: other weights, another precision or quantization"
        mend = "find out which with a replay: eyas check DATASET --target TARGET"
    elif as_read:
        mend = (
            f"the draft's config is right for {ran.engine} as it was released, and what is installed here does "
            f"otherwise (a patch, a plugin, another model class?): install that release again, or capture what this "
            f"one feeds with eyas capture --taps"
        )
    return Finding(
        check=f"live {format_slots([column.slot for column in wrong]) or 'slots'}",
        status="mismatch",
        found=f"{ran.label} feeds {'; '.join(texts)}",
        expected=f"{format_taps(identity.taps)}, which were captured",
        consequence=consequence,
        mend=mend,
    )


def _fed_and_held(column: _Column) -> str:
    """``after:2 into slot 0, 57% away from what is stored there, which is after:1 (0.00% away)``."""
    name, held = column.slot.name, column.held
    stored = f"which is {held.best} ({held.best_error:.2%} away)"
    if not held.decided:
        stored = f"which is no tap: {held.undecided}"
    if column.fed is None:
        return f"nothing into {name}, {stored}"
    fed = str(column.fed.best) if column.fed.decided else f"no tap ({column.fed.undecided})"
    return f"{fed} into {name}, {column.error:.0%} away from what is stored there, {stored}"


def _is(match: Match | None, tap: Tap | None) -> bool:
    return match is not None and match.decided and match.best == tap


def _config_mend(ran: _Ran, identity: DatasetIdentity, facts: TargetFacts) -> str:
    return describe_fragments(ran.engine, identity.taps, facts)


def _last_hidden(ran: _Ran, column: _Column, allowed: float) -> Finding:
    """last_hidden is fed to no draft: a trainer makes the target's distribution of it, before or after the norm."""
    held, declared = column.held, column.slot.declared
    norm = {FINAL: "after the final norm"}
    if _is(held, declared) and held.best_error <= allowed:
        where = norm.get(declared, "before the final norm") if declared is not None else ""
        return Finding(
            check=f"live {LAST_HIDDEN}",
            status="ok",
            found=f"{declared} of {ran.label}, {where}: {held.best_error:.2%} away, next {held.runner_up} at "
            f"{held.runner_up_error:.0%}",
        )
    found = f"{held.best}, {held.best_error:.2%} away" if held.decided else f"no tap of {ran.label}: {held.undecided}"
    return Finding(
        check=f"live {LAST_HIDDEN}",
        status="mismatch" if not _is(held, declared) else "unknown",
        found=found,
        expected=f"{declared}, which was captured",
        consequence="who trains on it applies the target's final norm twice or not at all, or learns from other states",
        mend=RECAPTURE,
    )


def _cannot_feed(why: str, system: str, identity: DatasetIdentity, facts: TargetFacts) -> Finding:
    return Finding(
        check="live slots",
        status="mismatch",
        found=f"{system} cannot serve this draft: {why}",
        expected=f"{format_taps(identity.taps)}, which were captured",
        consequence=f"{system} does not start with it, or feeds it fewer taps than it has inputs for",
        mend=describe_fragments(Engine(system, None), identity.taps, facts),
    )
