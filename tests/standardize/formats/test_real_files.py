"""Files that the other systems' own code made, and our files in their own readers' hands.

golden/ holds a few of the former (real/make_golden.py and make_golden_vllm.py make them), with what a replay of the
target says of each token.
What needs the trainers themselves runs where EYAS_SPECFORGE, EYAS_MODELOPT, EYAS_EAGLE or EYAS_TORCHSPEC name them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample, sample_id
from eyas.standardize.formats.base import ForeignSample, FormatError
from eyas.taps.notation import FINAL, Tap, parse_tap, parse_taps

from ...captured import captured_identity, make_samples
from .exchange import bits, detect, export, open_reader, read_all, run_peer, writer_of

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = {
    "specforge": ("specforge/plain", "bfloat16"),
    "specforge, compressed": ("specforge/packed", "bfloat16"),
    "modelopt": ("modelopt", "float32"),
    "eagle": ("eagle", "float16"),
}


def _agrees(sample: ForeignSample, said: dict[str, Any]) -> None:
    """First channel of each tap against the replay's, up to what batches and padding round."""
    final = torch.tensor(said["final"])
    if sample.last_hidden is None:
        torch.testing.assert_close(sample.features[:, 0, 0].float(), final, rtol=0.03, atol=0.03)
        return
    torch.testing.assert_close(sample.features[:, :, 0].float(), torch.tensor(said["features"]), rtol=0.03, atol=0.03)
    torch.testing.assert_close(sample.last_hidden[:, 0].float(), final, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("which", FOLDERS)
def test_golden_files_are_read_for_what_they_are(which: str) -> None:
    folder, dtype = FOLDERS[which]
    name = which.split(",")[0]
    said = {tuple(sample["input_ids"]): sample for sample in json.loads((GOLDEN / f"{name}.json").read_text())}
    layout = detect(GOLDEN / folder, name)
    assert layout is not None
    assert (layout.num_files, layout.hidden_size, layout.dtype) == (2, 16, dtype)
    assert (layout.num_taps, layout.last_hidden) == ((1, None) if name == "eagle" else (3, "post-norm"))
    found = {tuple(sample.input_ids.tolist()): sample for sample in read_all(open_reader(GOLDEN / folder, name))}
    assert found.keys() == said.keys()  # the padding of the shorter is gone
    for ids, sample in found.items():
        assert sample.loss_mask is not None
        mask = sample.loss_mask.tolist()
        assert [token for token, trained in zip(ids, mask, strict=True) if trained and token > 5], "words are answers"
        if name != "modelopt":  # whose tokens were masked by the template, and to the same
            assert mask == said[ids]["loss_mask"]
        _agrees(sample, said[ids])


def _normed(last_TH: torch.Tensor) -> torch.Tensor:
    """First channel of the target's final norm, whose weights are 1: [T]."""
    return (last_TH * torch.rsqrt(last_TH.square().mean(-1, keepdim=True) + 1e-6))[:, 0]


def test_speculators_files_are_read_for_what_they_are() -> None:
    said = json.loads((GOLDEN / "speculators.json").read_text())
    layout = detect(GOLDEN / "speculators", "speculators")
    assert layout is not None
    assert (layout.num_files, layout.num_taps, layout.hidden_size, layout.dtype) == (2, 3, 32, "float32")
    assert (layout.last_hidden, layout.has_loss_mask, layout.problems) == ("pre-norm", True, ())
    samples = read_all(open_reader(GOLDEN / "speculators", "speculators"))
    assert len(samples) == len(said) == 2
    for sample, expected in zip(samples, said, strict=True):
        assert sample.input_ids.tolist() == expected["input_ids"]
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == expected["loss_mask"]
        assert sample.last_hidden is not None
        torch.testing.assert_close(sample.features[:, :, 0], torch.tensor(expected["features"]), rtol=0, atol=2e-4)
        torch.testing.assert_close(_normed(sample.last_hidden), torch.tensor(expected["final"]), rtol=0, atol=2e-4)


def test_vllm_files_are_read_for_what_they_are() -> None:
    said = {tuple(sample["input_ids"]): sample for sample in json.loads((GOLDEN / "vllm.json").read_text())}
    layout = detect(GOLDEN / "vllm", "vllm")
    assert layout is not None
    assert (layout.num_files, layout.num_taps, layout.hidden_size, layout.dtype) == (3, 4, 32, "float32")
    assert (layout.last_hidden, layout.has_loss_mask) == (None, False)
    found = {tuple(sample.input_ids.tolist()): sample for sample in read_all(open_reader(GOLDEN / "vllm", "vllm"))}
    assert found.keys() == said.keys()
    for ids, sample in found.items():
        expected = said[ids]
        torch.testing.assert_close(sample.features[:, :3, 0], torch.tensor(expected["features"]), rtol=0, atol=2e-4)
        torch.testing.assert_close(_normed(sample.features[:, 3]), torch.tensor(expected["final"]), rtol=0, atol=2e-4)


def test_modelopt_says_what_it_does_not_know() -> None:
    layout = detect(GOLDEN / "modelopt", "modelopt")
    assert layout is not None
    assert any("does not say whether hidden_states is pre-norm" in problem for problem in layout.problems)


def _dataset(*, last_hidden: Tap = FINAL, dtype: str = "bfloat16") -> tuple[DatasetIdentity, list[Sample]]:
    """Three samples; the first, by hand, ends as padding does."""
    identity = captured_identity(
        num_samples=3,
        taps="after:1,after:3,after:5",
        stage="standard",
        last_hidden=last_hidden,
        dtype=dtype,
        target_statistics=False,
    )
    samples = make_samples(identity, 3)
    ids = torch.tensor([11, 12, 13, 14, 15, 16, 17, 0], dtype=torch.int32)
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0], dtype=torch.uint8)
    states = torch.randn(8, 4 * 16).to(getattr(torch, dtype))
    first = replace(
        samples[0],
        sample_id=sample_id(ids.numpy(), mask.numpy()),
        input_ids=ids,
        loss_mask=mask,
        features=states[:, :48],
        last_hidden=states[:, 48:],
    )
    return identity, [first, *samples[1:]]


