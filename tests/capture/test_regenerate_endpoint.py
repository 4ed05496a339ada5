"""`eyas regenerate --endpoint`: answers of servers that fail, come and go, in whatever order they come."""

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
from aiohttp import web
from click.testing import CliRunner, Result

from eyas.capture.endpoints import pool
from eyas.capture.endpoints import server as server_module
from eyas.capture.prepared import PreparedSamples
from eyas.cli.main import main
from tests import tiny
from tests.fake_server import DROP, LONGEST, FakeServer, answer_to


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without weights: a server has those."""
    folder = tiny.make_target(tmp_path_factory.mktemp("target") / "tiny-llama", num_layers=2)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(pool, "REST_SECONDS", 0.05)
    monkeypatch.setattr(pool, "LONGEST_REST_SECONDS", 0.2)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.1)


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


def regenerate(
    source: Path, out: Path, target: Path, *servers: FakeServer | str, options: tuple[Any, ...] = ()
) -> Result:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    arguments = ["regenerate", source, out, "--target", target, "--max-new-tokens", 10, "--json", *options]
    for url in urls:
        arguments += ["--endpoint", url]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in lines}) == len(lines)
    return {row["id"]: row for row in lines}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_jsonl(tmp_path_factory.mktemp("asked") / "x.jsonl", questions(40))


@pytest.fixture(scope="module")
def expected(target: Path, asked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a server without trouble makes of ``asked``."""
    out = tmp_path_factory.mktemp("expected") / "out.jsonl"
    with FakeServer(target) as server:
        result = regenerate(asked, out, target, server, options=("--batch-size", 1))
        assert result.exit_code == 0, result.output
    return rows(out)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_each_turn_is_asked_with_the_targets_own_tokens_before_it(target: Path, tmp_path: Path, kind: str) -> None:
    given = questions(12)
    out = tmp_path / "out.jsonl"
    with FakeServer(target, kind=kind, adapters=("a-lora",)) as server:
        source = tiny.write_jsonl(tmp_path / "x.jsonl", given)
        result = regenerate(source, out, target, server, options=("--temperature", 0))
        assert result.exit_code == 0, result.output
        assert server.num_answers == json.loads(result.stdout)["num_answers"] > 12
        tokenizer = server.tokenizer
    found = {row["source_id"]: row for row in rows(out).values()}
    finishes = set()
    for row in given:
        messages, ids, mask, finish = [], [], [], ""
        for question in row["conversations"][::2]:
            messages.append({"role": "user", "content": question["value"]})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert prompt[: len(ids)] == ids
            mask += [0] * (len(prompt) - len(ids))
            answer, finish = answer_to(prompt, 0, 10, greedy=True)
            ids, mask = prompt + answer, mask + [1] * len(answer)
            messages.append({"role": "assistant", "content": tokenizer.decode([t for t in answer if t != 2])})
            finishes.add(finish)
            if finish == "length":
                break
        got = found[row["id"]]
        assert (got["messages"], got["input_ids"], got["loss_mask"], got["finish"]) == (messages, ids, mask, finish)
    assert finishes == {"stop", "length"}
    prepared = CliRunner().invoke(main, ["prepare", str(out), str(tmp_path / "p"), "--target", str(target)])
    assert prepared.exit_code == 0, prepared.output
    samples = PreparedSamples.open(tmp_path / "p")
    assert samples[0].input_ids.tolist() == next(iter(rows(out).values()))["input_ids"]


