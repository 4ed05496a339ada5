"""One capture from start to end: what is left to do, the engine's events, limits, signals, rejects.

Every rank of a launch runs this in step. Rank 0 recovers the dataset from the last crash, holds its lock, and decides
what is left to do; the others are told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eyas.capture.canaries import CANARIES_BYTES, capture_canaries, choose_canaries, new_session
from eyas.capture.engines import create_engine, hash_weights, installed_version, read_nodes
from eyas.capture.engines.base import Engine, EngineSettings, Forwarded, Rejected, Sealed, Sink, TargetOutline, Work
from eyas.capture.errors import CaptureFailed, PreparedError
from eyas.capture.launch import follow_parent
from eyas.capture.nodes import Leader, Node
from eyas.capture.prepared import PreparedSamples
from eyas.capture.ranks import Ranks
from eyas.shards.canaries import CANARIES_FOLDER, SESSION, begin_canaries
from eyas.shards.identity import (
    IDENTITY_FILE,
    DatasetIdentity,
    IdentityError,
    TargetIdentity,
    create_or_match,
    read_identity,
)
from eyas.shards.ledger import (
    LEDGER_FOLDER,
    SHARDS_FOLDER,
    Problem,
    check_worker_name,
    lock_dataset,
    read_ledgers,
    recover,
)
from eyas.shards.rejects import REJECTS_FOLDER, append_reject, read_rejects
from eyas.shards.sample import TokenSample

PROBE_SAMPLES = 2
PROBE_TOKENS = 256  # of each probe sample: enough to tell taps apart, quick on a CPU


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """A capture, resolved: everything that decides what is written and when to stop."""

    prepared: Path
    dataset: Path
    engine: str
    settings: EngineSettings
    codec: Literal["raw", "zstd"] = "raw"
    worker: str  # rank r writes as f"{worker}-{r}"
    shard_bytes: int = 1 << 30
    codec_threads: int = 8
    max_samples: int | None = None  # the first so many of the prepared samples
    max_runtime_seconds: float | None = None
    max_rejects: float = 0.01  # share of the prepared samples
    retry_rejects: bool = False

    def __post_init__(self) -> None:
        check_worker_name(f"{self.worker}-0")  # before any folder is made


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a capture has to do, and what is behind it. Token counts are those of the prepared samples."""

    rows: npt.NDArray[np.int64]  # [R] rows of the prepared samples that are left
    lengths: npt.NDArray[np.int64]  # [R] tokens of each
    num_samples: int  # wanted in all
    num_tokens: int
    num_done: int
    num_done_tokens: int
    num_rejected: int  # and not tried again

    @property
    def num_left(self) -> int:
        return len(self.rows)

    @property
    def num_left_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How far a capture has come, over all ranks; what this run did unless named otherwise."""

    num_samples: int  # through the target
    num_tokens: int
    num_bytes: int  # sealed
    num_shards: int
    num_rejects: int


@dataclass(frozen=True, kw_only=True)
class CaptureSummary:
    """How a capture ended."""

    rank: int  # of this process; the rest is over all ranks
    dataset: str
    num_samples: int  # wanted in all
    num_done: int  # sealed, earlier runs included
    num_rejected: int  # earlier runs included
    num_left: int
    num_new_samples: int  # sealed or rejected by this run
    num_new_tokens: int  # through the target
    num_new_bytes: int
    seconds: float  # of this run, loading included
    capture_seconds: float  # from the first batch on
    stopped: str | None  # why it stopped with work left: "signal" or "max runtime"


def plan_capture(prepared: PreparedSamples, dataset: Path, *, max_samples: int | None, retry_rejects: bool) -> Plan:
    """Compare the prepared samples with the ledgers: what is left. Opens no shard file."""
    ids = np.asarray(prepared.sample_ids, dtype=np.uint64)  # [N]
    lengths = np.asarray(prepared.lengths, dtype=np.int64)  # [N]
    if max_samples is not None:
        ids, lengths = ids[:max_samples], lengths[:max_samples]
    done = np.isin(ids, read_ledgers(dataset).sample_ids())
    rejected = np.zeros(len(ids), dtype=bool)
    if not retry_rejects:
        rejected_ids = [int(name, 16) for name in read_rejects(dataset)]
        rejected = np.isin(ids, np.array(rejected_ids, dtype=np.uint64)) & ~done
    rows = np.flatnonzero(~done & ~rejected)
    return Plan(
        rows=rows,
        lengths=lengths[rows],
        num_samples=len(ids),
        num_tokens=int(lengths.sum()),
        num_done=int(done.sum()),
        num_done_tokens=int(lengths[done].sum()),
        num_rejected=int(rejected.sum()),
    )


def bytes_per_token(config: CaptureConfig, outline: TargetOutline) -> int:
    """Of a shard, before compression: taps, last hidden, token, mask and target statistics."""
    settings = config.settings
    width = (len(settings.taps) + (settings.last_hidden is not None)) * outline.hidden_size
    return width * (4 if settings.dtype == "float32" else 2) + 5 + (8 if settings.target_statistics else 0)


def check_tokenizer(config: CaptureConfig, prepared: PreparedSamples) -> None:
    """Refuse a target whose tokenizer is not the one that the samples were prepared with. Raises PreparedError."""
    from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity

    settings = config.settings
    tokenizer = load_tokenizer(settings.target, settings.revision, settings.trust_remote_code)
    found = asdict(tokenizer_identity(settings.target, tokenizer, settings.revision))
    differing = [name for name, value in asdict(prepared.tokenizer).items() if value != found[name]]
    if differing:
        raise PreparedError(
            f"{config.prepared} was prepared with another tokenizer than that of {settings.target} "
            f"({', '.join(differing)} differ): prepare it again with --target {settings.target}"
        )


def planned_identity(config: CaptureConfig, prepared: PreparedSamples, outline: TargetOutline) -> DatasetIdentity:
    """What dataset.json would hold, as far as it is known before the target is loaded.

    What only the loaded target tells (its final norm, ...) is taken from the dataset that is there already, and left
    empty where there is none. Raises IdentityError for options that no dataset can have.
    """
    known: dict[str, Any] = {
        "config_hash": outline.config_hash,
        "model_class": outline.model_class,
        "num_layers": outline.num_layers,
        "hidden_size": outline.hidden_size,
        "vocab_size": outline.vocab_size,
    }
    if (config.dataset / IDENTITY_FILE).exists():
        # Here and not once the target is loaded: where nothing is left to capture it never is.
        settings = config.settings
        known["weights_hash"] = hash_weights(config.engine, target=settings.target, revision=settings.revision)
        return _identity(config, prepared, replace(read_identity(config.dataset).target, **known))
    target = TargetIdentity(
        name=config.settings.target,
        revision=None,
        weights_hash=None,
        weight_dtype=outline.dtype,
        quantization=None,
        final_norm="",
        final_norm_eps=None,
        logit_scale=1.0,
        logit_softcap=None,
        lm_head_bias=False,
        lm_head_rows=outline.vocab_size,
        **known,
    )
    return _identity(config, prepared, target)


def check_identity_early(config: CaptureConfig, planned: DatasetIdentity) -> None:
    """Refuse another dataset in the output folder before the target is loaded. Raises IdentityError."""
    if (config.dataset / IDENTITY_FILE).exists():
        create_or_match(config.dataset, planned)
        return
    # What a start that was killed leaves is hidden, or a folder of ours.
    others = [path.name for path in config.dataset.glob("*") if not path.name.startswith(".")]
    if others and not set(others) <= {SHARDS_FOLDER, LEDGER_FOLDER, REJECTS_FOLDER}:
        raise IdentityError(
            f"{config.dataset} is no dataset and not empty (it holds {', '.join(sorted(others)[:3])}): give another OUT"
        )


def this_node(config: CaptureConfig, planned: DatasetIdentity) -> Node | None:
    """Which node of a launch over several this process is; None where there is one. Raises UsageError."""
    num_nodes, rank, address, port = read_nodes(config.engine, config.settings)
    if num_nodes == 1:
        return None
    settings, own = config.settings, ("--node-rank", "--node_rank", "-r")
    options = [
        option
        for before, option in zip(("", *settings.engine_options), settings.engine_options, strict=False)
        if before not in own and option.partition("=")[0] not in own
    ]
    identity = planned.to_json()
    means = {
        **{name: json.dumps(identity[name]) for name in ("taps", "last_hidden", "dtype", "target_statistics", "codec")},
        "the target's config.json": planned.target.config_hash,
        "the prepared samples": planned.prepared.fingerprint,
        "--engine": config.engine,
        "its version": installed_version(config.engine),
        "--tp": str(settings.tp),
        "--batch-tokens": str(settings.batch_tokens),
        "options after --": " ".join(options),
    }
    return Node(rank=rank, num_nodes=num_nodes, address=address, port=port + 1, means=means)


def run_capture(
    config: CaptureConfig,
    *,
    should_stop: Callable[[], bool],
    on_plan: Callable[[Plan, list[Problem]], None],
    on_progress: Callable[[Tally], None],
    other_nodes: Leader | None = None,
) -> CaptureSummary:
    """Capture what is left of ``config.prepared`` into ``config.dataset``. Call it on every rank.

    ``should_stop`` is asked between batches; once true, what is complete is sealed and the summary says "signal".
    ``on_plan`` and ``on_progress`` are called on rank 0 only. Raises EyasError subclasses (CaptureFailed when too many
    samples were rejected). What was sealed before a failure stays.
    """
    started = time.monotonic()
    deadline = started + config.max_runtime_seconds if config.max_runtime_seconds is not None else float("inf")
    prepared = PreparedSamples.open(config.prepared)
    follow_parent()
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks())
        problems: list[Problem] = []
        if ranks.rank == 0:
            config.dataset.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_dataset(config.dataset))
            if (config.dataset / IDENTITY_FILE).exists():
                problems = recover(config.dataset, read_identity(config.dataset))
        plan = ranks.broadcast(_plan(config, prepared) if ranks.rank == 0 else None)
        work = Work(source=prepared, rows=plan.rows, lengths=plan.lengths)
        if ranks.rank == 0:
            on_plan(plan, problems)
        tally = _Tally(ranks)
        capture_started = time.monotonic()
        max_rejects = int(config.max_rejects * plan.num_samples)

        def too_many_rejects() -> bool:
            return plan.num_rejected + tally.now().num_rejects > max_rejects

        def refuse_too_many_rejects() -> None:
            if too_many_rejects():
                raise CaptureFailed(
                    f"{plan.num_rejected + tally.now().num_rejects} of {plan.num_samples} samples were rejected, more "
                    f"than --max-rejects {config.max_rejects:g} allows ({max_rejects}); the reasons are in "
                    f"{config.dataset / REJECTS_FOLDER}. What was captured is kept: mend the cause and run it again "
                    f"with --retry-rejects, or allow more with --max-rejects."
                )

        refuse_too_many_rejects()
        if plan.num_left and not should_stop():
            if other_nodes is not None:
                other_nodes.start()
            engine = stack.enter_context(create_engine(config.engine, config.settings))
            if other_nodes is not None:
                stack.callback(other_nodes.stop)
            identity = _identity(config, prepared, engine.target)
            engine.self_test(_probe(work))
            if ranks.rank == 0:
                create_or_match(config.dataset, identity)
                begin_canaries(config.dataset, identity)
            session = ranks.broadcast(new_session() if ranks.rank == 0 else None)
            sink = Sink(
                dataset=config.dataset,
                identity=identity,
                worker=config.worker,
                shard_bytes=config.shard_bytes,
                codec_threads=config.codec_threads,
            )
            capture_canaries(
                engine,
                choose_canaries(prepared, identity.target.vocab_size),
                replace(
                    sink,
                    dataset=config.dataset / CANARIES_FOLDER,
                    shard_bytes=CANARIES_BYTES,
                    metadata=((SESSION, session),),
                ),
                rank=ranks.rank,
                should_stop=should_stop,
            )
            ranks.barrier()
            capture_started = time.monotonic()
            _pump_events(
                engine,
                work,
                sink,
                rank=ranks.rank,
                tally=tally,
                should_stop=lambda: should_stop() or time.monotonic() > deadline or too_many_rejects(),
                on_progress=on_progress if ranks.rank == 0 else None,
            )
        ranks.barrier()
        finished = time.monotonic()
        after = ranks.broadcast(_plan(replace(config, retry_rejects=False), prepared) if ranks.rank == 0 else None)
        total = tally.now()
        refuse_too_many_rejects()
        reason = "signal" if should_stop() else "max runtime" if finished > deadline else None
        if after.num_left and reason is None:
            raise CaptureFailed(
                f"the engine ended with {after.num_left} samples neither captured nor rejected: run it again; if it "
                f"ends so again, this is a fault of eyas"
            )
        return CaptureSummary(
            rank=ranks.rank,
            dataset=str(config.dataset),
            num_samples=plan.num_samples,
            num_done=after.num_done,
            num_rejected=after.num_rejected,
            num_left=after.num_left,
            num_new_samples=total.num_samples,
            num_new_tokens=total.num_tokens,
            num_new_bytes=total.num_bytes,
            seconds=finished - started,
            capture_seconds=finished - capture_started,
            stopped=reason if after.num_left else None,
        )


class _Tally:
    """Counters that all ranks add to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def add(self, *, samples: int = 0, tokens: int = 0, num_bytes: int = 0, shards: int = 0, rejects: int = 0) -> None:
        for name, amount in (
            ("samples", samples),
            ("tokens", tokens),
            ("bytes", num_bytes),
            ("shards", shards),
            ("rejects", rejects),
        ):
            if amount:
                self._ranks.count(name, amount)

    def now(self) -> Tally:
        count = self._ranks.count
        return Tally(
            num_samples=count("samples"),
            num_tokens=count("tokens"),
            num_bytes=count("bytes"),
            num_shards=count("shards"),
            num_rejects=count("rejects"),
        )


