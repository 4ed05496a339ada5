"""A folder in another system's layout becomes a standard dataset.

Two passes. The first reads every item's tokens and mask alone, which files that can be mapped give cheaply: it knows
each sample's id, what is there twice, and what cannot be used. The second writes the samples that are not there yet.
What is done is a set of sample ids, as everywhere: after any kill the same call goes on, and each sample is there
exactly once. The foreign folder may grow, or lose what was taken in already, between runs: dataset.json counts what
was ever found.

Threads read; one writer takes their samples in turn, and two threads of its own seal shards. Where files are mapped, a
sample's states are read when its shard is sealed, and go from one file to the other through a buffer that stays in
cache. Memory: a sample for each thread, the shard that fills and the two that are being sealed.
"""

from __future__ import annotations

import hashlib
import json
import queue
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.identity import (
    IDENTITY_FILE,
    DatasetIdentity,
    PreparedIdentity,
    TargetIdentity,
    TokenizerIdentity,
    create_or_match,
    identity_differences,
    read_identity,
)
from eyas.shards.ledger import LedgerState, SealedShard, lock_dataset, read_ledgers, recover
from eyas.shards.rejects import write_item_rejects
from eyas.shards.sample import Sample, parse_sample_ids, sample_id
from eyas.shards.writer import ShardWriter
from eyas.standardize.count import count_tokens
from eyas.standardize.events import Advanced, Event, Importing, Noticed, Rejected, Sealed, Summary, Surveyed, Surveying
from eyas.standardize.formats.base import ForeignFileError, ForeignSample, FormatError, Layout, Reader
from eyas.taps.errors import EyasError
from eyas.taps.notation import FINAL, Tap, after, format_taps

_POLL_SECONDS = 0.2
_SURVEYED_AT_ONCE = 64  # items that a thread of the first pass takes
_MAPPED_BYTES = 1 << 20  # a sample of less is copied

# input_ids int32 [T] -> the loss mask uint8 [T] that belongs to them. Raises EyasError where there is none.
MaskOf = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class ForeignRequest:
    """What to import, and as what. Built by foreign_request()."""

    source: Path
    out: Path
    layout: Layout
    reader: Reader
    identity: DatasetIdentity  # out's, its ``prepared`` still to be found by the first pass
    slot_last_hidden: bool  # the last of the layout's slots is the dataset's last_hidden
    mask_of: MaskOf | None


def foreign_request(
    source: Path,
    out: Path,
    reader: Reader,
    *,
    target: TargetIdentity,
    tokenizer: TokenizerIdentity,
    taps: Sequence[Tap],
    last_hidden: Tap | Literal["captured", "none"] = "captured",
    beside: Literal["pre-norm", "post-norm"] | None,
    codec: str = "raw",
    mask_of: MaskOf | None = None,
) -> ForeignRequest:
    """Resolve an import. ``taps`` says what the layout's slots are, in their order. Writes nothing.

    beside: what the last hidden state beside the slots is, the layout's ``last_hidden`` or what a replay found.
    last_hidden: "captured" takes that; where there is none, the last of several slots
    is it if that is ``after:{L-1}`` or ``final``. "none" leaves it out. A tap must be what one of these gives.
    mask_of: where the loss mask of some tokens is found; the layout's own mask counts first.

    Raises FormatError: another number of slots, another hidden size, no loss mask, a last_hidden that is not there;
    TapError for taps that the target does not have; EyasError where ``out`` holds something else.
    """
    layout = reader.layout
    _check_layout(source, layout, target, taps)
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise EyasError(f"{out} is the folder {source} or inside it, which is never changed: name another")
    if out.exists() and not (out / IDENTITY_FILE).exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise EyasError(f"{out} holds files and is no eyas dataset: name a new or an empty folder")
    refuse_without_mask(source, layout, mask_of)
    feature_taps, kept, from_slot = _last_hidden(source, beside, target, tuple(taps), last_hidden)
    return ForeignRequest(
        source=source,
        out=out,
        layout=layout,
        reader=reader,
        slot_last_hidden=from_slot,
        mask_of=mask_of,
        identity=DatasetIdentity(
            stage="standard",
            taps=feature_taps,
            last_hidden=kept,
            dtype=layout.dtype,
            codec=codec,
            target_statistics=False,
            target=target,
            tokenizer=tokenizer,
            prepared=PreparedIdentity(fingerprint="", num_samples=0),
        ),
    )


def refuse_without_mask(source: Path, layout: Layout, mask_of: MaskOf | None) -> None:
    """Raises FormatError where nothing says which tokens are targets."""
    if not layout.has_loss_mask and mask_of is None:
        raise FormatError(
            f"{source}: {layout.format} keeps no loss mask there, and without one nothing says which tokens are "
            f"targets: give the prepared folder that the tokens came from (--prepared)"
        )


