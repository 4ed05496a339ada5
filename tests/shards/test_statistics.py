"""Statistics, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.shards.statistics import summarize, tap_statistics

ODD = [0.0, np.nan, np.inf, -np.inf, 0.0]


@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 7)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    num_odd=st.integers(0, 5),
)
def test_they_equal_numpys(seed: int, shape: tuple[int, int, int], dtype: torch.dtype, num_odd: int) -> None:
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.standard_normal(shape)).to(dtype)  # [T, A, H]
    flat = values.view(-1)
    for at, odd in zip(generator.integers(0, flat.numel(), num_odd).tolist(), ODD[:num_odd], strict=True):
        flat[at] = odd
    found = tap_statistics(values).numpy()
    assert found.shape == (shape[1], 4)
    assert found.dtype == np.float64
    exact = values.double().numpy()
    finite_rows = np.isfinite(exact).all(-1)  # [T, A]
    cleaned = np.where(finite_rows[:, :, None], exact, 0)
    np.testing.assert_allclose(found[:, 0], np.linalg.norm(cleaned, axis=-1).sum(0), rtol=1e-5)
    np.testing.assert_array_equal(found[:, 1], np.abs(cleaned).max((0, 2)))
    np.testing.assert_array_equal(found[:, 2], (exact == 0).sum((0, 2)))
    np.testing.assert_array_equal(found[:, 3], (~np.isfinite(exact)).sum((0, 2)))


def test_long_samples_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, 3, 8, generator=torch.Generator().manual_seed(0))
    whole = tap_statistics(values)
    monkeypatch.setattr("eyas.shards.statistics._CHUNK_ELEMENTS", {"cpu": 100})
    torch.testing.assert_close(tap_statistics(values), whole)


def test_norms_that_overflow_float32_stay_finite() -> None:
    found = tap_statistics(torch.full((2, 1, 4), 3e38))
    assert torch.isfinite(found).all()
    assert found[0, 3] == 0


def test_a_shards_statistics() -> None:
    a, b = torch.ones(3, 2, 4), 2 * torch.ones(1, 2, 4)
    a[0, 0, 0] = 0
    found = summarize([tap_statistics(a), tap_statistics(b)], ["after:1", "last_hidden"], num_tokens=4, hidden_size=4)
    assert found["after:1"]["mean_norm"] == pytest.approx((2 + 2 + 3**0.5 + 4) / 4, rel=1e-5)
    assert found["after:1"]["zeros"] == 1 / 16
    assert found["last_hidden"] == {"mean_norm": 2.5, "max_abs": 2.0, "zeros": 0.0, "nonfinite": 0}
