"""Which tap a tensor is: on made-up residual streams, tiny random models, and SmolLM2 in bfloat16."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.taps.match import MAX_ERROR, MIN_MARGIN, Match, match_taps
from eyas.taps.notation import EMBED, FINAL, Tap, after, all_taps

NUM_LAYERS, NUM_TOKENS, WIDTH = 12, 40, 64


def stream(seed: int, step: float = 0.2) -> tuple[list[torch.Tensor], tuple[Tap, ...]]:
    """A residual stream that moves by ``step`` of its norm a layer; token 0 is a sink that never moves."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(NUM_TOKENS, WIDTH, generator=generator)  # [T, H]
    taps = [rows]
    for _ in range(NUM_LAYERS):
        change = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
        rows = rows + step * change * rows.norm(dim=-1, keepdim=True) / change.norm(dim=-1, keepdim=True)
        rows[0] = 1000 * taps[0][0]
        taps.append(rows)
    taps.append(rows / rows.norm(dim=-1, keepdim=True))
    return taps, all_taps(NUM_LAYERS)


def noisy(rows: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """``rows`` with every token moved by ``noise`` of its norm in a random direction."""
    direction = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    return rows + noise * direction * rows.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    which=st.integers(0, NUM_LAYERS + 1),
    noise=st.floats(0, 0.05),
    step=st.floats(0.08, 0.5),
)
def test_noise_of_bfloat16_does_not_fool_it(seed: int, which: int, noise: float, step: float) -> None:
    reference, taps = stream(seed, step)
    match = match_taps(noisy(reference[which], noise, seed), reference, taps)
    assert match.best == taps[which]
    assert match.decided, match
    assert match.best_error == pytest.approx(noise, abs=1e-5)
    assert match.best_error < match.runner_up_error
    assert match.margin == pytest.approx(1 - match.best_error / match.runner_up_error)
    assert match.num_tokens == NUM_TOKENS - 1
    assert match.errors[which] == match.best_error


@pytest.mark.parametrize("candidate_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("reference_dtype", [torch.bfloat16, torch.float32])
def test_any_dtype(candidate_dtype: torch.dtype, reference_dtype: torch.dtype) -> None:
    reference, taps = stream(0)
    stored = torch.stack(reference).to(reference_dtype)  # [n, T, H]
    match = match_taps(reference[5].to(candidate_dtype), stored, taps)
    assert (match.best, match.decided) == (after(4), True)


def test_an_exact_match_has_margin_one() -> None:
    reference, taps = stream(1)
    match = match_taps(reference[0], reference, taps)
    assert (match.best, match.best_error, match.margin, match.undecided) == (EMBED, 0.0, 1.0, "")


def test_a_minority_of_sinks_and_damaged_rows_does_not_decide() -> None:
    reference, taps = stream(2)
    for tensor in reference[1:-1]:
        tensor[1:8] = reference[1][1:8]  # seven more tokens that no layer moves
    candidate = reference[6].clone()
    candidate[8:16] = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
    candidate[16:30] = math.nan
    candidate[30, 5] = math.inf
    match = match_taps(candidate, reference, taps)
    assert (match.best, match.decided) == (after(5), True)
    assert match.num_tokens == NUM_TOKENS - 1 - 15


def test_token_0_does_not_count() -> None:
    reference, taps = stream(4)
    candidate = reference[3].clone()
    candidate[0] = reference[9][0] * 7
    assert match_taps(candidate, reference, taps) == match_taps(reference[3], reference, taps)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_without_tokens_nothing_is_decided(num_tokens: int) -> None:
    reference, taps = stream(5)
    match = match_taps(reference[3][:num_tokens], [tensor[:num_tokens] for tensor in reference], taps)
    assert (match.best, match.runner_up, match.num_tokens) == (None, None, 0)
    assert not match.decided
    assert "token 0" in match.undecided
    assert all(map(math.isnan, (match.best_error, match.runner_up_error, match.margin)))


def test_all_nan_is_undecided() -> None:
    reference, taps = stream(6)
    assert not match_taps(torch.full_like(reference[0], math.nan), reference, taps).decided


def test_a_nan_in_a_reference_costs_that_token_only() -> None:
    reference, taps = stream(7)
    reference[9][4] = math.nan
    match = match_taps(reference[3].clone(), reference, taps)
    assert (match.best, match.decided, match.num_tokens) == (after(2), True, NUM_TOKENS - 2)


def test_rows_of_zeros() -> None:
    reference, taps = stream(8)
    zeros = torch.zeros_like(reference[0])
    match = match_taps(zeros, reference, taps)
    assert not match.decided
    assert match.best_error == 1.0
    reference[4] = zeros
    assert match_taps(zeros, reference, taps).best == after(3)
    match = match_taps(reference[5], reference, taps)
    assert (match.best, match.decided, match.errors[4]) == (after(4), True, math.inf)


def test_two_equal_taps_are_said_to_fit_alike() -> None:
    reference, taps = stream(9)
    reference[6] = reference[5].clone()
    match = match_taps(noisy(reference[5], 0.01, 1), reference, taps)
    assert not match.decided
    assert "after:4 and after:5 fit alike" in match.undecided


@pytest.mark.parametrize("damage", ["shifted", "other sample", "normalized", "half"])
def test_what_is_no_tap_is_not_called_one(damage: str) -> None:
    reference, taps = stream(10)
    rows = reference[6]
    candidate = {
        "shifted": rows.roll(1, dims=0),
        "other sample": stream(11)[0][6],
        "normalized": rows / rows.norm(dim=-1, keepdim=True) * 3,
        "half": rows / 2,
    }[damage]
    assert not match_taps(candidate, reference, taps).decided


def test_one_tap_alone() -> None:
    reference, taps = stream(12)
    match = match_taps(reference[6], reference[6:7], taps[6:7])
    assert (match.best, match.runner_up, match.runner_up_error, match.decided) == (after(5), None, math.inf, True)


def test_more_rows_than_one_chunk() -> None:
    generator = torch.Generator().manual_seed(13)
    reference = [torch.randn(2500, 2048, generator=generator).bfloat16() for _ in range(3)]
    match = match_taps(reference[1], reference, all_taps(1))
    assert (match.best, match.num_tokens, match.best_error) == (after(0), 2499, 0.0)


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [((4, 8), [(4, 8)]), ((4, 8), [(4, 8), (4, 9), (4, 8)]), ((4, 8), [(5, 8)] * 3), ((1, 4, 8), [(1, 4, 8)] * 3)],
)
def test_shapes_that_do_not_agree(candidate: tuple[int, ...], reference: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError):
        match_taps(torch.zeros(candidate), [torch.zeros(shape) for shape in reference], all_taps(1))


