"""The training-time test against a plain per-step loop: hidden states, loss, metrics and every gradient."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import eyas.train.loss
from eyas.taps.errors import EyasError
from eyas.train.attention import prepare_documents
from eyas.train.draft import DraftModel
from eyas.train.loss import TargetHead
from eyas.train.rope import rotary_table
from eyas.train.target_parts import TargetParts
from eyas.train.ttt import loss_rows, ttt_forward, unroll
from tests.train import reference
from tests.train.made_drafts import make_documents, make_head, make_model, make_shape, pack

LENGTHS = (7, 1, 2, 9, 3, 4)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"num_kv_heads": 4},
    {"num_kv_heads": 1, "fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"num_layers": 2, "fc_norm": True, "norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    {"hidden_size": 12, "num_layers": 2},
]


def close(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-5 of the largest number."""
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    if len(ours.shape) == 0 or len(ours):
        assert (ours - theirs).detach().abs().max() <= 1e-5 * max(1.0, float(theirs.detach().abs().max()))


def forward(model: DraftModel, batch: Any, head: Any, steps: int, **options: Any) -> Any:
    rows = loss_rows(batch.loss_mask, batch.document, multiple=8)
    table = rotary_table(model.shape, int(batch.position.max()) + steps + 1)
    return ttt_forward(model, batch, head, rows=rows, rotary=table, num_steps=steps, **options)


@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_equals_a_plain_loop(options: dict[str, Any], loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.train.loss, "CHUNK_ROWS", 8)  # several chunks
    steps, weights = 4, [1.0, 0.8, 0.5, 0.3]
    shape = make_shape(**options)
    model = make_model(shape)
    documents = make_documents(LENGTHS)
    head, whole = make_head()
    batch = pack(documents, whole, padding=3)
    named = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    theirs = reference.run(shape, named, documents, whole, head.ids, steps, loss, weights)
    ours = forward(model, batch, head, steps, loss=loss, step_weights=weights)

    close(ours.loss, theirs.loss)
    for k, step in enumerate(ours.steps):
        close(step.loss, theirs.loss_sums[k])
        assert float(step.num_rows) == theirs.num_rows[k]
        assert float(step.greedy_accepted) == theirs.accepted[k]
        assert float(step.greedy_reached) == theirs.reached[k]
        assert float(step.overlap) == pytest.approx(theirs.overlap[k], rel=1e-4)
        assert float(step.out_of_vocabulary) == pytest.approx(theirs.outside[k], rel=1e-4)
    theirs.loss.backward()
    ours.loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert named[name].grad is not None, name
            close(parameter.grad, named[name].grad)


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_hidden_states_equal_a_plain_loop(options: dict[str, Any]) -> None:
    shape = make_shape(**options)
    model = make_model(shape)
    documents = make_documents(LENGTHS)
    head, whole = make_head()
    batch = pack(documents, whole, padding=5)
    theirs = reference.run(shape, dict(model.named_parameters()), documents, whole, head.ids, 3, "kl", [1.0, 1.0, 1.0])
    table = rotary_table(shape, 20)
    ours = unroll(model, batch.features, batch.input_ids, batch.position, *table, prepare_documents(batch.document), 3)
    start = 0
    for document, hidden in zip(documents, theirs.hidden, strict=True):
        length = len(document.input_ids)
        for k in range(3):
            inside = max(0, length - 1 - k)  # rows whose embedded token is in the document
            close(ours[k][start : start + inside], hidden[k][:inside])
        start += length


def test_trained_head_gets_its_gradient() -> None:
    shape = make_shape()
    model = make_model(shape)
    model.lm_head.requires_grad_(True)
    documents = make_documents(LENGTHS)
    head, whole = make_head()
    named = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    reference.run(shape, named, documents, whole, head.ids, 3, "kl", [1.0] * 3).loss.backward()
    (forward(model, pack(documents, whole), head, 3).loss * 2).backward()
    expected = named["lm_head.weight"].grad
    assert expected is not None
    assert model.lm_head.weight.grad is not None
    close(model.lm_head.weight.grad, 2 * expected)


def test_full_head_serves_where_statistics_are_missing() -> None:
    model = make_model(make_shape())
    documents = make_documents(LENGTHS)
    head, whole = make_head(full=True)
    stored, computed = pack(documents, whole), pack(documents, None)
    ours, theirs = forward(model, computed, head, 3), forward(model, stored, head, 3)
    close(ours.loss, theirs.loss)
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert mine.greedy_accepted == other.greedy_accepted
    with pytest.raises(EyasError, match="carry no target_lse"):
        forward(model, computed, make_head()[0], 3)


def test_batch_without_loss_is_zero_and_finite() -> None:
    model = make_model(make_shape())
    documents = make_documents((5, 1))
    for document in documents:
        document.loss_mask[:] = False
    head, whole = make_head()
    out = forward(model, pack(documents, whole, padding=2), head, 2)
    out.loss.backward()
    assert float(out.loss.detach()) == 0
    for parameter in model.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


