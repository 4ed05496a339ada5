"""Speculative decoding: the draft sees what it was trained on, and the output is the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.taps.notation import Tap, after, parse_taps
from eyas.train.acceptance.decode import Chooser, decode_plain, decode_speculative, prompt, verify
from eyas.train.acceptance.drafters import BigramTable, Choose, Drafter, DraftHead, Proposal, untrained
from eyas.train.acceptance.target import RunningTarget
from eyas.train.attention import prepare_documents
from eyas.train.loss import TargetHead
from eyas.train.rope import rotary_table
from eyas.train.target_parts import load_target_parts
from eyas.train.ttt import loss_rows, ttt_forward, unroll
from tests import tiny
from tests.train.made_drafts import make_model, make_shape
from tests.train.test_ttt import OPTIONS

TAPS = parse_taps("after:1,after:3,after:5")
CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 99, 42, 8, 61]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_draft_logits_are_those_of_the_training_forward(options: dict[str, Any]) -> None:
    """At every position and step, the cache having been through proposals that were thrown away."""
    torch.manual_seed(0)
    model = make_model(make_shape(**options))
    num_tokens, num_steps = 12, 4
    input_ids = torch.randint(29, (num_tokens,))
    features = torch.randn(num_tokens, model.fc.in_features)
    positions = torch.arange(num_tokens)
    with torch.no_grad():
        documents = prepare_documents(torch.zeros(num_tokens, dtype=torch.int32))
        table = rotary_table(model.shape, num_tokens + num_steps)
        trained = unroll(model, features, input_ids, positions, *table, documents, num_steps)
        expected = [model.lm_head(step) for step in trained]  # K of [T, Vd]
    head = DraftHead("draft", model, torch.arange(29), TAPS)
    rows = 3  # of the prompt
    head.extend(input_ids[1 : rows + 1], features[:rows])
    while rows + num_steps < num_tokens:
        seen: list[Tensor] = []

        def teacher(logits: Tensor, seen: list[Tensor] = seen, row: int = rows - 1) -> tuple[Tensor, None]:
            seen.append(logits)
            return input_ids[row + 1 + len(seen)], None

        head.propose(num_steps, teacher)
        for k, logits in enumerate(seen):
            reference = expected[k][rows - 1]
            assert (logits - reference).abs().max() <= 1e-5 * reference.abs().max()
        head.extend(input_ids[rows + 1 : rows + 3], features[rows : rows + 2])  # two are verified
        rows += 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> RunningTarget:
    return RunningTarget(str(folder), taps=TAPS, device="cpu")


def draft_head(folder: Path, *, draft_vocab: int = 100, **options: Any) -> DraftHead:
    """A random draft of the target, which proposes every id below ``draft_vocab``."""
    shape = make_shape(
        hidden_size=32, target_hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512,
        intermediate_size=64, vocab_size=tiny.VOCAB_SIZE, draft_vocab_size=draft_vocab, **options,
    )  # fmt: skip
    ids = torch.arange(draft_vocab)
    model = make_model(shape)
    parts = load_target_parts(folder, rows=ids, dtype=torch.float32)
    model.use_target(parts.embedding, parts.head)
    return DraftHead("draft", model, ids, TAPS)


def trained_head(folder: Path, target: RunningTarget, answer: list[int]) -> DraftHead:
    """A draft that has learned one answer by heart."""
    head = draft_head(folder)
    model = untrained(head._model)
    model.requires_grad_(True)
    ids = [*PROMPT, *answer]
    last = RunningTarget(str(folder), taps=[*TAPS, after(7)], device="cpu")
    _, features = last.forward(ids)
    batch: Any = type("Batch", (), {})()
    batch.input_ids, batch.loss_mask = torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)
    batch.document, batch.position = torch.zeros(len(ids), dtype=torch.int32), torch.arange(len(ids))
    batch.features = features[:, :3].flatten(1).clone()
    batch.last_hidden = features[:, 3].clone()
    batch.target_top1 = batch.target_lse = None
    full = load_target_parts(folder, dtype=torch.float32)
    kept = torch.arange(100)
    judge = TargetHead(parts=full.rows(kept), ids=kept, last_hidden_is_final=False, full=full)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rotary = rotary_table(model.shape, len(ids) + 4)
    rows = loss_rows(batch.loss_mask, batch.document, multiple=1)
    for _ in range(120):
        optimizer.zero_grad()
        ttt_forward(model, batch, judge, rows=rows, rotary=rotary, num_steps=3).loss.backward()
        optimizer.step()
    return DraftHead("trained", model.requires_grad_(False), kept, TAPS)


class Scripted:
    """Knows the answer, and proposes it where ``right`` says so; else something wrong."""

    name, taps = "scripted", ()

    def __init__(self, answer: Sequence[int], right: Sequence[bool]) -> None:
        self._answer, self._right = list(answer), list(right)

    def start(self) -> None:
        self._known = -len(PROMPT)

    def extend(self, next_ids: Tensor, features: Tensor) -> None:
        self._known += len(next_ids)

    def propose(self, num_tokens: int, choose: Choose) -> Proposal:
        tokens = []
        for n in range(self._known + 1, self._known + 1 + num_tokens):
            right = self._answer[n] if n < len(self._answer) else 0
            tokens.append(right if self._right[n % len(self._right)] else (right + 1) % tiny.VOCAB_SIZE)
        return Proposal(tokens, None)


def greedy(target: RunningTarget, drafter: Drafter | None, *, num_draft: int = 4, stop_ids: Sequence[int] = ()) -> Any:
    choose = Chooser(0.0, 0, CPU)
    start = prompt(target, PROMPT, choose)
    limits: dict[str, Any] = {"max_new_tokens": 40, "stop_ids": frozenset(stop_ids)}
    if drafter is None:
        return decode_plain(target, start, choose, **limits)
    return decode_speculative(target, drafter, start, choose, num_draft=num_draft, **limits)


def test_greedy_output_is_plain_greedy_whatever_the_draft(folder: Path, target: RunningTarget) -> None:
    plain = greedy(target, None)
    assert len(plain.token_ids) == 40
    scripts = [[True], [False], [True, False], [True, True, True, False], [False, False, True]]
    drafters: list[Drafter] = [
        draft_head(folder),
        draft_head(folder, num_layers=2, norm_output=True),
        trained_head(folder, target, plain.token_ids),
        BigramTable(np.arange(tiny.VOCAB_SIZE)),
        *(Scripted(plain.token_ids, right) for right in scripts),
    ]
    lengths = {}
    for drafter in drafters:
        for num_draft in (1, 4):
            decoded = greedy(target, drafter, num_draft=num_draft)
            assert decoded.token_ids == plain.token_ids
            assert [best.token_ids[0] for best in decoded.best] == plain.token_ids[1:]
            lengths[drafter.name] = decoded.num_tokens / decoded.num_forwards
    assert lengths["trained"] > 2 > lengths["draft"]  # it knows the answer, up to what is outside its vocabulary
    assert greedy(target, Scripted(plain.token_ids, [False])).num_forwards == 39
    for stop in plain.token_ids[3:20:4]:  # an end token, in the middle of what is accepted
        ended = greedy(target, None, stop_ids=[stop])
        assert greedy(target, drafters[4], stop_ids=[stop]).token_ids == ended.token_ids


def test_sliding_windows_give_tokens_back(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, initializer_range=0.2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    target = RunningTarget(str(tmp_path), taps=[], device="cpu")
    model = MistralForCausalLM.from_pretrained(tmp_path)
    expected = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, eos_token_id=None)
    plain = greedy(target, None)
    assert plain.token_ids == expected[0, len(PROMPT) :].tolist()
    for right in ([True], [True, False, True]):
        assert greedy(target, Scripted(plain.token_ids, right)).token_ids == plain.token_ids


def test_what_is_counted(target: RunningTarget) -> None:
    plain = greedy(target, None)
    # Of three proposals the first two are right: each cycle gives 3 tokens, 39 tokens in 13 cycles.
    script = [n % 3 != 0 for n in range(40)]  # answer[3], answer[6], ... are proposed wrong
    decoded = greedy(target, Scripted(plain.token_ids, script), num_draft=3)
    assert (decoded.num_forwards, decoded.num_tokens) == (13, 39)
    assert decoded.reached == [13, 13, 13]
    assert decoded.accepted == [13, 13, 0]
    stopped = greedy(target, Scripted(plain.token_ids, [True]), num_draft=3, stop_ids=[plain.token_ids[2]])
    if plain.token_ids[2] not in plain.token_ids[:2]:  # the end token is the second proposal: what follows never counts
        assert (stopped.num_tokens, stopped.reached, stopped.accepted) == (2, [1, 1, 0], [1, 1, 0])


def chi_square_is_small(found: Counter[Any], expected: dict[Any, float]) -> bool:
    """Within five standard deviations of what chance gives."""
    total = sum(found.values())
    assert set(found) <= set(expected)
    statistic = sum((found[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    freedom = len(expected) - 1
    return statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("num_draft", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_tokens_have_the_targets_distribution(num_draft: int, temperature: float, tmp_path: Path) -> None:
    """Three tokens of a vocabulary of six, of which the draft proposes four, against their exact probabilities."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=6, initializer_range=0.4, **sizes)).save_pretrained(tmp_path)
    taps = parse_taps("after:0,after:1")
    target = RunningTarget(str(tmp_path), taps=taps, device="cpu")
    ids = torch.tensor([0, 1, 3, 4])
    model = make_model(make_shape(num_taps=2, vocab_size=6, draft_vocab_size=4))
    parts = load_target_parts(tmp_path, rows=ids, dtype=torch.float32)
    model.use_target(parts.embedding, parts.head)
    head = DraftHead("draft", model, ids, taps)

    given = [1, 2, 3]
    choose = Chooser(temperature, 7, CPU)
    start = prompt(target, given, choose)

    def probabilities(tokens: list[int]) -> list[float]:
        target.crop(len(given))
        logits, _ = target.forward([start.first, *tokens])
        return torch.softmax(logits[-1].double() / temperature, -1).tolist()

    expected = {
        (a, b): first * second
        for a, first in enumerate(probabilities([]))
        for b, second in enumerate(probabilities([a]))
    }
    found: Counter[Any] = Counter()
    num_accepted = 0
    for _ in range(1500):
        decoded = decode_speculative(
            target, head, start, choose, num_draft=num_draft, max_new_tokens=3, stop_ids=frozenset()
        )
        found[tuple(decoded.token_ids[1:])] += 1
        num_accepted += sum(decoded.accepted)
    assert num_accepted > 200  # or nothing was tested
    assert chi_square_is_small(found, expected)


@pytest.mark.parametrize("known", [True, False], ids=["drawn", "certain"])
def test_verify_gives_the_targets_distribution(known: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 8) * 1.5
    p = torch.softmax(logits[0].double(), -1)
    q = torch.softmax(torch.randn(8) * 1.5, -1)
    q[2:4] = 0  # outside the draft's vocabulary
    choose = Chooser(1.0, 3, CPU)
    found: Counter[Any] = Counter()
    for _ in range(8000):
        token = int(choose.draw(q)) if known else 1
        accepted, own = verify(logits, Proposal([token], q[None] if known else None), choose)
        found[token if accepted else own] += 1
    assert chi_square_is_small(found, dict(enumerate(p.tolist())))


def test_taps_of_drafts_may_differ(folder: Path) -> None:
    """One target gives several drafts what each is fed."""
    taps: tuple[Tap, ...] = parse_taps("after:1,after:3,after:5")
    wide = RunningTarget(str(folder), taps=[after(0), *taps, after(6)], device="cpu")
    narrow = RunningTarget(str(folder), taps=taps, device="cpu")
    head = draft_head(folder)
    assert greedy(wide, head).accepted == greedy(narrow, head).accepted
