"""Attention of steps: gradients, masks, and equality with decoding from a key/value cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from eyas.train import attention
from eyas.train.attention import block_mask, causal_attention, document_bounds, prepare_documents
from eyas.train.rope import rotary_table
from eyas.train.ttt import unroll
from tests.train.made_drafts import TAPS, TARGET_WIDTH, VOCAB, make_documents, make_model, make_shape, pack


def ids_of(lengths: tuple[int, ...], padding: int = 0) -> Tensor:
    documents = [torch.full((length,), i, dtype=torch.int32) for i, length in enumerate(lengths)]
    return torch.cat([*documents, torch.full((padding,), -1, dtype=torch.int32)])


def allowed(document: Tensor) -> Tensor:
    """bool [T, T], from the sentence: causal within a document, a padding row itself alone."""
    same = (document[:, None] == document) & (document[:, None] >= 0)
    return (same & torch.ones(len(document), len(document)).tril().bool()) | torch.eye(len(document)).bool()


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~mask, -math.inf)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(repeats, 1))
    return output, scores.logsumexp(-1).T


def test_bounds_of_documents() -> None:
    assert document_bounds(ids_of((3, 1, 2), padding=2)) == ((0, 3), (3, 4), (4, 6), (6, 7), (7, 8))
    assert document_bounds(ids_of((), padding=1)) == ((0, 1),)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_dense_attention_and_its_gradients(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CPU_QUERY_ROWS", 4)  # several blocks of queries in a document
    document = ids_of((7, 1, 2, 9, 3), padding=2)
    drawn = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(len(document), heads, 6, generator=drawn, dtype=torch.float64, requires_grad=True)

    inputs = draw(4), draw(kv_heads), draw(kv_heads)
    ours = causal_attention(*inputs, prepare_documents(document))
    theirs = dense(*inputs, allowed(document))
    weights = [torch.randn(part.shape, generator=drawn, dtype=torch.float64) for part in ours]  # lse's gradient too
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    gradients = [
        torch.autograd.grad(sum((part * w).sum() for part, w in zip(parts, weights, strict=True)), inputs)  # type: ignore[arg-type]
        for parts in (ours, theirs)
    ]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)


def test_bfloat16_is_accumulated_in_float32() -> None:
    document = ids_of((300,))
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(300, heads, 8, generator=drawn).bfloat16() for heads in (4, 2, 2))
    output, lse = causal_attention(query, key, value, prepare_documents(document))
    expected, expected_lse = dense(query.float(), key.float(), value.float(), allowed(document))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(output, expected.bfloat16(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("lengths", "padding"), [((100, 1, 130, 27, 256, 300, 2), 40), ((900,), 0), ((128, 384, 128), 128), ((), 300)]
)
def test_block_mask_equals_the_one_made_from_a_dense_mask(lengths: tuple[int, ...], padding: int) -> None:
    document = ids_of(lengths, padding)
    mask = allowed(document)
    ours = block_mask(document)
    theirs = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, len(document), len(document), device="cpu")

    def sets(numbers: Tensor, indices: Tensor) -> list[set[int]]:
        return [set(indices[0, 0, row, : numbers[0, 0, row]].tolist()) for row in range(numbers.shape[-1])]

    # A block that is full may be called partial, which costs time alone; no other difference is allowed.
    assert ours.kv_indices is not None
    assert ours.full_kv_indices is not None
    partial, full = sets(ours.kv_num_blocks, ours.kv_indices), sets(ours.full_kv_num_blocks, ours.full_kv_indices)  # type: ignore[arg-type]
    expected_partial = sets(theirs.kv_num_blocks, theirs.kv_indices)
    expected_full = sets(theirs.full_kv_num_blocks, theirs.full_kv_indices)  # type: ignore[arg-type]
    assert full == expected_full
    assert partial == expected_partial
    index = torch.arange(len(document))
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(ours.mask_mod(zero, zero, index[:, None], index[None, :]), mask)


class _Cache:
    """A decoder's keys and values: every call's rows are appended and see all rows up to themselves."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        before = len(self.keys[layer]) if layer in self.keys else 0
        self.keys[layer] = torch.cat([self.keys[layer], key]) if before else key
        self.values[layer] = torch.cat([self.values[layer], value]) if before else value
        mask = torch.ones(len(query), before + len(query), dtype=torch.bool).tril(before)
        return dense(query, self.keys[layer], self.values[layer], mask)[0]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "norm_output": True}, {"num_layers": 3, "num_kv_heads": 1}])
def test_steps_equal_incremental_decoding(options: dict[str, Any]) -> None:
    """Prefill with the target's taps up to row t, then decode true tokens one by one, each on the last hidden state."""
    steps, length = 4, 11
    shape = make_shape(**options)
    model = make_model(shape)
    other, document = make_documents((5, length))  # not alone in its batch
    batch = pack([other, document], None)
    cos, sin = rotary_table(shape, 32)
    with torch.no_grad():
        trained = unroll(
            model, batch.features, batch.input_ids, batch.position, cos, sin, prepare_documents(batch.document), steps
        )
        for t in range(length - steps):
            cache = _Cache()
            ids = document.input_ids
            hidden = model(model.embed(ids[1 : t + 2]), model.fuse(document.features[: t + 1]), cos[: t + 1],
                           sin[: t + 1], cache)[-1:]  # fmt: skip
            for k in range(steps):
                if k:
                    at = slice(t + k, t + k + 1)
                    hidden = model(model.embed(ids[t + 1 + k : t + 2 + k]), hidden, cos[at], sin[at], cache)
                expected = model.lm_head(trained[k][5 + t : 6 + t])
                torch.testing.assert_close(model.logits(hidden), expected, atol=1e-4, rtol=1e-5)


def test_flex_path_equals_the_cpu_path_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on CUDA, traced and run by eager kernels here: FlexAttention's arithmetic has a backward on the CPU,
    and only a check in front of it forbids it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)
    shape = make_shape(num_layers=2, head_dim=16, max_positions=512)
    model = make_model(shape)
    cos, sin = rotary_table(shape, 512)
    compiled = torch.compile(unroll, backend="eager", fullgraph=True, dynamic=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    drawn = torch.Generator().manual_seed(0)
    for lengths, padding in (((100, 1, 130, 27, 60), 26), ((344,), 0)):
        document = ids_of(lengths, padding)
        position = torch.cat([torch.arange(n) for n in (*lengths, padding)])
        features = torch.randn(len(document), TAPS * TARGET_WIDTH, generator=drawn)
        inputs = features, torch.randint(VOCAB, (len(document),), generator=drawn), position, cos, sin
        weight = torch.randn(len(document), TARGET_WIDTH, generator=drawn)
        results = []
        for run, documents in ((unroll, document_bounds(document)), (compiled, block_mask(document))):
            with torch._dynamo.config.patch(error_on_recompile=padding == 0):  # another batch is no other graph
                outputs = run(model, *inputs, documents, 3)
            total = torch.stack([(output * weight).sum() for output in outputs]).sum()
            results.append([*outputs, *torch.autograd.grad(total, trained)])
        for mine, other in zip(*results, strict=True):
            assert (mine - other).norm() <= 1e-4 * other.norm()
