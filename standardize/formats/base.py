"""What every format of another system is to eyas: a layout that is found, a reader, a writer.

Each folder beside this file is one format, with the same files: ``detect.py`` (``detect(folder) -> Layout | None``),
``read.py`` (``open_reader(folder, layout) -> Reader``) and ``write.py`` (``Writer``). formats/registry.py lists them.

Shapes: T tokens, A taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.shards.dataset import Dataset
    from eyas.shards.identity import DatasetIdentity
    from eyas.shards.sample import Sample
    from eyas.taps.notation import Tap


class FormatError(EyasError):
    """A folder that is not in the format expected, or a dataset that a format cannot say."""


class ForeignFileError(EyasError):
    """One sample of a foreign folder cannot be used. It is rejected by name, and the rest goes on.

    ``where`` is the file (and the row in it), ``what`` what was found and what was expected.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a folder says of itself, from its names and a few of its files."""

    format: str  # the registry's name
    version: str  # which of the format's layouts, in words: "0.9: Arrow dataset and hs_N.safetensors"
    num_files: int  # that hold states
    num_taps: int  # A: the slots of the features, without last_hidden
    hidden_size: int | None  # H; None where the files do not tell it from A*H
    dtype: str  # bfloat16, float16 or float32: as read, after any scales
    last_hidden: Literal["pre-norm", "post-norm"] | None  # what the format keeps beside the features
    has_loss_mask: bool
    layer_ids: tuple[int, ...] | None = None  # of the features, where the folder states them ...
    convention: str | None = None  # ... and the system whose numbers they are
    taps: tuple[Tap, ...] | None = None  # of the features, where the folder names them outright
    problems: tuple[str, ...] = ()  # what is wrong with the folder, as far as a look shows


@dataclass(frozen=True, kw_only=True)
class ForeignSample:
    """One sample as a foreign file holds it, already aligned as eyas stores it: row t of the features is token t's."""

    where: str  # the file, and the row in it where it holds several
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor | None  # uint8 [T], 1 where the token itself is a training target; None: the format keeps none
    features: Tensor  # [T, A, H], any strides; mapped from the file where the format allows
    last_hidden: Tensor | None  # [T, H], any strides

    states_are_costly: ClassVar[bool] = False  # features and last_hidden are made when they are asked for


class Reader(Protocol):
    """Reads one folder, one sample at a time; several threads call read() at once."""

    @property
    def layout(self) -> Layout: ...

    def items(self) -> Sequence[str]:
        """A name for each sample, in a stable order: the file below the folder, "#row" behind it where it holds
        several. Cheap: opens no file of states."""

    def read(self, item: str) -> ForeignSample:
        """One sample. Where files are mapped, only what is touched is read: asking for ids alone is cheap.

        Raises ForeignFileError (truncated, not the format's keys or shapes, ids without states, unsafe pickles).
        """


class Writer(Protocol):
    """Writes one format. Holds no state of a run: what is done is known from files.

    What it needs beyond the dataset (the final norm, a draft vocabulary) is given when it is built.
    """

    def check(self, identity: DatasetIdentity) -> None:
        """Raises FormatError where the trainer would misread the dataset, or it lacks what the format keeps."""

    def files(self, row: int, sample: Sample) -> Mapping[str, Sequence[bytes | memoryview]]:
        """The files of one sample, by path below OUT: their contents in pieces, to be written one after the other."""

    def finish(self, out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
        """Write what is of the whole set (token table, vocabulary), once every row is there. May be called again."""
