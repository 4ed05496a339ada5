"""Running a check for every release that the engine may be, and saying one thing where they agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft
from eyas.align.loaders import known_architectures, loaders_for
from eyas.align.loaders.base import Loading, load
from eyas.align.verdict import Finding


def over_releases(subject: Subject, check: Callable[[Loading, Draft], Sequence[Finding]]) -> list[Finding]:
    """The findings of ``check`` for each way the engine may load the draft, one for each subject of a finding.

    Nothing where there is no draft or engine, or where no way is known (``check_loads`` says that).
    """
    if subject.draft is None or subject.engine is None:
        return []
    found = [
        (loader.label, check(load(loader, subject.draft), subject.draft))
        for loader in loaders_for(subject.engine, subject.draft)
    ]
    names = dict.fromkeys(finding.check for _, findings in found for finding in findings)
    return [combine([pair for one in found for pair in _named(*one, name)]) for name in names]


def _named(label: str, findings: Sequence[Finding], name: str) -> list[tuple[str, Finding]]:
    """A release's findings of this name; where it has none, nothing is wrong with it there."""
    same = [(label, finding) for finding in findings if finding.check == name]
    return same or [(label, Finding(check=name, status="ok", found="nothing of the kind"))]


def combine(found: Sequence[tuple[str, Finding]]) -> Finding:
    """One finding of several about the same thing, each with the release it holds for.

    Where they differ in status it is unknown which holds, and each is shown.
    """
    first = found[0][1]
    distinct = {(f.status, f.found, f.expected, f.consequence, f.mend) for _, f in found}
    if len(distinct) == 1:
        sources = "; ".join(dict.fromkeys(f.source for _, f in found if f.source))
        return replace(first, source=sources or None)
    shown = "\n".join(f"{label}: {f.found}" for label, f in found)
    statuses = {f.status for _, f in found}
    worst = next((f for _, f in found if f.status == "mismatch"), None) or next(
        (f for _, f in found if f.status != "ok"), first
    )
    if len(statuses) == 1:
        return replace(worst, found=shown.replace("\n", "; "))
    return Finding(
        check=first.check,
        status="unknown",
        found="depends on the engine's release, which is not given",
        expected=worst.expected,
        consequence=shown,
        mend="say which one it is: --engine SYSTEM@VERSION" + (f"\n{worst.mend}" if worst.mend else ""),
        source=worst.source,
    )


def _usual_name(draft: Draft) -> str:
    """The architecture by which vLLM and SGLang both know a draft with this attention."""
    return "Eagle3DeepseekV2ForCausalLM" if draft.config.layer.get("kv_lora_rank") else "LlamaForCausalLMEagle3"


def check_loads(subject: Subject) -> list[Finding]:
    """Whether the engine knows the draft's architecture, in a release that was read."""
    if subject.draft is None or subject.engine is None:
        return []
    engine, config = subject.engine, subject.draft.config
    given = config.raw.get("architectures")
    name = config.architecture or ("no architecture" if given is None else f"{given!r}, which is no list of names")
    loaders = loaders_for(engine, subject.draft)
    if loaders:
        cite = "; ".join(dict.fromkeys(loader.cite for loader in loaders))
        return [Finding(check="draft loads", status="ok", found=f"{name}, by {loaders[0].source}", source=cite)]
    architectures = known_architectures(engine)
    if not architectures:
        return [
            Finding(
                check="draft loads",
                status="unknown",
                found=f"how {engine} loads a draft is unknown",
                mend="give a release whose source was read (docs/alignment.md lists them)",
            )
        ]
    return [
        Finding(
            check="draft loads",
            status="mismatch",
            found=f'"architectures": ["{name}"]',
            expected=f"one of {', '.join(architectures)}",
            consequence=f"{engine} has no model of this name: it does not load the draft",
            mend=f'"architectures": ["{_usual_name(subject.draft)}"], once the tensors are those of that model',
            source=f"{engine}, the registry of its models",
        )
    ]