def test_sampling_is_said_in_full_and_each_answer_has_its_seed(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target) as server:
        options = ("--temperature", 0.5, "--top-p", 0.25)
        assert regenerate(asked, tmp_path / "out", target, server, options=options).exit_code == 0
    seeds = {body["seed"] for body in server.questions}
    assert len(seeds) == len(server.questions)
    for body in server.questions:
        # What a request leaves out, a server takes from the model's generation_config.json.
        assert {key: body[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} == {
            "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        assert body["stop_token_ids"] == [2]


def test_the_answers_do_not_depend_on_servers_order_or_trouble(
    target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    draw = random.Random(5)
    troubles = [
        lambda: web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "0"}),
        lambda: web.json_response({"error": "later"}, status=503),
        lambda: web.Response(text="it broke", status=500),
        lambda: web.Response(text="{no json", content_type="application/json"),
        lambda: web.json_response({"choices": []}),
        lambda: DROP,
    ]

    def trouble(number: int, body: dict[str, Any]) -> Any:
        return troubles[number // 5 % len(troubles)]() if number % 5 == 2 else None

    def delay() -> float:
        return draw.choice([0.0, 0.0, 0.03])

    with (
        FakeServer(target, trouble=trouble, delay=delay) as one,
        FakeServer(target, kind="sglang", trouble=trouble, delay=delay) as two,
    ):
        result = regenerate(asked, tmp_path / "out", target, one, two)
        assert result.exit_code == 0, result.output
        assert one.num_answers > 10 < two.num_answers
    assert rows(tmp_path / "out") == expected
    assert list(rows(tmp_path / "out")) != list(expected)  # another order
    tallies = json.loads(result.stdout)["endpoints"]
    assert all(tally["num_lost"] > 0 < tally["num_busy"] for tally in tallies)
    assert sum(tally["num_answers"] for tally in tallies) == json.loads(result.stdout)["num_answers"]


def test_a_timeout_is_asked_again(target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    def trouble(number: int, body: dict[str, Any]) -> Any:
        return 10.0 if number in (3, 4) else None

    with FakeServer(target, trouble=trouble) as server:
        result = regenerate(asked, tmp_path / "out", target, server, options=("--request-timeout", "0.5"))
    assert result.exit_code == 0, result.output
    assert rows(tmp_path / "out") == expected
    assert json.loads(result.stdout)["endpoints"][0]["num_lost"] == 2


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(target: Path, asked: Path, tmp_path: Path, form: str) -> None:
    from email.utils import formatdate

    refused_at: list[float] = []

    def trouble(number: int, body: dict[str, Any]) -> Any:
        if number:
            return None
        refused_at.append(time.monotonic())
        after = "0.6" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
        return web.json_response({}, status=429, headers={"Retry-After": after})

    with FakeServer(target, trouble=trouble) as server:
        assert regenerate(asked, tmp_path / "out", target, server, options=("--batch-size", 1)).exit_code == 0
    assert server.arrived[1] - refused_at[0] > 0.59


def test_a_server_that_dies_is_left_and_used_again(
    target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    import threading

    with FakeServer(target, delay=lambda: 0.02) as dying, FakeServer(target, delay=lambda: 0.02) as steady:
        started = threading.Event()

        def trouble(number: int, body: dict[str, Any]) -> Any:
            if number == 4:
                started.set()
            return None

        def die_and_return() -> None:
            assert started.wait(60)
            dying.stop()
            time.sleep(0.3)
            dying.start()

        dying.trouble = trouble
        steady.trouble = lambda number, body: 0.1  # slow, so that it is still needed
        killer = threading.Thread(target=die_and_return)
        killer.start()
        result = regenerate(asked, tmp_path / "out", target, dying, steady, options=("--batch-size", 2))
        killer.join()
    assert result.exit_code == 0, result.output
    assert rows(tmp_path / "out") == expected
    first, second = json.loads(result.stdout)["endpoints"]
    assert first["num_rests"] >= 1
    assert second["num_rests"] == 0
    assert "is left alone, and tried again" in result.stderr
    assert f"{dying.url} answers again" in result.stderr


def test_a_server_that_comes_back_as_another_model_is_given_up(
    target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    other = _other_tokenizer(tmp_path / "other")

    def trouble(number: int, body: dict[str, Any]) -> Any:
        if number == 3:
            changing.tokenizer = FakeServer(other).tokenizer
        return DROP if number >= 3 else None

    with FakeServer(target) as changing, FakeServer(target) as steady:
        changing.trouble = trouble
        steady.trouble = lambda number, body: 0.02
        result = regenerate(asked, tmp_path / "out", target, changing, steady, options=("--batch-size", 4))
    assert result.exit_code == 0, result.output
    assert rows(tmp_path / "out") == expected
    assert f"{changing.url} is given up" in result.stderr


def _other_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<unk>", "<|im_end|>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_another_model_is_refused_by_name(target: Path, asked: Path, tmp_path: Path) -> None:
    other = _other_tokenizer(tmp_path / "other")
    with FakeServer(other, model="somebody/else") as server:
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 1
        assert f"{server.url} serves 'somebody/else' with another tokenizer than that of --target" in result.stderr
        assert server.questions == []
    assert not (tmp_path / "out").exists()
    with FakeServer(target, model="somebody/else") as server:  # the tokenizer is the target's, the name is not
        result = regenerate(asked, tmp_path / "out", target, server, options=("--max-samples", 1))
        assert result.exit_code == 0
        assert "serves 'somebody/else', and --target is" in result.stderr
    folder = tiny.make_target(tmp_path / "here", num_layers=3)
    with FakeServer(target, model=str(folder)) as server:  # a folder that is here, of another configuration
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 1
        assert f"runs {folder}, whose config.json is not that of --target" in result.stderr
    own, finetuned = (tiny.make_target(tmp_path / name, num_layers=2, seed=n) for n, name in enumerate(("a", "b")))
    with FakeServer(target, model=str(finetuned)) as server:
        result = regenerate(asked, tmp_path / "out2", own, server)
        assert result.exit_code == 1
        assert f"runs the weights in {finetuned}, which are not those of --target {own}" in result.stderr


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("max_model_len", [50, 512])
def test_a_tokenizer_with_a_few_words_swapped_is_refused(
    target: Path, asked: Path, tmp_path: Path, kind: str, max_model_len: int
) -> None:
    for name, (one, two) in {"apart": ("w7", "w90"), "last": ("w120", "w121")}.items():
        other = tiny.add_tokenizer(tmp_path / name)
        text = (other / "tokenizer.json").read_text()
        swapped = text.replace(f'"{one}":', '"-":').replace(f'"{two}":', f'"{one}":').replace('"-":', f'"{two}":')
        (other / "tokenizer.json").write_text(swapped)
        with FakeServer(other, kind=kind, model=str(target), max_model_len=max_model_len) as server:
            result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 1
        assert "with another tokenizer than that of --target" in result.stderr
        assert 1 < server.num_tokenized <= 9


def test_samples_of_a_server_that_speculates_are_warned_of(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target) as drafting, FakeServer(target) as plain, FakeServer(target, kind="sglang") as other:
        plain.has_draft = False
        servers = (drafting, plain, other)
        sampled = regenerate(asked, tmp_path / "sampled", target, *servers)
        greedy = regenerate(asked, tmp_path / "greedy", target, *servers, options=("--temperature", 0))
    assert sampled.exit_code == greedy.exit_code == 0
    (line,) = (line for line in sampled.stderr.splitlines() if "rejection sampler" in line)
    assert line.startswith(f"eyas: {drafting.url}: sampled answers come from the server's rejection sampler")
    assert "rejection sampler" not in greedy.stderr


def test_a_stopped_run_counts_all_that_is_left(target: Path, tmp_path: Path) -> None:
    given = questions(60, turns=1)
    source = tiny.write_jsonl(tmp_path / "x.jsonl", [*given, given[0]])
    out = tmp_path / "out"

    def trouble(number: int, body: dict[str, Any]) -> Any:
        if len(server.questions) - before <= answers:
            return None
        os.kill(os.getpid(), signal.SIGTERM)
        return 30.0

    with FakeServer(target, trouble=trouble) as server:
        for answers, limit, total in (0, (), 60), (0, ("--max-samples", 30), 30), (7, (), 60):
            before = len(server.questions)
            result = regenerate(source, out, target, server, options=("--batch-size", 1, *limit))
            assert result.exit_code == 75
            summary = json.loads(result.stdout)
            assert (summary["num_done"], summary["num_left"]) == (answers, total - answers)
            assert summary["num_answers"] == answers
            assert summary["seconds"] > 0
        server.trouble = lambda number, body: None
        assert json.loads(regenerate(source, out, target, server).stdout)["num_left"] == 0


def test_leading_answers_are_counted(target: Path, tmp_path: Path) -> None:
    given = questions(3, turns=1)
    given[1]["conversations"].insert(0, {"from": "gpt", "value": "w1"})
    source = tiny.write_jsonl(tmp_path / "x.jsonl", given)
    with FakeServer(target) as server:
        result = regenerate(source, tmp_path / "out", target, server)
    assert json.loads(result.stdout)["num_leading_dropped"] == 1
    assert "1  start with the assistant: that answer is left out" in result.stderr


def test_one_server_that_is_not_there_is_said_and_none_is_an_error(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target) as server:
        gone = "http://127.0.0.1:9"
        result = regenerate(asked, tmp_path / "out", target, gone, server)
        assert result.exit_code == 0, result.output
        assert f"{gone} is left alone" in result.stderr
        assert len(rows(tmp_path / "out")) == 40
    result = regenerate(asked, tmp_path / "other", target, gone, server)
    assert result.exit_code == 1
    assert "no endpoint answers" in result.stderr
    assert "Is the server running there?" in result.stderr


def test_servers_that_stay_away_stop_the_run_with_75(
    target: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE_SECONDS", 0.5)

    def trouble(number: int, body: dict[str, Any]) -> Any:
        return DROP if number >= 5 else None

    with FakeServer(target, trouble=trouble) as server:
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 75
        assert "stopped early (no endpoint answers)" in result.stderr
        done = len(rows(tmp_path / "out"))
        assert done < 40
        server.trouble = lambda number, body: None
        assert regenerate(asked, tmp_path / "out", target, server).exit_code == 0
    assert len(rows(tmp_path / "out")) == 40


def test_a_server_that_hangs_is_left(
    target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SHORT_SECONDS", 0.1)

    def trouble(number: int, body: dict[str, Any]) -> Any:
        hanging.hangs |= number == 3
        return 30.0 if number >= 3 else None

    with FakeServer(target) as hanging, FakeServer(target, delay=lambda: 0.05) as steady:
        hanging.trouble = trouble
        result = regenerate(asked, tmp_path / "out", target, hanging, steady, options=("--batch-size", 4))
    assert result.exit_code == 0, result.output
    assert rows(tmp_path / "out") == expected
    assert f"{hanging.url} is left alone" in result.stderr
    assert "it does not answer any more" in result.stderr


def test_what_a_server_refuses_or_always_loses_is_listed_and_tried_again(
    target: Path, expected: dict[str, Any], asked: Path, tmp_path: Path
) -> None:
    given = questions(40)
    ill = [given[3]["conversations"][0]["value"], given[7]["conversations"][0]["value"]]

    def trouble(number: int, body: dict[str, Any]) -> Any:
        text = server.tokenizer.decode(body["prompt"])
        if text.startswith(f"<|im_start|> user {ill[0]} <|im_end|>"):
            return web.json_response({"error": {"message": "too odd"}}, status=400)
        if text.startswith(f"<|im_start|> user {ill[1]} <|im_end|>"):
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        return None

    with FakeServer(target, trouble=trouble) as server:
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["rejected"] == {"refused": 1, "server": 1}
        listed = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
        assert {(reject["source"], reject["kind"]) for reject in listed} == {
            (f"{asked}:4", "refused"),
            (f"{asked}:8", "server"),
        }
        assert "too odd" in next(reject["reason"] for reject in listed if reject["kind"] == "refused")
        assert "5 attempts failed, the last: /v1/completions: HTTP 500" in json.dumps(listed)
        server.trouble = lambda number, body: None
        result = regenerate(asked, tmp_path / "out", target, server)
        assert json.loads(result.stdout)["num_new"] == 2
    assert rows(tmp_path / "out") == expected


def test_a_server_that_refuses_everything_is_an_error(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target, trouble=lambda number, body: web.json_response({"detail": "no"}, status=422)) as server:
        result = regenerate(asked, tmp_path / "out", target, server)
    assert result.exit_code == 1
    assert "refuses every question" in result.stderr
    assert len(server.questions) < 30


def test_a_server_without_token_ids(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target, kind="plain") as server:
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 0, result.output
        assert "gives no token ids back, so eyas prepare will tokenize its answers again" in result.stderr
        assert "has no /tokenize" in result.stderr
        summary = json.loads(result.stdout)
        assert summary["num_retokenized"] == 40
        for body in server.questions:
            for message in body["messages"][1::2]:  # its own answers, not those of the file
                assert message["role"] == "assistant"
    found = rows(tmp_path / "out")
    assert all("input_ids" not in row for row in found.values())
    several = [row for row in found.values() if len(row["messages"]) > 2]
    assert several
    asked_with = [[m["content"] for m in body["messages"]] for body in server.questions]
    for row in several:
        assert [m["content"] for m in row["messages"][:-1]] in asked_with
    result = CliRunner().invoke(main, ["prepare", str(tmp_path / "out"), str(tmp_path / "p"), "--target", str(target)])
    assert result.exit_code == 0, result.output
    assert len(PreparedSamples.open(tmp_path / "p")) > 30


def test_reasoning_and_tool_calls_of_a_server_without_token_ids(target: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    given = [{"tools": tools, **row} for row in questions(4, turns=1)]
    for row in given:
        row["conversations"] = row["conversations"] * 2  # the same question again
    source = tiny.write_jsonl(tmp_path / "x.jsonl", given)
    with FakeServer(target, kind="plain") as server:
        server.message = {"role": "assistant", "content": "w1", "reasoning": "w2 w3"}
        assert regenerate(source, tmp_path / "thought", target, server).exit_code == 0
        second = [body for body in server.questions if len(body["messages"]) == 3]
        assert len(second) == 4
        for body in second:
            assert body["tools"] == tools
            assert body["messages"][1] == server.message  # called as this server calls it
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        server.message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert regenerate(source, tmp_path / "called", target, server).exit_code == 0
    for row in rows(tmp_path / "thought").values():
        assert row["messages"][1] == {"role": "assistant", "content": "w1", "reasoning_content": "w2 w3"}
    for row in rows(tmp_path / "called").values():
        assert row["tools"] == tools
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]  # the tool's result is unknown
        assert row["messages"][1]["tool_calls"] == [call]


def test_a_server_is_asked_for_as_much_as_it_takes(target: Path, tmp_path: Path) -> None:
    room = 6

    def trouble(number: int, body: dict[str, Any]) -> Any:
        return web.json_response({}, status=429) if server.in_flight > room else None

    source = tiny.write_jsonl(tmp_path / "x.jsonl", questions(120, turns=1))
    with FakeServer(target, trouble=trouble, delay=lambda: 0.1) as server:
        result = regenerate(source, tmp_path / "out", target, server)
        assert result.exit_code == 0, result.output
        assert room <= server.most_in_flight < 4 * room
        # Most questions are taken at once: refusals are the exception.
        assert len(server.questions) < 1.5 * server.num_answers
    with FakeServer(target, delay=lambda: 0.4) as server:
        assert regenerate(source, tmp_path / "free", target, server).exit_code == 0
        assert server.most_in_flight > 20
    with FakeServer(target, delay=lambda: 0.02) as server:
        assert regenerate(source, tmp_path / "few", target, server, options=("--batch-size", 3)).exit_code == 0
        assert server.most_in_flight == 3


def test_a_key_is_read_from_the_environment(
    target: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(target, key="k-123") as server:
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 1
        assert "EYAS_API_KEY" in result.stderr
        monkeypatch.setenv("EYAS_API_KEY", "k-123")
        assert regenerate(asked, tmp_path / "out", target, server, options=("--max-samples", 1)).exit_code == 0


def test_conversations_stay_within_what_the_servers_take(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target, max_model_len=40) as server:
        result = regenerate(asked, tmp_path / "out", target, server)
        assert result.exit_code == 0, result.output
        for body in server.questions:
            assert len(body["prompt"]) + body["max_tokens"] <= 40
    assert "kept within the 40 tokens" in result.stderr


def test_answers_of_servers_and_of_an_engine_do_not_mix(target: Path, asked: Path, tmp_path: Path) -> None:
    with FakeServer(target) as server:
        assert regenerate(asked, tmp_path / "out", target, server, options=("--max-samples", 1)).exit_code == 0
    result = regenerate(asked, tmp_path / "out", target)
    assert result.exit_code == 1
    assert "dtype is 'as served' there and 'float32' here" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--endpoint", "localhost:8000"), "expected an address such as http://localhost:8000"),
        (("--endpoint", "http://h:1", "--device", "cpu"), "--device says how the target runs here"),
        (("--request-timeout", "5s"), "--request-timeout belongs to --endpoint"),
    ],
)
def test_wrong_usage(target: Path, asked: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = regenerate(asked, tmp_path / "out", target, options=options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_kills_lose_no_finished_conversation_and_change_none(
    target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    draw = random.Random(1)
    with FakeServer(target, delay=lambda: draw.choice([0.02, 0.1, 0.2])) as server:
        command = [sys.executable, "-m", "eyas.cli.main", "regenerate", str(asked), str(out), "--target", str(target)]
        command += ["--max-new-tokens", "10", "--batch-size", "2", "--endpoint", server.url]
        for number in (signal.SIGKILL, signal.SIGTERM):
            size = out.stat().st_size if out.exists() else 0
            running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 120
            while not (out.exists() and out.stat().st_size > size + 1500):
                assert time.monotonic() < deadline
                assert running.poll() is None
                time.sleep(0.01)
            running.send_signal(number)
            running.communicate(timeout=120)
            assert running.returncode == (75 if number == signal.SIGTERM else -number)
            os.truncate(out, out.stat().st_size - 7)  # a line torn in the middle
        server.delay = lambda: 0.0
        assert regenerate(asked, out, target, server).exit_code == 0
    assert rows(out) == expected


def test_a_run_that_fails_before_its_first_answer_leaves_nothing(target: Path, asked: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    out = tmp_path / "here" / "out.jsonl"
    with FakeServer(_other_tokenizer(tmp_path / "other")) as server:
        for url in ("http://127.0.0.1:9", server.url):
            assert regenerate(asked, out, target, url, options=("--seed", 1)).exit_code == 1
            assert list(out.parent.iterdir()) == []
    with FakeServer(target) as server:
        assert regenerate(asked, out, target, server, options=("--seed", 2)).exit_code == 0
        assert "seed is 2 there and 3 here" in regenerate(asked, out, target, server, options=("--seed", 3)).stderr
    assert len(rows(out)) == 40


def test_questions_without_answers_are_answered(target: Path, tmp_path: Path) -> None:
    given = {
        "turns": {"turns": ["w1 w2", "w3"], "category": "math"},
        "messages": {"messages": [{"role": "user", "content": text} for text in ("w1", "w3", "w4")]},
        "open": {"conversations": [{"from": side, "value": "w5"} for side in ("human", "gpt", "human")]},
        "alone": {"messages": [{"role": "system", "content": "w7"}, {"role": "user", "content": "w6"}]},
    }
    source = tiny.write_jsonl(tmp_path / "x.jsonl", [{"id": name, **row} for name, row in given.items()])
    with FakeServer(target) as server:
        result = regenerate(source, tmp_path / "out", target, server, options=("--max-new-tokens", LONGEST))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rejected"] == {}
    found = {row["source_id"]: row for row in rows(tmp_path / "out").values()}
    assert found["turns"]["category"] == "math"
    said = {name: [message["content"] for message in row["messages"]] for name, row in found.items()}
    assert {name: texts[:-1:2] for name, texts in said.items()} == {
        "turns": ["w1 w2", "w3"], "messages": ["w1", "w3", "w4"], "open": ["w5", "w5"], "alone": ["w7"],
    }  # fmt: skip
    assert {name: len(texts) for name, texts in said.items()} == {"turns": 4, "messages": 6, "open": 4, "alone": 3}


def test_a_disk_that_fills_up_is_named_and_the_next_run_goes_on(
    target: Path, asked: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
    code += "from eyas.cli.main import main; main()"
    command = [sys.executable, "-c", code, "regenerate", str(asked), str(out), "--target", str(target)]
    with FakeServer(target) as server:
        command += ["--max-new-tokens", "10", "--endpoint", server.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"Error: {out}: cannot be written (File too large). What was written is kept: " in done.stderr
        assert "Traceback" not in done.stderr
        assert out.stat().st_size == 5000
        assert regenerate(asked, out, target, server).exit_code == 0
    assert rows(out) == expected


def test_a_disk_that_is_full(target: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "here" / "out.jsonl"
    out.parent.mkdir()
    out.symlink_to("/dev/full")
    with FakeServer(target) as server:
        result = regenerate(asked, out, target, server)
    assert result.exit_code == 1
    assert f"Error: {out}: cannot be written (No space left on device). " in result.stderr
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(target: Path, asked: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with FakeServer(target) as server:
        result = regenerate(asked, tmp_path / "locked" / "out.jsonl", target, server)
    assert result.exit_code == 1
    assert f"{tmp_path / 'locked' / 'out.jsonl'}: cannot be written (Permission denied)" in result.stderr


def test_a_folder_that_is_a_file(target: Path, asked: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with FakeServer(target) as server:
        result = regenerate(asked, tmp_path / "file" / "out.jsonl", target, server)
    assert result.exit_code == 1
    assert f"{tmp_path / 'file' / 'out.jsonl'}: cannot be written (" in result.stderr
