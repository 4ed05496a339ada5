"""Targets that serving engines run on a CPU (for vLLM: head_dim 32 at least, latent attention in DeepSeek's own sizes
only), captured by such an engine and by transformers, and compared tap by tap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.align.static import check_static
from eyas.shards import Dataset, open_dataset
from eyas.shards.sample import Sample
from eyas.taps.match import match_taps
from eyas.taps.notation import Tap, all_taps, format_taps
from tests.tiny import VOCAB_SIZE, add_tokenizer, make_target, prepare_rows, tokenized_rows

REPOSITORY = Path(__file__).parents[2]
# Per token relative L2 between the engines, and how much further away every other tap must be.
MAX_ERROR, MIN_RATIO = 1e-4, 100.0

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
# By a target's name what the live checks are made of.
LIVE_TAPS = {"llama": "after:1,after:2,after:5", "qwen3_moe": "after:0,after:1,after:2"}


@dataclass(frozen=True)
class World:
    """A folder with ``target``, ``prepared`` and ``reference``: every tap as engine transformers captures it."""

    folder: Path
    taps: tuple[Tap, ...]  # of the reference

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    @property
    def reference(self) -> Path:
        return self.folder / "reference"

    @property
    def some_taps(self) -> str:
        """embed, a layer in the middle and final, as --taps takes them."""
        return f"embed,after:{(len(self.taps) - 2) // 2},final"


def make_world(folder: Path, name: str) -> World:
    """``name`` is llama, qwen3_moe, deepseek_v3, granite, cohere or smollm2 (skips without EYAS_TARGET)."""
    folder.mkdir()
    target = folder / "target"
    if name == "smollm2":
        real = Path(os.environ.get("EYAS_TARGET", REPOSITORY / "demo" / "target"))
        if not real.exists():
            pytest.skip(f"no SmolLM2 at {real}: set EYAS_TARGET, or run make demo")
        target.symlink_to(real)
        rows = tokenized_rows(12, min_tokens=20, max_tokens=90)
    else:
        _build(target, name)
        rows = tokenized_rows(40, min_tokens=2, max_tokens=150)
    prepare_rows(folder / "prepared", target, rows)
    num_layers = json.loads((target / "config.json").read_bytes())["num_hidden_layers"]
    world = World(folder, all_taps(num_layers))
    result = capture(world, world.reference, "--taps", format_taps(world.taps), "--last-hidden", "none")
    assert result.returncode == 0, result.stderr
    return world


def capture_command(world: World, out: Path, *options: object) -> list[str]:
    arguments = ["capture", world.prepared, out, "--target", world.target, "--dtype", "float32", "--worker", "w"]
    return [sys.executable, "-m", "eyas.cli.main", *map(str, [*arguments, *options])]


def capture(world: World, out: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        capture_command(world, out, *options), capture_output=True, text=True, timeout=280, check=False
    )


def checked(world: World, dataset: Path, *options: object, script: tuple[object, ...] = ()) -> tuple[int, list[Any]]:
    """Exit status and findings of `eyas check`; ``script`` runs it in place of the command itself."""
    start = [sys.executable, *(script or ("-m", "eyas.cli.main")), "check", dataset, "--target", world.target, "--json"]
    result = subprocess.run(
        [str(word) for word in [*start, *options]], capture_output=True, text=True, timeout=500, check=False
    )
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)["findings"]


def write_draft(dataset: Path, out: Path, engine: str, target: Path) -> Path:
    """The config of a draft that ``engine`` feeds the dataset's taps; no weights."""
    from click.testing import CliRunner

    from eyas.cli.main import main

    arguments = ["export", dataset, out, "--engine", engine, "--target", target]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return out


def assert_same(world: World, dataset: Path) -> Dataset:
    """``dataset`` holds every sample once, each column being the tap it is called, as transformers has it."""
    ours, reference = open_dataset(dataset), open_dataset(world.reference)
    assert not ours.problems
    ids = [sample_id for shard in ours.iter_shards() for sample_id in shard.sample_ids]
    assert sorted(ids) == sorted(sample.sample_id for sample in reference.iter_samples())
    samples = [(ours.sample(sample.sample_id), sample) for sample in reference.iter_samples()]
    every = [_columns(theirs, len(world.taps)) for _, theirs in samples]  # per sample [T, L + 2, H]
    columns = {tap: [_columns(mine, len(ours.identity.taps))[:, a] for mine, _ in samples]
               for a, tap in enumerate(ours.identity.taps)}  # fmt: skip
    last = ours.identity.last_hidden
    if last is not None:
        columns[last] = [mine.last_hidden for mine, _ in samples if mine.last_hidden is not None]
    for tap, parts in columns.items():
        index = world.taps.index(tap)
        for part, states in zip(parts, every, strict=True):
            error = (part - states[:, index]).norm(dim=-1) / states[:, index].norm(dim=-1)  # [T]
            assert float(error.max()) < MAX_ERROR, (tap, float(error.max()))
        joined = [torch.cat([states[:, n] for states in every]) for n in range(len(world.taps))]
        match = match_taps(torch.cat(parts), joined, world.taps)
        assert match.best == tap
        assert match.runner_up_error > MIN_RATIO * match.best_error, match
    for mine, theirs in samples:
        assert mine.target_lse is not None
        assert theirs.target_lse is not None
        assert torch.equal(mine.input_ids, theirs.input_ids)
        assert torch.equal(mine.target_lse.isnan(), theirs.target_lse.isnan())
        set_ = ~mine.target_lse.isnan()
        assert torch.allclose(mine.target_lse[set_], theirs.target_lse[set_], atol=1e-3)
        assert torch.equal(mine.target_top1, theirs.target_top1)
    return ours


def assert_canaries(dataset: Path, *, workers: int, builds: int = 1, tp: str) -> None:
    """Every worker's canary is there, and they are alike."""
    checked = {finding.check: finding for finding in check_static(dataset).findings}
    found = checked["canaries"]
    assert found.status == "ok", found
    assert f" by {workers} worker" in found.found
    assert f", {builds} build" in found.found
    assert f", tp {tp}: " in found.found


def _columns(sample: Sample, num_taps: int) -> torch.Tensor:
    return sample.features.view(sample.num_tokens, num_taps, -1)


def _build(folder: Path, name: str) -> None:
    import transformers

    torch.manual_seed(0)
    if name == "llama":
        make_target(folder, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
        return
    configs: dict[str, Any] = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, **MOE),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**COMMON, **MLA),
        "granite": lambda: transformers.GraniteConfig(**COMMON, logits_scaling=3.0),
        "cohere": lambda: transformers.CohereConfig(**(COMMON | {"tie_word_embeddings": True}), logit_scale=0.0625),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)  # far apart taps, norms that are not exactly 1
    model.save_pretrained(folder)
    add_tokenizer(folder)
