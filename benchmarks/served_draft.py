"""A draft of eyas in an engine's own server against `eyas eval --decode`: accepted length, and greedy output.

    python benchmarks/served_draft.py WORK --engine vllm --python VENV/bin/python --target TARGET --draft DRAFT \
        --prompts mt_bench.jsonl:18 gsm8k.jsonl:28 -- --max-model-len 2048 --enforce-eager

The engine serves TARGET with DRAFT (as ``eyas export`` writes it for that engine) in float32, answers the first so
many prompts of each file while ``eyas eval --endpoint`` reads its counters, and once more for their tokens; then
without the draft. ``eyas eval --decode`` decodes the same prompts with transformers, one process a file. What is there
already in WORK is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EYAS = [sys.executable, "-m", "eyas.cli.main"]
Rows = dict[str, dict[str, Any]]


class Measurement:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.prompts = [(Path(path), int(number)) for path, _, number in (p.rpartition(":") for p in options.prompts)]
        self.common = ["--target", options.target, "--max-new-tokens", options.max_new_tokens]

    def decode(self) -> None:
        """`eyas eval --decode` of every prompts file, at the same time."""
        running = []
        for path, number in self.prompts:
            out = self.work / f"decode-{path.stem}.json"
            if not out.exists() or not out.stat().st_size:
                command = [*EYAS, "eval", self.options.draft, "--engine", self.options.reading, *self.common, "--dtype",
                           "float32", "--decode", path, "--max-prompts", number, "--draft-tokens",
                           self.options.draft_tokens, "--json"]  # fmt: skip
                with open(out, "w") as file:
                    running.append(subprocess.Popen(list(map(str, command)), stdout=file))
        for process in running:
            if process.wait() not in (
                0,
                1,
            ):  # 1: greedy output differs where rounding does not explain it, in the report
                raise SystemExit("eyas eval --decode failed")

    def serve(self, name: str, draft: Sequence[object]) -> None:
        """What the server says with ``draft`` (or without one) and answers."""
        options, url = self.options, f"http://127.0.0.1:{self.options.port}"
        answers = self.work / f"answers-{name}.jsonl"
        wanted = [(path, number, self.work / f"endpoint-{path.stem}.json") for path, number in self.prompts if draft]
        missing = [entry for entry in wanted if not entry[2].exists()]
        if answers.exists() and not missing:
            return
        folder = self.work / f"serving-{name}"
        run("serve", "start", folder, "--engine", options.engine, "--python", options.python, "--target",
            options.target, *draft, "--port", options.port, "--", "--dtype", "float32", *options.rest)  # fmt: skip
        try:
            for path, number, out in missing:
                found = run(
                    "eval", "--endpoint", url, *self.common, "--decode", path, "--max-prompts", number, "--json"
                )
                out.write_text(found)
            run("regenerate", self.conversations(), answers, "--endpoint", url, "--temperature", 0, *self.common)
        finally:
            run("serve", "stop", folder)

    def conversations(self) -> Path:
        """The prompts as conversations whose answers are to be replaced."""
        out = self.work / "conversations.jsonl"
        rows = []
        for path, number in self.prompts:
            for line in path.read_text().splitlines()[:number]:
                turns = [[{"role": "user", "content": turn}, {"role": "assistant", "content": "?"}]
                         for turn in json.loads(line)["turns"]]  # fmt: skip
                rows.append({"messages": [message for turn in turns for message in turn]})
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return out

    def report(self) -> None:
        print("| prompts | cycles served, decoded | accepted length served | decoded | apart |\n|---|---|---|---|---|")
        totals = [0, 0, 0, 0]
        for path, number in self.prompts:
            served = _drafted(self.work / f"endpoint-{path.stem}.json")
            decoded = _drafted(self.work / f"decode-{path.stem}.json")
            counts = [served["num_tokens"], served["num_forwards"], decoded["num_tokens"], decoded["num_forwards"]]
            _line(f"{path.stem}, {number}", counts)
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
        _line("all", totals)
        drafted, plain = (_rows(self.work / f"answers-{name}.jsonl") for name in ("draft", "plain"))
        same = sum(drafted[key]["input_ids"] == row["input_ids"] for key, row in plain.items())
        tokens = sum(sum(row["loss_mask"]) for row in plain.values())
        print(f"\ngreedy with and without the draft: {same} of {len(plain)} conversations the same, token for token "
              f"({tokens:,} tokens without)")  # fmt: skip
        for key, row in plain.items():
            if drafted[key]["input_ids"] != row["input_ids"]:
                pairs = zip(drafted[key]["input_ids"], row["input_ids"], strict=False)
                print(
                    f"  {row['source']}: from token {next((n for n, (a, b) in enumerate(pairs) if a != b), 'the end')}"
                )


def run(*arguments: object) -> str:
    return subprocess.run([*EYAS, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout


def _drafted(path: Path) -> dict[str, Any]:
    (found,) = json.loads(path.read_bytes())["decoding"]["drafts"]
    return dict(found)


def _rows(path: Path) -> Rows:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def _line(name: str, counts: Sequence[int]) -> None:
    accepted, served, tokens, decoded = counts
    ours, theirs = accepted / served, tokens / decoded
    print(f"| {name} | {served:,}, {decoded:,} | {ours:.3f} | {theirs:.3f} | {abs(ours - theirs):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--engine", choices=["vllm", "sglang"], required=True)
    parser.add_argument("--reading", help="the engine with its version, whose reading of the draft's ids counts")
    parser.add_argument("--python", required=True, help="of the engine's environment")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE:NUMBER")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--port", type=int, default=8231)
    arguments, rest = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments, argparse.Namespace(rest=rest))  # rest: the engine's own options
    measurement = Measurement(options)
    measurement.serve("draft", ["--draft", options.draft, "--draft-tokens", options.draft_tokens])
    measurement.serve("plain", [])
    measurement.decode()
    measurement.report()


if __name__ == "__main__":
    main()
