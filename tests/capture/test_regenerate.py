"""`eyas regenerate`: the target's own answers, whatever the batch, the order and the kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from eyas.capture.engines.base import Sampling
from eyas.capture.engines.transformers.generate import choose
from eyas.capture.prepared import PreparedSamples
from eyas.cli.main import main
from tests import tiny

END = 2  # <|im_end|>
DROPS_THINKING = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {% if message['role'] == 'assistant' %}"
    "w0{% else %}{{ message['content'] }}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that ends an answer now and then."""
    return make_ending_target(tmp_path_factory.mktemp("target"))


def make_ending_target(folder: Path) -> Path:
    from transformers import LlamaForCausalLM

    tiny.make_target(folder, num_layers=2)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[END] += 0.5 * model.model.norm.weight * torch.linspace(-1, 1, 32)
        model.lm_head.weight[END] *= 2
    model.save_pretrained(folder)
    return folder


def questions(number: int, *, turns: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def words() -> str:
        return " ".join(f"w{draw.randrange(100)}" for _ in range(draw.randint(1, 12)))

    return [
        {
            "id": f"row-{n}",
            "conversations": [
                {"from": side, "value": words()} for _ in range(draw.randint(1, turns)) for side in ("human", "gpt")
            ],
        }
        for n in range(number)
    ]


def regenerate(source: Path, out: Path, target: Path, *options: object) -> Result:
    arguments = ["regenerate", source, out, "--target", target, "--device", "cpu", "--max-new-tokens", 16, *options]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_greedy_answers_are_what_generate_gives_turn_by_turn(target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = questions(12)
    result = regenerate(
        tiny.write_jsonl(tmp_path / "x.jsonl", asked), tmp_path / "out.jsonl", target, "--temperature", 0
    )
    assert result.exit_code == 0, result.output
    found = {row["source_id"]: row for row in rows(tmp_path / "out.jsonl").values()}
    finishes = []
    for given in asked:
        messages, ids, mask, finish = [], [], [], ""
        for question in given["conversations"][::2]:
            messages.append({"role": "user", "content": question["value"]})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert prompt[: len(ids)] == ids
            mask += [0] * (len(prompt) - len(ids))
            answer = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=END)
            answer = answer[0, len(prompt) :].tolist()
            ids, mask = prompt + answer, mask + [1] * len(answer)
            finish = "stop" if answer[-1] == END else "length"
            messages.append({"role": "assistant", "content": tokenizer.decode([t for t in answer if t != END])})
            if finish == "length":
                break
        row = found[given["id"]]
        assert (row["messages"], row["input_ids"], row["loss_mask"], row["finish"]) == (messages, ids, mask, finish)
        finishes.append((finish, len(messages)))
    assert {finish for finish, _ in finishes} == {"stop", "length"}
    assert max(number for _, number in finishes) >= 4  # a second turn was reached


def test_prepare_takes_the_tokens_as_they_are(target: Path, tmp_path: Path) -> None:
    source = tiny.write_jsonl(tmp_path / "x.jsonl", questions(8))
    assert regenerate(source, tmp_path / "out.jsonl", target).exit_code == 0
    result = CliRunner().invoke(
        main, ["prepare", str(tmp_path / "out.jsonl"), str(tmp_path / "prepared"), "--target", str(target)]
    )
    assert result.exit_code == 0, result.output
    samples = PreparedSamples.open(tmp_path / "prepared")
    expected = list(rows(tmp_path / "out.jsonl").values())
    assert [samples[n].input_ids.tolist() for n in range(len(samples))] == [row["input_ids"] for row in expected]
    assert [samples[n].loss_mask.tolist() for n in range(len(samples))] == [row["loss_mask"] for row in expected]
    assert json.loads(samples.row_text(0)["messages"] or "") == expected[0]["messages"]


def test_prepare_refuses_tokens_of_another_target(target: Path, tmp_path: Path) -> None:
    source, out = tiny.write_jsonl(tmp_path / "x.jsonl", questions(4)), tmp_path / "out.jsonl"
    assert regenerate(source, out, target).exit_code == 0
    swapped, rewriting = (tiny.add_tokenizer(tmp_path / name) for name in ("swapped", "rewriting"))
    text = (swapped / "tokenizer.json").read_text()
    text = text.replace('"w7":', '"-":').replace('"w90":', '"w7":').replace('"-":', '"w90":')
    (swapped / "tokenizer.json").write_text(text)
    (rewriting / "chat_template.jinja").write_text(DROPS_THINKING)
    for other, what in ((swapped, "tokenizer files"), (rewriting, "chat template")):
        result = CliRunner().invoke(main, ["prepare", str(out), str(tmp_path / "prepared"), "--target", str(other)])
        assert result.exit_code == 1
        assert f"{out}.options.json and --target {other} differ in their {what}. " in result.stderr
        assert not (tmp_path / "prepared").exists()
    (tmp_path / "out.jsonl.options.json").write_text("{")
    result = CliRunner().invoke(main, ["prepare", str(out), str(tmp_path / "prepared"), "--target", str(target)])
    assert result.exit_code == 1
    assert f"{out}.options.json: unreadable" in result.stderr


@pytest.mark.parametrize(
    "damage", [lambda line: line[: len(line) // 2] + "\n", lambda line: line.replace("[", "\0", 1)]
)
def test_a_line_that_is_damaged_is_named_and_answered_again(
    target: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    source, out = tiny.write_jsonl(tmp_path / "x.jsonl", questions(6)), tmp_path / "out.jsonl"
    assert regenerate(source, out, target).exit_code == 0
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join([*whole[:2], damage(whole[2]), *whole[3:]]))
    result = regenerate(source, out, target)
    assert result.exit_code == 0
    assert "1 damaged (line 3)" in result.output
    lines = out.read_text().splitlines(keepends=True)
    assert [*lines[:2], lines[6], *lines[3:6]] == whole


def test_samples_depend_on_the_seed_and_not_on_the_batch(target: Path, tmp_path: Path) -> None:
    source = tiny.write_jsonl(tmp_path / "x.jsonl", questions(12))
    for name, options in {
        "one": ("--batch-size", 1),
        "five": ("--batch-size", 5),
        "other": ("--seed", 1),
    }.items():
        result = regenerate(source, tmp_path / name, target, "--temperature", 1.5, *options)
        assert result.exit_code == 0, result.output
    one, five, other = (rows(tmp_path / name) for name in ("one", "five", "other"))
    assert len(one) == 12
    assert one == five
    assert {key: row["input_ids"] for key, row in other.items()} != {key: row["input_ids"] for key, row in one.items()}


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.3, 1e-9])
@pytest.mark.parametrize("vocab_size", [40, 700])  # fewer and more than are looked at first
def test_tokens_are_drawn_with_the_probabilities_of_the_nucleus(top_p: float, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(vocab_size, generator=generator)
    probabilities = torch.softmax(logits.double() / 0.7, -1).numpy()
    expected, mass = np.zeros(vocab_size), 0.0
    for token in np.argsort(-probabilities):
        if mass >= top_p:
            break
        expected[token], mass = probabilities[token], mass + probabilities[token]
    expected /= expected.sum()
    draws = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000  # evenly spread, so that counts are probabilities
    sampling = Sampling(temperature=0.7, top_p=top_p, stop_ids=frozenset())
    tokens = choose(logits.expand(len(draws), -1), draws, sampling)
    found = np.bincount(tokens.numpy(), minlength=vocab_size) / len(draws)
    assert np.abs(found - expected).max() <= 1.01 / len(draws)


def test_a_template_that_rewrites_answers_leaves_only_the_last_trained(target: Path, tmp_path: Path) -> None:
    rewriting = make_ending_target(tmp_path / "rewriting")
    (rewriting / "chat_template.jinja").write_text(DROPS_THINKING)
    source = tiny.write_jsonl(tmp_path / "x.jsonl", questions(12, turns=4))
    result = regenerate(source, tmp_path / "out", rewriting, "--json")
    assert result.exit_code == 0, result.output
    several = [row for row in rows(tmp_path / "out").values() if len(row["messages"]) > 2]
    assert several
    assert json.loads(result.stdout)["num_rewritten"] == len(several)
    for row in several:
        mask = np.array(row["loss_mask"])
        assert (np.diff(mask) == 1).sum() == 1  # one stretch
        assert mask[-1] == 1
    # A conversation whose next question finds no room ends with its last answer.
    assert regenerate(source, tmp_path / "short", rewriting, "--max-tokens", 30).exit_code == 0
    short = rows(tmp_path / "short").values()
    assert any(len(row["messages"]) < len(rows(tmp_path / "out")[row["id"]]["messages"]) for row in short)
    for row in short:
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= 30
        assert row["loss_mask"][-1] == 1
        assert row["messages"][-1]["role"] == "assistant"


def test_what_cannot_be_answered_is_listed(target: Path, tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    given: list[Any] = [
        *questions(2, turns=1),
        questions(1, turns=1)[0],  # the same question: one conversation
        {"messages": [{"role": "system", "content": "w1"}]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "tool_calls": [call]}]},
        {
            "messages": [
                {"role": "user", "content": " ".join(["w1"] * 60)},
                {"role": "assistant", "content": "w2"},
            ]
        },
    ]
    source = tiny.write_jsonl(tmp_path / "x.jsonl", given)
    result = regenerate(source, tmp_path / "out", target, "--json", "--max-tokens", 40)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["num_done"], summary["num_new"], summary["num_duplicates"]) == (2, 2, 1)
    assert summary["rejected"] == {"form": 1, "no answer": 1, "too long": 1, "tools": 1}
    listed = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [(reject["source"], reject["kind"]) for reject in listed] == [
        (f"{source}:4", "no answer"),
        (f"{source}:5", "form"),
        (f"{source}:6", "tools"),
        (f"{source}:7", "too long"),
    ]


