"""The draft vocabulary: which ids, and the two maps that engines read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eyas.align.checks.subject import TargetFolder
from eyas.taps.errors import UsageError
from eyas.train.vocabulary import DraftVocabulary, VocabularyError, always_ids, build_vocabulary
from tests.chat import make_tokenizer, vocabulary_of_words


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.data())
def test_the_most_frequent_ids_and_those_asked_for(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    vocabulary = build_vocabulary(np.array(counts, np.int64), size, sorted(always))
    inside = set(vocabulary.ids.tolist())
    assert len(inside) == len(vocabulary) == size
    assert always <= inside
    free = inside - always
    outside = set(range(len(counts))) - inside
    if free and outside:
        assert min((counts[n], -n) for n in free) > max((counts[n], -n) for n in outside)
    total = sum(counts)
    assert vocabulary.coverage == pytest.approx(sum(counts[n] for n in inside) / total if total else 1)


def test_maps_as_engines_read_them(tmp_path: Path) -> None:
    vocabulary = build_vocabulary(np.array([0, 5, 0, 9, 2, 7]), 3, [])
    vocabulary.save(tmp_path / "v.safetensors")
    maps = load_file(tmp_path / "v.safetensors")
    assert (np.arange(3) + maps["d2t"]).tolist() == [1, 3, 5]
    assert maps["t2d"].tolist() == [False, True, False, True, False, True]
    again = DraftVocabulary.load(tmp_path / "v.safetensors")
    assert again.ids.tolist() == [1, 3, 5]
    assert again.vocab_size == 6
    assert again.coverage == vocabulary.coverage == 21 / 23


def test_the_whole_vocabulary_has_no_offsets() -> None:
    whole = DraftVocabulary.identity(7)
    assert not whole.d2t.any()
    assert whole.t2d.all()


def test_indexes_in_place_of_offsets_are_refused() -> None:
    with pytest.raises(VocabularyError, match="offsets"):
        DraftVocabulary.from_maps(np.array([1, 3, 5]), np.array([0, 1, 0, 1, 0, 1], bool), where="draft")


@pytest.mark.parametrize(("size", "always", "message"), [(9, [], "the target has 6"), (1, [0, 1], "must be in it")])
def test_sizes_that_cannot_be(size: int, always: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_vocabulary(np.arange(6), size, always)


def test_end_tokens_are_always_in(tmp_path: Path) -> None:
    """Those of the tokenizer, config.json and generation_config.json, and special tokens that answers use."""
    make_tokenizer(tmp_path, "chatml", eos="<|im_end|>", stop=["<|eot_id|>", "<|endoftext|>"])
    ids = vocabulary_of_words()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids["</s>"], "num_hidden_layers": 2}))
    counts = np.zeros(len(ids), np.int64)
    counts[ids["<|call|>"]] = 3
    counts[ids["hello"]] = 5
    names = {name for name, n in ids.items() if n in always_ids(TargetFolder(tmp_path), counts)}
    assert Counter(names) == Counter(["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>", "<|call|>"])
