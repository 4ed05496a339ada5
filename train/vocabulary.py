"""The draft's vocabulary: the target ids that a draft can propose.

The most frequent training targets of the dataset, and always the ids that end the assistant's turn: a draft that cannot
propose them loses the last token of every answer. On disk as the engines read it: ``d2t`` int64 [Vd], what to add to a
draft id to get the target's (offsets, never indices), and ``t2d`` bool [V], which target ids are in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.taps.errors import EyasError, UsageError

if TYPE_CHECKING:
    from eyas.align.checks.subject import TargetFolder

VOCABULARY_FILE = "vocabulary.safetensors"


class VocabularyError(EyasError):
    """vocabulary.safetensors is missing, unreadable or contradicts itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftVocabulary:
    """Which of the target's ids a draft proposes; draft id n is target id ``ids[n]``."""

    ids: npt.NDArray[np.int64]  # [Vd] ascending
    vocab_size: int  # V, the target's
    coverage: float  # share of the counted training targets that are inside

    def __post_init__(self) -> None:
        if not len(self.ids) or np.any(np.diff(self.ids) <= 0) or self.ids[0] < 0 or self.ids[-1] >= self.vocab_size:
            raise VocabularyError(f"draft vocabulary: expected ascending ids below {self.vocab_size}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> npt.NDArray[np.int64]:
        """int64 [Vd]: target id minus draft id; all zeros where the draft has the target's whole vocabulary."""
        return np.asarray(self.ids - np.arange(len(self.ids)), dtype=np.int64)

    @property
    def t2d(self) -> npt.NDArray[np.bool_]:
        """bool [V]: whether a target id is in the draft's vocabulary."""
        inside = np.zeros(self.vocab_size, dtype=np.bool_)
        inside[self.ids] = True
        return inside

    @property
    def fingerprint(self) -> str:
        """blake2b-128, hex, over the ids as little-endian int64."""
        return hashlib.blake2b(self.ids.astype("<i8").tobytes(), digest_size=16).hexdigest()

    @classmethod
    def identity(cls, vocab_size: int) -> DraftVocabulary:
        """The target's whole vocabulary."""
        return cls(ids=np.arange(vocab_size, dtype=np.int64), vocab_size=vocab_size, coverage=1.0)

    @classmethod
    def from_maps(
        cls, d2t: npt.NDArray[Any], t2d: npt.NDArray[Any], *, coverage: float = float("nan"), where: str
    ) -> DraftVocabulary:
        """From a checkpoint's two maps. Raises VocabularyError, naming ``where``, if they contradict each other."""
        ids = d2t.astype(np.int64) + np.arange(len(d2t))
        if not np.array_equal(np.flatnonzero(t2d), ids):
            raise VocabularyError(f"{where}: d2t and t2d name other ids: expected d2t to be offsets from draft ids")
        return cls(ids=ids, vocab_size=len(t2d), coverage=coverage)

    def save(self, path: Path) -> None:
        """Write ``path`` in one step."""
        from safetensors.numpy import save

        publish(path, save({"d2t": self.d2t, "t2d": self.t2d}, metadata={"coverage": repr(self.coverage)}))

    @classmethod
    def load(cls, path: Path) -> DraftVocabulary:
        """Read what save() wrote. Raises VocabularyError."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
                coverage = float((file.metadata() or {}).get("coverage", "nan"))
        except (OSError, SafetensorError) as error:
            raise VocabularyError(f"{path}: unreadable ({error})") from error
        return cls.from_maps(d2t, t2d, coverage=coverage, where=str(path))


def build_vocabulary(counts: npt.NDArray[np.int64], size: int, always: Sequence[int]) -> DraftVocabulary:
    """The ``size`` most frequent ids of ``counts`` (int64 [V]), those of ``always`` among them; ties go to lower ids.

    Raises UsageError where ``size`` is larger than the target's vocabulary or leaves no room for ``always``.
    """
    vocab_size = len(counts)
    if size > vocab_size:
        raise UsageError(f"--draft-vocab-size {size}: the target has {vocab_size} ids; give that many or fewer")
    forced = np.array(sorted({n for n in always if 0 <= n < vocab_size}), dtype=np.int64)
    if len(forced) > size:
        raise UsageError(f"--draft-vocab-size {size}: {len(forced)} ids must be in it (end tokens); give more")
    rank = counts.astype(np.int64).copy()
    rank[forced] = np.iinfo(np.int64).max
    ids = np.sort(np.lexsort((np.arange(vocab_size), -rank))[:size]).astype(np.int64)
    total = int(counts.sum())
    return DraftVocabulary(ids=ids, vocab_size=vocab_size, coverage=float(counts[ids].sum() / total) if total else 1.0)


def always_ids(target: TargetFolder, counts: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Ids the draft must be able to propose: the target's end tokens, and special tokens that answers were seen to use.

    End tokens are ``eos_token_id`` of config.json (outer and language model's) and of generation_config.json, and the
    tokenizer's eos. ``counts`` int64 [V]: how often each id is a training target.
    """
    tokenizer = target.tokenizer
    found: set[int] = set()
    for config in (target.config, target.text, _generation_config(target.path)):
        named = config.get("eos_token_id")
        found |= {n for n in (named if isinstance(named, list) else [named]) if isinstance(n, int)}
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    special = {int(n) for n in tokenizer.all_special_ids if n is not None}
    special |= {int(n) for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    found |= {n for n in special if 0 <= n < len(counts) and counts[n] > 0}
    return tuple(sorted(n for n in found if 0 <= n < len(counts)))


def _generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EyasError(f"{path}: unreadable ({error})") from error
    return config if isinstance(config, dict) else {}
