"""Two tokenizers are the same, or the identity says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.capture.errors import TargetError
from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity
from eyas.shards.identity import TokenizerIdentity
from tests.chat import make_tokenizer


def identity(folder: Path) -> TokenizerIdentity:
    return tokenizer_identity(folder, load_tokenizer(folder, None, False))


def test_the_same_files_elsewhere_are_the_same_tokenizer(tmp_path: Path) -> None:
    assert identity(make_tokenizer(tmp_path / "a", "chatml")) == identity(make_tokenizer(tmp_path / "b", "chatml"))


def test_what_differs_is_told_apart(tmp_path: Path) -> None:
    first = identity(make_tokenizer(tmp_path / "a", "chatml"))
    other_template = identity(make_tokenizer(tmp_path / "b", "llama3"))
    assert other_template.chat_template_hash != first.chat_template_hash
    assert other_template.probe_hash == first.probe_hash
    assert identity(make_tokenizer(tmp_path / "c", None)).chat_template_hash is None

    folder = make_tokenizer(tmp_path / "d", "chatml")
    body = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = body["model"]["vocab"]
    vocabulary["x"], vocabulary["\n"] = vocabulary["\n"], len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(body))
    other_ids = identity(folder)
    assert other_ids.files_hash != first.files_hash
    assert other_ids.probe_hash != first.probe_hash


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "vocab.json", "merges.txt"])
def test_every_tokenizer_file_counts(name: str, tmp_path: Path) -> None:
    first = identity(make_tokenizer(tmp_path / "a", "chatml"))
    tokenizer = load_tokenizer(tmp_path / "a", None, False)
    (tmp_path / "a" / name).write_bytes(b"\x00")
    assert tokenizer_identity(tmp_path / "a", tokenizer).files_hash != first.files_hash
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"\x00")
    assert tokenizer_identity(tmp_path / "a", tokenizer).files_hash == first.files_hash


def test_a_tokenizer_with_code_of_its_own_is_loaded_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make_tokenizer(tmp_path / "a", "chatml")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    code = "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "tokenization_own.py").write_text(code)
    with pytest.raises(TargetError, match="--trust-remote-code"):
        load_tokenizer(folder, None, False)
    tokenizer = load_tokenizer(folder, None, True)
    assert type(tokenizer).__name__ == "OwnTokenizer"
    before = tokenizer_identity(folder, tokenizer)
    (folder / "tokenization_own.py").write_text(code + "# changed\n")
    assert tokenizer_identity(folder, tokenizer).files_hash != before.files_hash


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"--target {tmp_path}"):
        load_tokenizer(tmp_path, None, False)