def _check_layout(source: Path, layout: Layout, target: TargetIdentity, taps: Sequence[Tap]) -> None:
    if len(taps) != layout.num_taps:
        beside = f" (and the {layout.last_hidden} last hidden state beside them)" if layout.last_hidden else ""
        raise FormatError(
            f"{source} holds {layout.num_taps} slots of features{beside}, and {len(taps)} taps were given "
            f"({format_taps(taps)}): name the tap of each slot, in their order"
        )
    if layout.hidden_size not in (None, target.hidden_size):
        raise FormatError(
            f"{source} holds states of width {layout.hidden_size}, and {target.name} has hidden size "
            f"{target.hidden_size}: these are another target's"
        )


def _last_hidden(
    source: Path,
    kind: Literal["pre-norm", "post-norm"] | None,
    target: TargetIdentity,
    taps: tuple[Tap, ...],
    asked: Tap | Literal["captured", "none"],
) -> tuple[tuple[Tap, ...], Tap | None, bool]:
    """The features' taps, the dataset's last_hidden, and whether that is the last slot."""
    last = after(target.num_layers - 1)
    beside = {"pre-norm": last, "post-norm": FINAL, None: None}[kind]
    in_slot = taps[-1] if beside is None and len(taps) > 1 and taps[-1] in (last, FINAL) else None
    there = in_slot if beside is None else beside
    if asked == "none":
        return taps, None, False
    if asked not in ("captured", there):
        raise FormatError(
            f"--last-hidden {asked}: {source} holds {there or 'none'}, as far as its format says; a replay finds what "
            f"it is (--taps identify)"
        )
    return (taps[:-1] if in_slot else taps), there, in_slot is not None


@dataclass
class _Survey:
    """What the first pass found. Arrays are by item."""

    ids: npt.NDArray[np.uint64]  # [N] sample ids; of rejected items 0
    lengths: npt.NDArray[np.int64]  # [N] tokens
    usable: npt.NDArray[np.bool_]  # [N] first of its id
    num_duplicates: int
    rejects: dict[str, str]


def import_folder(
    request: ForeignRequest, *, workers: int, shard_bytes: int, should_stop: Callable[[], bool]
) -> Iterator[Event]:
    """Do it; the last event is the Summary. ``workers`` threads, each with one sample in memory.

    ``should_stop`` is asked often; once true, what is complete is sealed and the run ends early. Raises EyasError and
    OSError: what is sealed stays, and the same call goes on from there.
    """
    out, summary = request.out, Summary()
    with lock_dataset(out):
        survey = yield from _surveyed(request, workers, should_stop)
        if survey is None:
            summary.stopped_early = True
            yield summary
            return
        if not survey.usable.any() and not (out / IDENTITY_FILE).exists():
            raise FormatError(_nothing(request, survey))
        for event in _open_out(request, survey):
            yield event
        identity = read_identity(out)
        sealed = read_ledgers(out)
        todo = np.flatnonzero(survey.usable & ~sealed.contains(survey.ids))
        yield Importing(
            num_samples=len(todo),
            num_tokens=int(survey.lengths[todo].sum()),
            num_done_samples=sealed.num_samples,
            num_duplicates=survey.num_duplicates,
            num_rejected=len(survey.rejects),
        )
        if len(todo):
            work = _Work(replace(request, identity=identity), survey, todo, workers=workers, shard_bytes=shard_bytes)
            for event in work.events(should_stop):
                summary.num_written += isinstance(event, Sealed)
                yield event
        summary.stopped_early = should_stop() and len(todo) > 0 and _num_left(out, survey) > 0
        write_item_rejects(out, _worker_name(), survey.rejects)
        if not summary.stopped_early:
            summary.stopped_early = not (yield from count_tokens(out, identity.target.vocab_size, workers, should_stop))
        _add_up(summary, read_ledgers(out), identity, survey)
    yield summary


def _worker_name() -> str:
    return f"{socket.gethostname()}-import"


def _num_left(out: Path, survey: _Survey) -> int:
    return int((survey.usable & ~read_ledgers(out).contains(survey.ids)).sum())


def _add_up(summary: Summary, state: LedgerState, identity: DatasetIdentity, survey: _Survey) -> None:
    summary.num_samples, summary.num_tokens = state.num_samples, state.num_tokens
    summary.num_bytes, summary.num_shards = state.num_bytes, len(state.entries)
    summary.num_trained_tokens = state.num_trained_tokens
    summary.num_rejected, summary.num_duplicates = len(survey.rejects), survey.num_duplicates
    summary.num_missing = max(identity.prepared.num_samples - state.num_samples, 0)


