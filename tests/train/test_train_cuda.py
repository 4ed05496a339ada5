"""The training-time test on a GPU: FlexAttention and compiled graphs against the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.train.attention import causal_attention, merge_own_keys, prepare_documents
from eyas.train.rope import rotary_table
from eyas.train.target_parts import TargetParts
from eyas.train.ttt import loss_rows, ttt_forward, unroll
from tests.train.made_drafts import TAPS, TARGET_WIDTH, VOCAB, make_documents, make_head, make_model, make_shape, pack
from tests.train.test_attention import ids_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _packed(total: int, device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return lambda *sizes: torch.randn(total, *sizes, generator=drawn).to(device, dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (32, 8, 128), (9, 3, 64)])
def test_flex_equals_the_cpu(heads: int, kv_heads: int, dim: int) -> None:
    document = ids_of((100, 1, 2, 3, 130, 700, 256), padding=88)
    draw = _packed(len(document), "cpu", torch.float32)
    own = [(draw(kv_heads, dim), draw(kv_heads, dim)) for _ in range(3)]
    query, weight = draw(heads, dim), draw(heads, dim)

    def attend(query: Tensor, documents: Any, *own: Tensor) -> Tensor:
        output, lse = causal_attention(query, own[0], own[1], documents)
        return merge_own_keys(query, output, lse, own[2::2], own[3::2])

    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_(True) for x in (query, *(part for pair in own for part in pair))]
        run = torch.compile(attend, fullgraph=True, dynamic=False) if device == "cuda" else attend
        output = run(inputs[0], prepare_documents(document.to(device)), *inputs[1:])
        gradients = torch.autograd.grad((output * weight.to(device)).sum(), inputs)
        results.append([output.detach().cpu(), *(gradient.cpu() for gradient in gradients)])
    for cpu, cuda in zip(*results, strict=True):
        assert cuda.isfinite().all()
        assert (cpu - cuda).norm() <= 2e-3 * cpu.norm()  # Triton's dot may round float32 to tf32


def test_unroll_equals_the_cpu_without_recompiling() -> None:
    shape = make_shape(num_layers=2, head_dim=64, max_positions=1024)
    model = make_model(shape)
    cos, sin = rotary_table(shape, 1024)
    compiled = torch.compile(unroll, fullgraph=True, dynamic=False)
    for lengths, padding in (((100, 1, 130, 27, 256), 126), ((640,), 0)):
        document = ids_of(lengths, padding)
        position = torch.cat([torch.arange(n) for n in (*lengths, padding)])
        draw = _packed(len(document), "cpu", torch.float32)
        inputs = draw(TAPS * TARGET_WIDTH), torch.randint(VOCAB, (len(document),)), position, cos, sin
        model.cpu()
        expected = unroll(model, *inputs, prepare_documents(document), 3)
        model.cuda()
        placed = [x.cuda() for x in inputs]
        with torch._dynamo.config.patch(error_on_recompile=lengths == (640,)):
            found = compiled(model, *placed, prepare_documents(document.cuda()), 3)
        for mine, other in zip(found, expected, strict=True):
            assert (mine.detach().cpu() - other).norm() <= 5e-3 * other.norm()


def _on_cuda(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: _on_cuda(part) for name, part in vars(value).items()})
    if isinstance(value, TargetParts):
        return TargetParts(**{name: _on_cuda(part) for name, part in vars(value).items()})
    return value


@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
@pytest.mark.parametrize("trained_head", [False, True])
def test_loss_gradients_and_acceptance_equal_the_cpu(loss: Any, trained_head: bool) -> None:
    shape = make_shape(head_dim=64, max_positions=512)
    model = make_model(shape)
    model.lm_head.requires_grad_(trained_head)
    on_cuda = copy.deepcopy(model).cuda()
    head, whole = make_head()
    batch = pack(make_documents((7, 1, 2, 200, 3, 40)), whole, padding=3)
    rows, table = loss_rows(batch.loss_mask, batch.document), rotary_table(shape, 256)
    expected = ttt_forward(model, batch, head, rows=rows, rotary=table, num_steps=3, loss=loss)
    moved = type(head)(
        parts=_on_cuda(head.parts), ids=head.ids.cuda(), last_hidden_is_final=True, full=_on_cuda(head.full)
    )
    placed, placed_rows, placed_table = _on_cuda(batch), rows.cuda(), (table[0].cuda(), table[1].cuda())
    # The first call compiles, and compiling may wait for the device.
    ttt_forward(on_cuda, placed, moved, rows=placed_rows, rotary=placed_table, num_steps=3, loss=loss)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
    try:
        found = ttt_forward(on_cuda, placed, moved, rows=placed_rows, rotary=placed_table, num_steps=3, loss=loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected.loss.backward()
    found.loss.backward()
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-3)
    for mine, other in zip(found.steps, expected.steps, strict=True):
        assert float(mine.num_rows) == float(other.num_rows)
        assert float(mine.greedy_accepted) == float(other.greedy_accepted)
        assert float(mine.overlap) == pytest.approx(float(other.overlap), rel=1e-3)
        assert float(mine.out_of_vocabulary) == pytest.approx(float(other.out_of_vocabulary), rel=1e-3)
    for (name, mine), other in zip(on_cuda.named_parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            assert mine.grad is not None, name
            assert (mine.grad.cpu() - other.grad).norm() <= 5e-3 * other.grad.norm(), name
