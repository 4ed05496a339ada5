"""The GPU's one pass over logits, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from eyas.capture.engines.reduce_logits import reduce_logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True, params=[True, False], ids=["kernel", "torch"])
def with_and_without_a_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.capture.engines.reduce_logits.can_compile_kernels", lambda: request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (3, 4095), (5, 49_152), (700, 128_256)])
def test_the_largest_logit_its_first_column_and_the_logsumexp(
    dtype: torch.dtype, num_rows: int, num_columns: int
) -> None:
    torch.manual_seed(0)
    padded = (8 * torch.randn(num_rows, num_columns + 5, device="cuda")).to(dtype)
    logits = padded[:, :num_columns]  # rows with gaps between them, of any alignment
    logits[0, num_columns // 2] = logits[0, num_columns // 3] = logits[0].max() + 4
    logits[-1, : num_columns // 2] = -math.inf
    largest, column, lse = reduce_logits(logits)
    wide = logits.double().cpu()
    assert torch.equal(largest.double().cpu(), wide.amax(-1))
    assert torch.equal(column.cpu(), (wide == wide.amax(-1, keepdim=True)).int().argmax(-1))
    assert torch.allclose(lse.double().cpu(), wide.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_no_number_shows_in_the_logsumexp(bad: float) -> None:
    logits = torch.randn(3, 5000, device="cuda", dtype=torch.bfloat16)
    logits[1, 4321] = bad
    assert reduce_logits(logits)[2].isfinite().tolist() == [True, False, True]
