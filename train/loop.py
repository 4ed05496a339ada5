"""The training loop.

    for each step:
        read its batches (train/reader.py, ahead of time)
        unroll the draft on each and add up the gradients of the summed loss (train/ttt.py)
        add them up over ranks, divide by the number of loss rows of all of them, clip, update (train/optimizer.py)

The loss of a step is the mean over its loss rows wherever they were computed, so that one rank with twice the
accumulation makes the same update as two ranks. Gradients are added up over ranks after the backward pass and not by
DistributedDataParallel: the unroll is one compiled graph whose gradients all come at its end, so there is nothing for
it to overlap with. On CUDA nothing waits for the GPU but the loop itself, two steps behind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from eyas.capture.launch import follow_parent
from eyas.shards.ledger import lock_dataset
from eyas.taps.errors import EyasError, UsageError
from eyas.train.batches import EpochPlan, Share, plan_epoch, rank_shares
from eyas.train.checkpoint import (
    CHECKPOINTS_FOLDER,
    DRAFT_FOLDER,
    State,
    checkpoint_name,
    list_checkpoints,
    point_to_best,
    read_optimizer,
    read_state,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)
from eyas.train.draft import DraftModel
from eyas.train.draft_files import WEIGHTS_FILE, load_draft, save_draft
from eyas.train.loss import LossName, TargetHead
from eyas.train.metrics import STATISTICS, Acceptance, MetricsWriter, flops, peak_flops
from eyas.train.optimizer import DraftOptimizer, copy_full, full_tensor, learning_rate
from eyas.train.ranks import Ranks
from eyas.train.reader import BatchReader, Job, ReadBatch, default_threads
from eyas.train.rope import rotary_table
from eyas.train.run import RunPlan, TrainConfig, init_folder, match_run, write_run
from eyas.train.samples import SAMPLES_FILE, SampleTable
from eyas.train.split import mix64, validation_mask
from eyas.train.target_parts import load_target_parts
from eyas.train.ttt import ttt_forward

_STEPS_A_COPY = 10  # whose numbers are fetched from the GPU at once
_STEPS_AHEAD = 2  # that the host may run ahead of the GPU: more would only pile up batches there


class DivergedError(EyasError):
    """Losses that are no numbers any more."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with, for its user to see."""

    num_training: int
    num_validation: int
    num_tokens: int  # of an epoch, as trained
    num_overlong: int  # samples over batch_tokens
    overlong: str  # what became of them
    num_batches: int  # of this epoch
    num_steps: int  # updates that the run takes; with epochs, about so many
    step: int  # updates made before
    fill: float  # share of batch rows that are no padding
    num_trained_parameters: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """How a run ended."""

    rank: int
    run: str
    step: int
    num_tokens: int  # trained on, earlier starts included
    seconds: float  # of training, earlier starts included
    data_wait: float  # share of this start's training time in which rank 0 waited for data
    finished: bool
    stopped: str | None  # why with work left: "signal" or "max runtime"
    best: dict[str, Any] | None
    validation: dict[str, Any] | None  # of the last checkpoint


