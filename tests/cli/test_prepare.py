"""`eyas prepare` from outside: exit statuses, what is printed, what is left on disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eyas.capture.prepared import PreparedSamples
from eyas.cli.main import main
from tests import chat

ASKED = {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat.make_tokenizer(tmp_path_factory.mktemp("target"), "chatml")


def conversations(number: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(chat.WORDS, k=draw.randint(1, 12)))

    return [
        {"messages": [{"role": ("user", "assistant")[n % 2], "content": text()} for n in range(2 * draw.randint(1, 3))]}
        for _ in range(number)
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prepare(source: Path | str, out: Path, target: Path, *options: object, stdin: str | None = None) -> Result:
    arguments = ["prepare", source, out, "--target", target, "--workers", 1, *options]
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_samples_and_summary(target: Path, tmp_path: Path) -> None:
    rows = conversations(100)
    result = prepare(write(tmp_path / "x.jsonl", [*rows, rows[3]]), tmp_path / "out", target)
    assert result.exit_code == 0, result.output
    samples = PreparedSamples.open(tmp_path / "out")
    total, trained = samples.counts["num_tokens"], samples.counts["num_trained_tokens"]
    assert result.stdout.splitlines() == [
        f"{tmp_path / 'out'}: 100 samples, {total:,} tokens, {trained:,} of them trained",
        "        101  rows read",
        "          1  duplicates",
        f"        {samples.counts['notes']['answers_trained']:>3}  answers trained",
    ]
    for n, row in enumerate(rows):
        marked = "".join(
            f"<|im_start|>{m['role']}\n"
            + (
                f"{chat.OPEN}{m['content']}<|im_end|>{chat.CLOSE}\n"
                if m["role"] == "assistant"
                else f"{m['content']}<|im_end|>\n"
            )
            for m in row["messages"]
        )
        assert (samples[n].input_ids.tolist(), samples[n].loss_mask.tolist()) == chat.expected(marked)
        text = samples.row_text(n)
        assert text["source"] == f"{tmp_path / 'x.jsonl'}:{n + 1}"
        assert json.loads(text["messages"] or "") == row["messages"]


MALFORMED = [
    ("{torn", "no JSON"),
    ({"messages": [ASKED]}, "no answer"),
    ({"text": "hi"}, "form"),
    ({"messages": [{"role": "narrator", "content": "hi"}, ANSWERED]}, "role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}, ANSWERED]}, "multimodal"),
    ({"input_ids": [10**6], "loss_mask": [1]}, "tokens"),
]


def test_malformed_rows_are_counted_and_listed_and_fail_only_with_strict(target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", [{"messages": [ASKED, ANSWERED]}, *(row for row, _ in MALFORMED)])
    result = prepare(source, tmp_path / "out", target)
    assert result.exit_code == 0, result.output
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["source"], reject["kind"]) for reject in rejects] == [
        (f"{source}:{n}", kind) for n, (_, kind) in enumerate(MALFORMED, start=2)
    ]
    assert "an image (image_url)" in rejects[4]["reason"]
    for _, kind in MALFORMED:
        assert f"          1  rejected, {kind}\n" in result.stdout
    assert f"each rejected row and its reason: {tmp_path / 'out' / 'rejects.jsonl'}" in result.stderr

    for _ in range(2):  # also when it is done already
        strict = prepare(source, tmp_path / "strict", target, "--strict")
        assert strict.exit_code == 1
        assert "--strict: 6 rows are malformed" in strict.stderr
        assert len(PreparedSamples.open(tmp_path / "strict")) == 1


def test_rows_left_out_by_options_are_listed_and_no_fault(target: Path, tmp_path: Path) -> None:
    long = {"messages": [ASKED, {"role": "assistant", "content": " ".join(["yes"] * 50)}]}
    short = {"messages": [ASKED, ANSWERED]}
    source = write(
        tmp_path / "x.jsonl", [short, long, {"messages": [ASKED, {"role": "assistant", "content": "hello hi bye"}]}]
    )
    options = ("--max-tokens", 60, "--overlong", "skip", "--min-trained-tokens", 3, "--strict")
    result = prepare(source, tmp_path / "out", target, *options)
    assert result.exit_code == 0, result.output
    samples = PreparedSamples.open(tmp_path / "out")
    assert [samples.row_text(n)["source"] for n in range(len(samples))] == [f"{source}:3"]
    assert samples.counts["skipped"] == {"too few trained tokens": 1, "too long": 1}
    assert samples.counts["num_rejected"] == 0

    truncated = prepare(source, tmp_path / "truncated", target, "--max-tokens", 60)
    assert truncated.exit_code == 0, truncated.output
    assert PreparedSamples.open(tmp_path / "truncated").lengths.max() == 60


def test_done_is_said_and_other_input_or_options_are_refused(target: Path, tmp_path: Path) -> None:
    source, out = write(tmp_path / "x.jsonl", conversations(5)), tmp_path / "out"
    first = prepare(source, out, target)
    before = files(out)
    again = prepare(source, out, target)
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines()[0] == first.stdout.splitlines()[0] + (
        " (finished before, from the same input and options)"
    )
    other = prepare(source, out, target, "--last-turn-only")
    assert other.exit_code == 1
    assert "last_turn_only is False there and True here" in other.stderr
    assert f"rm -r {out}" in other.stderr
    elsewhere = chat.make_tokenizer(tmp_path / "elsewhere", "llama3")
    other_target = prepare(source, out, elsewhere)
    assert other_target.exit_code == 1
    assert "chat_template_hash is" in other_target.stderr
    write(source, conversations(6))
    other_input = prepare(source, out, target)
    assert other_input.exit_code == 1
    assert "input is" in other_input.stderr
    assert files(out) == before


def test_standard_input_show_and_json(target: Path, tmp_path: Path) -> None:
    line = json.dumps({"messages": [ASKED, ANSWERED]}) + "\n"
    shown = prepare("-", tmp_path / "out", target, "--show", 1, stdin=line)
    assert shown.exit_code == 0, shown.output
    sample_id = PreparedSamples.open(tmp_path / "out")[0].sample_id
    assert shown.stdout.endswith(
        f"\n--- {sample_id} (stdin:1): 12 tokens, 2 trained\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n\u27e6hello<|im_end|>\u27e7\n\n"
    )
    again = prepare("-", tmp_path / "out", target, stdin=line)
    assert again.exit_code == 1
    assert "standard input, which cannot be compared" in again.stderr

    as_json = prepare("-", tmp_path / "json", target, "--json", stdin=line + "{\n")
    assert as_json.exit_code == 0, as_json.output
    body = json.loads(as_json.stdout)
    assert body["num_samples"] == body["num_rejected"] == 1
    assert body["num_rows"] == 2
    assert body["fingerprint"] == PreparedSamples.open(tmp_path / "out").identity.fingerprint


WRONG_USAGE = [
    (["--show", "1", "--json"], "give one of them"),
    (["--max-tokens", "5", "--min-trained-tokens", "5"], "leaves no room"),
    (["--split", "train"], "no splits"),
    (["--overlong", "cut"], "'cut' is not one of"),
    (["--workers", "0"], "--workers"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_USAGE, ids=[" ".join(options) for options, _ in WRONG_USAGE])
def test_wrong_usage(options: list[str], message: str, target: Path, tmp_path: Path) -> None:
    result = prepare(write(tmp_path / "x.jsonl", conversations(1)), tmp_path / "out", target, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_failures_name_what_mends_them(target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", conversations(1))
    assert "no such file or folder" in prepare(tmp_path / "y.jsonl", tmp_path / "out", target).stderr
    assert "no tokenizer could be loaded" in prepare(source, tmp_path / "out", tmp_path).stderr
    bare = chat.make_tokenizer(tmp_path / "bare", None)
    result = prepare(source, tmp_path / "out", bare)
    assert result.exit_code == 1
    assert "has no chat template" in result.stderr
    tokens = write(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]}])
    assert prepare(tokens, tmp_path / "out", bare, "--last-turn-only").exit_code == 0
    assert PreparedSamples.open(tmp_path / "out")[0].loss_mask.tolist() == [0, 0, 0, 1]


def test_a_cut_off_array_is_salvaged_and_said(target: Path, tmp_path: Path) -> None:
    text = json.dumps(conversations(9))
    (tmp_path / "x.json").write_text(text[:-10])
    result = prepare(tmp_path / "x.json", tmp_path / "out", target)
    assert result.exit_code == 0, result.output
    assert len(PreparedSamples.open(tmp_path / "out")) == 8
    assert f"eyas: {tmp_path / 'x.json'}[8]: the JSON array is cut off or broken within element 8" in result.stderr
    assert "the 8 whole elements before it were read" in result.stderr


def test_dry_run_writes_nothing(target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", conversations(3))
    result = prepare(source, tmp_path / "out", target, "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"{source.stat().st_size:,} B" in result.stdout
    assert not (tmp_path / "out").exists()


def command(source: Path | str, out: Path, target: Path, *options: object) -> list[str]:
    arguments = ["prepare", source, out, "--target", target, *options]
    return [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)]


def test_workers_change_nothing_but_the_time(target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", [*conversations(400), "{torn", *conversations(10)])
    assert prepare(source, tmp_path / "one", target).exit_code == 0
    subprocess.run(command(source, tmp_path / "two", target, "--workers", 2), check=True, capture_output=True)
    assert files(tmp_path / "two") == files(tmp_path / "one")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
def test_killed_at_work_it_can_be_run_again(number: int, status: int, target: Path, tmp_path: Path) -> None:
    rows = [json.dumps(row) + "\n" for row in conversations(200)]
    out = tmp_path / "out"
    arguments = command("-", out, target, "--workers", 2)
    running = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdin is not None
    running.stdin.write("".join(rows))
    running.stdin.flush()
    deadline = time.monotonic() + 120
    while len(workers := children(running.pid)) < 3:  # both workers, and multiprocessing's resource tracker
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(number)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == status
    if status == 75:
        assert stderr.endswith(f"eyas: stopped before {out} was finished; run the same command again\n")
    while any(Path(f"/proc/{worker}").exists() for worker in workers):  # nobody is orphaned
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (out / "prepared.json").exists()
    result = prepare("-", out, target, stdin="".join(rows))
    assert result.exit_code == 0, result.output
    assert len(PreparedSamples.open(out)) == 200


@pytest.fixture(scope="module")
def real_target() -> Path:
    path = Path(os.environ.get("EYAS_TARGET", Path(__file__).parents[2] / "demo" / "target"))
    if not path.is_dir():
        pytest.skip("no real target: make demo, or EYAS_TARGET")
    return path


def test_real_conversations_of_a_real_target(real_target: Path, tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "shared" / "data" / "smol-sharegpt.jsonl.gz"
    if not source.is_file():
        pytest.skip("no real conversations beside the repository")
    import gzip

    from eyas.capture.tokenizer import load_tokenizer

    result = prepare(source, tmp_path / "out", real_target, "--max-samples", 100)
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(real_target, None, False)
    samples = PreparedSamples.open(tmp_path / "out")
    with gzip.open(source) as file:
        for n in range(len(samples)):
            row = json.loads(next(file))
            sample = samples[n]
            trained = tokenizer.decode(sample.input_ids[sample.loss_mask == 1].tolist())
            answer = row["conversations"][-1]["value"]
            if row["finish"] == "length":
                assert trained == answer
                assert sample.loss_mask[-1] == 1
            else:
                assert trained == answer + "<|im_end|>"
                assert sample.input_ids[-2:].tolist() == tokenizer.encode("<|im_end|>\n", add_special_tokens=False)
                assert sample.loss_mask[-2:].tolist() == [1, 0]