def _nothing(request: ForeignRequest, survey: _Survey) -> str:
    shown = [f"\n  {item}: {reason}" for item, reason in list(survey.rejects.items())[:3]]
    return f"{request.source}: none of its {len(survey.ids):,} samples can be used{''.join(shown)}"


def _open_out(request: ForeignRequest, survey: _Survey) -> Iterator[Event]:
    """dataset.json, with the samples that were ever found; and what a killed run left mended."""
    out = request.out
    found = np.unique(survey.ids[survey.usable])
    if (out / IDENTITY_FILE).exists():
        there = read_identity(out)
        for problem in recover(out, there):
            yield Noticed(message=f"{out}/{problem}")
        found = np.union1d(found, read_ledgers(out).sample_ids())
        identity = replace(request.identity, prepared=_prepared(found))
        differing = {name for name, _, _ in identity_differences(there, identity)}
        if differing and differing <= {"prepared.fingerprint", "prepared.num_samples"}:
            # Shards do not depend on it, so a folder that grew (or gave away what is sealed here) is the same dataset.
            publish(out / IDENTITY_FILE, (json.dumps(identity.to_json(), indent=2) + "\n").encode())
    identity = replace(request.identity, prepared=_prepared(found))
    create_or_match(out, identity)


def _prepared(ids: npt.NDArray[np.uint64]) -> PreparedIdentity:
    """As capture's prepared.json names a set of samples: blake2b-128 over the ascending ids as little-endian uint64."""
    digest = hashlib.blake2b(np.sort(ids).astype("<u8").tobytes(), digest_size=16).hexdigest()
    return PreparedIdentity(fingerprint=digest, num_samples=len(ids))


# --- first pass ---------------------------------------------------------------------------------


def _surveyed(
    request: ForeignRequest, workers: int, should_stop: Callable[[], bool]
) -> Generator[Event, None, _Survey | None]:
    """The tokens of every item; None where it was stopped."""
    items = request.reader.items()
    yield Surveying(num_items=len(items))
    ids, lengths = np.zeros(len(items), np.uint64), np.zeros(len(items), np.int64)
    found = np.zeros(len(items), np.bool_)
    rejects: dict[str, str] = {}

    def look(start: int) -> list[tuple[str, int] | str]:
        results: list[tuple[str, int] | str] = []
        for item in items[start : start + _SURVEYED_AT_ONCE]:
            if should_stop():
                break
            try:
                foreign = request.reader.read(item)
                tokens, mask = _tokens(request, foreign)
                if not foreign.states_are_costly:
                    _check_states(request, foreign)
                results.append((sample_id(tokens, mask), len(tokens)))
            except ForeignFileError as error:
                results.append(error.what)
        return results

    with ThreadPoolExecutor(workers, thread_name_prefix="eyas-survey") as pool:
        starts = range(0, len(items), _SURVEYED_AT_ONCE)
        for start, results in zip(starts, pool.map(look, starts), strict=True):
            if should_stop():
                return None
            for n, result in enumerate(results, start=start):
                if isinstance(result, str):
                    rejects[items[n]] = result
                    yield Rejected(item=items[n], reason=result)
                else:
                    ids[n], lengths[n], found[n] = parse_sample_ids([result[0]])[0], result[1], True
                yield Surveyed()
    usable = np.zeros(len(items), np.bool_)
    places = np.flatnonzero(found)
    usable[places[np.unique(ids[places], return_index=True)[1]]] = True
    return _Survey(
        ids=ids, lengths=lengths, usable=usable, num_duplicates=int(found.sum() - usable.sum()), rejects=rejects
    )


def _tokens(request: ForeignRequest, foreign: ForeignSample) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """input_ids int32 [T] and loss_mask uint8 [T]. Raises ForeignFileError for what is no sample of the target."""
    ids, T = foreign.input_ids, len(foreign.input_ids)
    vocab_size, where = request.identity.target.vocab_size, foreign.where
    if not T:
        raise ForeignFileError(where, "holds no token")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ForeignFileError(
            where, f"token ids {lowest} to {highest}, expected 0 to {vocab_size - 1}, the target's vocabulary"
        )
    tokens = ids.numpy().astype(np.int32)
    if foreign.loss_mask is not None:
        mask = foreign.loss_mask.numpy().astype(np.uint8, copy=False)
    elif request.mask_of is not None:
        try:
            mask = request.mask_of(tokens)
        except EyasError as error:
            raise ForeignFileError(where, str(error)) from error
    else:
        raise ForeignFileError(where, "has no loss mask")
    if mask.shape != tokens.shape or (mask > 1).any():
        raise ForeignFileError(where, f"the loss mask is {list(mask.shape)}, expected 0 or 1 for each of {T:,} tokens")
    return tokens, mask


