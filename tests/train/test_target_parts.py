"""Embedding, lm_head and final norm of targets, read from their files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.taps.errors import EyasError
from eyas.train.target_parts import load_target_parts
from tests.capture.engines.families import FAMILIES, TEXT, build_target
from tests.tiny import make_target


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("targets")
    return lambda family: build_target(root / family, family)


def read(target: Path, **options: Any) -> Any:
    return load_target_parts(target, dtype=torch.float32, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_give_the_models_own_logits(family: str, targets: Callable[[str], Path]) -> None:
    folder = targets(family)
    parts = read(folder)
    model = getattr(transformers, family).from_pretrained(folder).eval()
    states: list[Tensor] = []
    finals: list[Tensor] = []

    def note(module: Any, args: Any, output: Tensor) -> None:
        if len(output.shape) == 3 and output.shape[-1] == TEXT["hidden_size"]:
            states.append(args[0][0])
            finals.append(output[0])

    for name, module in model.named_modules():
        if "norm" in name.rpartition(".")[2].lower() or name.endswith("ln_f"):
            module.register_forward_hook(note)
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0]
    # The last norm that ran is the final one.
    torch.testing.assert_close(parts.final(states[-1]), finals[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts.logits(finals[-1]), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts.embedding, model.get_input_embeddings().weight[: len(parts.embedding)])
    rows = torch.tensor([3, 17, 40])
    few = read(folder, rows=rows)
    torch.testing.assert_close(few.logits(finals[-1]), logits[:, rows], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts.rows(rows).head, few.head)


def test_sharded_checkpoints_and_only_the_files_that_matter(tmp_path: Path) -> None:
    whole = read(make_target(tmp_path / "one"))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    weight_map = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    ends = {weight_map[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    for name in set(weight_map.values()) - ends:
        (tmp_path / "many" / name).unlink()  # layers are never read
    parts = read(tmp_path / "many")
    assert torch.equal(parts.embedding, whole.embedding)
    assert torch.equal(parts.head, whole.head)
    assert torch.equal(parts.norm_weight, whole.norm_weight)


def test_tied_head_is_the_embedding_whatever_else_the_file_holds(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", tie_word_embeddings=True)
    parts = read(target)
    assert parts.head is parts.embedding
    tensors = load_file(target / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(128, 32)}, target / "model.safetensors", {"format": "pt"})
    assert torch.equal(read(target).head, read(target).embedding)


def test_rows_that_pad_the_vocabulary_are_cut(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t")
    tensors = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.ones(64, 32)])
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    parts = read(target)
    assert len(parts.embedding) == len(parts.head) == 128


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("embed_tokens", "tokens"): tensor for name, tensor in tensors.items()}


def _quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}


def _pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    head = tensors.pop("lm_head.weight")
    return {**tensors, "lm_head.qweight": head.to(torch.int32)}


def _two(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "other.norm.weight": torch.ones(32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rename, "expected one token embedding of shape .128 or more, 32. .*found none"),
        (_quantize, "lm_head.weight is F8_E4M3"),
        (_pack, "lm_head is quantized .lm_head.qweight."),
        (_two, "found model.norm.weight, other.norm.weight"),
    ],
)
def test_what_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "t")
    save_file(change(load_file(target / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    with pytest.raises(EyasError, match=message):
        read(target)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"no config.json"):
        read(tmp_path)
    target = make_target(tmp_path / "t")
    with pytest.raises(EyasError, match="id 500 of the draft vocabulary is beyond"):
        read(target, rows=torch.tensor([1, 500]))
    (target / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "../x.safetensors"}}')
    with pytest.raises(EyasError, match="is no file of this folder"):
        read(target)
    (target / "model.safetensors.index.json").unlink()
    (target / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(EyasError, match="unreadable"):
        read(target)
