"""Captured taps and statistics against transformers' own, for every family, as read back from the shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from eyas.capture.engines.transformers import statistics
from eyas.capture.engines.transformers.statistics import Head
from eyas.shards.sample import TokenSample
from eyas.taps.notation import EMBED, FINAL, after
from tests.capture.engines.families import FAMILIES, VOCAB, run_capture, token_samples

LENGTHS = [5, 9, 14, 3, 20, 11, 8, 1]
TAPS = (EMBED, after(0), after(1), after(2), FINAL)  # first, middle, L-2 of 4 layers
HIDDEN_STATES_INDEX = {EMBED: 0, after(0): 1, after(1): 2, after(2): 3, FINAL: 4}


def load(target: Path) -> Any:
    name = json.loads((target / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(target, dtype=torch.float32).eval()


def last_layer(model: Any) -> Any:
    """By name, unlike the engine: the last decoder layer of the text model."""
    lists = ("model.language_model.layers", "model.layers", "transformer.h", "model.decoder.layers")
    modules = dict(model.named_modules())
    return next(modules[name] for name in lists if name in modules)[-1]


def reference(model: Any, sample: TokenSample) -> dict[str, torch.Tensor]:
    """One plain forward of the whole model over one sample alone: hidden_states, full logits, and after:{L-1} from a
    hook of this test's own."""
    kept = []
    handle = last_layer(model).register_forward_hook(lambda _, args, output: kept.append(output))
    with torch.no_grad():
        ids = torch.tensor(sample.input_ids, dtype=torch.int64)[None]
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    handle.remove()
    pre_norm = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    states = {str(tap): output.hidden_states[k][0] for tap, k in HIDDEN_STATES_INDEX.items()}
    return states | {"after:3": pre_norm[0], "logits": output.logits[0].float()}