def test_max_samples_counts_what_can_be_answered_and_may_grow(target: Path, tmp_path: Path) -> None:
    asked = questions(9, turns=1)
    for long in (0, 3):
        asked[long]["conversations"][0]["value"] = " ".join(["w1"] * 60)
    source, out = tiny.write_jsonl(tmp_path / "x.jsonl", asked), tmp_path / "out"
    for number, expected in ((2, {1, 2}), (4, {1, 2, 4, 5}), (4, {1, 2, 4, 5})):
        assert regenerate(source, out, target, "--max-samples", number, "--max-tokens", 40).exit_code == 0
        assert {row["source_id"] for row in rows(out).values()} == {f"row-{n}" for n in expected}


def test_other_options_and_foreign_files_are_refused(target: Path, tmp_path: Path) -> None:
    source, out = tiny.write_jsonl(tmp_path / "x.jsonl", questions(3)), tmp_path / "out.jsonl"
    assert regenerate(source, out, target, "--max-samples", 2).exit_code == 0
    assert len(rows(out)) == 2
    before = out.read_bytes()
    other = regenerate(source, out, target, "--seed", 1)
    assert other.exit_code == 1
    assert "seed is 0 there and 1 here" in other.stderr
    assert out.read_bytes() == before
    foreign = regenerate(out, source, target)
    assert foreign.exit_code == 1
    assert "not of eyas regenerate" in foreign.stderr
    assert regenerate(source, out, target, "--batch-size", 2).exit_code == 0  # goes on with the third
    assert out.read_bytes().startswith(before)
    assert len(rows(out)) == 3


