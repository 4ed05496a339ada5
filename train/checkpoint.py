"""Checkpoints of a run: whole or not there, the newest few and the best kept.

    checkpoints/step-000400/
      draft/                  a draft folder (train/draft_files.py), float32 master weights
      optimizer.safetensors   the optimizer's state: <kind>.<parameter>
      state.json              State
    checkpoints/best.json     the best checkpoint's name and its expected accepted length

A checkpoint is written under a temporary name, fsynced and renamed; one that is given up is renamed first. So a folder
named step-* is whole, and everything else in there may be deleted. No random state is stored: each random number is
drawn from a generator seeded by the run's seed and the position in the data.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder, publish, readable_by_all
from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINTS_FOLDER = "checkpoints"
BEST_FILE = "best.json"
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
DRAFT_FOLDER = "draft"
_CHECKSUMS = "files"  # in state.json: the xxh3 of every other file
_NAME = re.compile(r"step-[0-9]{6,12}")


class CheckpointError(EyasError):
    """A checkpoint that is missing or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a run stands after a step."""

    step: int  # updates made
    epoch: int  # of the next batch
    batch: int  # the next batch of that epoch
    num_tokens: int  # trained on so far, repeats included
    seconds: float  # of training so far
    finished: bool
    validation_due: bool  # stopped before these weights were measured, as they are to be
    validation: Mapping[str, Any] | None  # what was measured on these very weights
    best: Mapping[str, Any] | None  # name and accepted length of the best checkpoint so far, this one included


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of ``run``, oldest first."""
    folder = run / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the highest expected accepted length; the newest where none was measured.

    Raises CheckpointError where there is none.
    """
    path = run / CHECKPOINTS_FOLDER / BEST_FILE
    if path.is_file():
        best = run / CHECKPOINTS_FOLDER / str(json.loads(path.read_bytes())["checkpoint"])
        if not best.is_dir():
            raise CheckpointError(f"{best}, the best of {run}, is gone: name one of those that are left in its place")
        return best
    found = list_checkpoints(run)
    if not found:
        raise CheckpointError(f"{run}: no checkpoint there yet: run eyas train until it has saved one")
    return found[-1]


def read_state(checkpoint: Path) -> State:
    """Raises CheckpointError."""
    try:
        body = json.loads((checkpoint / STATE_FILE).read_bytes())
        body.pop(_CHECKSUMS)
        return State(**body)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE}: unreadable ({error!r}): {_mend(checkpoint)}") from error


def verify_checkpoint(checkpoint: Path) -> None:
    """Prove that every file is what was written. Raises CheckpointError naming the first that is not."""
    try:
        written = json.loads((checkpoint / STATE_FILE).read_bytes())[_CHECKSUMS]
        found = _checksums(checkpoint)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint}: unreadable ({error!r}): {_mend(checkpoint)}") from error
    for name, checksum in written.items():
        if found.get(name) != checksum:
            what = "is missing" if name not in found else "is not what was written"
            raise CheckpointError(f"{checkpoint / name} {what}: {_mend(checkpoint)}")


def _mend(checkpoint: Path) -> str:
    return f"remove {checkpoint}, and the same eyas train goes on from the checkpoint before"


def _checksums(checkpoint: Path) -> dict[str, str]:
    """xxh3-64, hex, of each file but state.json, by its path in the checkpoint."""
    import xxhash

    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name != STATE_FILE and not path.name.startswith(TEMPORARY_PREFIX):
            digest = xxhash.xxh3_64()
            with open(path, "rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            found[name] = digest.hexdigest()
    return found


def read_optimizer(checkpoint: Path) -> dict[str, Tensor]:
    """The optimizer's state. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(checkpoint / OPTIMIZER_FILE)  # type: ignore[no-any-return]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint / OPTIMIZER_FILE}: unreadable ({error}): {_mend(checkpoint)}") from error


def save_checkpoint(
    run: Path, state: State, *, save_draft: Callable[[Path], None], optimizer: Mapping[str, Tensor], keep: int
) -> Path:
    """Write a checkpoint, then best.json, then give up all but the ``keep`` newest and the best."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = run / CHECKPOINTS_FOLDER
    folder.mkdir(exist_ok=True)
    temporary = folder / f"{TEMPORARY_PREFIX}{os.getpid()}"
    temporary.mkdir()
    save_draft(temporary / DRAFT_FOLDER)
    try:
        save_file(dict(optimizer), temporary / OPTIMIZER_FILE)
    except SafetensorError as error:
        raise CheckpointError(
            f"{folder / checkpoint_name(state.step)}: not written ({error}): make room, then run the same command again"
        ) from error
    readable_by_all(temporary / OPTIMIZER_FILE)
    _fsync(temporary / OPTIMIZER_FILE)
    body = {**asdict(state), _CHECKSUMS: _checksums(temporary)}
    publish(temporary / STATE_FILE, (json.dumps(body, indent=2) + "\n").encode())
    fsync_folder(temporary)
    final = folder / checkpoint_name(state.step)
    if final.exists():  # same step, same weights: saved once more because it is now measured, or the run's last
        _remove(final)
    os.replace(temporary, final)
    fsync_folder(folder)
    point_to_best(run, state)
    for old in list_checkpoints(run)[:-keep]:
        if state.best is None or old.name != state.best["checkpoint"]:
            _remove(old)
    return final


def point_to_best(run: Path, state: State) -> None:
    """Write best.json as ``state`` knows it: after a kill it may be older than the newest checkpoint."""
    if state.best is not None:
        publish(run / CHECKPOINTS_FOLDER / BEST_FILE, (json.dumps(state.best) + "\n").encode())


def remove_leftovers(run: Path) -> None:
    """Remove what a killed run left half written or half removed. Call it under the run's lock."""
    folder = run / CHECKPOINTS_FOLDER
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(TEMPORARY_PREFIX):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove(checkpoint: Path) -> None:
    doomed = checkpoint.with_name(f"{TEMPORARY_PREFIX}{checkpoint.name}")
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def _fsync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