class Listener(Protocol):
    """What rank 0 is told while it trains."""

    def start(self, start: Start) -> None: ...

    def step(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""


class Objective(nn.Module):
    """The draft with its loss: one module whose forward uses every parameter, which is what FSDP needs."""

    def __init__(self, model: DraftModel, head: TargetHead, rotary: tuple[Tensor, Tensor], config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self._head, self._rotary, self._config = head, rotary, config

    def forward(self, read: ReadBatch[Any], weights: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """weights: [K], of each step's mean loss -> the loss, a scalar; sums over rows [K, len(STATISTICS)].

        Plain tensors: FSDP looks for what it hooks into among them.
        """
        loss: LossName = self._config.loss  # type: ignore[assignment]
        out = ttt_forward(
            self.model,
            read.batch,
            self._head,
            rows=read.rows,
            rotary=self._rotary,
            num_steps=self._config.ttt_steps,
            loss=loss,
            step_weights=weights,
        )
        sums = [torch.stack([getattr(step, name) for name in STATISTICS]) for step in out.steps]
        return out.loss, torch.stack(sums).detach()


def train(
    config: TrainConfig, plan: RunPlan, *, should_stop: Callable[[], bool], listener: Listener | None
) -> TrainSummary:
    """Train until the run is finished or is to stop, on every rank. Raises EyasError subclasses.

    ``should_stop`` is asked after every step. What is there already is continued; a finished run is left alone.
    """
    started = time.monotonic()
    follow_parent()
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks(config.device))
        if config.batches_per_step % ranks.world_size:
            raise UsageError(f"{config.batches_per_step} batches a step cannot be dealt to {ranks.world_size} ranks")
        if ranks.is_first:
            config.run.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_dataset(config.run))
            match_run(config)
            write_run(config, plan)
            remove_leftovers(config.run)
        ranks.barrier()
        table = SampleTable.load(config.run / SAMPLES_FILE)
        deadline = float("inf") if config.max_runtime_seconds is None else started + config.max_runtime_seconds

        def why_stop() -> str | None:
            return "signal" if should_stop() else "max runtime" if time.monotonic() > deadline else None

        if config.device == "cuda" and not config.compile:
            torch.compiler.set_stance("force_eager")
        return _Training(config, plan, table, ranks, why_stop, listener).run()


class _Data:
    """Which samples are trained on and which are held out, and every epoch's batches."""

    def __init__(self, config: TrainConfig, table: SampleTable) -> None:
        self._config, self._table = config, table
        self._lengths = np.minimum(table.lengths, config.batch_tokens).astype(np.int64)
        overlong = table.lengths > config.batch_tokens
        used = ~overlong if config.overlong == "skip" else np.ones(len(table), dtype=np.bool_)
        held_out = validation_mask(table.ids, config.validation)
        self.num_overlong = int(overlong.sum())
        self.training = np.flatnonzero(used & ~held_out)
        self.validation = np.flatnonzero(used & held_out)
        if not len(self.training):
            raise UsageError(
                f"no sample is left to train on: {len(table):,} in the dataset, {self.num_overlong:,} of them longer "
                f"than --batch-tokens {config.batch_tokens}, {int(held_out.sum()):,} held out"
            )
        self.longest = int(self._lengths.max())
        self._epochs: dict[int, EpochPlan] = {}
        self._lock = threading.Lock()  # the reader's thread asks, too, and packing 1.4 M samples takes seconds

    def epoch(self, epoch: int) -> EpochPlan:
        """The batches of an epoch; this one's and the next's are kept, where the reader may be already."""
        with self._lock:
            if epoch not in self._epochs:
                self._epochs = {n: plan for n, plan in self._epochs.items() if n >= epoch - 1}
                self._epochs[epoch] = self._plan(self.training, self._config.seed, epoch)
            return self._epochs[epoch]

    def validation_plan(self) -> EpochPlan:
        return self._plan(self.validation, 0, 0)

    def _plan(self, samples: npt.NDArray[np.int64], seed: int, epoch: int) -> EpochPlan:
        table = self._table
        return plan_epoch(
            samples, table.ids, table.lengths, batch_tokens=self._config.batch_tokens, seed=seed, epoch=epoch
        )

    def tokens(self, plan: EpochPlan, start: int, stop: int) -> tuple[int, int]:
        """Rows of the batches start:stop, and the sum of their documents' squared lengths."""
        lengths = self._lengths[plan.members[plan.starts[start] : plan.starts[stop]]]
        return int(lengths.sum()), int((lengths**2).sum())


class _Training:
    def __init__(
        self,
        config: TrainConfig,
        plan: RunPlan,
        table: SampleTable,
        ranks: Ranks,
        why_stop: Callable[[], str | None],
        listener: Listener | None,
    ) -> None:
        self._config, self._plan, self._table, self._ranks = config, plan, table, ranks
        self._why_stop, self._listener = why_stop, listener
        self._device = ranks.device
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._data = _Data(config, table)
        self._stop: str | None = None
        checkpoints = list_checkpoints(config.run)
        self._checkpoint = checkpoints[-1] if checkpoints else None
        self._state = State(
            step=0, epoch=0, batch=0, num_tokens=0, seconds=0.0, finished=False, validation_due=False, validation=None,
            best=None,
        )  # fmt: skip
        if self._checkpoint is not None:
            self._state = read_state(self._checkpoint)
            best = self._state.best
            if best is not None and not (config.run / CHECKPOINTS_FOLDER / best["checkpoint"]).is_dir():
                self._state = replace(self._state, best=None)  # removed by hand: the next measured one is the best

    def run(self) -> TrainSummary:
        state, config = self._state, self._config
        if self._ranks.is_first:
            point_to_best(config.run, state)
        if state.finished and self._progress_now() >= 1:
            return self._summary(stopped=None)
        self._state = replace(state, finished=False)  # it was, and --epochs has grown
        self._build()
        with ExitStack() as stack:
            self._reader = stack.enter_context(self._open_reader(self._jobs()))
            self._log = stack.enter_context(_Log(config, plan=self._plan, ranks=self._ranks, listener=self._listener,
                                                 step=state.step))  # fmt: skip
            self._tell_start()
            stopped = self._steps()
        return self._summary(stopped=stopped, log=self._log)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        config, plan = self._config, self._plan
        ids = torch.from_numpy(plan.vocabulary.ids)  # int64 [Vd]
        load = {"dtype": self._dtype, "device": self._device}
        parts = load_target_parts(config.target, rows=ids, **load).as_captured(plan.identity.target)  # type: ignore[arg-type]
        full = None
        if not plan.identity.target_statistics:
            full = load_target_parts(config.target, **load).as_captured(plan.identity.target)  # type: ignore[arg-type]
        last_hidden = plan.identity.last_hidden
        assert last_hidden is not None
        head = TargetHead(
            parts=parts, ids=ids.to(self._device), last_hidden_is_final=last_hidden.kind == "final", full=full
        )
        model, weights = self._model()
        if plan.shape.shares_target_width:
            model.embed_tokens.weight = nn.Parameter(parts.embedding, requires_grad=False)
            # A published draft may have trained an lm_head of its own.
            model.lm_head.weight = nn.Parameter(weights.get("lm_head.weight", parts.head), requires_grad=False)
        # A sharded draft holds float32 parameters and computes in the working dtype by itself.
        model.to(self._device, torch.float32 if config.shard else self._dtype)
        for parameter in (model.embed_tokens.weight, model.lm_head.weight):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._dtype)
        rotary = rotary_table(plan.shape, self._data.longest + config.ttt_steps, self._device)
        self._objective = Objective(model, head, rotary, config)
        if config.shard:
            _shard(self._objective, self._dtype, self._ranks)
        self._optimizer = DraftOptimizer(model, config.optimizer)
        for name, master in self._optimizer.masters.items():
            copy_full(master, weights[name])
        self._optimizer.round()
        if self._checkpoint is not None:
            self._optimizer.load_state(read_optimizer(self._checkpoint))

    def _model(self) -> tuple[DraftModel, dict[str, Tensor]]:
        """The draft, and its float32 weights by name: of the checkpoint, of --init-from, or fresh from the seed."""
        from safetensors.torch import load_file

        config = self._config
        torch.manual_seed(config.seed)
        if self._checkpoint is None and config.init_from is not None:
            loaded = load_draft(init_folder(config.init_from), target=config.target, dtype=torch.float32)
            if loaded.taps != self._plan.identity.taps:
                raise UsageError(
                    f"--init-from {config.init_from} is fed {', '.join(map(str, loaded.taps))}, and the dataset holds "
                    f"{', '.join(map(str, self._plan.identity.taps))}: standardize with the draft's taps"
                )
            return loaded.model, {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
        model = DraftModel(self._plan.shape)
        if self._checkpoint is not None:
            verify_checkpoint(self._checkpoint)
            return model, load_file(self._checkpoint / DRAFT_FOLDER / WEIGHTS_FILE)
        return model, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    # -- the data -----------------------------------------------------------------------------------------------------

    def _open_reader(self, jobs: Iterator[Job[Any]]) -> BatchReader[Any]:
        config = self._config
        return BatchReader(
            self._plan.dataset,
            self._table,
            jobs,
            num_rows=config.batch_tokens,
            fixed=self._device.type == "cuda",
            device=self._device,
            dtype=self._dtype,
            num_steps=config.ttt_steps,
            threads=config.reader_threads or default_threads(),
        )

    def _jobs(self) -> Iterator[Job[tuple[int, Share]]]:
        """What this rank reads from where the run stands, without end."""
        epoch, first = self._state.epoch, self._state.batch
        while True:
            plan = self._data.epoch(epoch)
            for shares in self._shares(plan, first):
                yield from (Job(plan.samples(share.batch), (epoch, share)) for share in shares)
            epoch, first = epoch + 1, 0

    def _shares(self, plan: EpochPlan, first: int, per_step: int | None = None) -> Iterator[list[Share]]:
        ranks = self._ranks
        return rank_shares(
            plan.num_batches,
            first,
            per_step or self._config.batches_per_step,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )

    def _progress(self, epoch: int, batch: int, step: int) -> float:
        """How far the run is when ``batch`` of ``epoch`` is next, 0 to 1."""
        config = self._config
        if config.max_steps is not None:
            return step / config.max_steps
        assert config.epochs is not None
        return (epoch + batch / self._data.epoch(epoch).num_batches) / config.epochs if batch else epoch / config.epochs

    def _progress_now(self) -> float:
        return self._progress(self._state.epoch, self._state.batch, self._state.step)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _steps(self) -> str | None:
        """Train to the end, or until told to stop (returns why)."""
        save_every = self._config.save_every
        unsaved = False  # whether the state is another than the newest checkpoint's
        in_flight: deque[torch.cuda.Event] = deque()
        while True:
            stop = self._agree_to_stop()
            save = stop is not None or (save_every is not None and self._state.step % save_every == 0)
            if self._state.validation_due and stop is None:
                if not self._validate():
                    continue  # told to stop: it is due again when the run goes on
                save = unsaved = True
            if not self._state.validation_due and self._progress_now() >= 1:
                self._state = replace(self._state, finished=True)
                save = unsaved = True
            if save and unsaved:
                self._save()
                unsaved = False
            if self._state.finished or stop is not None:
                return None if self._state.finished else stop
            self._step()
            unsaved = True
            if self._device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                in_flight.append(event)
                if len(in_flight) > _STEPS_AHEAD:
                    in_flight.popleft().synchronize()

    def _agree_to_stop(self) -> str | None:
        """Why this run is to stop, once any rank was told to; the same from then on."""
        why = self._why_stop()
        if self._stop is None and self._ranks.any(why is not None):
            self._stop = why or "signal"
        return self._stop

    def _step(self) -> None:
        """One update on the next batches."""
        config, state = self._config, self._state
        plan = self._data.epoch(state.epoch)
        stop = min(state.batch + config.batches_per_step, plan.num_batches)
        num_tokens, square_tokens = self._data.tokens(plan, state.batch, stop)
        sums = torch.zeros(config.ttt_steps, len(STATISTICS), device=self._device)
        num_rows = 0
        for _ in next(self._shares(plan, state.batch)):
            read = next(self._reader)
            epoch, share = read.tag
            assert epoch == state.epoch
            assert state.batch <= share.batch < stop
            self._add_noise(read, epoch, share.batch)
            # Of sums and not of means: what a step is divided by is only known once all ranks have counted.
            counts = [0 if share.is_filler else count for count in read.num_rows]
            weights = tuple(w * count for w, count in zip(config.step_weights, counts, strict=True))
            loss, found = self._objective(read, weights)
            loss.backward()
            self._optimizer.accumulate()
            if not share.is_filler:
                sums += found
                num_rows += counts[0]
        total_rows = self._ranks.sum_(torch.tensor([float(num_rows)], device=self._device))
        scale = self._reduce_gradients() / total_rows[0].clamp(min=1)
        at_end = stop == plan.num_batches
        epoch, batch = (state.epoch + 1, 0) if at_end else (state.epoch, stop)
        before = self._progress(state.epoch, state.batch, state.step)
        after = self._progress(epoch, batch, state.step + 1)
        rate = learning_rate(config.optimizer, (before + after) / 2)
        norm = self._optimizer.step(rate, scale)
        step = state.step + 1
        every = config.validate_every
        self._state = replace(
            state,
            step=step,
            epoch=epoch,
            batch=batch,
            num_tokens=state.num_tokens + num_tokens,
            validation_due=len(self._data.validation) > 0
            and (after >= 1 or (at_end if every is None else step % every == 0)),
            validation=None,
        )
        record = {"kind": "train", "step": step, "epoch": epoch + batch / plan.num_batches, "learning_rate": rate}
        self._log.add(record, sums, norm, num_tokens, square_tokens, self._reader.wait_seconds)

    def _reduce_gradients(self) -> float:
        """Add the gradients up over ranks, in the dtype that the draft computes in; returns what they are still to be
        multiplied by (FSDP has averaged them)."""
        if self._config.shard:
            return float(self._ranks.world_size)
        if self._ranks.world_size > 1:
            grads = [p.grad for p in self._optimizer.masters.values() if p.grad is not None]
            flat = torch.cat([grad.flatten().to(self._dtype) for grad in grads])
            self._ranks.sum_(flat)
            torch._foreach_copy_(
                grads,
                [part.view_as(g) for part, g in zip(torch.split(flat, [g.numel() for g in grads]), grads, strict=True)],
            )
        return 1.0

    def _add_noise(self, read: ReadBatch[Any], epoch: int, batch: int) -> None:
        """Uniform noise on the features: (u - 0.5) * noise * 512 / length of the document, EAGLE's (its train/main.py,
        AddUniformNoise), from a generator seeded by the run's seed and the batch."""
        if not self._config.noise:
            return
        features, document = read.batch.features, read.batch.document.long()
        seed = int(mix64(np.array([self._config.seed], np.uint64), 1 + (epoch << 32 | batch))[0] >> np.uint64(1))
        draw = torch.Generator(self._device).manual_seed(seed)
        num_rows = len(document)
        places = torch.where(document >= 0, document, num_rows)
        lengths = torch.zeros(num_rows + 1, device=self._device).index_add_(
            0, places, torch.ones(num_rows, device=self._device)
        )
        noise = torch.rand(features.shape, generator=draw, device=self._device, dtype=features.dtype) - 0.5
        size = self._config.noise * 512 / lengths[places]  # [T]
        features += noise * size[:, None].to(features.dtype)

    # -- validation and checkpoints -----------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Measure the draft on the held-out samples; the state then says how good it is. False where told to stop."""
        config, state = self._config, self._state
        plan = self._data.validation_plan()
        shares = list(self._shares(plan, 0, self._ranks.world_size))
        jobs = (Job(plan.samples(share.batch), share) for step in shares for share in step)
        sums = torch.zeros(config.ttt_steps, len(STATISTICS), dtype=torch.float64, device=self._device)
        with torch.no_grad(), self._open_reader(jobs) as reader:
            for read in reader:
                _, measured = self._objective(read, config.step_weights)
                if not read.tag.is_filler:
                    sums += measured
                if self._agree_to_stop() is not None:
                    return False
        found = asdict(Acceptance.from_sums(self._ranks.sum_(sums).tolist(), config.step_weights))
        best = state.best
        if best is None or found["accepted_length"] > best["accepted_length"]:
            best = {"checkpoint": checkpoint_name(state.step), "accepted_length": found["accepted_length"]}
        self._state = replace(state, validation_due=False, validation=found, best=best)
        epoch = state.epoch + (state.batch / self._data.epoch(state.epoch).num_batches if state.batch else 0)
        self._log.flush()
        self._log.write({"kind": "validation", "step": state.step, "epoch": epoch, **found})
        self._log.restart_clock()
        return True

    def _save(self) -> None:
        self._log.flush()  # metrics first: a checkpoint never knows more steps than they
        if self._log.num_steps and not self._log.num_rows:
            raise UsageError(
                f"no trained token had a target in {self._log.num_steps:,} steps: masks are empty, samples have "
                f"under three tokens, or --batch-tokens {self._config.batch_tokens} cuts them before their answers"
            )
        masters = {name: full_tensor(master) for name, master in self._optimizer.masters.items()}
        optimizer = self._optimizer.state()
        if self._ranks.is_first:
            masters.setdefault("lm_head.weight", self._objective.model.lm_head.weight)
            state = replace(self._state, seconds=self._state.seconds + self._log.seconds)
            save_checkpoint(
                self._config.run,
                state,
                save_draft=lambda path: save_draft(path, masters, self._plan.vocabulary, self._plan.draft_config),
                optimizer=optimizer,
                keep=self._config.keep,
            )
        self._ranks.barrier()
        self._log.restart_clock()

    # -- reports ------------------------------------------------------------------------------------------------------

    def _tell_start(self) -> None:
        if self._listener is None or not self._ranks.is_first:
            return
        plan = self._data.epoch(self._state.epoch)
        num_tokens, _ = self._data.tokens(plan, 0, plan.num_batches)
        epochs = self._config.epochs or 0
        self._listener.start(
            Start(
                num_training=len(self._data.training),
                num_validation=len(self._data.validation),
                num_tokens=num_tokens,
                num_overlong=self._data.num_overlong,
                overlong="left out" if self._config.overlong == "skip" else "cut",
                num_batches=plan.num_batches,
                num_steps=self._config.max_steps or -(-plan.num_batches // self._config.batches_per_step) * epochs,
                step=self._state.step,
                fill=num_tokens / (plan.num_batches * self._config.batch_tokens),
                num_trained_parameters=sum(master.numel() for master in self._optimizer.masters.values()),
                world_size=self._ranks.world_size,
            )
        )

    def _summary(self, *, stopped: str | None, log: _Log | None = None) -> TrainSummary:
        state = self._state
        return TrainSummary(
            rank=self._ranks.rank,
            run=str(self._config.run),
            step=state.step,
            num_tokens=state.num_tokens,
            seconds=state.seconds + (0.0 if log is None else log.seconds),
            data_wait=0.0 if log is None else log.wait_seconds / max(log.seconds, 1e-9),
            finished=state.finished,
            stopped=stopped,
            best=None if state.best is None else dict(state.best),
            validation=None if state.validation is None else dict(state.validation),
        )


class _Log:
    """Turns what stands on the device into lines of metrics.jsonl, some steps late, so that no step waits for it.

    Every rank calls add() and flush() in the same places: sums are added up over ranks. Rank 0 writes.
    """

    def __init__(
        self, config: TrainConfig, *, plan: RunPlan, ranks: Ranks, listener: Listener | None, step: int
    ) -> None:
        self.seconds = 0.0  # in steps
        self.wait_seconds = 0.0  # of these, waiting for data
        self.num_steps, self.num_rows = 0, 0.0  # written down so far, and their rows that carried loss
        self._config, self._shape, self._ranks = config, plan.shape, ranks
        self._listener = listener if ranks.is_first else None
        self._writer = MetricsWriter(config.run, step=step, tensorboard=config.tensorboard) if ranks.is_first else None
        self._rows: list[tuple[dict[str, Any], Tensor]] = []  # of steps whose numbers are on the device
        self._copies: deque[tuple[list[dict[str, Any]], Tensor, torch.cuda.Event | None]] = deque()
        self._every = _STEPS_A_COPY if ranks.device.type == "cuda" else 1
        self._peak = None
        if ranks.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(ranks.device))
            self._peak = None if peak is None else peak * ranks.world_size
        self.restart_clock()

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def restart_clock(self) -> None:
        """What was done since the last step was no step."""
        self._last = time.perf_counter()

    def add(
        self,
        record: dict[str, Any],
        sums: Tensor,
        norm: Tensor,
        num_tokens: int,
        square_tokens: int,
        wait_seconds: float,
    ) -> None:
        """One step. sums [K, len(STATISTICS)] of this rank, norm scalar: on the device; wait_seconds: of the reader."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        waited, self.wait_seconds = wait_seconds - self.wait_seconds, wait_seconds
        self.seconds += seconds
        timing = {"seconds": seconds, "data_wait": waited / seconds, "num_tokens": num_tokens}
        self._rows.append((
            {**record, **timing, "square_tokens": square_tokens},
            torch.cat([sums.flatten(), norm.reshape(1)]),
        ))  # fmt: skip
        if len(self._rows) >= self._every:
            self._start_copy()
            self._write_ready(wait=False)

    def flush(self) -> None:
        """Write everything that was added; waits for the device."""
        self._start_copy()
        self._write_ready(wait=True)

    def write(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(record)
        if self._listener is not None:
            self._listener.step(record)

    def _start_copy(self) -> None:
        if not self._rows:
            return
        values = torch.stack([row for _, row in self._rows])  # [n, K * len(STATISTICS) + 1]
        sums = self._ranks.sum_(values[:, :-1].contiguous())
        values = torch.cat([sums, values[:, -1:]], dim=1).to("cpu", non_blocking=True)
        event = None
        if self._ranks.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._copies.append(([record for record, _ in self._rows], values, event))
        self._rows = []

    def _write_ready(self, *, wait: bool) -> None:
        while self._copies:
            records, values, event = self._copies[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait:
                    return
                event.synchronize()
            self._copies.popleft()
            for record, finite in zip(records, values.isfinite().all(-1).tolist(), strict=True):
                if not finite:
                    raise DivergedError(
                        f"step {record['step']:,}: the loss or the gradient is not finite, so the run has diverged and "
                        f"stops; its checkpoints are of before. Give a lower --learning-rate and another RUN, or check "
                        f"the data: eyas check {self._config.dataset}"
                    )
            self.num_steps += len(records)
            self.num_rows += float(values[:, STATISTICS.index("num_rows")].sum())
            if self._writer is not None:
                for record, row in zip(records, values.tolist(), strict=True):
                    self.write(self._finish(record, row))

    def _finish(self, record: dict[str, Any], row: list[float]) -> dict[str, Any]:
        width, steps = len(STATISTICS), self._config.ttt_steps
        sums = [row[k * width : (k + 1) * width] for k in range(steps)]
        seconds, num_tokens, square_tokens = record["seconds"], record["num_tokens"], record.pop("square_tokens")
        done = {
            **record,
            **asdict(Acceptance.from_sums(sums, self._config.step_weights)),
            "gradient_norm": row[-1],
            "tokens_per_second": num_tokens / seconds,
        }
        if self._peak is not None:
            work = flops(
                self._shape, num_steps=steps, num_tokens=num_tokens, square_tokens=square_tokens, num_rows=sums[0][1]
            )
            done["mfu"] = work / seconds / self._peak
        return done


def _shard(objective: Objective, dtype: torch.dtype, ranks: Ranks) -> None:
    """Split the trained parameters, their gradients and the optimizer's state over the ranks (FSDP2); the frozen ones
    stay whole. One group: a draft is used several times in a forward pass, and would be gathered as often otherwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    fully_shard(
        objective,
        mesh=init_device_mesh(ranks.device.type, (ranks.world_size,)),
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        ignored_params={p for p in objective.parameters() if not p.requires_grad},
    )
