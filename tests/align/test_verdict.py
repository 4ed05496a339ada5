"""The report of a check: its text, its JSON and its exit status."""

from __future__ import annotations

import json

import pytest

from eyas.align.verdict import Finding, Report, Status

OK = Finding(check="taps", status="ok", found="after:1, after:14, after:26")
BAD = Finding(
    check="draft d2t",
    status="mismatch",
    found="values are token ids",
    expected="offsets",
    consequence="every proposal is another token",
    mend="line one\nline two",
    source="vllm 0.32.0, llama_eagle3.py",
)
UNSURE = Finding(check="rope", status="unknown", found="no source")


@pytest.mark.parametrize(
    ("findings", "strict", "status"),
    [((OK,), True, 0), ((OK, UNSURE), False, 0), ((OK, UNSURE), True, 3), ((BAD, OK), False, 3), ((), True, 0)],
)
def test_exit_status(findings: tuple[Finding, ...], strict: bool, status: int) -> None:
    assert Report(findings).exit_status(strict=strict) == status


def test_text_is_one_line_a_finding_and_details_of_what_is_not_ok() -> None:
    assert Report((OK, BAD)).text().splitlines() == [
        "ok        taps       after:1, after:14, after:26",
        "mismatch  draft d2t  values are token ids",
        "          expected  offsets",
        "                so  every proposal is another token",
        "              mend  line one",
        "                    line two",
        "            source  vllm 0.32.0, llama_eagle3.py",
        "1 ok, 1 mismatch",
    ]


def test_paint_colours_the_status_alone() -> None:
    def paint(text: str, status: Status) -> str:
        return f"<{status}>{text}</>"

    assert Report((OK,)).text(paint).splitlines()[0] == "<ok>ok      </>  taps  after:1, after:14, after:26"


def test_json_holds_every_field() -> None:
    body = json.loads(json.dumps(Report((OK, BAD)).to_json()))
    assert body["counts"] == {"ok": 1, "warning": 0, "mismatch": 1, "unknown": 0}
    assert body["findings"][1]["mend"] == "line one\nline two"
    assert body["findings"][0]["source"] is None
