"""The same capture on a GPU: side stream, pinned memory, copies that overlap the forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.taps.notation import EMBED, FINAL, after
from tests.capture.engines.families import FAMILIES, run_capture, token_samples

TAPS = (EMBED, after(0), after(2), FINAL)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_cpu(family: str, targets: Callable[[str], Path], tmp_path: Path) -> None:
    samples = token_samples([5, 9, 14, 3, 20, 11, 8, 1] * 8)
    on_cpu = run_capture(targets(family), tmp_path / "cpu", samples, taps=TAPS, batch_tokens=100)
    on_cuda = run_capture(targets(family), tmp_path / "cuda", samples, taps=TAPS, batch_tokens=100, device="cuda")
    assert on_cuda.rejects == {}
    assert sorted(on_cuda.sealed_ids) == sorted(on_cpu.sealed_ids)
    for sample in samples:
        a, b = on_cuda.dataset.sample(sample.sample_id), on_cpu.dataset.sample(sample.sample_id)
        assert a.target_top1 is not None
        assert b.target_top1 is not None
        torch.testing.assert_close(a.features, b.features, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a.last_hidden, b.last_hidden, rtol=1e-3, atol=1e-4)
        assert torch.equal(a.target_top1, b.target_top1)
        torch.testing.assert_close(a.target_lse, b.target_lse, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_batches_in_flight_stay_apart(dtype: str, targets: Callable[[str], Path], tmp_path: Path) -> None:
    # One sample a batch and more batches than fit between forward and writer: memory that was reused too early shows.
    samples = token_samples([40, 64, 33, 57] * 50, seed=3)
    unique = list({sample.sample_id: sample for sample in samples}.values())
    target = targets("LlamaForCausalLM")
    a, b = (
        run_capture(target, tmp_path / name, unique, taps=TAPS, dtype=dtype, batch_tokens=1, device="cuda")
        for name in ("first", "second")
    )
    for sample in unique:
        first, second = a.dataset.sample(sample.sample_id), b.dataset.sample(sample.sample_id)
        assert torch.equal(first.features, second.features)
        assert first.last_hidden is not None
        assert second.last_hidden is not None
        assert torch.equal(first.last_hidden, second.last_hidden)


def test_a_batch_that_does_not_fit_the_gpu_is_halved(targets: Callable[[str], Path], tmp_path: Path) -> None:
    samples = token_samples([64] * 4096)
    options = {"taps": TAPS, "device": "cuda", "batch_tokens": 4096 * 64}
    target = targets("LlamaForCausalLM")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run_capture(target, tmp_path / "roomy", samples, **options)
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * needed / torch.cuda.get_device_properties(0).total_memory)
    try:
        captured = run_capture(target, tmp_path / "tight", samples, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert captured.rejects == {}
    assert len(captured.sealed_ids) == len(samples)