def test_max_runtime_stops_with_75_and_the_next_run_goes_on(target: Path, tmp_path: Path) -> None:
    source = tiny.write_jsonl(tmp_path / "x.jsonl", questions(3))
    stopped = regenerate(source, tmp_path / "out", target, "--max-runtime", "0.000001")
    assert stopped.exit_code == 75
    assert "stopped early (max runtime)" in stopped.stderr
    assert rows(tmp_path / "out") == {}
    assert regenerate(source, tmp_path / "out", target).exit_code == 0
    assert len(rows(tmp_path / "out")) == 3


def test_kills_lose_no_finished_conversation_and_change_none(target: Path, tmp_path: Path) -> None:
    source = tiny.write_jsonl(tmp_path / "x.jsonl", questions(60))
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert regenerate(source, whole, target, "--batch-size", 3).exit_code == 0
    command = [sys.executable, "-m", "eyas.cli.main", "regenerate", str(source), str(out), "--target", str(target)]
    command += ["--device", "cpu", "--max-new-tokens", "16", "--batch-size", "3"]
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        size = out.stat().st_size if out.exists() else 0
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while not (out.exists() and out.stat().st_size > size + 2000):
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        running.communicate(timeout=120)
        assert running.returncode == (75 if number == signal.SIGTERM else -number)
        os.truncate(out, out.stat().st_size - 7)  # a line torn in the middle
    assert regenerate(source, out, target, "--batch-size", 7).exit_code == 0
    assert len(out.read_text().splitlines()) == 60
    assert rows(out) == rows(whole)
