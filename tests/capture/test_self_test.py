"""The self-test of serving engines, on made-up tensors: what it lets through and what it refuses, and how."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.capture.engines.base import TargetOutline
from eyas.capture.errors import SelfTestError
from eyas.capture.self_test import Probed, Reference, check_taps, check_workers_agree, usable_probe
from eyas.shards.sample import TokenSample
from eyas.taps.notation import FINAL, Tap, after, all_taps

TAPS = all_taps(4)
LENGTHS, HIDDEN = (9, 5), 16
ASKED = (after(0), after(2), FINAL)


def noise(tensor: Tensor, share: float, seed: int = 7) -> Tensor:
    """``tensor`` with every row moved by ``share`` of its norm."""
    moved = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return tensor + share * moved * tensor.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True)


def reference() -> Reference:
    draw = torch.Generator().manual_seed(0)
    states = [[torch.randn(length, HIDDEN, generator=draw) for _ in TAPS] for length in LENGTHS]
    return Reference(taps=TAPS, states=states, lse=[torch.randn(length, generator=draw) for length in LENGTHS])


def captured(truth: Reference, share: float, shift: int = 0) -> list[Probed]:
    """What an engine would capture that takes each tap ``shift`` boundaries too deep."""

    def column(tap: Tap, n: int) -> Tensor:
        return noise(truth.states[n][(TAPS.index(tap) + shift) % len(TAPS)], share)

    return [
        Probed(columns={tap: column(tap, n) for tap in ASKED}, target_lse=truth.lse[n]) for n in range(len(LENGTHS))
    ]


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_the_right_taps_pass_up_to_the_rounding_of_the_dtype(dtype: str, share: float) -> None:
    check_taps("vLLM", dtype, captured(reference(), share), reference())


def test_an_attention_sink_at_token_0_decides_nothing() -> None:
    truth = reference()
    found = captured(truth, 1e-5)
    for sample in found:
        for column in sample.columns.values():
            column[0] *= 1000
    check_taps("vLLM", "float32", found, truth)


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_that_are_off_by_one_are_refused_by_the_name_of_what_they_are(shift: int) -> None:
    with pytest.raises(SelfTestError, match=rf"as after:0 is not transformers' after:0.*nearest is {TAPS[1 + shift]}"):
        check_taps("vLLM", "bfloat16", captured(reference(), 0.01, shift), reference())


def test_a_tap_that_is_the_nearest_but_far_away_is_refused() -> None:
    with pytest.raises(SelfTestError, match=r"relative error 0\.5, allowed 0\.3; the nearest is after:0"):
        check_taps("SGLang", "bfloat16", captured(reference(), 0.5), reference())


def test_taps_that_cannot_be_told_apart_are_refused() -> None:
    truth = reference()
    for states in truth.states:
        states[2][:] = noise(states[1], -0.01)  # after:1 is nearly after:0
    with pytest.raises(SelfTestError, match="as after:0 cannot be told from after:1"):
        check_taps("vLLM", "bfloat16", captured(truth, 0.05), truth)


def test_logits_of_another_scale_are_refused() -> None:
    truth = reference()
    found = [replace(sample, target_lse=2 * lse) for sample, lse in zip(captured(truth, 0), truth.lse, strict=True)]
    with pytest.raises(SelfTestError, match="--no-target-statistics"):
        check_taps("vLLM", "float32", found, truth)


def test_statistics_that_are_unset_or_not_captured_are_not_compared() -> None:
    truth = reference()
    unset = [
        replace(sample, target_lse=torch.full((length,), float("nan")))
        for sample, length in zip(captured(truth, 0), LENGTHS, strict=True)
    ]
    check_taps("vLLM", "float32", unset, truth)
    check_taps("vLLM", "float32", [replace(sample, target_lse=None) for sample in unset], truth)


def test_workers_that_hold_parts_of_a_tap_are_refused() -> None:
    truth = reference()
    whole = captured(truth, 0)
    check_workers_agree("vLLM", "bfloat16", [whole, captured(truth, 0)])
    parts = [replace(sample, columns={tap: 0.5 * column for tap, column in sample.columns.items()}) for sample in whole]
    with pytest.raises(SelfTestError, match="after:0 differs between worker 0 and worker 1"):
        check_workers_agree("vLLM", "bfloat16", [whole, parts])


def test_samples_that_cannot_go_through_the_target_are_no_probe() -> None:
    outline = TargetOutline(
        config=None, config_hash="", model_class="", num_layers=4, hidden_size=HIDDEN, vocab_size=10, dtype="float32",
        max_positions=6,
    )  # fmt: skip

    def sample(ids: list[int]) -> TokenSample:
        return TokenSample(sample_id="", input_ids=np.array(ids, np.int32), loss_mask=np.ones(len(ids), np.uint8))

    usable = usable_probe([sample([1]), sample([1, 99]), sample([-1, 2]), sample(list(range(9)))], outline)
    assert [s.input_ids.tolist() for s in usable] == [[0, 1, 2, 3, 4, 5]]
    assert len(usable_probe([sample([1, 99])], outline)[0].input_ids) == 6
