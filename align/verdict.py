"""What a check says: findings, each with its mend, and the report they make.

A finding is one line: its status, its subject, what was found. One that is not ok says more below it: what was
expected, what follows from the difference in plain words, the exact line that mends it, and where a claim about another
system was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "mismatch", "unknown"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "mismatch", "unknown")

EXIT_MISMATCH = 3

# The mend of most that is wrong with stored states.
RECAPTURE = "capture again, and check the first sealed shard before the rest: eyas check DATASET --target TARGET"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check.

    ``unknown`` is for what cannot be told from what is at hand, or what no source backs; it is never a guess. A
    mismatch always says what was expected, what follows and how to mend it.
    """

    check: str  # its subject in a few words, e.g. "taps", "draft d2t", "replay slot 2"
    status: Status
    found: str
    expected: str = ""
    consequence: str = ""  # what happens if nothing is changed, in plain words
    mend: str = ""  # the exact line, command or config fragment; may have several lines
    source: str | None = None  # system, version and file that the claim about that system was read from

    def __post_init__(self) -> None:
        if self.status == "mismatch":
            assert all((self.expected, self.consequence, self.mend)), f"mismatch without its mend: {self}"


@dataclass(frozen=True)
class Report:
    """The findings of one run of ``eyas check``, in the order the checks ran."""

    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)

    def exit_status(self, *, strict: bool = False) -> int:
        """3 on any mismatch, with ``strict`` on anything unknown too; else 0."""
        bad = self.count("mismatch") + (self.count("unknown") if strict else 0)
        return EXIT_MISMATCH if bad else 0

    def to_json(self) -> dict[str, Any]:
        """What --json prints: a number for each status, and every finding with all its fields."""
        return {
            "counts": {status: self.count(status) for status in STATUSES},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def text(self, paint: Callable[[str, Status], str] = lambda text, _: text) -> str:
        """One line a finding, details indented below those that are not ok, and a last line that counts.

        ``paint`` colours a word by a status; without it the text is plain.
        """
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = [line for finding in self.findings for line in _lines(finding, width, paint)]
        counts = ", ".join(f"{self.count(status)} {status}" for status in STATUSES if self.count(status))
        return "\n".join([*lines, counts or "nothing was checked"])


def merge(parts: Iterable[Report]) -> Report:
    """One report of several, in order."""
    return Report(tuple(finding for part in parts for finding in part.findings))


def _lines(finding: Finding, width: int, paint: Callable[[str, Status], str]) -> list[str]:
    status = paint(f"{finding.status:8}", finding.status)
    lines = [f"{status}  {finding.check:{width}}  {finding.found}"]
    if finding.status == "ok":
        return lines
    details = (
        ("expected", finding.expected),
        ("so", finding.consequence),
        ("mend", finding.mend),
        ("source", finding.source or ""),
    )
    for name, text in details:
        for number, line in enumerate(text.splitlines()):
            lines.append(f"{'':10}{name if number == 0 else '':>8}  {line}".rstrip())
    return lines
