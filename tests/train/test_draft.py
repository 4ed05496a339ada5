"""The draft's forward is the one of the peers whose names it has."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from eyas.align.draft import DraftConfig, DraftError
from eyas.train.attention import prepare_documents
from eyas.train.draft import DraftModel
from eyas.train.rope import rotary_table
from eyas.train.shape import DraftShape
from eyas.train.ttt import unroll
from tests.train.made_drafts import DRAFT_VOCAB, TARGET_WIDTH, VOCAB, make_documents, make_model, make_shape, pack


@pytest.fixture
def eagle3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """speculators.models.eagle3. Its package imports clients of a server, which the model has no use for."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed")
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "hs_connectors"):
        if name.partition(".")[0] in sys.modules or importlib.util.find_spec(name.partition(".")[0]) is None:
            monkeypatch.setitem(sys.modules, name, _Anything(name))
    return pytest.importorskip("speculators.models.eagle3")


class _Anything(ModuleType):
    """A module that has whatever is imported from it."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True, "num_layers": 2},
    ],
)
def test_logits_equal_speculators(options: dict[str, Any], eagle3: Any) -> None:
    from transformers import LlamaConfig

    shape = make_shape(**options)
    model = make_model(shape)
    layer = LlamaConfig(
        hidden_size=TARGET_WIDTH, intermediate_size=24, num_hidden_layers=shape.num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, vocab_size=VOCAB, max_position_embeddings=64,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "default"}, attention_bias=False, mlp_bias=False,
        attn_implementation="eager", pad_token_id=None,
    )  # fmt: skip
    flags = {name: value for name, value in options.items() if name != "num_layers"}
    theirs = eagle3.Eagle3DraftModel(
        eagle3.Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCAB, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            **flags,
        )
    )  # fmt: skip
    unknown = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not unknown.unexpected_keys
    assert {name.partition(".")[0] for name in unknown.missing_keys} <= {
        "d2t",
        "t2d",
        "verifier_norm",
        "verifier_lm_head",
    }

    # Its batches have tokens shifted by one against the taps (shift_batch in its data.py): row t has token t+1.
    documents = make_documents((9, 4))
    batch = pack(documents, None)
    shifted = torch.cat([batch.input_ids[1:], batch.input_ids.new_zeros(1)])
    logits: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    with torch.no_grad():
        theirs(
            hidden_states=batch.features[None], input_ids=shifted[None], document_ids=batch.document[None],
            position_ids=batch.position[None], ttt_steps=3,
        )  # fmt: skip
        ours = unroll(
            model, batch.features, batch.input_ids, batch.position, *rotary_table(shape, 32),
            prepare_documents(batch.document), 3,
        )  # fmt: skip
        for k in range(3):
            for start, length in ((0, 9), (9, 4)):
                rows = slice(start, start + length - 1 - k)
                torch.testing.assert_close(model.lm_head(ours[k][rows]), logits[k][rows], atol=1e-4, rtol=1e-4)


def test_names_and_frozen_parts() -> None:
    model = DraftModel(make_shape(num_layers=2, fc_norm=True, norm_before_fc=True))
    names = set(model.state_dict())
    layer = {
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    }  # fmt: skip
    ends = {f"{name}.weight" for name in ("embed_tokens", "fc", "input_norm", "norm", "lm_head")}
    assert names == layer | ends | {"layers.0.hidden_norm.weight", *(f"fc_norm.{a}.weight" for a in range(3))}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}
    own = DraftModel(make_shape(hidden_size=12))
    assert all(parameter.requires_grad and parameter.isfinite().all() for parameter in own.parameters())


def test_target_weights_are_shared_not_copied() -> None:
    model = make_model(make_shape())
    embedding, head = torch.ones(VOCAB, TARGET_WIDTH).bfloat16(), torch.ones(DRAFT_VOCAB, TARGET_WIDTH).bfloat16()
    model.use_target(embedding, head)
    assert model.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert model.lm_head.weight.data_ptr() == head.data_ptr()
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "cannot share 3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "expected 'silu'"),
        ({"head_dim": 5}, "even"),
        ({"draft_vocab_size": 30}, "exceeds"),
    ],
)
def test_configs_that_make_no_draft(changes: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 29}
    with pytest.raises(DraftError, match=message):
        DraftShape.from_draft_config(DraftConfig({**sizes, **changes}), 3)
