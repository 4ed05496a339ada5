"""What proposes tokens: a draft head, run as an engine runs it, and the baselines that any draft must beat.

Shapes: n rows, A taps, H the target's hidden size, D the draft's, V and Vd the target's and the draft's vocabulary,
P cached rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.shards.dataset import Dataset
from eyas.shards.ledger import SHARDS_FOLDER
from eyas.taps.notation import Tap
from eyas.train.draft import DraftModel
from eyas.train.rope import rotary_table

_FIRST_ROWS = 1024  # that caches and rotary tables have room for at first


@dataclass(frozen=True)
class Proposal:
    """Tokens that are proposed, and the distribution that each was drawn from."""

    token_ids: list[int]  # N of the target's ids
    probabilities: Tensor | None  # float32 [N, V]; None where each token was the only possible one


# Logits over the draft's vocabulary [Vd] -> which of them (int64 scalar), and the probabilities it was drawn from [Vd];
# None: no other could have been drawn.
Choose = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class Drafter(Protocol):
    """Proposes the continuation of one sequence."""

    name: str
    taps: tuple[Tap, ...]  # of the target, that extend() is given

    def start(self) -> None:
        """Forget the sequence."""
        ...

    def extend(self, next_ids: Tensor, features: Tensor) -> None:
        """Positions that the target has verified: their taps [n, A*H], and the token behind each, int64 [n]."""
        ...

    def propose(self, num_tokens: int, choose: Choose) -> Proposal:
        """``num_tokens`` tokens that follow the last of extend()."""
        ...


class DraftHead:
    """An EAGLE-3 draft with its cache.

    The rows of verified positions are those of training step 0: the target's taps, and the token behind. Drafted
    positions carry the draft's own hidden state, as training step k does, and leave the cache when the target has
    spoken (train/ttt.py).
    """

    def __init__(
        self, name: str, model: DraftModel, ids: Tensor, taps: tuple[Tap, ...], *, vocab_size: int | None = None
    ) -> None:
        """ids: int64 [Vd], the target's ids of the draft vocabulary, on the model's device."""
        self.name, self.taps = name, taps
        self._model, self._ids = model, ids
        self._vocab_size = vocab_size or model.shape.vocab_size
        self._rotary = rotary_table(model.shape, _FIRST_ROWS, ids.device)
        self.start()

    def start(self) -> None:
        self._attend = CachedAttention(self._model.shape.num_layers)
        self._num_rows = 0  # of step 0
        self._carried: Tensor | None = None  # [1, D]

    @torch.inference_mode()
    def extend(self, next_ids: Tensor, features: Tensor) -> None:
        self._attend.crop(self._num_rows)
        carried = self._step(next_ids, self._model.fuse(features.to(self._dtype)), self._num_rows)
        self._num_rows += len(next_ids)
        self._carried = carried[-1:]

    @torch.inference_mode()
    def propose(self, num_tokens: int, choose: Choose) -> Proposal:
        assert self._carried is not None
        self._attend.crop(self._num_rows)
        carried, tokens, rows = self._carried, [], []
        for step in range(num_tokens):
            chosen, probabilities = choose(self._model.logits(carried)[0])
            tokens.append(self._ids[chosen])
            if probabilities is not None:
                rows.append(torch.zeros(self._vocab_size, device=chosen.device).index_copy(0, self._ids, probabilities))
            if step + 1 < num_tokens:
                carried = self._step(tokens[-1][None], carried, self._num_rows + step)
        return Proposal(torch.stack(tokens).tolist(), torch.stack(rows) if rows else None)

    @property
    def _dtype(self) -> torch.dtype:
        return self._model.fc.weight.dtype

    def _step(self, token_ids: Tensor, hidden: Tensor, position: int) -> Tensor:
        """token_ids [n] and hidden [n, D] at ``position``, position + 1, ... -> carried [n, D]."""
        end = position + len(token_ids)
        if end > len(self._rotary[0]):
            self._rotary = rotary_table(self._model.shape, 2 * end, token_ids.device)
        cos, sin = (table[position:end] for table in self._rotary)
        embeds = self._model.embed(token_ids).to(hidden.dtype)
        return self._model(embeds, hidden, cos, sin, self._attend)  # type: ignore[no-any-return]


class CachedAttention:
    """Attention over all rows so far, for all layers (``Attend`` of train/draft.py)."""

    def __init__(self, num_layers: int) -> None:
        self._buffers: list[Tensor | None] = [None] * num_layers  # [2, kv_heads, room, d]: keys, values
        self._lengths = [0] * num_layers

    def crop(self, num_rows: int) -> None:
        """Forget all rows but the first ``num_rows``."""
        self._lengths = [min(length, num_rows) for length in self._lengths]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [n, heads, d], key and value [n, kv_heads, d] -> [n, heads, d]"""
        begin, end = self._lengths[layer], self._lengths[layer] + len(query)
        buffer = self._buffers[layer]
        if buffer is None or end > buffer.shape[2]:
            grown = key.new_empty(2, key.shape[1], max(_FIRST_ROWS, 2 * end), key.shape[2])
            if buffer is not None:
                grown[:, :, :begin] = buffer[:, :, :begin]
            self._buffers[layer] = buffer = grown
        buffer[0, :, begin:end], buffer[1, :, begin:end] = key.transpose(0, 1), value.transpose(0, 1)
        self._lengths[layer] = end
        rows = torch.arange(begin, end, device=query.device)
        mask = rows[:, None] >= torch.arange(end, device=query.device)  # [n, P]
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            buffer[None, 0, :, :end],
            buffer[None, 1, :, :end],
            attn_mask=mask if len(query) > 1 else None,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # [1, heads, n, d]
        return attended[0].transpose(0, 1)


