"""Dataset and target: another config, other weights, another tokenizer or template."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.align.static import check_static
from eyas.capture.engines.transformers.load import hash_weights
from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity
from eyas.shards.identity import DatasetIdentity
from tests.align.made import bad, make_dataset, make_identity
from tests.tiny import make_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", vocab_size=128, hidden_size=16, num_attention_heads=4)


def captured_from(target: Path) -> DatasetIdentity:
    """The identity that a capture from ``target`` writes."""
    tokenizer = tokenizer_identity(target, load_tokenizer(target, None, False))
    return make_identity(
        "after:1,after:3,after:5",
        num_layers=8,
        target={
            "config_hash": hashlib.blake2b((target / "config.json").read_bytes(), digest_size=16).hexdigest(),
            "weights_hash": hash_weights(str(target), None),
            "vocab_size": 128,
            "lm_head_rows": 128,
        },
        tokenizer=vars(tokenizer),
    )


def edit(target: Path, **changes: Any) -> None:
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retemplate(target: Path) -> None:
    (target / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|> {{ m['content'] }}{% endfor %}")


def reweight(target: Path) -> None:
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def retokenize(target: Path) -> None:
    path = target / "tokenizer.json"
    path.write_text(path.read_text().replace('"w0": 6', '"fox\'s": 6'))


@pytest.mark.parametrize(
    ("change", "subject", "status", "words"),
    [
        (lambda target: None, None, "ok", ""),
        (lambda target: edit(target, rms_norm_eps=1e-3), "target model", "warning", "keys other than its sizes"),
        (lambda target: edit(target, num_hidden_layers=9), "target model", "mismatch", "layers 9"),
        (
            lambda target: edit(target, architectures=["Qwen3ForCausalLM"]),
            "target model",
            "mismatch",
            "Qwen3ForCausalLM",
        ),
        (reweight, "target weights", "mismatch", "not those that were captured with"),
        (
            lambda target: edit(target, quantization_config={"quant_method": "fp8"}),
            "target weights",
            "mismatch",
            "quantization: fp8",
        ),
        (retemplate, "chat template", "mismatch", "not the one the dataset was rendered with"),
        (retokenize, "tokenizer", "mismatch", "other ids for the probe text"),
    ],
    ids=["same", "epsilon", "layers", "class", "weights", "quantization", "template", "tokenizer"],
)
def test_differences_are_named(tmp_path: Path, target: Path, change, subject, status, words) -> None:  # type: ignore[no-untyped-def]
    dataset = make_dataset(tmp_path / "dataset", captured_from(target))
    change(target)
    found = bad(check_static(dataset, target=target))
    found.pop("mask roles", None)  # random tokens
    if subject is None:
        assert not found
        return
    assert found[subject].status == status
    assert words in found[subject].found


@pytest.mark.parametrize(
    ("last_hidden", "words"),
    [
        ("after:31", "before the target's LlamaRMSNorm (eps 1e-05): the trainer applies it"),
        ("final", "nothing may norm it"),
    ],
)
def test_who_applies_the_norm(tmp_path: Path, last_hidden: str, words: str) -> None:
    identity = make_identity("after:1,after:15,after:28", last_hidden=last_hidden)
    report = check_static(make_dataset(tmp_path, identity))
    (finding,) = [finding for finding in report.findings if finding.check == "last hidden"]
    assert words in finding.found


def test_a_quantized_target_that_was_captured_as_it_serves(tmp_path: Path, target: Path) -> None:
    edit(target, quantization_config={"quant_method": "fp8"})
    identity = captured_from(target)
    identity = replace(identity, target=replace(identity.target, quantization="fp8"))
    found = bad(check_static(make_dataset(tmp_path / "dataset", identity), target=target))
    assert found.keys() <= {"mask roles"}  # random tokens
