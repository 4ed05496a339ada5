"""Statistics on a GPU, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eyas.shards.statistics import tap_statistics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True, params=[True, False], ids=["kernel", "torch"])
def with_and_without_a_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.shards.statistics.can_compile_kernels", lambda: request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 3, 576), (5, 4, 5001), (2048, 3, 4096)])
def test_they_equal_numpys(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    padded = torch.randn(shape[0], shape[1], shape[2] + 3, device="cuda").to(dtype)
    values = padded[:, :, : shape[2]]  # [T, A, H], with gaps between the rows
    values[0, 0, -1] = 0.0
    values[-1, -1, 0] = torch.finfo(dtype).tiny / 8  # no zero
    if shape[0] > 2:
        values[1, 0, 0], values[2, -1, 1], values[2, -1, 2] = math.nan, -math.inf, math.inf
    found = tap_statistics(values).cpu().numpy()
    exact = values.double().cpu().numpy()
    finite_rows = np.isfinite(exact).all(-1)  # [T, A]
    cleaned = np.where(finite_rows[:, :, None], exact, 0)
    np.testing.assert_allclose(found[:, 0], np.linalg.norm(cleaned, axis=-1).sum(0), rtol=1e-5, atol=1e-18)
    np.testing.assert_array_equal(found[:, 1], np.abs(cleaned).max((0, 2)))
    np.testing.assert_array_equal(found[:, 2], (exact == 0).sum((0, 2)))
    np.testing.assert_array_equal(found[:, 3], (~np.isfinite(exact)).sum((0, 2)))


def test_norms_that_overflow_float32_stay_finite() -> None:
    found = tap_statistics(torch.full((2, 1, 4), 3e38, device="cuda")).cpu()
    assert torch.isfinite(found).all()
    assert found[0, 3] == 0
