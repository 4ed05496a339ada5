"""The target's tokenizer: loading it, and proving that two are the same."""

from __future__ import annotations

import hashlib
import json
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from eyas.capture.errors import TargetError
from eyas.shards.identity import TokenizerIdentity

# Files that tokenizers of transformers are made from, next to those that the tokenizer's class names itself
# (vocab_files_names) and the code files of its auto_map. Chat templates have a hash of their own.
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

# Scripts, digits, code, runs of white space, emoji joined from several code points, and strings that are special
# tokens in some vocabularies: where two tokenizers differ, they differ here or nowhere that matters.
PROBE_TEXT = (
    "The quick brown fox's 12345678 jumps, 3.14159.\n\n\t\t    def f(x):\r\n        return x**2  # ok\n"
    "na\u00efve caf\u00e9 cafe\u0301 Stra\u00dfe \ufb01 \u00bd \u00a0\u200b\ufeff"
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155"
    " \u041f\u0440\u0438\u0432\u0435\u0442"
    " \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e44\u0e17\u0e22 "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ed "
    "<s></s><unk><pad><bos><eos><|endoftext|><|im_start|>user<|im_end|><|eot_id|><|end|><end_of_turn>[INST][/INST]"
    '<think></think><tool_call>{"name": "f", "arguments": {"x": [1, null]}}</tool_call>   '
)
MOST_VOCABULARY_TEXTS = 8
MOST_VOCABULARY_TOKENS = 1 << 16
_FILLED = 0.9  # of what a vocabulary text may have: its tokens are known only once it is made


def load_tokenizer(target: str | Path, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of ``target``: a folder or a hub name.

    Raises TargetError where there is none, or where it needs its own code and ``trust_remote_code`` is False.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target), revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"--target {target}: its tokenizer comes with code of its own, which eyas runs only with "
                "--trust-remote-code. Read that code first"
            ) from error
        raise TargetError(f"--target {target}: no tokenizer could be loaded ({_first_line(error)})") from error


def tokenizer_identity(target: str | Path, tokenizer: Any, revision: str | None = None) -> TokenizerIdentity:
    """What makes ``tokenizer``, loaded from ``target`` (a folder or a hub name), the one it is.

    ``files_hash`` goes over the name and bytes of every tokenizer file there, sorted by name; ``chat_template_hash``
    over the template (of several named ones, over all); ``probe_hash`` over the int32 ids of PROBE_TEXT without
    special tokens added. Each is blake2b-128, hex.
    """
    from transformers.utils import cached_file

    names = {*TOKENIZER_FILES, *(name for name in tokenizer.vocab_files_names.values() if isinstance(name, str))}
    names |= _code_files(tokenizer)
    files = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        path = cached_file(
            str(target),
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            content = Path(path).read_bytes()
            files.update(f"{name}\0{len(content)}\0".encode())
            files.update(content)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = json.dumps(template, sort_keys=True)
    probe = np.asarray(tokenizer.encode(PROBE_TEXT, add_special_tokens=False), dtype="<i4")  # [T]
    return TokenizerIdentity(
        files_hash=files.hexdigest(),
        chat_template_hash=None if template is None else _blake2b(template.encode()),
        probe_hash=_blake2b(probe.tobytes()),
    )


def vocabulary_texts(tokenizer: Any, longest: int) -> list[str]:
    """Texts of at most ``longest`` tokens each that hold every token of the vocabulary, as far as one can be written
    alone: bytes of a character cannot. Where there are more than MOST_VOCABULARY_TOKENS, or than
    MOST_VOCABULARY_TEXTS hold, every n-th is there.
    """
    # What a token adds behind another of its kind: SentencePiece drops the space before the first.
    # One by one and without options: Kimi's own tokenizer says a line about each option.
    ids = range(0, len(tokenizer), ceil(len(tokenizer) / MOST_VOCABULARY_TOKENS))
    added = [tokenizer.decode([n, n])[len(tokenizer.decode([n])) :] for n in ids]
    # A word of its own each, so that neighbours do not become one token.
    words = [text if text[0] == " " else f"\n{text}" for text in added if text and "\ufffd" not in text]
    num_tokens = len(tokenizer.encode("".join(words), add_special_tokens=False))
    num_texts = min(ceil(num_tokens / (_FILLED * longest)), MOST_VOCABULARY_TEXTS)
    share = min(1.0, num_texts * _FILLED * longest / max(num_tokens, 1))
    words = [words[int(n / share)] for n in range(int(len(words) * share))]
    texts = []
    for first in range(num_texts):
        chosen = words[first::num_texts]
        while (length := len(tokenizer.encode("".join(chosen), add_special_tokens=False))) > longest:
            chosen = chosen[: len(chosen) * longest // length]
        texts.append("".join(chosen))
    return texts


def _code_files(tokenizer: Any) -> set[str]:
    """Files of the tokenizer's own code, from its auto_map: "module.Class" or "repo--module.Class"."""
    auto_map = tokenizer.init_kwargs.get("auto_map") or {}
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    classes = entry if isinstance(entry, list | tuple) else [entry]
    return {f"{name.split('.')[0]}.py" for name in classes if isinstance(name, str) and "--" not in name}


def _blake2b(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
