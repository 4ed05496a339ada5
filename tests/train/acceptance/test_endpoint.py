"""`eyas eval --endpoint`: a server's own speculation, counted while it answers prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from eyas.train.acceptance import endpoint
from tests import tiny
from tests.fake_server import FakeServer

PROMPTS = [
    {"category": "math", "turns": ["w1 w2 w3", "w4", "w5 w6"]},
    {"category": "writing", "turns": ["w9"]},
    {"category": "math", "turns": ["w7 w7", "w8"]},
    {"messages": [{"role": "user", "content": "w7 w8"}]},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target") / "tiny-llama", num_layers=2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return tiny.write_jsonl(tmp_path / "prompts.jsonl", PROMPTS)


def evaluate(server: FakeServer, target: Path, prompts: Path, *options: object) -> Result:
    arguments = ["eval", "--endpoint", server.url, "--target", target, "--decode", prompts, "--max-new-tokens", 40]
    return CliRunner().invoke(main, [str(argument) for argument in [*arguments, *options]])


def count(histogram: list[int]) -> dict[str, Any]:
    """What the report says of verify steps by accepted tokens."""
    accepted = [sum(histogram[n + 1 :]) for n in range(3)]
    return {
        "accepted": accepted,
        "reached": [sum(histogram), *accepted[:2]],
        "num_forwards": sum(histogram),
        "num_tokens": sum((n + 1) * steps for n, steps in enumerate(histogram)),
    }


@pytest.mark.parametrize(("kind", "says"), [("vllm", False), ("vllm", True), ("sglang", True)])
def test_accepted_tokens_are_what_the_server_accepted(target: Path, prompts: Path, kind: str, says: bool) -> None:
    draw = random.Random(0)
    with FakeServer(target, kind=kind, delay=lambda: draw.choice([0.0, 0.02])) as server:
        server.says_histogram = says
        server.histogram = [0, 0, 0, 0] if says else [5, 6, 7, 8]  # of others, before
        before = list(server.histogram)
        result = evaluate(server, target, prompts, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        (tally,) = report["decoding"]["drafts"]
        done = [after - then for after, then in zip(server.histogram, before, strict=True)]
    assert {key: tally[key] for key in count(done)} == count(done)
    assert tally["accepted_length"] == tally["num_tokens"] / tally["num_forwards"] == tally["kept_length"] > 1
    assert tally["acceptance"] == [a / r for a, r in zip(tally["accepted"], tally["reached"], strict=True)]
    assert set(tally["categories"]) == {"math", "writing", "all"}
    assert [sum(pair) for pair in zip(*tally["categories"].values(), strict=True)] == [
        tally["num_tokens"],
        tally["num_forwards"],
    ]
    assert (tally["num_turns"], report["num_prompts"], report["num_draft"]) == (7, 4, 3)
    assert report["foreign_requests"] == (0 if kind == "vllm" else None)
    assert report["source"].startswith("each answer" if says else "the server's counters")
    # The turns are those of a conversation: the target's own answers are between them.
    asked = [body.get("prompt") or body["input_ids"] for body in server.questions]
    assert sum(any(len(b) > len(a) and b[: len(a)] == a for a in asked) for b in asked) == 3


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_requests_of_others_leave_only_what_still_means_something(
    target: Path, prompts: Path, says: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "SETTLED_WITHIN_SECONDS", 0.3)
    reports = []
    for options in ((), ("--json",)):
        with FakeServer(target) as server:
            server.says_histogram = says

            def also_ask(number: int, body: dict[str, Any], server: FakeServer = server) -> None:
                if number == 2:  # another's request
                    server.finished += ends
                    server.in_flight += not ends
                    server.histogram[3] += 50

            server.trouble = also_ask
            result = evaluate(server, target, prompts, *options)
            done = list(server.histogram)
        assert result.exit_code == 0, result.output
        assert "the server was busy with 1 requests of others meanwhile" in result.stderr
        assert (": the server is busy with 1 requests of others: waiting up to 0.3 s" in result.stderr) == (not ends)
        assert ("which are not in these numbers" if says else "is that of the whole server") in result.stderr
        reports.append(result.stdout)
    text, report = reports[0], json.loads(reports[1])
    (tally,) = report["decoding"]["drafts"]
    assert report["foreign_requests"] == 1
    unknown = [key for key in ("num_kept", "kept_length", "categories", "tokens_per_second") if tally[key] is None]
    shown = [part in text for part in ("within the answers", "by category", "tokens/s", "  math ")]
    if says:
        assert not unknown
        assert all(shown)
    else:
        assert len(unknown) == 4
        assert not any(shown)
        assert "(of the whole server)  by position" in text
        assert {key: tally[key] for key in count(done)} == count(done)
        assert tally["accepted_length"] == tally["num_tokens"] / tally["num_forwards"]


def test_text_report(target: Path, prompts: Path) -> None:
    with FakeServer(target) as server:
        result = evaluate(server, target, prompts)
        assert result.exit_code == 0, result.output
        for text in (
            f"{server.url} (vllm) serves {target}, 3 tokens drafted a cycle",
            "decoding (4 prompts, 7 turns, greedy)",
            "  served draft  accepted length ",
            "accepted length by category",
            "  math     ",
            "measured by the server's counters, before and after",
        ):
            assert text in result.stdout


def test_a_server_that_does_not_speculate_is_an_error(target: Path, prompts: Path) -> None:
    with FakeServer(target, kind="sglang") as server:  # no histograms, no counters
        result = evaluate(server, target, prompts)
    assert result.exit_code == 1
    assert "says nothing of speculation" in result.stderr


def test_a_server_without_token_ids_is_an_error(target: Path, prompts: Path) -> None:
    with FakeServer(target, kind="plain") as server:
        result = evaluate(server, target, prompts)
    assert result.exit_code == 1
    assert "gives no token ids back" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://h:1"], "--endpoint needs --decode"),
        (["--endpoint", "http://h:1", "--decode", "{prompts}"], "--endpoint needs --target"),
        (["--endpoint", "http://h:1", "--device", "cpu"], "--device says nothing to a server"),
        (["{target}", "--endpoint", "http://h:1"], "judges the server's own draft"),
        ([], "Missing argument 'DRAFT...'"),
    ],
)
def test_wrong_usage(target: Path, prompts: Path, arguments: list[str], message: str) -> None:
    filled = [argument.format(prompts=prompts, target=target) for argument in arguments]
    result = CliRunner().invoke(main, ["eval", *filled])
    assert result.exit_code == 2
    assert message in result.stderr


def test_counters_are_read_as_prometheus_writes_them() -> None:
    from eyas.capture.endpoints.prometheus import parse

    found = parse(
        '# HELP a:b_total x\n# TYPE a:b_total counter\na:b_total{engine="0",position="1"} 3.0\n'
        'a:b_total{engine="1",position="1"} 4.0\na:b_total{engine="0",position="0"} 1e+02\n'
        'a:b_created{engine="0"} 1.7e9\n# TYPE q gauge\nq{name="x\\"y,z}"} 2\n'
    )
    assert found.get("a:b_total") == 107
    assert found.positions("a:b_total") == [100, 7]
    assert found.get("q") == 2
    assert found.get("none") is None
