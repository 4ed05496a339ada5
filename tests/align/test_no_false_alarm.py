"""Good datasets and drafts of many shapes, made for an engine by its own convention: nothing is said against them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.align.engine import parse_engine
from eyas.align.readings import fragments
from eyas.align.static import check_static
from eyas.taps.notation import parse_taps
from eyas.taps.target import TargetFacts
from tests.align.made import VOCAB, bad, draft_config, draft_tensors, make_dataset, make_draft, make_identity

ENGINES = ["sglang@0.5.12", "sglang@0.5.16", "sglang@0.5.23", "vllm@0.24.0", "vllm@0.32.0"]
TARGETS = [
    ("LlamaForCausalLM", 32),
    ("Qwen3MoeForCausalLM", 48),
    ("DeepseekV3ForCausalLM", 61),
    ("KimiK25ForConditionalGeneration", 61),
]
TAPS = ["after:1,after:28", "after:1,after:15,after:28", "after:2,after:9,after:20,after:28", "after:2,after:30"]
VARIANTS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float32", "draft_vocab": VOCAB},
    {"dtype": "bfloat16", "layer": "layers.0"},
]
GOOD = [
    (engine, target, taps, variant)
    for n, (engine, target, taps, variant) in enumerate(product(ENGINES, TARGETS, TAPS, VARIANTS))
    if n % 3 == n // 3 % 3  # a third of them, each value with each other
]


@pytest.mark.parametrize(("engine", "target", "taps", "variant"), GOOD)
def test_nothing_is_said(
    tmp_path: Path, engine: str, target: tuple[str, int], taps: str, variant: dict[str, Any]
) -> None:
    model_class, num_layers = target
    facts = TargetFacts(num_layers=num_layers, model_class=model_class)
    (fragment,) = fragments(parse_engine(engine), parse_taps(taps), facts)
    num_taps, vocab = taps.count(",") + 1, variant.get("draft_vocab", VOCAB // 3)
    ids: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(fragment.ids)}
    config = draft_config(
        draft_vocab_size=vocab,
        num_aux_hidden_states=num_taps,
        torch_dtype=variant["dtype"],
        **({"eagle_config": ids} if fragment.place.startswith("eagle_config") else ids),
    )
    tensors = draft_tensors(num_taps=num_taps, draft_vocab=vocab, layer=variant.get("layer", "midlayer"))
    if vocab == VOCAB:
        del tensors["d2t"], tensors["t2d"]
    dtype: torch.dtype = getattr(torch, variant["dtype"])
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    identity = make_identity(taps, model_class=model_class, num_layers=num_layers, dtype=variant["dtype"])
    report = check_static(
        make_dataset(tmp_path / "dataset", identity),
        draft=make_draft(tmp_path / "draft", config, tensors),
        engine=parse_engine(engine),
    )
    assert bad(report).keys() == {"mask roles"}  # no tokenizer is at hand
    assert report.exit_status() == 0