def _pump_events(
    engine: Engine,
    work: Work,
    sink: Sink,
    *,
    rank: int,
    tally: _Tally,
    should_stop: Callable[[], bool],
    on_progress: Callable[[Tally], None] | None,
) -> None:
    for event in engine.capture(work, sink, should_stop):
        if isinstance(event, Forwarded):
            tally.add(samples=event.num_samples, tokens=event.num_tokens)
        elif isinstance(event, Sealed):
            tally.add(num_bytes=event.shard.num_bytes, shards=1)
        elif isinstance(event, Rejected):
            append_reject(sink.dataset, f"{sink.worker}-{rank}", event.sample_id, event.reason)
            tally.add(rejects=1)
        if on_progress is not None:
            on_progress(tally.now())


def _plan(config: CaptureConfig, prepared: PreparedSamples) -> Plan:
    return plan_capture(prepared, config.dataset, max_samples=config.max_samples, retry_rejects=config.retry_rejects)


def _identity(config: CaptureConfig, prepared: PreparedSamples, target: TargetIdentity) -> DatasetIdentity:
    settings = config.settings
    return DatasetIdentity(
        stage="captured",
        taps=settings.taps,
        last_hidden=settings.last_hidden,
        dtype=settings.dtype,
        codec=config.codec,
        target_statistics=settings.target_statistics,
        target=target,
        tokenizer=prepared.tokenizer,
        prepared=prepared.identity,
    )


def _probe(work: Work) -> list[TokenSample]:
    """The first tokens of a few samples that are still to be captured."""
    probe = []
    for row in work.rows[:PROBE_SAMPLES]:
        sample = work.source[int(row)]
        probe.append(
            replace(sample, input_ids=sample.input_ids[:PROBE_TOKENS], loss_mask=sample.loss_mask[:PROBE_TOKENS])
        )
    return probe
