"""A run: its options, what follows from them and the data before a step is made, and run.json.

run.json holds every option and which dataset (by its shards' names and checksums), target and draft the run is about.
The same command goes on with it; a command that differs in what decides the weights is refused. Before the first
checkpoint there is nothing to go on with, and any command starts anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.shards.atomic import publish
from eyas.shards.identity import DatasetIdentity, read_identity
from eyas.shards.token_counts import read_token_counts, shards_fingerprint
from eyas.taps.errors import EyasError, UsageError
from eyas.train.checkpoint import (
    CHECKPOINTS_FOLDER,
    DRAFT_FOLDER,
    best_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from eyas.train.optimizer import OptimizerOptions
from eyas.train.samples import SAMPLES_FILE, read_samples
from eyas.train.vocabulary import VOCABULARY_FILE, DraftVocabulary, always_ids, build_vocabulary

if TYPE_CHECKING:
    from eyas.align.checks.subject import TargetFolder
    from eyas.align.draft import Draft
    from eyas.align.verdict import Report
    from eyas.shards.dataset import Dataset
    from eyas.train.shape import DraftShape

RUN_FILE = "run.json"
RUN_FORMAT_VERSION = 1
DEFAULT_DRAFT_VOCAB_SIZE = 32_000


class RunError(EyasError):
    """A run folder that holds another run, or data that cannot be trained on."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a run, resolved. Raises UsageError for values that contradict each other."""

    # What decides the weights: a run that is continued must have the same.
    draft_vocab_size: int | None  # None: that of init_from, else 32 000 or the target's if that is smaller
    init_from: str | None
    draft_layers: int | None  # None: that of init_from, else 1
    draft_hidden_size: int | None  # None: that of init_from, else the target's
    draft_switches: tuple[str, ...]  # of the forward, those that are on (align/loaders/base.py, FLAGS)
    serving_engine: str  # whose config the checkpoints carry; eyas export writes any other
    ttt_steps: int
    loss: str
    step_weights: tuple[float, ...]  # [ttt_steps]
    batch_tokens: int
    batches_per_step: int  # over all ranks
    overlong: str  # truncate or skip: samples longer than batch_tokens
    optimizer: OptimizerOptions
    noise: float
    validation: float
    seed: int
    dtype: str
    # How long: may grow.
    epochs: int | None
    max_steps: int | None
    # What may differ each time.
    dataset: Path
    run: Path
    target: Path
    trust_remote_code: bool
    validate_every: int | None  # steps; None: at the end of each epoch
    save_every: int | None
    keep: int
    device: str  # cpu or cuda
    shard: bool
    compile: bool
    reader_threads: int | None
    tensorboard: bool
    max_runtime_seconds: float | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.max_steps is None):
            raise UsageError("--epochs and --max-steps both say how long to train: give one of them")
        if len(self.step_weights) != self.ttt_steps:
            raise UsageError(
                f"--step-weights: {len(self.step_weights)} weights for --ttt-steps {self.ttt_steps}: give one a step"
            )
        if self.shard and self.optimizer.optimizer == "muon":
            raise UsageError(
                "--shard splits each matrix over the ranks, and muon needs it whole: use --optimizer adamw"
            )

    def decisive(self) -> dict[str, Any]:
        """What decides the weights, as run.json holds it."""
        names = [field.name for field in fields(self)]
        values = asdict(self)
        chosen = {name: values[name] for name in names[: names.index("epochs")]}
        flat = {**chosen.pop("optimizer"), **chosen}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What follows from the options, the dataset and the target before anything is computed."""

    dataset: Dataset
    fingerprint: str  # of the dataset's shards
    target: TargetFolder
    vocabulary: DraftVocabulary
    draft_config: Mapping[str, Any]  # as the serving engine reads it
    shape: DraftShape

    @property
    def identity(self) -> DatasetIdentity:
        return self.dataset.identity


def plan_run(config: TrainConfig) -> RunPlan:
    """Read what a run is about. Raises RunError, UsageError, TokenCountsError, VocabularyError, ExportError, ..."""
    from eyas.align.checks.subject import TargetFolder
    from eyas.align.draft import DraftConfig
    from eyas.shards.dataset import Dataset
    from eyas.train.shape import DraftShape

    identity = read_identity(config.dataset)
    if identity.stage != "standard":
        raise RunError(
            f"{config.dataset} is of stage {identity.stage}, expected standard (a draft's taps, every shard verified): "
            f"eyas standardize {config.dataset} STANDARD --taps default, then train on STANDARD"
        )
    if identity.last_hidden is None:
        raise RunError(
            f"{config.dataset} holds no last hidden states, which the target's distribution is computed from: capture "
            f"again with --last-hidden after:last"
        )
    dataset = Dataset.open(config.dataset)
    fingerprint = shards_fingerprint(dataset.ledgers.entries)
    found = read_run(config.run) if list_checkpoints(config.run) else None
    if found is not None and found["dataset"]["fingerprint"] != fingerprint:
        was = found["dataset"]
        raise RunError(
            f"{config.run} was trained on other data: {was['num_samples']:,} samples, {was['num_tokens']:,} tokens in "
            f"{was['path']}; {config.dataset} now holds {dataset.num_samples:,} samples, {dataset.num_tokens:,} tokens "
            f"in other shards. Give another RUN (and --init-from {config.run} to start from its draft)"
        )
    target = TargetFolder(config.target, config.trust_remote_code)
    vocabulary, draft_config = _draft(config, identity, target, found)
    shape = DraftShape.from_draft_config(DraftConfig(draft_config), len(identity.taps))
    return RunPlan(
        dataset=dataset,
        fingerprint=fingerprint,
        target=target,
        vocabulary=vocabulary,
        draft_config=draft_config,
        shape=shape,
    )


def _draft(
    config: TrainConfig, identity: DatasetIdentity, target: TargetFolder, found: Mapping[str, Any] | None
) -> tuple[DraftVocabulary, Mapping[str, Any]]:
    """The draft's vocabulary and config: those of the run that is there (``found``), of --init-from, or new ones."""
    from eyas.align.draft import read_draft
    from eyas.align.draft_config import make_draft_config
    from eyas.align.engine import parse_engine
    from eyas.align.loaders.base import FLAGS
    from eyas.train.draft_files import OWN_KEY

    if found is not None:
        return DraftVocabulary.load(config.run / VOCABULARY_FILE), found["draft"]
    vocab_size = identity.target.vocab_size
    layers, hidden_size, switches = config.draft_layers or 1, config.draft_hidden_size, config.draft_switches
    if config.init_from is not None:
        init = read_draft(init_folder(config.init_from))
        if config.draft_layers or config.draft_hidden_size or config.draft_switches:
            raise UsageError("--init-from says what the draft is like: leave out its layers, hidden size and norms")
        vocabulary = _init_vocabulary(config, init, vocab_size)
        layers, hidden_size = init.config.num_layers, init.config.hidden_size
        switches = tuple(name for name in FLAGS if (said := init.config.declared(name)) is not None and said[1])
    else:
        size = config.draft_vocab_size or min(DEFAULT_DRAFT_VOCAB_SIZE, vocab_size)
        counts = read_token_counts(config.dataset)
        vocabulary = build_vocabulary(counts, size, always_ids(target, counts))
    made = make_draft_config(
        identity,
        target.text,
        target.facts,
        parse_engine(config.serving_engine),
        draft_vocab_size=len(vocabulary),
        num_layers=layers,
        hidden_size=None if hidden_size == identity.hidden_size else hidden_size,
        switches=dict.fromkeys(switches, True),
    )
    own = {"taps": [str(tap) for tap in identity.taps], "ttt_steps": config.ttt_steps, "dataset": identity.to_json()}
    return vocabulary, {**made.config, "torch_dtype": "float32", OWN_KEY: own}