def error(captured: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest per-token relative L2."""
    return float(((captured - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_and_statistics_equal_a_plain_forward(family: str, targets: Callable[[str], Path], tmp_path: Path) -> None:
    target = targets(family)
    samples = token_samples(LENGTHS)
    captured = run_capture(target, tmp_path / "dataset", samples, taps=TAPS, batch_tokens=40)
    assert captured.rejects == {}
    assert captured.forwarded == sum(LENGTHS)
    assert sorted(captured.sealed_ids) == sorted(sample.sample_id for sample in samples)
    model = load(target)
    for sample in samples:
        stored, expected = captured.dataset.sample(sample.sample_id), reference(model, sample)
        features = stored.features.view(sample.num_tokens, len(TAPS), -1)
        for a, tap in enumerate(TAPS):
            assert error(features[:, a], expected[str(tap)]) < 1e-5, tap
        assert stored.last_hidden is not None
        assert error(stored.last_hidden, expected["after:3"]) < 1e-5
        assert stored.target_top1 is not None
        assert stored.target_lse is not None
        predicts = torch.zeros(sample.num_tokens, dtype=torch.bool)
        predicts[:-1] = torch.from_numpy(sample.loss_mask[1:] == 1)
        logits = expected["logits"]
        assert torch.equal(stored.target_top1[predicts].long(), logits[predicts].argmax(-1))
        torch.testing.assert_close(stored.target_lse[predicts], logits[predicts].logsumexp(-1), rtol=1e-5, atol=1e-4)
        assert bool((stored.target_top1[~predicts] == -1).all())
        assert bool(stored.target_lse[~predicts].isnan().all())


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_equals_one_by_one(family: str, targets: Callable[[str], Path], tmp_path: Path) -> None:
    target = targets(family)
    samples = token_samples(LENGTHS, seed=1)
    together = run_capture(target, tmp_path / "together", samples, taps=TAPS, batch_tokens=1000)
    alone = run_capture(target, tmp_path / "alone", samples, taps=TAPS, batch_tokens=1)
    for sample in samples:
        a, b = together.dataset.sample(sample.sample_id), alone.dataset.sample(sample.sample_id)
        assert error(a.features, b.features) < 1e-5
        assert a.last_hidden is not None
        assert b.last_hidden is not None
        assert error(a.last_hidden, b.last_hidden) < 1e-5
        assert a.target_top1 is not None
        assert b.target_top1 is not None
        assert torch.equal(a.target_top1, b.target_top1)


@pytest.mark.parametrize(
    ("family", "scale", "softcap", "bias"),
    [
        ("LlamaForCausalLM", 1.0, None, False),
        ("Gemma2ForCausalLM", 1.0, 0.5, False),
        ("CohereForCausalLM", 0.0625, None, False),
        ("GraniteForCausalLM", 1 / 3, None, False),
        ("PhiForCausalLM", 1.0, None, True),
    ],
)
def test_identity_says_how_logits_are_made(
    family: str, scale: float, softcap: float | None, bias: bool, targets: Callable[[str], Path], tmp_path: Path
) -> None:
    identity = run_capture(targets(family), tmp_path / "dataset", token_samples([4, 6])).target
    assert identity.model_class == family
    assert identity.logit_scale == pytest.approx(scale)
    assert (identity.logit_softcap, identity.lm_head_bias) == (softcap, bias)
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size, identity.lm_head_rows) == (4, 32, 96, 96)


def test_padded_rows_of_lm_head_name_no_token() -> None:
    torch.manual_seed(0)
    lm_head = torch.nn.Linear(32, 128, bias=False)
    with torch.no_grad():
        lm_head.weight[VOCAB:] *= 1000  # would win every argmax
    final = torch.randn(7, 32)
    with torch.no_grad():
        top1, lse = Head(lm_head=lm_head, vocab_size=VOCAB).top1_and_lse(final)
        logits = lm_head(final)[:, :VOCAB]
    assert torch.equal(top1.long(), logits.argmax(-1))
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_logits_in_chunks_are_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = Head(lm_head=torch.nn.Linear(32, VOCAB), vocab_size=VOCAB, scale=0.5, softcap=2.0)
    final = torch.randn(11, 32)
    with torch.no_grad():
        at_once = head.top1_and_lse(final)
        monkeypatch.setattr(statistics, "CHUNK_LOGITS", 3 * VOCAB)
        in_chunks = head.top1_and_lse(final)
    assert torch.equal(at_once[0], in_chunks[0])
    torch.testing.assert_close(at_once[1], in_chunks[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_stored_as_it_is(dtype: str, targets: Callable[[str], Path], tmp_path: Path) -> None:
    samples = token_samples(LENGTHS)
    captured = run_capture(targets("Qwen3ForCausalLM"), tmp_path / "dataset", samples, taps=TAPS, dtype=dtype)
    model = load(targets("Qwen3ForCausalLM")).to(getattr(torch, dtype))
    for sample in samples:
        stored, expected = captured.dataset.sample(sample.sample_id), reference(model, sample)
        assert str(stored.features.dtype) == f"torch.{dtype}"
        features = stored.features.view(sample.num_tokens, len(TAPS), -1).float()
        assert torch.equal(features[:, 0], expected["embed"].float())
        assert float((features[:, 3] - expected["after:2"].float()).norm() / expected["after:2"].float().norm()) < 0.03


def test_long_rope_ignores_the_company_a_sample_keeps(targets: Callable[[str], Path], tmp_path: Path) -> None:
    # LongRoPE takes other factors for a whole batch once its longest sequence exceeds 10 tokens here.
    target, samples = targets("Phi3ForCausalLM"), token_samples([10, 11, 4, 12])
    captured = run_capture(target, tmp_path / "dataset", samples, taps=TAPS, batch_tokens=1000)
    model = load(target)
    for sample in samples:
        features = captured.dataset.sample(sample.sample_id).features.view(sample.num_tokens, len(TAPS), -1)
        assert error(features[:, 3], reference(model, sample)["after:2"]) < 1e-5


def test_without_statistics_and_last_hidden_only_features_are_stored(
    targets: Callable[[str], Path], tmp_path: Path
) -> None:
    captured = run_capture(
        targets("LlamaForCausalLM"),
        tmp_path / "dataset",
        token_samples([4, 6]),
        last_hidden=None,
        target_statistics=False,
    )
    stored = captured.dataset.sample(captured.sealed_ids[0])
    assert (stored.last_hidden, stored.target_top1, stored.target_lse) == (None, None, None)


def test_shard_statistics_are_those_of_the_tensors(targets: Callable[[str], Path], tmp_path: Path) -> None:
    captured = run_capture(targets("LlamaForCausalLM"), tmp_path / "dataset", token_samples(LENGTHS), taps=TAPS)
    for shard in captured.dataset.iter_shards():
        rows = torch.cat([sample.features.view(-1, len(TAPS), 32) for sample in shard])
        for a, tap in enumerate(TAPS):
            said = shard.metadata.statistics[str(tap)]
            assert said["mean_norm"] == pytest.approx(float(rows[:, a].norm(dim=-1).mean()), rel=1e-4)
            assert said["max_abs"] == pytest.approx(float(rows[:, a].abs().max()), rel=1e-4)


def test_sample_ids_and_tokens_come_back(targets: Callable[[str], Path], tmp_path: Path) -> None:
    samples = token_samples(LENGTHS)
    captured = run_capture(targets("GPT2LMHeadModel"), tmp_path / "dataset", samples)
    for sample in samples:
        stored = captured.dataset.sample(sample.sample_id)
        assert np.array_equal(stored.input_ids.numpy(), sample.input_ids)
        assert np.array_equal(stored.loss_mask.numpy(), sample.loss_mask)
