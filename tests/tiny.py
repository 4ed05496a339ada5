"""Targets and inputs small enough for tests, made on the spot: nothing is fetched and nothing is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def make_target(folder: Path, *, seed: int = 0, num_layers: int = 8, **config: Any) -> Path:
    """A random Llama of 8 layers, hidden size 32, 4 query and 2 key heads in float32, with a word-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,  # far apart taps
    }
    LlamaForCausalLM(LlamaConfig(**{**settings, **config})).save_pretrained(folder)
    return add_tokenizer(folder)


def add_tokenizer(folder: Path) -> Path:
    """A word-level tokenizer with a chat template, beside the target in ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant"]
    words += [f"w{n}" for n in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def tokenized_rows(
    num_samples: int, *, min_tokens: int = 2, max_tokens: int = 24, seed: int = 0
) -> list[dict[str, Any]]:
    """Random samples as already-tokenized conversations; about half of the tokens are trained."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_samples):
        length = draw.randint(min_tokens, max_tokens)
        mask = [draw.randint(0, 1) for _ in range(length - 1)]
        rows.append({"input_ids": [draw.randrange(VOCAB_SIZE) for _ in range(length)], "loss_mask": [0, *mask]})
        rows[-1]["loss_mask"][-1] = 1
    return rows


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_rows(out: Path, target: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`eyas prepare` of already-tokenized rows."""
    from click.testing import CliRunner

    from eyas.cli.main import main

    source = write_jsonl(out.with_suffix(".jsonl"), rows)
    result = CliRunner().invoke(main, ["prepare", str(source), str(out), "--target", str(target)])
    assert result.exit_code == 0, result.output
