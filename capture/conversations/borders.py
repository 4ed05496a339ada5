"""Token ids of a text, and between which tokens given positions of it lie. Proven for each text, never assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

_WHITE_AHEAD = 64  # characters: some tokenizers leave white space out of a token's offsets


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A text as tokens. For a border that lies within a token, before is that token and after the next whole one."""

    ids: list[int]  # [T]
    before: dict[int, int]  # border -> number of tokens that end before it
    after: dict[int, int]  # border -> the first token that begins behind it


def encode_with_borders(tokenizer: Any, text: str, borders: Sequence[int]) -> Encoded:
    """``borders``: ascending positions in ``text``. No special token is added: chat templates write their own.

    Three ways, the cheapest first, each of which proves what it says or gives way to the next:

    1. The tokenizer's own offsets say where the borders are, and the tokens between them decode to the text between
       them. (Byte-level BPE: one encoding and a tenth of its time.)
    2. The pieces between the borders, encoded alone, have together the tokens of the whole.
    3. Border by border: the tokens that the beginning up to it shares with the whole, and the end after it.
       (SentencePiece tokenizers that put a space before every text, and tokens that lie across a border.)
    """
    encoding = tokenizer(text, **_PLAIN)
    ids: list[int] = encoding["input_ids"]
    pieces = [text[start:end] for start, end in pairwise([0, *borders, len(text)])]
    if tokenizer.is_fast:
        hints = _offsets_of(encoding, borders, len(text), len(ids))
        if hints is not None and _decodes_to(tokenizer, ids, hints, pieces):
            clean = dict(zip(borders, hints, strict=True))
            return Encoded(ids=ids, before=clean, after=clean)
    alone: list[list[int]] = tokenizer(pieces, **_PLAIN)["input_ids"]
    if [token for piece in alone for token in piece] == ids:
        counts = list(accumulate(len(piece) for piece in alone))[:-1]
        clean = dict(zip(borders, counts, strict=True))
        return Encoded(ids=ids, before=clean, after=clean)
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for border in borders:
        beginning = tokenizer(text[:border], **_PLAIN)["input_ids"]
        before[border] = after[border] = num_same(beginning, ids)
        if before[border] < len(beginning):
            end = tokenizer(text[border:], **_PLAIN)["input_ids"]
            after[border] = max(before[border], len(ids) - num_same(end[::-1], ids[::-1]))
    return Encoded(ids=ids, before=before, after=after)


def num_same(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_PLAIN = {
    "add_special_tokens": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,  # no warning about texts longer than the tokenizer thinks the model takes
}


def _offsets_of(encoding: Any, borders: Sequence[int], num_characters: int, num_tokens: int) -> list[int] | None:
    """The token that begins at each border, by the tokenizer's offsets; None where they do not say."""
    hints = []
    for border in borders:
        if border == num_characters:
            hints.append(num_tokens)
            continue
        ahead = range(border, min(border + _WHITE_AHEAD, num_characters))
        token = next((token for at in ahead if (token := encoding.char_to_token(at)) is not None), None)
        if token is None:
            return None
        hints.append(token)
    return hints


def _decodes_to(tokenizer: Any, ids: list[int], hints: list[int], pieces: list[str]) -> bool:
    return all(
        tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False) == piece
        for (start, end), piece in zip(pairwise([0, *hints, len(ids)]), pieces, strict=True)
    )
