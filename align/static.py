"""Every static check of a dataset, in the order of a verdict: what is fed, the draft, the target, the data."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.align.checks.canaries import check_canaries
from eyas.align.checks.data import LookedAt, check_data
from eyas.align.checks.masks import check_masks
from eyas.align.checks.norms import check_norms
from eyas.align.checks.releases import check_loads
from eyas.align.checks.rope import check_rope
from eyas.align.checks.shapes import check_shapes
from eyas.align.checks.subject import Subject, TargetFolder
from eyas.align.checks.taps import check_taps
from eyas.align.checks.target import check_target
from eyas.align.checks.tensors import check_tensors
from eyas.align.checks.values import check_values
from eyas.align.checks.vocabulary import check_vocabulary
from eyas.align.draft import CONFIG_FILE, read_draft
from eyas.align.engine import Engine
from eyas.align.verdict import Finding, Report
from eyas.shards.errors import ShardError
from eyas.shards.identity import DatasetIdentity, read_identity
from eyas.shards.ledger import LedgerState, read_ledgers


def check_static(
    dataset: Path,
    *,
    draft: Path | None = None,
    engine: Engine | None = None,
    target: Path | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Check ``dataset`` without running the target; ``draft`` and ``target`` are folders.

    Raises EyasError (IdentityError, DraftError, ...) for what is no dataset, draft or target.
    """
    return check_subject(
        Subject(
            dataset=dataset,
            identity=read_identity(dataset),
            ledgers=read_ledgers(dataset),
            draft=None if draft is None else read_draft(draft),
            engine=engine,
            target=None if target is None else TargetFolder(target, trust_remote_code),
        )
    )


def check_plan(planned: DatasetIdentity, *, draft: Path | None, engine: Engine | None) -> Report:
    """What a capture that would write ``planned`` gives this draft in this engine, before a token is captured."""
    subject = Subject(
        dataset=Path(),
        identity=planned,
        ledgers=LedgerState([], []),
        draft=None if draft is None else read_draft(draft),
        engine=engine,
    )
    return Report(tuple(_draft_findings(subject)))


def check_subject(subject: Subject) -> Report:
    """The findings about ``subject``."""
    looked_at = LookedAt(subject)
    findings = [
        *_draft_findings(subject),
        *check_target(subject),
        *check_data(subject, looked_at),
        *check_canaries(subject),
    ]
    if subject.ledgers.entries:
        with contextlib.suppress(ShardError):  # check_data has said so
            findings += check_masks(subject, looked_at)
    return Report(tuple(findings))


def _without_weights(subject: Subject) -> list[Finding]:
    draft = subject.draft
    if draft is None or draft.tensors or not (draft.path / CONFIG_FILE).is_file():
        return []
    found = f"{draft.path} holds a config and no weights: tensors, vocabulary maps and lm_head were not looked at"
    return [Finding(check="draft weights", status="unknown", found=found, mend="check the trained draft once more")]


def _draft_findings(subject: Subject) -> list[Finding]:
    """What the taps, the draft and the engine say of each other."""
    return [
        *check_taps(subject),
        *check_loads(subject),
        *_without_weights(subject),
        *check_shapes(subject),
        *check_norms(subject),
        *check_rope(subject),
        *check_vocabulary(subject),
        *check_tensors(subject),
        *check_values(subject),
    ]