def test_specforge_loads_ours(tmp_path: Path) -> None:
    identity, samples = _dataset()
    export(writer_of("specforge"), identity, samples, tmp_path / "ours")
    run_peer("specforge", "load", tmp_path / "ours", tmp_path / "loaded.pt")
    batches = torch.load(tmp_path / "loaded.pt", weights_only=True)
    for sample, batch in zip(samples, batches, strict=True):
        assert torch.equal(batch["input_ids"], sample.input_ids.long()[None])
        assert torch.equal(bits(batch["hidden_state"][0]), bits(sample.features))
        assert sample.last_hidden is not None
        assert torch.equal(bits(batch["target"][0]), bits(sample.last_hidden))
        assert batch["loss_mask"][0, :-1].tolist() == sample.loss_mask[:-1].tolist()
        # Position t: token t+1 goes in, the teacher's row t+1 comes out, and the weight is the mask's of t.
        assert torch.equal(batch["trained_input_ids"][0, :-1], sample.input_ids[1:].long())
        assert torch.equal(bits(batch["trained_target"][0, :-1]), bits(sample.last_hidden[1:]))
    assert batches[0]["trained_loss_mask"].flatten().tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_modelopt_loads_ours(tmp_path: Path) -> None:
    identity, samples = _dataset()
    export(writer_of("modelopt"), identity, samples, tmp_path / "ours")
    run_peer("modelopt", "load", tmp_path / "ours", tmp_path / "loaded.pt")
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert loaded.keys() == {sample.sample_id for sample in samples}
    for sample in samples:
        batch = loaded[sample.sample_id]
        states = batch["base_model_outputs"]
        assert torch.equal(batch["input_ids"], sample.input_ids.long()[None])
        assert torch.equal(batch["loss_mask"], sample.loss_mask.long()[None])
        assert torch.equal(bits(states["aux_hidden_states"][0]), bits(sample.features))
        assert sample.last_hidden is not None
        assert torch.equal(bits(states["base_model_hidden_states"][0]), bits(sample.last_hidden))
        assert states["base_hidden_prenorm"] is False