def test_bfloat16_rounds_and_no_more() -> None:
    model = make_model(make_shape())
    documents = make_documents(LENGTHS)
    head, whole = make_head()
    exact = forward(model, pack(documents, whole), head, 3)
    batch = pack(documents, whole)
    batch.features, batch.last_hidden = batch.features.bfloat16(), batch.last_hidden.bfloat16()
    rounded = forward(model, batch, head, 3)
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=0.05)
    rounded.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


class _Echo(torch.nn.Module):
    """A draft that records what it is given and carries on the number of its step: hidden [row's tap or step, 0]."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = SimpleNamespace(num_layers=1)
        self.lm_head = torch.nn.Linear(2, 3, bias=False)
        self.given: list[tuple[list[float], list[float], list[float]]] = []

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.stack([token_ids.float(), torch.zeros(len(token_ids))], dim=-1)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def project(self, embeds: Tensor) -> list[Tensor]:
        return [embeds]

    def step(self, tokens: list[Tensor], hidden: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:
        self.given.append((tokens[0][:, 0].tolist(), hidden[:, 0].tolist(), cos[:, 0].tolist()))
        return hidden + 100  # so that the step is seen

    def head_input(self, carried: Tensor) -> Tensor:
        return carried


def test_shifts_by_hand() -> None:
    """The diagram of ttt.py in numbers: documents of 5 and 3 tokens, 2 steps.

    row              0    1    2    3    4  |  5    6    7
    token           10   11   12   13   14  | 20   21   22
    trained          0    0    1    1    1  |  0    0    1
    tap              0    1    2    3    4  |  5    6    7
    """
    batch: Any = SimpleNamespace(
        input_ids=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22]),
        loss_mask=torch.tensor([0, 0, 1, 1, 1, 0, 0, 1]).bool(),
        document=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
        position=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]),
        features=torch.stack([torch.arange(8.0), torch.zeros(8)], dim=-1),
        last_hidden=torch.zeros(8, 2),
        # Of three equal logits 0 each p is exp(-lse): row 1 e^-2, row 2 e^-3, row 3 e^-4, row 6 e^-5.
        target_lse=torch.tensor([math.nan, 2, 3, 4, math.nan, math.nan, 5, math.nan]),
        target_top1=torch.tensor([-1, 7, 8, 7, -1, -1, 7, -1]),
    )
    # Rows 1, 2, 3 predict tokens 12, 13, 14; row 6 predicts 22; row 5 would predict 21, which is not trained.
    rows = loss_rows(batch.loss_mask, batch.document, multiple=3)
    assert rows.tolist() == [1, 2, 3, 6, -1, -1]

    model: Any = _Echo()
    model.lm_head.weight.data = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # argmax 0, which is id 7
    parts = TargetParts(
        embedding=torch.zeros(9, 2), head=torch.zeros(3, 2), head_bias=None, norm_weight=torch.ones(2),
        norm_bias=None, norm_kind="rms", norm_eps=1e-6, logit_scale=1.0, softcap=None,
    )  # fmt: skip
    head = TargetHead(parts=parts, ids=torch.tensor([7, 8, 11]), last_hidden_is_final=True)
    table = torch.arange(10.0)[:, None], torch.zeros(10, 1)  # "cos" of a position is the position
    out = ttt_forward(model, batch, head, rows=rows, rotary=table, num_steps=2, loss="tv")

    (embeds0, hidden0, positions0), (embeds1, hidden1, positions1) = model.given
    assert embeds0 == [11, 12, 13, 14, 20, 21, 22, 0]
    assert embeds1 == [12, 13, 14, 20, 21, 22, 0, 0]
    assert hidden0 == [0, 1, 2, 3, 4, 5, 6, 7]
    assert hidden1 == [100, 101, 102, 103, 104, 105, 106, 107]
    assert positions0 == [0, 1, 2, 3, 4, 0, 1, 2]
    assert positions1 == [1, 2, 3, 4, 5, 1, 2, 3]

    # Step 0 judges rows 0, 1, 2 and 5 by target rows 1, 2, 3 and 6; q is 1/3 throughout.
    # Step 1 judges rows 0 and 1 by target rows 2 and 3: row -1 and row 4 are of no or another document.
    first, second = out.steps
    assert (float(first.num_rows), float(second.num_rows)) == (4, 2)
    overlaps = {r: 3 * math.exp(-lse) for r, lse in ((1, 2), (2, 3), (3, 4), (6, 5))}
    assert float(first.overlap) == pytest.approx(sum(overlaps.values()))
    assert float(second.overlap) == pytest.approx(overlaps[2] + overlaps[3])
    assert float(first.loss) == pytest.approx(4 - sum(overlaps.values()))
    assert float(second.out_of_vocabulary) == pytest.approx(2 - overlaps[2] - overlaps[3])
    expected = (4 - sum(overlaps.values())) / 4 + (2 - overlaps[2] - overlaps[3]) / 2
    assert float(out.loss) == pytest.approx(expected)
    # The draft always says 7. Step 0: rows 0 (7), 1 (8), 2 (7), 5 (7). Step 1: row 0 (8) and row 1, not reached.
    assert (float(first.greedy_reached), float(first.greedy_accepted)) == (4, 3)
    assert (float(second.greedy_reached), float(second.greedy_accepted)) == (1, 0)