def _check_states(request: ForeignRequest, foreign: ForeignSample) -> None:
    """Raises ForeignFileError where the states are not those of the tokens and the layout."""
    T, H, where = len(foreign.input_ids), request.identity.hidden_size, foreign.where
    expected = [T, request.layout.num_taps, H]
    if list(foreign.features.shape) != expected:
        raise ForeignFileError(where, f"features are {list(foreign.features.shape)}, expected {expected}")
    states = [foreign.features]
    if request.layout.last_hidden is not None:
        if foreign.last_hidden is None or list(foreign.last_hidden.shape) != [T, H]:
            found = None if foreign.last_hidden is None else list(foreign.last_hidden.shape)
            raise ForeignFileError(where, f"the last hidden state is {found}, expected {[T, H]}")
        states.append(foreign.last_hidden)
    if any(str(tensor.dtype) != f"torch.{request.layout.dtype}" for tensor in states):
        raise ForeignFileError(
            where, f"states are {states[0].dtype}, and the folder's first ones {request.layout.dtype}"
        )


# --- second pass --------------------------------------------------------------------------------


class _Work:
    """The items still to be written, by several threads that share one writer."""

    def __init__(
        self,
        request: ForeignRequest,
        survey: _Survey,
        todo: npt.NDArray[np.int64],
        *,
        workers: int,
        shard_bytes: int,
    ) -> None:
        self._request, self._survey, self._todo = request, survey, todo
        self._items = request.reader.items()
        self._num_workers = min(workers, len(todo))
        self._shard_bytes = shard_bytes
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._next = iter(todo.tolist())
        self._taking, self._writing = threading.Lock(), threading.Lock()

    def events(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Do the work. Raises what the first thread to fail raised; what is complete is sealed unless the writer
        failed."""
        layout = self._request.layout
        metadata = {"engine": layout.format, "layout": layout.version, "source": str(self._request.source)}
        writer = ShardWriter(
            self._request.out,
            identity=self._request.identity,
            worker=_worker_name(),
            shard_bytes=self._shard_bytes,
            codec_threads=self._num_workers,
            metadata=metadata,
            verify=True,
            lazy=True,
        )
        with ExitStack() as stack:
            stack.enter_context(writer)
            pool = stack.enter_context(ThreadPoolExecutor(self._num_workers, thread_name_prefix="eyas-import"))
            stack.callback(self._stop.set)  # the pool waits for its threads
            running = [pool.submit(self._run, writer) for _ in range(self._num_workers)]
            num_running = self._num_workers
            while num_running:
                if should_stop():
                    self._stop.set()
                with suppress(queue.Empty):
                    event = self._events.get(timeout=_POLL_SECONDS)
                    if event is None:
                        num_running -= 1
                    else:
                        yield event
            for future in running:
                future.result()
            for entry in writer.close():
                yield Sealed(shard=entry, how="written")

    def _run(self, writer: ShardWriter) -> None:
        try:
            while not self._stop.is_set():
                with self._taking:
                    n = next(self._next, None)
                if n is None:
                    break
                try:
                    sample = self._read(n)
                except ForeignFileError as error:
                    self._survey.rejects[self._items[n]] = error.what
                    self._events.put(Rejected(item=self._items[n], reason=error.what))
                else:
                    with self._writing:
                        self._sealed(writer.add(sample))
                self._events.put(Advanced(num_tokens=int(self._survey.lengths[n])))
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._events.put(None)  # this thread ends, and nothing of it follows

    def _sealed(self, entries: list[SealedShard]) -> None:
        for entry in entries:
            self._events.put(Sealed(shard=entry, how="written"))

    def _read(self, n: int) -> Sample:
        """One sample, as it is mapped where it is large. Raises ForeignFileError."""
        import torch

        request = self._request
        foreign = request.reader.read(self._items[n])
        tokens, mask = _tokens(request, foreign)
        _check_states(request, foreign)
        name = sample_id(tokens, mask)
        if parse_sample_ids([name])[0] != self._survey.ids[n]:
            raise ForeignFileError(foreign.where, "changed while it was being imported: run it again")
        A = len(request.identity.taps)
        features = foreign.features[:, :A].flatten(1)  # [T, A*H], no copy where the slots of a row stand together
        last_hidden = None
        if request.identity.last_hidden is not None:
            last_hidden = foreign.features[:, -1] if request.slot_last_hidden else foreign.last_hidden  # [T, H]
            assert last_hidden is not None  # _tokens
        if features.nbytes < _MAPPED_BYTES:  # the kernel allows a process some ten thousand mappings
            features = features.clone()
            last_hidden = None if last_hidden is None else last_hidden.clone()
        return Sample(
            sample_id=name,
            input_ids=torch.from_numpy(tokens),
            loss_mask=torch.from_numpy(mask.copy()),
            features=features,
            last_hidden=last_hidden,
            target_top1=None,
            target_lse=None,
        )
