"""Starts another trainer on a dataset of ours: exports what it reads, builds its command line, streams its log."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.sample import parse_sample_ids
from eyas.standardize.formats.registry import create_writer
from eyas.standardize.formats.write_rows import write_rows
from eyas.taps.errors import EyasError
from eyas.train.peers import specforge, speculators
from eyas.train.peers.settings import PeerSettings
from eyas.train.run import RunPlan, TrainConfig
from eyas.train.split import validation_mask

DATA_FOLDER = "data"
_REQUIRES = {"speculators": "pip install speculators==0.9.0", "specforge": "pip install specforge"}


class PeerError(EyasError):
    """Another trainer that is not installed, or that failed."""


def settings_of(config: TrainConfig, plan: RunPlan, *, processes: int, extra: tuple[str, ...]) -> PeerSettings:
    """What of a run's options another trainer can be told. The rest is its own; ``extra`` goes to it as it is."""
    if config.epochs is None:
        raise ValueError("another trainer is told epochs, not steps")
    _, held_out = _split(config, plan)
    whole = len(plan.vocabulary) == plan.vocabulary.vocab_size
    return PeerSettings(
        target=config.target,
        run=config.run,
        processes=processes,
        epochs=config.epochs,
        batch_tokens=config.batch_tokens,
        ttt_steps=config.ttt_steps,
        learning_rate=config.optimizer.learning_rate,
        optimizer=config.optimizer.optimizer,
        schedule=config.optimizer.schedule,
        seed=config.seed,
        draft_vocab_size=None if whole else len(plan.vocabulary),
        # Theirs is int(rows * share): half a row more keeps rounding from moving the border.
        train_share=min(1.0, (int((~held_out).sum()) + 0.5) / len(held_out)),
        extra=extra,
    )


def command_line(trainer: str, settings: PeerSettings, plan: RunPlan) -> list[str]:
    """What is run. Raises UsageError for options that the trainer does not have."""
    data = settings.run / DATA_FOLDER
    if trainer == "speculators":
        return speculators.command(settings, plan.dataset, plan.target.facts, data)
    specforge.config(settings, plan.dataset, plan.target.facts, data)
    return specforge.command(settings)


def launch(
    trainer: str, settings: PeerSettings, config: TrainConfig, plan: RunPlan, written: Callable[[int], None]
) -> int:
    """Write the data, training samples first, and run the trainer to its end; returns its exit status.

    The data of a call that was cut short is completed. Its log goes where ours does. SIGTERM and Ctrl-C reach it.
    Raises PeerError where it is not installed, and the writers' errors for data that it would misread.
    """
    import torch

    from eyas.train.target_parts import load_target_parts

    _require(trainer)
    settings.run.mkdir(parents=True, exist_ok=True)
    data, dataset = settings.run / DATA_FOLDER, plan.dataset
    ids, held_out = _split(config, plan)
    order = [*ids[~held_out].tolist(), *ids[held_out].tolist()]
    whole = settings.draft_vocab_size is None
    d2t, t2d = (None, None) if whole else (plan.vocabulary.d2t, plan.vocabulary.t2d)
    norm = None
    if trainer == "specforge":
        dtype = getattr(torch, plan.identity.dtype)
        norm = load_target_parts(settings.target, dtype=dtype).as_captured(plan.identity.target).final
    write_rows(
        dataset,
        data,
        create_writer(trainer, final_norm=norm, d2t=d2t, t2d=t2d),
        format=trainer,
        sample_ids=order,
        options={} if whole else {"draft vocabulary": plan.vocabulary.fingerprint},
        written=written,
    )
    if trainer == "specforge":
        values = specforge.config(settings, dataset, plan.target.facts, data)
        publish(settings.run / specforge.CONFIG_FILE, specforge.render(values).encode())
    command = command_line(trainer, settings, plan)
    with subprocess.Popen(command) as process:
        previous = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in _FORWARDED}
        try:
            return process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def _split(config: TrainConfig, plan: RunPlan) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.bool_]]:
    """Sample ids [N] in the order of the ledgers, and which of them are held out, bool [N]."""
    ids = np.array([sample for entry in plan.dataset.ledgers.entries for sample in entry.sample_ids])
    return ids, validation_mask(parse_sample_ids(ids.tolist()), config.validation)


def _require(trainer: str) -> None:
    found = importlib.util.find_spec("speculators") if trainer == "speculators" else shutil.which("specforge")
    if found is None:
        raise PeerError(f"--trainer {trainer}: it is not installed here: {_REQUIRES[trainer]}")
