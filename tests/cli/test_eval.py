"""`eyas eval` from outside: a tiny run judged on its dataset and by decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from tests import tiny

TAPS = "after:1,after:3,after:5"


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a standard dataset of it, a run on that, and prompts."""
    path = tmp_path_factory.mktemp("eval")
    target = tiny.make_target(path / "target")
    tiny.prepare_rows(path / "prepared", target, tiny.tokenized_rows(40, min_tokens=8))
    for command in (
        ("capture", path / "prepared", path / "captured", "--target", target, "--taps", TAPS, "--device", "cpu"),
        ("standardize", path / "captured", path / "standard", "--taps", TAPS),
        ("train", path / "standard", path / "run", "--target", target, "--max-steps", 3, "--batch-tokens", 128,
         "--validation", 0.2, "--draft-vocab-size", 64, "--device", "cpu"),
    ):  # fmt: skip
        result = eyas(*command)
        assert result.exit_code == 0, result.output
    tiny.write_jsonl(
        path / "prompts.jsonl",
        [
            {"category": "math", "turns": ["w1 w2 w3", "w4"]},
            {"category": "writing", "turns": ["w9"]},
            {"messages": [{"role": "user", "content": "w7 w8"}]},
        ],
    )
    return path


def evaluate(folder: Path, *options: object, status: int = 0) -> Any:
    result = eyas("eval", folder / "run", *options, "--device", "cpu", "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def decode(folder: Path, *options: object) -> Any:
    return evaluate(folder, "--decode", folder / "prompts.jsonl", "--max-new-tokens", 12, *options)


def test_a_run_is_judged_on_what_it_held_out(folder: Path) -> None:
    report = evaluate(folder)
    (found,) = report["held_out"].values()
    best = json.loads((folder / "run" / "checkpoints" / "best.json").read_bytes())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    (measured,) = [record for record in map(json.loads, lines) if record["kind"] == "validation"]
    assert found["acceptance"] == pytest.approx(measured["acceptance"], abs=1e-6)
    assert found["overlap"] == pytest.approx(measured["overlap"], rel=1e-4)
    assert found["accepted_length"] == pytest.approx(best["accepted_length"], abs=1e-6)
    assert report["validation"] == 0.2
    everything = evaluate(folder, "--validation", 0)["held_out"][str(folder / "run")]
    assert everything["num_samples"] == 40 > found["num_samples"]
    draft = folder / "run" / "checkpoints" / best["checkpoint"] / "draft"
    same = eyas("eval", draft, "--json", "--device", "cpu")  # a checkpoint's draft belongs to its run
    assert json.loads(same.stdout)["held_out"] == {str(draft): found}


def test_decoding_proves_itself_and_sets_baselines_beside(folder: Path) -> None:
    report = decode(folder, "--baselines", "--dtype", "float32")["decoding"]
    assert [draft["name"] for draft in report["drafts"]] == [str(folder / "run"), "untrained draft", "2-gram table"]
    for draft in report["drafts"]:
        assert draft["num_turns"] == draft["num_identical"] == 4
        assert draft["differences"] == []
        assert draft["accepted_length"] == draft["num_tokens"] / draft["num_forwards"] >= 1
        assert set(draft["categories"]) == {"math", "writing", "all"}
        assert len(draft["acceptance"]) == 3  # what the draft was trained for
    again = decode(folder, "--baselines", "--dtype", "float32")["decoding"]
    assert [draft["num_forwards"] for draft in again["drafts"]] == [draft["num_forwards"] for draft in report["drafts"]]


def test_sampled_decoding_depends_on_the_seed(folder: Path) -> None:
    def sampled(seed: int) -> list[Any]:
        report = decode(folder, "--temperature", 1.0, "--seed", seed)["decoding"]
        return [(draft["reached"], draft["num_tokens"], draft["num_identical"]) for draft in report["drafts"]]

    assert sampled(0) == sampled(0)


def test_text_report(folder: Path) -> None:
    result = eyas(
        "eval", folder / "run", "--decode", folder / "prompts.jsonl", "--dataset", folder / "standard", "--baselines",
        "--max-new-tokens", 12, "--device", "cpu", "--steps", "1..3", "--verify-ms", "21..28", "--draft-ms", 0.5,
        "--plot", folder / "steps.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in (
        "held-out conversations (20.0%: ",
        "decoding (3 prompts, 4 turns, greedy)",
        "accepted length by category",
        "  untrained draft: 4 of 4 answers the same, token for token",
        "  2-gram table: 4 of 4 answers the same, token for token",
        "verify ms  draft ms  verify's share  tokens/s",
        "  <- best",
    ):
        assert text in result.stdout
    assert (folder / "steps.png").stat().st_size > 5_000


def test_costs_are_measured_where_they_are_not_given(folder: Path) -> None:
    (choices,) = evaluate(folder, "--steps", "1,3")["steps"].values()
    assert [choice["steps"] for choice in choices] == [1, 3]
    for choice in choices:
        assert choice["verify_ms"] > 0 < choice["draft_ms"]
        milliseconds = choice["verify_ms"] + choice["draft_ms"]
        assert choice["tokens_per_second"] == pytest.approx(1000 * choice["accepted_length"] / milliseconds)


WRONG = [
    (["--draft-ms", "1"], 2, "--draft-ms belongs to --steps"),
    (["--steps", "1..3", "--draft-tokens", "2"], 2, "leave --draft-tokens out"),
    (["--steps", "0..3"], 2, "expected numbers from 1 to 64"),
    (["--steps", "1..4", "--verify-ms", "1,2,3"], 2, "give one each"),
    (["--dataset", "captured_other"], 2, "does not exist"),
]


@pytest.mark.parametrize(("options", "status", "message"), WRONG, ids=[" ".join(options) for options, _, _ in WRONG])
def test_wrong_usage(options: list[str], status: int, message: str, folder: Path) -> None:
    result = eyas("eval", folder / "run", *options)
    assert result.exit_code == status
    assert message in result.output


def test_a_draft_of_no_run_needs_to_be_told(folder: Path, tmp_path: Path) -> None:
    best = json.loads((folder / "run" / "checkpoints" / "best.json").read_bytes())
    alone = tmp_path / "draft"
    alone.symlink_to(folder / "run" / "checkpoints" / best["checkpoint"] / "draft")
    assert "--target is needed" in eyas("eval", alone).output
    assert "give --dataset, --decode" in eyas("eval", alone, "--target", folder / "target").output
    result = eyas("eval", alone, "--target", folder / "target", "--decode", folder / "prompts.jsonl", "--baselines")
    assert result.exit_code == 2
    assert "give --dataset" in result.output


def test_other_taps_are_refused(folder: Path) -> None:
    standard = folder / "other"
    other = eyas(
        "capture", folder / "prepared", standard, "--target", folder / "target", "--taps", "after:1,after:2,after:5",
        "--device", "cpu",
    )  # fmt: skip
    assert other.exit_code == 0, other.output
    result = eyas("eval", folder / "run", "--dataset", standard, "--device", "cpu")
    assert result.exit_code == 1
    assert f"holds after:1,after:2,after:5, and {folder}" in result.output


def test_another_models_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny.make_target(tmp_path / "other", seed=1)
    result = eyas("eval", folder / "run", "--target", other, "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "states of other weights" in result.output