@pytest.mark.parametrize("kept", ["final", "after:7"])
def test_modelopt_trains_on_ours(kept: str, tmp_path: Path) -> None:
    """Position t learns the teacher's row t+1, with the mask's weight of t+1; pre-norm states get the norm there."""
    from transformers import AutoModelForCausalLM

    from .real.make_golden import prepare

    target = prepare(tmp_path)
    identity, samples = _dataset(last_hidden=parse_tap(kept), dtype="float32")
    export(writer_of("modelopt"), identity, samples, tmp_path / "ours")
    run_peer("modelopt", "train", target, tmp_path / "ours", tmp_path / "given.pt")
    given = torch.load(tmp_path / "given.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(target)
    for sample in samples:
        teacher, mask = given[sample.sample_id]
        assert mask.tolist() == sample.loss_mask[1:].tolist()
        final = sample.last_hidden if kept == "final" else model.model.norm(sample.last_hidden)
        torch.testing.assert_close(teacher, model.lm_head(final[1:]).softmax(-1).detach(), rtol=1e-3, atol=1e-5)


def test_eagle_loads_ours(tmp_path: Path) -> None:
    identity, samples = _dataset()
    export(writer_of("eagle"), identity, samples, tmp_path / "ours")
    run_peer("eagle", "load", tmp_path / "ours" / "data", tmp_path / "loaded.pt")
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    for row, sample in enumerate(samples):
        batch = loaded[f"0/data_{row}.ckpt"]
        assert sample.last_hidden is not None
        states = sample.last_hidden.float()
        # Position t: state t and token t+1 go in, state t+1 comes out, and the weight is the mask's of t.
        assert torch.equal(batch["hidden_states"][0], states)
        assert torch.equal(batch["input_ids"][0, :-1], sample.input_ids[1:].long())
        assert torch.equal(batch["target"][0, :-1], states[1:])
        assert batch["loss_mask"][0].tolist() == [*sample.loss_mask[:-1].tolist(), 0]


def test_torchspec_and_we_read_the_same(tmp_path: Path) -> None:
    """Nothing of theirs writes these files, so this one is written after their reader."""
    _, samples = _dataset()
    for row, sample in enumerate(samples):
        file = {
            "input_ids": sample.input_ids.long(),
            "loss_mask": sample.loss_mask.long(),
            "aux_hidden_states": sample.features[None].clone(),
            "hidden_states": None if sample.last_hidden is None else sample.last_hidden[None].clone(),
        }
        torch.save(file, tmp_path / f"data_{row}.ckpt")
    found = {sample.where: sample for sample in read_all(open_reader(tmp_path, "torchspec"))}
    run_peer("torchspec", "load", tmp_path, tmp_path / "loaded")
    for where, batch in torch.load(tmp_path / "loaded", weights_only=True).items():
        ours = found[where]
        assert ours.last_hidden is not None
        assert ours.loss_mask is not None
        assert torch.equal(bits(batch["hidden_states"][0]), bits(ours.features.flatten(1)))
        assert torch.equal(bits(batch["target"][0, :-1]), bits(ours.last_hidden[1:]))
        assert torch.equal(batch["input_ids"][0, :-1], ours.input_ids[1:])
        assert batch["loss_mask"][0, :-1].tolist() == ours.loss_mask[:-1].tolist()


@pytest.mark.parametrize("name", ["specforge", "modelopt", "eagle"])
def test_a_run_of_the_real_tool_is_read(name: str, tmp_path: Path) -> None:
    from .real.make_golden import prepare, replayed

    target = prepare(tmp_path)
    conversations = tmp_path / "conversations.jsonl"
    if name == "specforge":
        run_peer(name, "make", target, conversations, tmp_path / "made")
        folder = tmp_path / "made" / "plain"
    elif name == "modelopt":
        run_peer(name, "make", target, conversations, tmp_path / "template.jinja", tmp_path / "made")
        folder = tmp_path / "made"
    else:
        run_peer(name, "make", target, GOLDEN / "eagle.json", tmp_path / "made")
        folder = tmp_path / "made"
    reader = open_reader(folder, name)
    assert reader.layout.num_files == 2
    for sample in read_all(reader):
        _agrees(sample, replayed(target, getattr(torch, reader.layout.dtype), sample.input_ids.tolist()))


@pytest.mark.parametrize("name", ["specforge", "modelopt", "eagle"])
def test_what_the_norm_makes_of_pre_norm_is_what_is_written(name: str, tmp_path: Path) -> None:
    identity = captured_identity(num_samples=3, taps="after:1,after:3,after:5", stage="standard")
    samples = make_samples(identity, 3)
    reader = open_reader(export(writer_of(name, final_norm=_twice), identity, samples, tmp_path), name)
    found = {tuple(sample.input_ids.tolist()): sample for sample in read_all(reader)}
    for sample in samples:
        read = found[tuple(sample.input_ids.tolist())]
        assert sample.last_hidden is not None
        final = read.features[:, 0] if read.last_hidden is None else read.last_hidden
        assert torch.equal(final, sample.last_hidden * 2)
    assert reader.layout.last_hidden == (None if name == "eagle" else "post-norm")


def _twice(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.float() * 2  # as a norm in float32 gives it back


def test_vocabularies_are_where_each_trainer_takes_them(tmp_path: Path) -> None:
    identity, samples = _dataset()
    maps = {"d2t": np.array([0, 3, 5]), "t2d": np.arange(64) % 5 == 0}
    modelopt = writer_of("modelopt", **maps)
    modelopt.finish(export(modelopt, identity, samples, tmp_path), None, [])
    offsets = torch.load(tmp_path / "draft_vocab_cache.bin", weights_only=True)
    assert (offsets.dtype, offsets.tolist()) == (torch.int64, [0, 3, 5])
    assert len(list(tmp_path.rglob("*.pt"))) == len(samples)  # all of them are samples to its trainer
    with pytest.raises(FormatError, match="leave --draft-vocab-size out"):
        writer_of("eagle", **maps).check(identity)


REFUSED = [
    ("specforge", {"last_hidden": None}, "keeps no last_hidden"),
    ("specforge", {}, "--target DIR"),
    ("specforge", {"last_hidden": FINAL, "taps": "after:1,after:3"}, "drafts have 3"),
    ("specforge", {"last_hidden": FINAL, "taps": "embed,after:1,after:3"}, "each after some layer"),
    ("modelopt", {"last_hidden": None}, "keeps no last_hidden"),
    ("modelopt", {"last_hidden": FINAL, "taps": "after:1,final"}, "do not reach embed and final"),
    ("eagle", {"last_hidden": None}, "no last_hidden"),
    ("eagle", {}, "--target DIR"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_a_trainer_would_misread_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    taps = changes.pop("taps", "after:1,after:3,after:5")
    identity = replace(captured_identity(num_samples=1, taps=taps), **changes)
    assert identity.taps == parse_taps(taps)
    with pytest.raises(FormatError, match=message):
        writer_of(name).check(identity)
