"""Updates, compared with torch's own optimizers; the schedule by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from eyas.train.optimizer import DraftOptimizer, OptimizerOptions, learning_rate


def options(**changes: object) -> OptimizerOptions:
    settings = {
        "optimizer": "adamw", "learning_rate": 0.01, "schedule": "cosine", "warmup": 0.1, "weight_decay": 0.1,
        "clip": None,
    }  # fmt: skip
    return OptimizerOptions(**{**settings, **changes})  # type: ignore[arg-type]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.norm(self.fc(x))).square().sum()
        return out


def backward(net: Net, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=draw).to(net.fc.weight.dtype)
    net(x).backward()


def one() -> torch.Tensor:
    return torch.tensor(1.0)


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    optimizer = DraftOptimizer(ours, options())
    trained = [p for p in theirs.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(5):
        backward(ours, seed)
        optimizer.accumulate()
        optimizer.step(0.01, one())
        backward(theirs, seed)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_masters_keep_what_bfloat16_rounds_away() -> None:
    """Updates far below a bfloat16's last bit add up."""
    torch.manual_seed(0)
    net = Net().bfloat16()
    optimizer = DraftOptimizer(net, options(weight_decay=0.0))
    start = optimizer.masters["fc.weight"].detach().clone()
    for _ in range(50):
        backward(net, 0)
        optimizer.accumulate()
        assert net.fc.weight.grad is None
        optimizer.step(1e-5, one())
    moved = (optimizer.masters["fc.weight"] - start).abs()
    assert moved.max() > 3e-4
    assert optimizer.masters["fc.weight"].dtype == torch.float32
    assert torch.equal(net.fc.weight, optimizer.masters["fc.weight"].bfloat16())


def test_gradients_add_up_and_are_scaled_and_clipped() -> None:
    torch.manual_seed(0)
    net, twice = Net(), Net()
    twice.load_state_dict(net.state_dict())
    optimizer = DraftOptimizer(net, options(clip=0.5))
    backward(net, 0)
    optimizer.accumulate()
    backward(net, 1)
    optimizer.accumulate()
    for seed in (0, 1):
        backward(twice, seed)
    trained = [p for p in twice.parameters() if p.requires_grad]
    grads = [p.grad.clone() / 4 for p in trained if p.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    reference = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for parameter, grad in zip(trained, grads, strict=True):
        parameter.grad = grad * min(1.0, 0.5 / float(norm))
    reference.step()
    found = optimizer.step(0.01, torch.tensor(0.25))
    torch.testing.assert_close(found, norm)
    torch.testing.assert_close(net.fc.weight, twice.fc.weight)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    optimizer = DraftOptimizer(Net(), options(optimizer="muon"))
    backward_all(optimizer)
    kinds = {name.partition(".")[2]: name.partition(".")[0] for name in optimizer.state()}
    assert kinds["fc.weight"] == "momentum_buffer"
    assert kinds["norm.weight"] in ("exp_avg", "exp_avg_sq", "step")


def backward_all(optimizer: DraftOptimizer) -> None:
    for master in optimizer.masters.values():
        master.grad = torch.ones_like(master)
    optimizer.step(0.01, one())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = Net().to(dtype)
    again = copy.deepcopy(net)
    first = DraftOptimizer(net, options(optimizer=kind))
    for seed in range(3):
        backward(net, seed)
        first.accumulate()
        first.step(0.01, one())
    second = DraftOptimizer(again, options(optimizer=kind))
    for name, master in second.masters.items():
        master.data.copy_(first.masters[name].data)
    second.round()
    second.load_state(first.state())
    for model, optimizer in ((net, first), (again, second)):
        backward(model, 9)
        optimizer.accumulate()
        optimizer.step(0.01, one())
    for name, master in first.masters.items():
        assert torch.equal(master, second.masters[name]), name


@pytest.mark.parametrize(
    ("schedule", "progress", "factor"),
    [("cosine", 0.05, 0.5), ("cosine", 0.1, 1.0), ("cosine", 0.55, 0.5), ("cosine", 1.0, 0.0),
     ("linear", 0.05, 0.5), ("linear", 0.55, 0.5), ("linear", 0.775, 0.25), ("linear", 1.0, 0.0),
     ("constant", 0.05, 0.5), ("constant", 0.9, 1.0)],
)  # fmt: skip
def test_the_schedule(schedule: str, progress: float, factor: float) -> None:
    assert learning_rate(options(schedule=schedule), progress) == pytest.approx(0.01 * factor)
