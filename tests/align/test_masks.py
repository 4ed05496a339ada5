"""Loss masks against the target's chat template: whose turns are trained, from which token on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eyas.align.static import check_static
from tests.align.made import bad, make_dataset, make_identity, make_sample
from tests.tiny import make_target

START, END, SYSTEM, USER, ASSISTANT = 1, 2, 3, 4, 5  # tokens of tests.tiny's tokenizer
IDENTITY = make_identity("after:1,after:3,after:5", num_layers=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def conversation(seed: int, *, thinking: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
    """Two questions and answers of random words, and the mask that eyas prepare gives them."""
    draw = np.random.default_rng(seed)
    ids, mask = [START, SYSTEM, 40, END], [0] * 4
    for _ in range(2):
        question, answer = (draw.integers(10, 90, draw.integers(3, 7)).tolist() for _ in range(2))
        ids += [START, USER, *question, END, START, ASSISTANT, *thinking, *answer, END]
        mask += [0] * (len(question) + 5 + len(thinking)) + [1] * (len(answer) + 1)
    return ids, mask


def shifted(mask: list[int], by: int) -> list[int]:
    return np.roll(mask, by).tolist() if by < 0 or not mask[-1] else [0, *mask[:-1]]


def users(ids: list[int], mask: list[int]) -> list[int]:
    """The user's words instead of the assistant's."""
    turns = np.cumsum(np.asarray(ids) == START)
    return [int(turn % 2 == 0 and token >= 10) for turn, token in zip(turns.tolist(), ids, strict=True)]


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        (lambda ids, mask: mask, None, ""),
        (lambda ids, mask: shifted(mask, 1), "mask position", "begins one token late in 12 of 12 answers"),
        (lambda ids, mask: shifted(mask, -1), "mask position", "begins one token early in 12 of 12 answers"),
        (users, "mask roles", "the prompts are trained, and the answers are not: 100%"),
        (lambda ids, mask: [1] * len(ids), "mask roles", "the prompts are trained too"),
    ],
    ids=["right", "late", "early", "user", "everything"],
)
def test_whose_turns_are_trained(tmp_path: Path, target: Path, change, subject, words) -> None:  # type: ignore[no-untyped-def]
    samples = []
    for seed in range(6):
        ids, mask = conversation(seed)
        samples.append(make_sample(IDENTITY, ids, change(ids, mask), seed=seed))
    report = check_static(make_dataset(tmp_path, IDENTITY, samples), target=target)
    found = {check: finding for check, finding in bad(report).items() if check.startswith("mask")}
    if subject is None:
        assert not found
        assert any(finding.check == "mask roles" and finding.status == "ok" for finding in report.findings)
    else:
        assert found.keys() == {subject}
        assert found[subject].status == "mismatch"
        assert words in found[subject].found


def test_tokens_of_another_template_are_not_judged(tmp_path: Path, target: Path) -> None:
    samples = [make_sample(IDENTITY, list(range(20, 40)), [0] * 10 + [1] * 10, seed=seed) for seed in range(1)]
    finding = bad(check_static(make_dataset(tmp_path, IDENTITY, samples), target=target))["mask roles"]
    assert finding.status == "unknown"
    assert "rendered by another template" in finding.found