def _init_vocabulary(config: TrainConfig, draft: Draft, vocab_size: int) -> DraftVocabulary:
    if draft.d2t is None or draft.t2d is None:
        vocabulary = DraftVocabulary.identity(vocab_size)
    else:
        vocabulary = DraftVocabulary.from_maps(draft.d2t, draft.t2d, where=str(draft.path))
    if config.draft_vocab_size not in (None, len(vocabulary)):
        raise UsageError(
            f"--draft-vocab-size {config.draft_vocab_size}: the draft of --init-from proposes {len(vocabulary)} ids; "
            f"leave the option out"
        )
    return vocabulary


def init_folder(init_from: str) -> Path:
    """The draft folder that --init-from names: a run's best checkpoint's, a checkpoint's, or itself."""
    path = Path(init_from)
    if not path.exists():
        raise UsageError(f"{init_from} does not exist: give a run, a checkpoint or a draft's folder")
    if (path / CHECKPOINTS_FOLDER).is_dir() or (path / RUN_FILE).is_file():
        path = best_checkpoint(path)
    if not (path / DRAFT_FOLDER).is_dir():
        return path
    verify_checkpoint(path)
    return path / DRAFT_FOLDER


def check_run(config: TrainConfig, plan: RunPlan) -> Report:
    """The static checks of the dataset against the target and the draft that is to be trained."""
    from eyas.align.checks.subject import Subject
    from eyas.align.draft import Draft, DraftConfig
    from eyas.align.engine import parse_engine
    from eyas.align.static import check_subject

    return check_subject(
        Subject(
            dataset=config.dataset,
            identity=plan.identity,
            ledgers=plan.dataset.ledgers,
            draft=Draft(
                path=config.run,
                config=DraftConfig(plan.draft_config),
                tensors={},
                d2t=plan.vocabulary.d2t,
                t2d=plan.vocabulary.t2d,
            ),
            engine=parse_engine(config.serving_engine),
            target=plan.target,
        )
    )


