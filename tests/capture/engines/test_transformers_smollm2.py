"""The real target: captured taps of SmolLM2-135M-Instruct against transformers' hidden_states."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

from eyas.taps.match import match_taps
from eyas.taps.notation import EMBED, FINAL, after, all_taps
from tests.capture.engines.families import run_capture, token_samples, tokens_sample

TARGET = Path(os.environ.get("EYAS_TARGET", Path(__file__).resolve().parents[3] / "demo" / "target"))
TEXTS = (
    "The hawk is taken from the nest and trained to fly.",
    "def add(a, b):\n    return a + b\n",
    "I live in Paris.",
)
TAPS = (EMBED, after(0), after(14), after(28), FINAL)

pytestmark = pytest.mark.skipif(not (TARGET / "config.json").exists(), reason="no SmolLM2: make demo, or EYAS_TARGET")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_taps_equal_hidden_states(dtype: str, tolerance: float, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    samples = [tokens_sample(tokenizer(text)["input_ids"]) for text in TEXTS]
    samples += token_samples([40, 23, 9])
    captured = run_capture(
        TARGET, tmp_path / "dataset", samples, taps=TAPS, last_hidden=after(29), dtype=dtype, batch_tokens=128
    )
    assert captured.rejects == {}
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=getattr(torch, dtype)).eval()
    pre_norm: list[torch.Tensor] = []
    model.model.layers[29].register_forward_hook(lambda _, args, output: pre_norm.append(output))
    for sample in samples:
        pre_norm.clear()
        with torch.no_grad():
            output = model(torch.tensor(sample.input_ids, dtype=torch.int64)[None], output_hidden_states=True)
        states = [state[0] for state in output.hidden_states]
        reference = [*states[:-1], pre_norm[0][0], states[-1]]  # by all_taps
        stored = captured.dataset.sample(sample.sample_id)
        assert stored.last_hidden is not None
        columns = [*stored.features.view(sample.num_tokens, len(TAPS), -1).unbind(1), stored.last_hidden]
        for tap, column in zip((*TAPS, after(29)), columns, strict=True):
            expected = reference[all_taps(30).index(tap)].float()
            errors = (column.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert float(errors.max()) < tolerance, tap
            match = match_taps(column, reference, all_taps(30))
            assert (match.best, match.decided) == (tap, True)
