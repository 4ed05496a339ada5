"""What is in these files? Stored states without metadata, as the replay takes them.

Understands any folder of .safetensors, .npy, .npz, .pt, .pth, .bin or .ckpt files that hold token ids and float
tensors of states, by their shapes alone: ids [T] or [B, T]; states [T, n*H], [T, n, H], [n, T, H], [B, T, n*H], or
lists of any of these. Ids and states of one sample may stand in one file, or in files whose names begin alike. Reading
the formats of other systems in full is standardize's.

Shapes: B samples, T tokens, n taps, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.align.replay import NUM_SAMPLES, replay_report
from eyas.align.stored import MIN_TOKENS, SCANNED_TOKENS, DatasetSource, Slot, Source, StoredSample
from eyas.align.verdict import Finding
from eyas.shards.identity import IDENTITY_FILE
from eyas.shards.tensor_files import SUFFIXES, read_tensor_file
from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor

_ID_NAMES = ("input_ids", "token_ids", "tokens", "ids")
_MAX_TAPS = 8  # more in one row are logits, where the vocabulary is that large
_TRIED_FILES = 64  # that hold no sample, before giving up on a folder


class IdentifyError(EyasError):
    """A folder in which no token ids with states beside them are found, or a file that cannot be read safely."""


def open_source(folder: Path, *, hidden_size: int, vocab_size: int) -> Source:
    """``folder`` as a source of stored samples of a target of those sizes: an eyas dataset, or any files.

    Raises IdentifyError, and what opening a dataset raises.
    """
    if (folder / IDENTITY_FILE).exists():
        from eyas.shards.dataset import Dataset

        return DatasetSource(Dataset.open(folder))
    return FilesSource(folder, hidden_size=hidden_size, vocab_size=vocab_size)


def identify(
    folder: Path, target: str, *, num_samples: int = NUM_SAMPLES, trust_remote_code: bool = False
) -> list[Finding]:
    """What the states in ``folder`` are, of ``target``: a finding for every slot, and for what is wrong with it.

    Raises IdentifyError, TargetError, and what opening a dataset raises.
    """
    from eyas.capture.engines.transformers.load import read_outline

    outline = read_outline(target, trust_remote_code=trust_remote_code)
    source = open_source(folder, hidden_size=outline.hidden_size, vocab_size=outline.vocab_size)
    return replay_report(source, target, num_samples=num_samples, trust_remote_code=trust_remote_code)


@dataclass(frozen=True)
class _Record:
    """One sample as found: its ids and every tensor of states, by name, one [T', H] per tap."""

    name: str
    file: Path
    ids: Tensor  # int64 [T]
    states: dict[str, list[Tensor]]


class FilesSource:
    """Files without metadata. The slots are those of the first sample found; samples of other slots are left out."""

    def __init__(self, folder: Path, *, hidden_size: int, vocab_size: int) -> None:
        self._folder, self._hidden_size, self._vocab_size = folder, hidden_size, vocab_size
        self.name = str(folder)
        self._files = sorted(
            path
            for path in folder.rglob("*")
            if path.suffix in SUFFIXES and path.is_file()  # the hub's are links
        )
        if not self._files:
            raise IdentifyError(f"{folder}: no files of states there (looked for {', '.join(SUFFIXES)})")

    @cached_property
    def _first(self) -> _Record:
        for file in self._files[:_TRIED_FILES]:
            for record in self._records(file):
                return record
        raise IdentifyError(
            f"{self._folder}: found no token ids with states of width {self._hidden_size} (or a multiple) beside them "
            f"in its first {min(len(self._files), _TRIED_FILES)} files: expected integer ids [T] and float states "
            f"[T, n*{self._hidden_size}] in one file, or in files whose names begin alike. Is --target the target?"
        )

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(name=f"{name}[{n}]" if len(taps) > 1 else name, tensor=name, declared=None)
            for name, taps in self._first.states.items()
            for n in range(len(taps))
        )

    @property
    def compute_dtype(self) -> str:
        """What files are stored in says nothing of what was computed in: the coarser one is allowed for."""
        return "bfloat16"

    @property
    def weights_hash(self) -> None:
        """Files without metadata do not say."""

    def pick(self, num_samples: int) -> list[StoredSample]:
        """Evenly spread over the files; more of one file where there are fewer files than samples."""
        import numpy as np

        picked: dict[str, StoredSample] = {}
        places = np.unique(((np.arange(num_samples) + 0.5) * len(self._files) / num_samples).astype(int)).tolist()
        wanted = -(-num_samples // len(places))
        for place in places:
            for file in self._files[place : place + _TRIED_FILES]:
                found = [sample for sample in self._samples(file) if sample.name not in picked]
                if found:
                    step = max(1, len(found) // wanted)
                    picked |= {sample.name: sample for sample in found[::step][:wanted]}
                    break
        return list(picked.values())[:num_samples]

    def neighbours(self, sample: StoredSample, num_samples: int) -> list[StoredSample]:
        """Samples of the same file, then of the files around it."""
        at = next(n for n, file in enumerate(self._files) if str(file) == sample.where)
        around = sorted(range(len(self._files)), key=lambda n: abs(n - at))[: num_samples + 1]
        found = [near for n in around for near in self._samples(self._files[n]) if near.name != sample.name]
        return found[:num_samples]

    def _samples(self, file: Path) -> list[StoredSample]:
        shape = {name: len(taps) for name, taps in self._first.states.items()}
        return [
            StoredSample(
                name=record.name,
                where=str(file),
                input_ids=record.ids[:SCANNED_TOKENS],
                slots=tuple(tap[:SCANNED_TOKENS] for taps in record.states.values() for tap in taps),
            )
            for record in self._records(file)
            if {name: len(taps) for name, taps in record.states.items()} == shape and len(record.ids) >= MIN_TOKENS
        ]

    def _records(self, file: Path) -> Iterator[_Record]:
        """The samples of one file; its ids may stand in another file."""
        tensors = read_tensors(file)
        states = {name: tensor for name, tensor in tensors.items() if self._is_states(name, tensor)}
        if not states:
            return
        ids = self._ids(tensors)
        if ids is None:
            ids = self._ids_beside(file, next(iter(states.values())))
        if ids is None:
            return
        label = str(file.relative_to(self._folder))
        batch = ids if ids.dim() == 2 else ids[None]  # [B, T]
        mask = tensors.get("attention_mask")
        for n, row in enumerate(batch):
            taps = {name: split for name, tensor in states.items() if (split := self._taps(tensor, n, batch))}
            if not taps:
                continue
            row = row.long()
            if mask is not None and mask.shape == ids.shape:
                keep = mask.reshape(batch.shape)[n].bool()
                taps = {name: [tap[keep] if len(tap) == len(keep) else tap for tap in t] for name, t in taps.items()}
                row = row[keep]
            yield _Record(label if len(batch) == 1 else f"{label}[{n}]", file, row, taps)

    def _is_states(self, name: str, tensor: Tensor) -> bool:
        width = tensor.shape[-1] if tensor.dim() >= 2 else 0
        return (
            tensor.is_floating_point()
            and 2 <= tensor.dim() <= 4
            and width > 0
            and width % self._hidden_size == 0
            and not (width == self._vocab_size and ("logit" in name or width > _MAX_TAPS * self._hidden_size))
        )

    def _ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The token ids among a file's tensors: by name, else the integer vector with most different values."""
        found = {
            name: tensor
            for name, tensor in tensors.items()
            if not tensor.is_floating_point()
            and not tensor.is_complex()
            and tensor.dim() in (1, 2)
            and tensor.shape[-1] >= MIN_TOKENS
            and int(tensor.min()) >= 0
            and int(tensor.max()) < self._vocab_size
        }
        for known in _ID_NAMES:
            for name, tensor in found.items():
                if name.rpartition(".")[2] == known:
                    return tensor
        varied = [tensor for tensor in found.values() if int(tensor.max()) > 1]
        return max(varied, key=lambda tensor: len(set(tensor.flatten().tolist())), default=None)

    def _ids_beside(self, file: Path, states: Tensor) -> Tensor | None:
        """Ids of the right length in the file whose name shares the longest beginning with ``file``'s."""
        siblings = [other for other in self._files if other.parent == file.parent and other != file]
        common = {other: _common_beginning(other.name, file.name) for other in siblings}
        for other in sorted(siblings, key=lambda other: -common[other])[:8]:
            ids = self._ids(read_tensors(other))
            if ids is not None and ids.shape[-1] in states.shape[:-1]:
                return ids
        return None

    def _taps(self, tensor: Tensor, n: int, batch: Tensor) -> list[Tensor]:
        """Sample n's taps of one tensor of states, [T', H] each; empty where its shape is of something else."""
        num_samples, num_tokens = batch.shape
        width = self._hidden_size
        if tensor.dim() == 4:  # [B, T, n, H], [B, n, T, H]
            if tensor.shape[0] != num_samples:
                return []
            tensor = tensor[n]
        elif tensor.dim() == 3 and tensor.shape[0] == num_samples and num_tokens == tensor.shape[1]:  # [B, T, n*H]
            tensor = tensor[n]
        elif num_samples > 1:
            return []
        if tensor.dim() == 2:  # [T', n*H]
            return list(tensor.reshape(len(tensor), -1, width).unbind(1))
        if tensor.shape[-1] != width:
            return []
        # [T', n, H] or [n, T', H]: the tokens are the longer one of two that are not exactly as many.
        by_token = tensor.shape[0] == num_tokens or (
            tensor.shape[1] != num_tokens and tensor.shape[0] > tensor.shape[1]
        )
        return list(tensor.unbind(1 if by_token else 0))


def _common_beginning(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Every tensor of a file by name, nested dicts and lists flattened ("hidden_states.3"). Raises TensorFileError."""
    content = read_tensor_file(file)
    return dict(_flatten("" if isinstance(content, Mapping) else file.stem, content))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "iuf" and value.dtype.itemsize <= 8:
            if value.dtype.kind == "u":
                value = value.astype(np.int64)
            yield name, torch.from_numpy(np.array(value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(isinstance(entry, int) for entry in value):
            yield name, torch.tensor(value)
        else:
            for n, inner in enumerate(value):
                yield from _flatten(f"{name}.{n}" if name else str(n), inner)
