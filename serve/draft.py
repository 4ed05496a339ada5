"""Before a draft is served: what this release of the engine feeds it, and whether it was trained on that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from eyas.align.checks.shapes import compare_hidden_size
from eyas.align.checks.subject import TargetFolder
from eyas.align.draft import Draft, read_draft
from eyas.align.engine import Engine
from eyas.align.readings import ConfigReading, grouped, read_config
from eyas.align.static import check_plan
from eyas.align.verdict import Finding, Report
from eyas.serve.command import ServeConfig
from eyas.shards.identity import DatasetIdentity, read_identity
from eyas.taps.notation import format_taps
from eyas.taps.target import TargetFacts


def check_served_draft(config: ServeConfig, release: str | None) -> Report:
    """What ``config``'s engine in this ``release`` makes of its draft; against its dataset where it has one.

    A draft with a mismatch is not to be served. Raises EyasError for what is no draft, target or dataset.
    """
    assert config.draft is not None
    engine = Engine(config.engine, _version(release))
    facts = TargetFolder(Path(config.target)).facts
    draft = read_draft(Path(config.draft))
    readings = read_config(draft.config.raw, engine, facts)
    if config.dataset is None:
        return Report(
            (*_fits(draft, TargetFolder(Path(config.target))), _readings_alone(draft, engine, facts, readings))
        )
    identity = read_identity(Path(config.dataset))
    report = check_plan(identity, draft=Path(config.draft), engine=engine)
    wrong = any(reading.taps != identity.taps for reading in readings)
    return Report(
        (
            *_same_model(config, facts, identity),
            # Which reading comes true is not known before the engine runs, and then it is silent: one that is wrong is
            # reason enough where all of them can be right.
            *(
                replace(finding, status="mismatch")
                if finding.check == "taps" and finding.status == "unknown" and wrong
                else finding
                for finding in report.findings
            ),
        )
    )


def _fits(draft: Draft, target: TargetFolder) -> list[Finding]:
    """What can be said of the draft's widths without a dataset: engines load some that do not fit, and end at the first
    request."""
    findings = []
    width = target.text.get("hidden_size")
    if isinstance(width, int):
        findings.append(compare_hidden_size(draft, width, f"the hidden size of {target.path}"))
    if draft.tensors and draft.find("fc.weight") is None:
        findings.append(
            Finding(
                check="fc width",
                status="mismatch",
                found="no tensor fc.weight",
                expected="an EAGLE-3 draft, whose fc takes the concatenated taps",
                consequence="the engine does not load it as one",
                mend="give the folder that eyas export or a trainer of EAGLE-3 drafts wrote",
            )
        )
    return findings


def _version(release: str | None) -> Version | None:
    try:
        return None if release is None else Version(release)
    except InvalidVersion:
        return None


def _readings_alone(draft: Draft, engine: Engine, facts: TargetFacts, readings: list[ConfigReading]) -> Finding:
    if not readings:
        return Finding(
            check="taps",
            status="unknown",
            found=f"how {engine} reads layer ids for {facts} is unknown, since no source was read",
            mend="eyas check DATASET --engine-live asks the engine itself",
        )
    shown = "; ".join(grouped((reading.label, reading.outcome) for reading in readings))
    cite = "; ".join(dict.fromkeys(reading.cite for reading in readings))
    taps = {reading.taps for reading in readings}
    if taps == {None}:
        return Finding(
            check="taps",
            status="mismatch",
            found=shown,
            expected="layer ids that it can feed",
            consequence="it stops, or feeds the draft something else in silence",
            mend=f"eyas export DRAFT OUT --engine {engine}, which writes the ids that it reads",
            source=cite,
        )
    if any(reading.ignored for reading in readings):
        return Finding(
            check="taps",
            status="warning",
            found=shown,
            consequence="the draft's config says its layers where this engine does not look",
            mend=f"eyas export DRAFT OUT --engine {engine}; --dataset proves what was trained on",
            source=cite,
        )
    if len(taps) > 1:
        return Finding(
            check="taps",
            status="unknown",
            found=shown,
            mend=f"eyas export DRAFT OUT --engine {engine} writes ids that all of these read alike",
            source=cite,
        )
    return Finding(check="taps", status="ok", found=shown, source=cite)


def _same_model(config: ServeConfig, facts: TargetFacts, identity: DatasetIdentity) -> list[Finding]:
    trained = TargetFacts(num_layers=identity.target.num_layers, model_class=identity.target.model_class)
    if (facts.num_layers, facts.model_class) == (trained.num_layers, trained.model_class):
        return []
    return [
        Finding(
            check="target model",
            status="mismatch",
            found=f"{config.target} is {facts}",
            expected=f"{trained}, which {config.dataset} ({format_taps(identity.taps)}) was captured from",
            consequence="the draft was trained on another model's hidden states",
            mend=f"--target {identity.target.name}, or the dataset of this target",
        )
    ]
