"""Drafts on disk: what is written for an engine or for speculators, read back by us and by speculators itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.align.checks.subject import TargetFolder
from eyas.align.draft import DraftConfig, DraftError
from eyas.align.draft_config import ExportError, make_draft_config
from eyas.align.engine import parse_engine
from eyas.taps.notation import parse_taps
from eyas.train.attention import document_bounds
from eyas.train.draft import DraftModel
from eyas.train.draft_files import OWN_KEY, LoadedDraft, load_draft, save_draft
from eyas.train.export import export_draft
from eyas.train.rope import rotary_table
from eyas.train.shape import DraftShape
from eyas.train.ttt import unroll
from eyas.train.vocabulary import DraftVocabulary
from tests.captured import captured_identity
from tests.tiny import VOCAB_SIZE, make_target

TAPS = parse_taps("after:1,after:3,after:5")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def _trained(folder: Path, target: Path, **options: Any) -> LoadedDraft:
    """A draft as a run keeps it, every weight random."""
    text, facts = TargetFolder(target).text, TargetFolder(target).facts
    identity = captured_identity(num_samples=1, taps="after:1,after:3,after:5", dtype="float32")
    identity = replace(identity, target=replace(identity.target, hidden_size=32, vocab_size=VOCAB_SIZE))
    made = make_draft_config(identity, text, facts, parse_engine("vllm@0.32.0"), draft_vocab_size=40, **options)
    config = {**made.config, OWN_KEY: {"taps": [str(tap) for tap in TAPS], "ttt_steps": 3}}
    vocabulary = DraftVocabulary(ids=np.arange(5, 125, 3), vocab_size=VOCAB_SIZE, coverage=1.0)
    model = DraftModel(DraftShape.from_draft_config(DraftConfig(config), len(TAPS)))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.dim() == 1 else noise * (1.5 / parameter.shape[1] ** 0.5)
    save_draft(folder, model.state_dict(), vocabulary, config)
    return load_draft(folder, target=target)


def _logits(draft: LoadedDraft, features: torch.Tensor, ids: torch.Tensor, num_steps: int = 3) -> list[torch.Tensor]:
    length = len(ids)
    cos, sin = rotary_table(draft.model.shape, length + num_steps, "cpu")
    documents = document_bounds(torch.zeros(length, dtype=torch.int32))
    hidden = unroll(draft.model, features, ids, torch.arange(length), cos, sin, documents, num_steps)
    return [h @ draft.model.lm_head.weight.T for h in hidden]


@pytest.mark.parametrize("engine", ["vllm@0.32.0", "sglang@0.5.9", "sglang@0.5.23", "speculators"])
def test_every_export_reads_back_as_the_same_draft(engine: str, target: Path, tmp_path: Path) -> None:
    draft = _trained(tmp_path / "run", target)
    parsed = None if engine == "speculators" else parse_engine(engine)
    facts = TargetFolder(target).facts
    export_draft(draft, tmp_path / "out", engine=parsed, target=target, facts=facts, dtype=torch.float32)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    del config[OWN_KEY]  # as a draft of others: the taps follow from the ids and the engine
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    again = load_draft(tmp_path / "out", target=target, engine=parsed)
    assert again.taps == TAPS
    assert np.array_equal(again.vocabulary.ids, draft.vocabulary.ids)
    assert again.model.shape == draft.model.shape
    for name, tensor in draft.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert ("midlayer.hidden_norm.weight" in names) == (engine != "speculators")
    assert load_file(tmp_path / "out" / "model.safetensors")["d2t"].dtype == torch.int64


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_output": True},
    ],
)
def test_speculators_computes_the_same_logits(switches: dict[str, bool], target: Path, tmp_path: Path) -> None:
    """speculators 0.9.0's own class, from_pretrained on our export, three teacher-forced steps, float32."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel

    draft = _trained(tmp_path / "run", target, switches=switches)
    facts = TargetFolder(target).facts
    export_draft(draft, tmp_path / "out", engine=None, target=target, facts=facts, dtype=torch.float32)
    config = Eagle3DraftModel.config_class.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "out", config=config).float().eval()
    length = 17
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(length, 3 * 32, generator=generator)
    ids = torch.randint(VOCAB_SIZE, (length,), generator=generator)
    got: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, output: got.append(output[0]))
    with torch.no_grad():
        # Their rows are shifted by the caller: row t holds features of t and the token t+1.
        theirs(
            hidden_states=features[None, :-1],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, length - 1, dtype=torch.long),
            ttt_steps=3,
        )
        ours = _logits(draft, features, ids)
    for k in range(3):
        rows = length - 1 - k  # beyond, they feed zeros
        assert torch.allclose(got[k][:rows], ours[k][:rows], atol=1e-4), k


def test_what_an_engine_lacks_is_refused_and_nothing_is_written(target: Path, tmp_path: Path) -> None:
    draft = _trained(tmp_path / "run", target, switches={"norm_before_residual": True})
    facts = TargetFolder(target).facts
    with pytest.raises(ExportError, match="no norm_before_residual"):
        export_draft(draft, tmp_path / "out", engine=parse_engine("sglang@0.5.23"), target=target, facts=facts,
                     dtype=torch.bfloat16)  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_damage_is_named(target: Path, tmp_path: Path) -> None:
    draft = _trained(tmp_path / "run", target)
    weights = tmp_path / "run" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, weights)
    with pytest.raises(DraftError, match=r"lacks norm\.weight"):
        load_draft(draft.path, target=target)
    save_file({**tensors, "surprise.weight": torch.ones(3)}, weights)
    with pytest.raises(DraftError, match=r"unknown surprise\.weight"):
        load_draft(draft.path, target=target)
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, weights)
    with pytest.raises(DraftError, match=r"fc\.weight is \[32, 95\], expected \[32, 96\]"):
        load_draft(draft.path, target=target)
    save_file({name: tensor for name, tensor in tensors.items() if name != "d2t"}, weights)
    with pytest.raises(DraftError, match="no d2t"):
        load_draft(draft.path, target=target)
    targets_own = ("lm_head.weight", "embed_tokens.weight")
    save_file({name: tensor for name, tensor in tensors.items() if name not in targets_own}, weights)
    whole = load_file(target / "model.safetensors")
    again = load_draft(draft.path, target=target)
    assert torch.equal(again.model.lm_head.weight, whole["lm_head.weight"][torch.from_numpy(draft.vocabulary.ids)])
    assert torch.equal(again.model.embed_tokens.weight, whole["model.embed_tokens.weight"])


def test_whose_ids_they_are_must_be_said(target: Path, tmp_path: Path) -> None:
    draft = _trained(tmp_path / "run", target)
    config = dict(draft.config.raw)
    del config[OWN_KEY]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftError, match="--engine"):
        load_draft(tmp_path / "run", target=target)
