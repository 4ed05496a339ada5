"""(dataset, draft, engine) to findings: every row is a draft that an engine reads otherwise than it was trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.align.engine import parse_engine
from eyas.align.static import check_static
from tests.align.made import (
    HEAD_DIM,
    VOCAB,
    H,
    bad,
    draft_config,
    draft_tensors,
    make_dataset,
    make_draft,
    make_identity,
)

KIMI = {"model_class": "KimiK25ForConditionalGeneration", "num_layers": 61}
DEFAULTS = "after:1,after:15,after:28"  # of 32 layers
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Case:
    """What is wrong, and the findings that say so: subject -> (status, words of the whole finding)."""

    name: str
    engine: str
    expect: dict[str, tuple[str, ...]]
    taps: str = DEFAULTS
    target: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[], dict[str, Tensor]] | None = draft_tensors


def speculators_config(**changes: Any) -> dict[str, Any]:
    """The same draft in the format of speculators 0.9.0."""
    layer = draft_config(architectures=..., draft_vocab_size=..., torch_dtype=...)
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VOCAB // 3,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        IDS: [2, 16, 29],
        "transformer_layer_config": layer,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def speculators_tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    return draft_tensors(layer="layers.0", **changes)


def mla_config(**changes: Any) -> dict[str, Any]:
    """An MLA draft, as for Kimi-K2."""
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    return draft_config(
        architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", draft_vocab_size=VOCAB, **ranks, **changes
    )


def mla_tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = draft_tensors(draft_vocab=VOCAB, layer="layers.0", d2t=None, t2d=None)
    shapes = {
        "q_a_proj": (8, 2 * H), "q_a_layernorm": (8,), "q_b_proj": (24, 8), "kv_a_proj_with_mqa": (8, 2 * H),
        "kv_a_layernorm": (6,), "kv_b_proj": (32, 6), "o_proj": (H, 16),
    }  # fmt: skip
    kept = {name: tensor for name, tensor in tensors.items() if "self_attn" not in name}
    kept |= {f"layers.0.self_attn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    for name, tensor in changes.items():
        if tensor is None:
            del kept[name.replace("__", ".")]
    return kept


def zeros(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


CASES = [
    Case(
        "vllm-numbers-in-eagle-config",  # right for one model runner alone
        "vllm@0.32.0",
        {"taps": ("unknown", "model runner V2: the ids stand in eagle_config", "in the others it is right")},
        taps="after:3,after:10,after:20",
        config=draft_config(eagle_config={IDS: [4, 11, 21]}),
    ),
    Case(
        "top-level-ids-served-by-sglang",
        "sglang@0.5.23",
        {"taps": ("mismatch", f"the ids stand in {IDS}, which it does not look at", '"eagle_config"')},
        taps="after:3,after:10,after:20",
        config=draft_config(**{IDS: [4, 11, 21]}),
    ),
    Case(
        "unknown-release",
        "sglang@0.9.0",
        {"taps": ("unknown", "no source was read"), "draft loads": ("unknown",)},
        config=draft_config(),
    ),
    Case("unknown-target", "sglang@0.5.23", {"taps": ("unknown",)}, target={"model_class": "NewForCausalLM"}),
    Case(
        "norm-before-fc-passed-on",
        "vllm@0.32.0",
        {},
        config=speculators_config(norm_before_fc=True),
        tensors=lambda: speculators_tensors(input_norm__weight=zeros(3 * H)),
    ),
    Case(
        "norm-before-fc-key-missing",
        "vllm@0.32.0",
        {
            "norm_before_fc": ("mismatch", "the checkpoint has input_norm.weight", '"norm_before_fc": true'),
            "draft tensors dropped": ("mismatch", "input_norm.weight"),
        },
        tensors=lambda: draft_tensors(input_norm__weight=zeros(3 * H)),
    ),
    Case(
        "norm-output-not-passed-on",
        "vllm@0.24.0",
        {"norm_output": ("mismatch", "computes with it off", "vllm 0.32.0")},
        config=speculators_config(norm_output=True),
        tensors=speculators_tensors,
    ),
    Case(
        "norm-before-residual-missing",  # false for the trainer, true for vLLM
        "vllm@0.32.0",
        {"norm_before_residual": ("mismatch", "computes with it on", '"norm_before_residual": false')},
        config=speculators_config(norm_before_residual=...),
        tensors=speculators_tensors,
    ),
    Case(
        "norm-before-residual-in-sglang",
        "sglang@0.5.23",
        {"norm_before_residual": ("mismatch", "has no such switch")},
        config=draft_config(norm_before_residual=True),
    ),
    Case(
        "fc-norm-in-old-sglang",
        "sglang@0.5.11",
        {"fc_norm": ("mismatch", "computes with it off"), "draft tensors dropped": ("mismatch", "fc_norm.0.weight")},
        config=draft_config(fc_norm=True),
        tensors=lambda: draft_tensors(**{f"fc_norm__{n}__weight": zeros(H) for n in range(3)}),
    ),
    Case(
        "d2t-holds-target-ids",
        "sglang@0.5.23",
        {"draft d2t": ("mismatch", "the target id itself", "d2t - torch.arange")},
        tensors=lambda: draft_tensors(d2t=draft_tensors()["d2t"] + torch.arange(VOCAB // 3)),
    ),
    Case(
        "d2t-holds-target-ids-without-t2d",
        "sglang@0.5.23",
        {"draft d2t": ("mismatch", "the target id itself")},
        tensors=lambda: draft_tensors(d2t=torch.arange(32) * 3, t2d=None),
    ),
    Case(
        "d2t-may-hold-target-ids",  # nothing decides it
        "sglang@0.5.23",
        {"draft d2t": ("unknown", "may be target ids")},
        tensors=lambda: draft_tensors(d2t=torch.arange(32) * 2 - torch.arange(32) // 2, t2d=None),
    ),
    Case(
        "d2t-arange",
        "sglang@0.5.23",
        {"draft d2t": ("mismatch", "an arange")},
        tensors=lambda: draft_tensors(d2t=torch.arange(32)),
    ),
    Case(
        "d2t-out-of-range",
        "sglang@0.5.23",
        {"draft d2t": ("mismatch", "draft id 31 stands for 231", "outside the vocabulary")},
        tensors=lambda: draft_tensors(d2t=torch.tensor([0] * 31 + [200]), t2d=None),
    ),
    Case(
        "d2t-repeats",
        "sglang@0.5.23",
        {"draft d2t": ("mismatch", "1 draft ids stand for a target id that another has")},
        tensors=lambda: draft_tensors(d2t=torch.tensor([0] * 30 + [1, 0]), t2d=None),
    ),
    Case(
        "d2t-of-another-run",
        "sglang@0.5.23",
        {"draft d2t": ("mismatch", "are not chosen in t2d")},
        tensors=lambda: draft_tensors(d2t=torch.tensor([0] * 16 + [40] * 16)),
    ),
    Case(
        "d2t-int32",
        "sglang@0.5.23",
        {"draft d2t": ("warning", "int32")},
        tensors=lambda: draft_tensors(d2t=draft_tensors()["d2t"].int()),
    ),
    Case(
        "d2t-never-filled",
        "sglang@0.5.23",
        {"draft d2t": ("warning", "all zeros")},
        tensors=lambda: draft_tensors(d2t=torch.zeros(32, dtype=torch.long), t2d=None),
    ),
    Case(
        "d2t-for-the-whole-vocabulary",
        "vllm@0.32.0",
        {"draft d2t name": ("mismatch", "remove d2t")},
        config=draft_config(draft_vocab_size=VOCAB),
        tensors=lambda: draft_tensors(draft_vocab=VOCAB),
    ),
    Case(
        "t2d-marks-too-few",
        "sglang@0.5.23",
        {"draft t2d": ("mismatch", "marks 10 ids"), "draft d2t": ("mismatch",)},
        tensors=lambda: draft_tensors(t2d=torch.arange(VOCAB) < 10),
    ),
    Case(
        "mla",
        "sglang@0.5.23",
        {},
        target=KIMI,
        taps="after:1,after:29,after:57",
        config=mla_config(),
        tensors=mla_tensors,
    ),
    Case(
        "lm-head-missing",
        "sglang@0.5.23",
        {"draft lm_head": ("mismatch", "leaves the head random")},
        tensors=lambda: draft_tensors(lm_head__weight=None),
    ),
    Case(
        "lm-head-missing-in-vllm",
        "vllm@0.32.0",
        {"draft lm_head": ("mismatch", "takes the target's head")},
        tensors=lambda: draft_tensors(lm_head__weight=None),
    ),
    Case(
        "lm-head-overwritten",
        "sglang@0.5.23",
        {"draft lm_head": ("mismatch", "overwrites the draft's head", f'"draft_vocab_size": {VOCAB}')},
        config=draft_config(draft_vocab_size=None),
        tensors=lambda: draft_tensors(draft_vocab=VOCAB, d2t=None, t2d=None),
    ),
    Case(
        "draft-vocab-size-absent",
        "sglang@0.5.23",
        {"draft lm_head": ("mismatch", "reads it as an attribute", '"draft_vocab_size": null')},
        config=draft_config(draft_vocab_size=...),
        tensors=lambda: draft_tensors(draft_vocab=VOCAB, d2t=None, t2d=None),
    ),
    Case(
        "lm-head-tied",
        "sglang@0.5.23",
        {"draft lm_head": ("mismatch", "takes the embeddings as head", '"tie_word_embeddings": false')},
        config=draft_config(tie_word_embeddings=True),
    ),
    Case(
        "lm-head-rows",
        "sglang@0.5.23",
        {"draft lm_head rows": ("mismatch", "[40, 16]", '"draft_vocab_size": 40')},
        tensors=lambda: draft_tensors(lm_head__weight=zeros(40, H)),
    ),
    Case(
        "rope-parameters-in-old-sglang",
        "sglang@0.5.9",
        {"rope": ("mismatch", "reads theta 10000, no scaling", '"rope_theta": 500000', '"rope_scaling"', "llama.py")},
        config=draft_config(
            rope_theta=..., rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
        ),
    ),
    Case(
        "rope-in-two-places",
        "vllm@0.32.0",
        {"rope": ("mismatch", "theta 500000", "theta 10000")},
        config=draft_config(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    ),
    Case(
        "layers-0-in-old-sglang",
        "sglang@0.5.11",
        {
            "draft tensors dropped": ("mismatch", "layers.0.hidden_norm.weight", "midlayer"),
            "draft tensors missing": ("mismatch", "matrices what was in memory"),
        },
        tensors=lambda: draft_tensors(layer="layers.0"),
    ),
    Case(
        "prefix-in-vllm",
        "vllm@0.32.0",
        {
            "draft tensors refused": ("mismatch", "model.fc.weight", "remove the prefix model."),
            "draft tensors missing": ("mismatch", "fc.weight"),
        },
        tensors=lambda: {("model." if n == "fc.weight" else "") + n: t for n, t in draft_tensors().items()},
    ),
    Case(
        "query-norms-in-sglang",
        "sglang@0.5.23",
        {"draft tensors dropped": ("mismatch", "q_norm.weight", "Eagle3Qwen3ForCausalLM")},
        tensors=lambda: draft_tensors(
            midlayer__self_attn__q_norm__weight=zeros(HEAD_DIM), midlayer__self_attn__k_norm__weight=zeros(HEAD_DIM)
        ),
    ),
    Case(
        "biases-in-sglang",
        "sglang@0.5.23",
        {"draft tensors dropped": ("mismatch", "q_proj.bias", "attention_bias false")},
        config=draft_config(attention_bias=True),
        tensors=lambda: draft_tensors(
            midlayer__self_attn__q_proj__bias=zeros(16),
            midlayer__self_attn__k_proj__bias=zeros(8),
            midlayer__self_attn__v_proj__bias=zeros(8),
        ),
    ),
    Case(
        "trained-embeddings-in-sglang",
        "sglang@0.5.23",
        {"draft embeddings": ("mismatch", "replaces embed_tokens.weight by the target's")},
        config=draft_config(embed_requires_grad=True),
    ),
    Case(
        "head-size",
        "sglang@0.5.23",
        {"draft tensors": ("mismatch", "q_proj.weight [16, 32] for [32, 32]", "head_dim")},
        config=draft_config(head_dim=8),
    ),
    Case(
        "four-taps-not-counted-by-vllm",
        "vllm@0.32.0",
        {"fc taps": ("mismatch", '"num_aux_hidden_states": 4'), "draft tensors": ("mismatch", "fc.weight")},
        taps="after:1,after:10,after:20,after:28",
        config=draft_config(**{IDS: [2, 11, 21, 29]}),
        tensors=lambda: draft_tensors(num_taps=4),
    ),
    Case(
        "one-tap-in-sglang",
        "sglang@0.5.23",
        {"fc taps": ("mismatch", "skips fc")},
        taps="after:15",
        config=draft_config(num_aux_hidden_states=1, eagle_config={IDS: [15]}),
        tensors=lambda: draft_tensors(num_taps=1),
    ),
    Case(
        "taps-switched-off",
        "vllm@0.32.0",
        {"taps": ("mismatch", "last hidden state alone")},
        config=draft_config(eagle_config={"use_aux_hidden_state": False}),
    ),
    Case(
        "caches-and-the-trainers-own",
        "sglang@0.5.23",
        {},
        tensors=lambda: draft_tensors(
            midlayer__self_attn__rotary_emb__inv_freq=zeros(2), verifier_norm__weight=zeros(H)
        ),
    ),
    Case(
        "the-trainers-own-in-vllm",
        "vllm@0.32.0",
        {"draft tensors refused": ("mismatch", "verifier_norm.weight")},
        tensors=lambda: draft_tensors(verifier_norm__weight=zeros(H)),
    ),
    Case(
        "switches-where-trtllm-does-not-look",
        "trtllm",
        {
            "taps": ("unknown",),
            "norm_before_fc": ("mismatch", "computes with it off", '"eagle_config"'),
            "draft weights": ("unknown", "a config and no weights"),
        },
        config=draft_config(norm_before_fc=True),
        tensors=None,
    ),
    Case(
        "nan-in-a-tensor",
        "vllm@0.32.0",
        {"draft values": ("mismatch", "fc.weight hold NaN")},
        tensors=lambda: draft_tensors(fc__weight=torch.full((H, 3 * H), float("nan"), dtype=torch.bfloat16)),
    ),
    Case(
        "a-tensor-of-zeros",
        "sglang@0.5.23",
        {"draft values": ("mismatch", "norm.weight are all zeros")},
        tensors=lambda: draft_tensors(norm__weight=torch.zeros(H, dtype=torch.bfloat16)),
    ),
    Case(
        "prefix-in-trtllm",
        "trtllm",
        {
            "taps": ("unknown",),
            "draft tensors dropped": ("mismatch", "model.fc.weight"),
            "draft tensors missing": ("mismatch", "fc.weight"),
        },
        tensors=lambda: {("model." if n == "fc.weight" else "") + n: t for n, t in draft_tensors().items()},
    ),
    Case(
        "lm-head-missing-in-trtllm",
        "trtllm",
        {"taps": ("unknown",), "draft lm_head": ("mismatch", "takes the target's head")},
        tensors=lambda: draft_tensors(lm_head__weight=None),
    ),
    Case("layers-0-in-trtllm", "trtllm", {"taps": ("unknown",)}, tensors=lambda: draft_tensors(layer="layers.0")),
    Case("mla-in-trtllm", "trtllm", {"taps": ("unknown",)}, config=mla_config(), tensors=mla_tensors),
    Case(
        "rope-parameters-in-trtllm",
        "trtllm",
        {"taps": ("unknown",), "rope": ("unknown", '"rope_theta": 500000')},
        config=draft_config(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    ),
    Case(
        "quantized-draft",
        "vllm@0.32.0",
        {"draft tensors": ("unknown", "quantized")},
        config=draft_config(quantization_config={"quant_method": "fp8"}),
    ),
    Case(
        "fc-of-another-width",
        "sglang@0.5.23",
        {
            "fc width": ("mismatch", "fc.weight takes 64 = 4 taps"),
            "draft tensors": ("mismatch", "fc.weight [16, 64] for [16, 48]"),
        },
        tensors=lambda: draft_tensors(num_taps=4),
    ),
    Case(
        "hidden-size",
        "sglang@0.5.23",
        {
            "hidden size": ("mismatch", "width 32", "another target"),
            "fc width": ("mismatch",),
            "draft tensors": ("mismatch",),
        },
        config=draft_config(target_hidden_size=32),
    ),
    Case(
        "another-vocabulary",
        "sglang@0.5.23",
        {"vocabulary": ("mismatch", "100"), "draft tensors": ("mismatch",), "draft t2d": ("mismatch",)},
        config=draft_config(vocab_size=100),
    ),
    Case(
        "float16-draft",
        "sglang@0.5.23",
        {"dtype": ("warning", "float16", "infinite")},
        tensors=lambda: {n: t.half() if t.is_floating_point() else t for n, t in draft_tensors().items()},
    ),
    Case(
        "speculators-format-in-sglang",
        "sglang@0.5.23",
        {"draft loads": ("mismatch", "Eagle3DraftModel", "no model of this name"), "taps": None},  # type: ignore[dict-item]
        config=speculators_config(),
        tensors=speculators_tensors,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_is_named(case: Case, tmp_path: Path) -> None:
    identity = make_identity(case.taps, **case.target)
    dataset = make_dataset(tmp_path / "dataset", identity)
    draft = make_draft(tmp_path / "draft", case.config or draft_config(), case.tensors() if case.tensors else None)
    found = bad(check_static(dataset, draft=draft, engine=parse_engine(case.engine)))
    found.pop("mask roles")  # no tokenizer at hand
    expected = {subject: words for subject, words in case.expect.items() if words is not None}
    for subject in set(case.expect) - set(expected):
        found.pop(subject, None)
    assert found.keys() == expected.keys(), found
    for subject, (status, *words) in expected.items():
        finding = found[subject]
        assert finding.status == status, finding
        whole = f"{finding.found}\n{finding.expected}\n{finding.consequence}\n{finding.mend}\n{finding.source}"
        for word in words:
            assert word in whole, f"{word!r} not in:\n{whole}"