def untrained(model: DraftModel, seed: int = 0) -> DraftModel:
    """A draft of the same shape whose weights are as before the first training step."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = DraftModel(model.shape)
    if model.shape.shares_target_width:
        fresh.use_target(model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    weight = model.fc.weight
    return fresh.to(device=weight.device, dtype=weight.dtype)


class BigramTable:
    """Proposes, after each token, the one that most often followed it in a dataset's answers."""

    def __init__(self, followers: npt.NDArray[np.int64]) -> None:
        """followers: int64 [V]."""
        self.name = "2-gram table"
        self.taps: tuple[Tap, ...] = ()
        self._followers = followers
        self._last = 0

    @classmethod
    def from_dataset(
        cls, dataset: Dataset, *, left_out: npt.NDArray[np.uint64] | None = None, max_tokens: int = 1 << 26
    ) -> BigramTable:
        """Count pairs whose second token is trained, without the samples ``left_out`` (their ids, ascending)."""
        from safetensors import safe_open

        vocab_size = dataset.identity.target.vocab_size
        pairs = [np.zeros(0, np.int64)]
        num_tokens = 0
        for entry in dataset.ledgers.entries:
            with safe_open(Path(dataset.path) / SHARDS_FOLDER / entry.shard, framework="numpy") as file:
                ids, mask, offsets = (file.get_tensor(name) for name in ("input_ids", "loss_mask", "offsets"))
            counted = mask.astype(bool)
            counted[offsets[:-1]] = False  # what a sample's first token follows is another sample
            if left_out is not None and len(left_out):
                names = np.array([int(name, 16) for name in entry.sample_ids], np.uint64)
                for n in np.flatnonzero(np.isin(names, left_out)):
                    counted[offsets[n] : offsets[n + 1]] = False
            at = np.flatnonzero(counted)
            pairs.append(ids[at - 1].astype(np.int64) * vocab_size + ids[at])
            num_tokens += len(at)
            if num_tokens >= max_tokens:
                break
        found, counts = np.unique(np.concatenate(pairs), return_counts=True)
        first, second = np.divmod(found, vocab_size)
        totals = np.bincount(second, weights=counts, minlength=vocab_size)
        followers = np.full(vocab_size, int(totals.argmax()), np.int64)
        order = np.argsort(counts, kind="stable")
        followers[first[order]] = second[order]  # the most frequent comes last, and stays
        return cls(followers)

    def start(self) -> None:
        self._last = 0

    def extend(self, next_ids: Tensor, features: Tensor) -> None:
        self._last = int(next_ids[-1])

    def propose(self, num_tokens: int, choose: Choose) -> Proposal:
        tokens = []
        token = self._last
        for _ in range(num_tokens):
            token = int(self._followers[token])
            tokens.append(token)
        return Proposal(tokens, None)