def captured(model: Any, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """Every tap [T, H] of one sample by transformers' own hidden_states, and a hook for the pre-norm last layer."""
    pre_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: pre_norm.append(inputs[0]))
    try:
        with torch.inference_mode():
            states = model.model(input_ids[None], output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    return [*(state[0] for state in states[:-1]), pre_norm[0][0], states[-1][0]]


def adjacent_margins(
    candidates: list[torch.Tensor], reference: list[torch.Tensor], taps: tuple[Tap, ...]
) -> list[tuple[Tap, Match]]:
    """For every tap, its match against its neighbours alone: an off-by-one has only them to be told from."""
    return [
        (taps[i], match_taps(candidates[i], reference[max(i - 1, 0) : i + 2], taps[max(i - 1, 0) : i + 2]))
        for i in range(len(taps))
    ]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe", "Gemma2"])
def test_every_tap_of_a_tiny_random_model(kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2} if kind == "Qwen3Moe" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **sizes,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    input_ids = torch.randint(0, 128, (24,))
    taps = all_taps(5)
    reference = captured(model, input_ids)
    for tap, tensor in zip(taps, captured(model.bfloat16(), input_ids), strict=True):
        match = match_taps(tensor, reference, taps)
        assert (match.best, match.decided) == (tap, True), match


TARGET = Path(os.environ.get("EYAS_TARGET") or Path(__file__).parents[2] / "demo" / "target")
TEXT = """The young hawk is taken from the nest at three weeks, before it has learnt to fly.

def area(width: float, height: float) -> float:
    return width * height

Q: What is 17 * 23?
A: 391. Und auf Deutsch: der Falke steigt, er kreist, er kommt zurueck."""


@pytest.mark.skipif(not (TARGET / "config.json").is_file(), reason="needs the real target: EYAS_TARGET or `make demo`")
def test_every_tap_of_smollm2_in_bfloat16_against_float32(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    input_ids = AutoTokenizer.from_pretrained(TARGET)(TEXT, return_tensors="pt").input_ids[0]  # [T]
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    taps = all_taps(model.config.num_hidden_layers)
    candidates = captured(model, input_ids)
    reference = captured(model.float(), input_ids)  # the same weights, exactly

    for tap, tensor in zip(taps, candidates, strict=True):
        match = match_taps(tensor, reference, taps)
        assert (match.best, match.decided) == (tap, True), match

    pairs = adjacent_margins(candidates, reference, taps)
    margins = sorted(match.margin for _, match in pairs)
    noise = sorted(match.best_error for _, match in pairs)
    nearest = sorted(match.runner_up_error for _, match in pairs)
    with capsys.disabled():
        print(f"\n{TARGET.name}: {len(taps)} taps, {len(input_ids)} tokens, bfloat16 against float32, neighbours")
        for name, values in (("noise", noise), ("nearest other tap", nearest), ("margin", margins)):
            print(f"  {name:<18} min {values[0]:.4f}  median {values[len(values) // 2]:.4f}  max {values[-1]:.4f}")
    assert all((match.best, match.decided) == (tap, True) for tap, match in pairs), pairs
    assert margins[0] > 4 * MIN_MARGIN
    assert noise[-1] < MAX_ERROR / 4

    # 5 % of noise a token on top, more than bfloat16 has: still every tap is told from its neighbours.
    for tap, match in adjacent_margins([noisy(t.float(), 0.05, 1) for t in candidates], reference, taps):
        assert (match.best, match.decided) == (tap, True), match

    # Rows of the next token, in the tap where tokens are most alike: nearer than made-up ones, but no tap.
    for tensor in candidates:
        assert not match_taps(tensor.roll(1, dims=0), reference, taps).decided
    assert match_taps(candidates[-1], reference, taps).best == FINAL