def read_run(run: Path) -> dict[str, Any] | None:
    """run.json of ``run``; None where there is none. Raises RunError."""
    path = run / RUN_FILE
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: unreadable ({error})") from error
    if not isinstance(body, dict) or body.get("format") != "eyas-run":
        raise RunError(f"{path}: no eyas run")
    if body.get("format_version") != RUN_FORMAT_VERSION:
        raise RunError(f"{path}: format version {body.get('format_version')!r}: use the eyas that wrote it")
    return body


def match_run(config: TrainConfig) -> None:
    """Prove that RUN is empty or holds a run that this command may go on with. Raises RunError with each difference."""
    found = read_run(config.run)
    if found is None or not list_checkpoints(config.run):
        others = {path.name for path in config.run.glob("*") if not path.name.startswith(".")}
        if found is None and others - {VOCABULARY_FILE, SAMPLES_FILE}:
            raise RunError(
                f"{config.run} is no run and not empty (it holds {', '.join(sorted(others)[:3])}): give another RUN"
            )
        return
    wanted = json.loads(json.dumps(config.decisive()))
    differences = [(name, found["options"].get(name), value) for name, value in wanted.items()
                   if found["options"].get(name) != value]  # fmt: skip
    for name in ("epochs", "max_steps"):
        was, now = found["options"].get(name), getattr(config, name)
        if (was is None) != (now is None) or (was is not None and now < was):
            differences.append((name, was, now))
    if differences:
        text = "; ".join(f"{_option(name)} was {was!r} and is {now!r}" for name, was, now in differences)
        hint = ""
        if any(name == "batches_per_step" for name, _, _ in differences):
            hint = " (batches_per_step is --accumulate times the number of ranks)"
        raise RunError(
            f"{config.run} was started with other options: {text}{hint}. Give the same options, or another RUN. "
            f"--epochs and --max-steps may grow"
        )


def write_run(config: TrainConfig, plan: RunPlan) -> None:
    """Write run.json, the vocabulary and the table of samples. Call it under the run's lock, after match_run()."""
    if not list_checkpoints(config.run):  # what a start before the first checkpoint left may be of other options
        plan.vocabulary.save(config.run / VOCABULARY_FILE)
        read_samples(plan.dataset).save(config.run / SAMPLES_FILE)
    body = {
        "format": "eyas-run",
        "format_version": RUN_FORMAT_VERSION,
        "options": {**config.decisive(), "epochs": config.epochs, "max_steps": config.max_steps},
        "dataset": {
            "path": str(config.dataset),
            "fingerprint": plan.fingerprint,
            "num_samples": plan.dataset.num_samples,
            "num_tokens": plan.dataset.num_tokens,
            "identity": plan.identity.to_json(),
        },
        "target": str(config.target),
        "draft": dict(plan.draft_config),
    }
    publish(config.run / RUN_FILE, (json.dumps(body, indent=2) + "\n").encode())


def _option(name: str) -> str:
    return name if name == "batches_per_step" else f"--{name.replace('_', '-')}"
