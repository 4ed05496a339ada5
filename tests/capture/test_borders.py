"""Borders between tokens, for tokenizers that keep them and tokenizers that do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from eyas.capture.conversations.borders import encode_with_borders


def bpe(letters: str, merges: list[tuple[str, str]]) -> Tokenizer:
    words = [*letters, *(a + b for a, b in merges)]
    return Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))


def merging_newlines() -> Any:
    tokenizer = bpe("ab\n", [("\n", "\n"), ("a", "b")])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_prefix_space() -> Any:
    """As SentencePiece tokenizers do: a space before every text, written as a low line."""
    tokenizer = bpe("ab\u2581", [("\u2581", "a"), ("\u2581", "b")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def slow(tokenizer: Any) -> Any:
    """The same tokenizer without offsets, as tokenizers written in Python are."""

    class Slow:
        is_fast = False

        def __call__(self, text: str | list[str], **options: Any) -> dict[str, Any]:
            return {"input_ids": tokenizer(text, **options)["input_ids"]}

    return Slow()


# text with | at the borders, ids, and for each border (tokens that end before it, first token behind it)
TABLE = [
    (merging_newlines(), "ab\n|a|", [4, 2, 0], [(2, 2), (3, 3)]),
    (merging_newlines(), "|a\n", [0, 2], [(0, 0)]),
    (merging_newlines(), "a\n|\nb", [0, 3, 1], [(1, 2)]),  # the border is within the token of two newlines
    (merging_newlines(), "a|b|\n", [4, 2], [(0, 1), (1, 1)]),
    (merging_newlines(), "a|b", [4], [(0, 1)]),
    (merging_newlines(), "", [], []),
    (with_prefix_space(), "a| b|a", [3, 4, 0], [(1, 1), (2, 2)]),
    (with_prefix_space(), "a |b a", [3, 4, 3], [(1, 2)]),
    (with_prefix_space(), "a| b a|", [3, 4, 3], [(1, 1), (3, 3)]),
]


@pytest.mark.parametrize("make", [lambda tokenizer: tokenizer, slow], ids=["fast", "slow"])
@pytest.mark.parametrize(("tokenizer", "marked", "ids", "around"), TABLE, ids=[repr(row[1]) for row in TABLE])
def test_borders(make: Any, tokenizer: Any, marked: str, ids: list[int], around: list[tuple[int, int]]) -> None:
    pieces = marked.split("|")
    borders = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces) - 1)]
    encoded = encode_with_borders(make(tokenizer), "".join(pieces), borders)
    assert encoded.ids == ids
    assert [(encoded.before[border], encoded.after[border]) for border in borders] == around


def test_offsets_that_lie_are_not_believed() -> None:
    """Some tokenizers report offsets of other places (transformers issue 30004 and its like)."""
    honest = merging_newlines()

    class Lying:
        is_fast = True

        def __call__(self, text: str | list[str], **options: Any) -> Any:
            encoding = honest(text, **options)
            encoding.char_to_token = lambda at: 0
            return encoding

        def decode(self, *arguments: Any, **options: Any) -> Any:
            return honest.decode(*arguments, **options)

    encoded = encode_with_borders(Lying(), "ab\na", [3])
    assert encoded.ids == [4, 2, 0]
    assert encoded.before == encoded.after == {3: 2}


@settings(deadline=None)
@given(text=st.text("ab\n", max_size=12), cuts=st.sets(st.integers(0, 12)))
def test_all_ways_agree(text: str, cuts: set[int]) -> None:
    borders = sorted(cut for cut in cuts if cut <= len(text))
    tokenizer = merging_newlines()
    fast = encode_with_borders(tokenizer, text, borders)
    assert fast == encode_with_borders(slow(tokenizer), text, borders)
    words = ["a", "b", "\n", "\n\n", "ab"]
    ends = [sum(len(words[token]) for token in fast.ids[: n + 1]) for n in range(len(fast.ids))]
    starts = [0, *ends[:-1]]
    for border in borders:
        assert fast.before[border] == sum(end <= border for end in ends)
        assert fast.after[border] == len(starts) - sum(start >= border for start in starts)


@pytest.fixture(scope="session")
def tokenizer_of_target() -> Any:
    """A real one."""
    from eyas.capture.tokenizer import load_tokenizer

    path = Path(os.environ.get("EYAS_TARGET", Path(__file__).parents[2] / "demo" / "target"))
    if not path.is_dir():
        pytest.skip("no real target: make demo, or EYAS_TARGET")
    return load_tokenizer(path, None, False)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_real_tokenizer_keeps_every_character_on_its_side(tokenizer_of_target: Any, pieces: list[str]) -> None:
    tokenizer = tokenizer_of_target
    text = "".join(pieces)
    borders = sorted({sum(map(len, pieces[: n + 1])) for n in range(len(pieces) - 1)})
    encoded = encode_with_borders(tokenizer, text, borders)
    assert encoded.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assume(tokenizer.decode(encoded.ids) == text)  # this vocabulary has no token for some bytes
    for border in borders:
        before, after = encoded.before[border], encoded.after[border]
        assert text[:border].startswith(tokenizer.decode(encoded.ids[:before]))
        assert text[border:].endswith(tokenizer.decode(encoded.ids[after:]))
        if before == after:
            assert tokenizer.decode(encoded.ids[:before]) == text[:border]
