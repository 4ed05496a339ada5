"""Dumps of a Llama under tensor parallelism, by processes with gloo, against what one process computes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from eyas.standardize.formats.dump.description import DESCRIPTION_FILE
from eyas.standardize.formats.dump.detect import detect
from eyas.standardize.formats.dump.guess import describe
from eyas.standardize.formats.dump.read import DumpReader, open_reader
from tests.standardize.formats.dump.rank import LAYERS, PLACEMENTS
from tests.tiny import make_target, tokenized_rows

ROOT = Path(__file__).resolve().parents[4]
STATES = {
    "replicated": 'files = "rank{rank}/layer_{layer}/req-{sample}_step{step}.pt"',
    "token-sharded": (
        'files = "{sample}/layer_{layer}.tp{rank}.chunk{step}.safetensors"\nkey = "hidden_states"\npadded = true'
    ),
    "hidden-sharded": 'files = "layer_{layer}/{sample}-step{step}-rank{rank}.npy"',
    "partial-sums": 'files = "rank_{rank}/{sample}.layer_{layer}.step{step}.pt"\nkey = "hidden_states"',
}
IDS = {
    "replicated": (
        'files = "ids/req-{sample}_step{step}.pt"\n[loss_mask]\nfiles = "loss_mask/req-{sample}_step{step}.pt"'
    ),
    "token-sharded": 'files = "{sample}/tokens.chunk{step}.safetensors"\nkey = "ids"',
    "hidden-sharded": 'files = "input_ids/{sample}.npy"',
    "partial-sums": 'files = "rank_{rank}/{sample}.layer_{layer}.step{step}.pt"\nkey = "token_ids"',
}


class World(NamedTuple):
    dumps: dict[int, Path]  # by tp
    samples: dict[str, dict[str, list[int]]]
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]]  # features [T, A, H], last_hidden [T, H]


def launch(target: Path, samples: Path, out: Path, tp: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "typings"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(tp),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "tests.standardize.formats.dump.rank", str(target), str(samples), str(out)]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(n)}, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for n in range(tp)
    ]
    try:
        for rank in ranks:
            _, stderr = rank.communicate(timeout=240)
            assert rank.returncode == 0, stderr[-4000:]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from transformers import LlamaForCausalLM

    root = tmp_path_factory.mktemp("parallel")
    target = make_target(root / "target", num_key_value_heads=4)
    samples = dict(zip(("abc", "d-2", "e5"), tokenized_rows(3, min_tokens=6, max_tokens=13), strict=True))
    (root / "samples.json").write_text(json.dumps(samples))
    for tp in (2, 4):
        launch(target, root / "samples.json", root / f"tp{tp}", tp)
    model = LlamaForCausalLM.from_pretrained(target)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
    expected = {}
    with torch.no_grad():
        for name, sample in samples.items():
            states = model(torch.tensor([sample["input_ids"]]), output_hidden_states=True).hidden_states
            expected[name] = torch.stack([states[layer + 1][0] for layer in LAYERS], dim=1), last[-1]
    return World({tp: root / f"tp{tp}" for tp in (2, 4)}, samples, expected)


def opened(folder: Path, text: str) -> DumpReader:
    (folder / DESCRIPTION_FILE).write_text(text)
    layout = detect(folder)
    assert layout is not None
    assert not layout.problems
    return open_reader(folder, layout)


def assert_is_one_process(reader: DumpReader, world: World) -> None:
    assert list(reader.items()) == sorted(world.samples)
    for name in reader.items():
        sample = reader.read(name)
        features, last = world.expected[name]
        assert sample.input_ids.tolist() == world.samples[name]["input_ids"]
        if reader.layout.has_loss_mask:
            assert sample.loss_mask is not None
            assert sample.loss_mask.tolist() == world.samples[name]["loss_mask"]
        assert sample.features.shape == features.shape
        assert float(((sample.features - features).norm(dim=-1) / features.norm(dim=-1)).max()) < 1e-5
        if reader.layout.last_hidden:
            assert sample.last_hidden is not None
            assert float(((sample.last_hidden - last).norm(dim=-1) / last.norm(dim=-1)).max()) < 1e-5


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_parts_are_merged_to_what_one_process_computes(world: World, tp: int, placement: str) -> None:
    last = STATES[placement].replace("layer_{layer}", "last_hidden")
    reader = opened(
        world.dumps[tp] / placement,
        f"""
        version = 1
        hidden_size = 32
        dtype = "float32"
        tp = {tp}
        first_step = 0
        [layers]
        ids = {list(LAYERS)}
        convention = "specforge"
        [states]
        placement = "{placement}"
        {STATES[placement]}
        [last_hidden]
        norm = "pre-norm"
        placement = "{placement}"
        {last}
        [input_ids]
        {IDS[placement]}
        """,
    )
    assert reader.layout.layer_ids == LAYERS
    assert reader.layout.convention == "specforge"
    assert_is_one_process(reader, world)
    if placement == "replicated":
        path = world.dumps[tp] / placement / "rank1/layer_3"
        chunks = [torch.load(file)[0] for file in sorted(path.glob("req-abc_step*.pt"))]
        assert torch.equal(reader.read("abc").features[:, 1], torch.cat(chunks))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_the_guessed_description_reads_the_same_once_the_convention_is_stated(
    world: World, tp: int, placement: str
) -> None:
    folder = world.dumps[tp] / placement
    (folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    text = describe(folder, hidden_size=32, vocab_size=128)
    assert 'convention = "?"' in text
    assert f'placement = "{placement}"' in text
    text = text.replace('convention = "?"', 'convention = "specforge"').replace('norm = "?"', 'norm = "pre-norm"')
    assert "first_step = 0" in text
    assert_is_one_process(opened(folder, text), world)
