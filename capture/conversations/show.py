"""Samples as text, with the trained tokens marked."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from eyas.shards.sample import TokenSample

PLAIN_MARKS = ("\u27e6", "\u27e7")  # white square brackets, which conversations hardly ever hold
COLOUR_MARKS = ("\x1b[30;42m", "\x1b[0m")


def marked_text(sample: TokenSample, tokenizer: Any, marks: tuple[str, str]) -> str:
    """The sample decoded, special tokens included, each stretch of trained tokens between ``marks``."""
    (changes,) = np.nonzero(np.diff(sample.loss_mask))
    bounds = [0, *(changes + 1).tolist(), sample.num_tokens]
    parts = []
    for start, end in pairwise(bounds):
        text = tokenizer.decode(
            sample.input_ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        parts.append(f"{marks[0]}{text}{marks[1]}" if sample.loss_mask[start] else text)
    return "".join(parts)
