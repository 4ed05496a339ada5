"""Muon beside exact polar factors and beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.train.muon import Muon, orthogonalize


def with_spectrum(kind: str, m: int, n: int) -> tuple[Tensor, Tensor]:
    """A matrix [m, n] and its polar factor."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(m, n, generator=draw)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    order = torch.arange(1, len(s) + 1)
    s = {"random": s, "power law": 1 / order, "flat": torch.ones(len(s))}[kind]
    return u * s @ v, u @ v


@pytest.mark.parametrize("shape", [(40, 140), (140, 40), (64, 64)])
@pytest.mark.parametrize("kind", ["random", "power law", "flat"])
def test_singular_values_become_one(shape: tuple[int, int], kind: str) -> None:
    x, polar = with_spectrum(kind, *shape)
    found = orthogonalize(torch.stack([x, 1e-6 * x]))
    assert found.shape == (2, *shape)
    torch.testing.assert_close(found[0], found[1], rtol=0.01, atol=0.01)
    # A square random matrix has singular values below what five steps can lift.
    floor = 0.8 if shape[0] != shape[1] or kind != "random" else 0.05
    values = torch.linalg.svdvals(found[0])
    assert floor < values.min()
    assert values.max() < 1.14
    assert torch.cosine_similarity(found[0].flatten(), polar.flatten(), dim=0) > 0.98


def test_a_matrix_of_zeros_stays() -> None:
    assert not orthogonalize(torch.zeros(1, 4, 6)).any()


def test_updates_are_torchs() -> None:
    """But for the coefficients: the same momentum, scale and decay, and nearly the same direction."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(24, 60), (60, 24), (24, 24), (24, 60)]
    ours = [torch.randn(shape, generator=draw) for shape in shapes]
    theirs = [tensor.clone() for tensor in ours]
    mine = Muon(ours, lr=0.01, momentum=0.95, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    starts = [tensor.clone() for tensor in ours]
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=draw)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, start in zip(ours, theirs, starts, strict=True):
        moved, expected = (a - start).flatten(), (b - start).flatten()
        assert torch.cosine_similarity(moved, expected, dim=0) > 0.97
        assert moved.norm() / expected.norm() == pytest.approx(1.1, abs=0.15)
