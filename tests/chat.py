"""Tokenizers and chat templates of many families, small enough to write down what they give.

The tokenizer knows whole words: each word, each white-space character, each sign and each special token is one token,
so that expectations can be written as text with marks around what is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<User>", "<Assistant>",
    "<end_of_sentence>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>", "<|user|>",
    "<|assistant|>", "<|observation|>",
)  # fmt: skip
WORDS = """
    user assistant system tool model human hi hello bye yes no maybe think thinking INST final analysis commentary
    You are kind default one two three four five first second third fourth question answer weather tool_call name
    arguments city Oslo sunny e o a
""".split()  # noqa: SIM905
_TOKEN = re.compile("|".join(map(re.escape, SPECIAL)) + r"|\s|\w+|[^\w\s]")

TEMPLATES = Path(__file__).parent / "templates"
OPEN, CLOSE = "\u27e6", "\u27e7"


def make_tokenizer(folder: Path, template: str | None, *, eos: str = "<|im_end|>", stop: Sequence[str] = ()) -> Path:
    """A target folder with the word tokenizer, templates/``template``.jinja, and ``stop`` as generation_config.json's end tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = vocabulary_of_words()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|[^\w\s]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=eos)
    fast.chat_template = None if template is None else (TEMPLATES / f"{template}.jinja").read_text()
    fast.save_pretrained(folder)
    if stop:
        ids = [vocabulary[token] for token in stop]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def vocabulary_of_words() -> dict[str, int]:
    """The word tokenizer's ids."""
    signs = [" ", "\n", *"<>/[]{}\"',:.!?=_-|"]
    return {token: n for n, token in enumerate(["<unk>", *SPECIAL, *signs, *WORDS])}


def expected(marked: str) -> tuple[list[int], list[int]]:
    """Ids and mask of a text with marks around what is trained, read without any tokenizer library."""
    vocabulary = vocabulary_of_words()
    ids: list[int] = []
    mask: list[int] = []
    for n, piece in enumerate(re.split(f"[{OPEN}{CLOSE}]", marked)):
        tokens = [vocabulary[token] for token in _TOKEN.findall(piece)]
        ids += tokens
        mask += [n % 2] * len(tokens)
    return ids, mask
