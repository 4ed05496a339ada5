"""What a capture engine is: it takes samples and a sink, and yields what became of them.

Whether the tensors pass through this process or are written inside the engine's own workers is the engine's matter:
a Sink travels to wherever the tensors are and opens a shard writer there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from eyas.shards.identity import DTYPES, DatasetIdentity, TargetIdentity
from eyas.shards.ledger import SealedShard
from eyas.shards.sample import TokenSample
from eyas.shards.writer import ShardWriter
from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import Tap

if TYPE_CHECKING:
    from eyas.capture.self_test import Probed


@dataclass(frozen=True, kw_only=True)
class TargetOutline:
    """What a target's configuration says without loading a weight: enough to resolve taps and to plan."""

    config: Any  # the engine library's own configuration object
    config_hash: str  # blake2b-128 of config.json's bytes, hex
    model_class: str  # e.g. LlamaForCausalLM
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str  # the checkpoint's: bfloat16, float16 or float32
    max_positions: int | None  # tokens; None where unlimited or unknown


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How a target is run and what is taken from it: everything an engine is constructed from.

    Engine transformers starts no processes: with ``tp`` above 1, or several groups, every rank constructs it from the
    same settings under torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and each
    ``tp`` consecutive ranks are one group. The serving engines start their own workers, ``tp`` of them.
    """

    target: str  # a folder, or a name on the hub
    taps: tuple[Tap, ...]  # of the features, ascending depth
    dtype: str  # bfloat16, float16 or float32: the activations', and so the dataset's
    last_hidden: Tap | None = None  # after:{L-1}, final, or not kept
    target_statistics: bool = True  # target_top1 and target_lse
    revision: str | None = None  # on the hub; None is its default branch
    trust_remote_code: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    tp: int = 1  # processes that share one copy of the target
    dp: int = 1  # copies that an engine starts itself, to answer; a capture's are processes of eyas
    batch_tokens: int | None = None  # in one forward at most, padding included
    engine_options: tuple[str, ...] = ()  # further options in the engine's own words, as its command line takes them

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise EyasError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.tp < 1:
            raise EyasError(f"--tp {self.tp}: expected at least 1")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise EyasError(f"--batch-tokens {self.batch_tokens}: expected at least 1")


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Where the tensors go. Small and picklable: engines hand it to their workers."""

    dataset: Path
    identity: DatasetIdentity
    worker: str  # rank r writes as f"{worker}-{r}"
    shard_bytes: int
    codec_threads: int
    metadata: tuple[tuple[str, str], ...] = ()  # of each shard, beside what the engine says of itself

    def open(self, rank: int, metadata: dict[str, str]) -> ShardWriter:
        """The shard writer of global rank ``rank``; ``metadata`` (engine, versions, tp, ...) goes into each shard."""
        return ShardWriter(
            self.dataset,
            identity=self.identity,
            worker=f"{self.worker}-{rank}",
            shard_bytes=self.shard_bytes,
            codec_threads=self.codec_threads,
            metadata=metadata | dict(self.metadata),
        )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are generated."""

    temperature: float  # 0 takes the most probable token always
    top_p: float  # 1 samples from the whole vocabulary
    stop_ids: frozenset[int]  # tokens that end an answer

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: expected more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens that the target is to answer."""

    input_ids: npt.NDArray[np.int32]  # [T]
    max_new_tokens: int
    seed: int  # of this answer's own random numbers


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target answered."""

    token_ids: list[int]  # the end token included where there is one
    finish: Literal["stop", "length"]  # length: cut at max_new_tokens, so there is no end token


@dataclass(frozen=True, kw_only=True)
class MessageAnswer:
    """What the target answered, from a server that gives no token ids."""

    message: dict[str, Any]  # role assistant; content, reasoning_content, tool_calls
    finish: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A prompt that the engine does not answer, and why."""

    reason: str


class TakePrompts(Protocol):
    """Where a generator gets its prompts."""

    def __call__(self, most: int, padded_tokens: int | None = None) -> Sequence[tuple[int, Prompt]]:
        """Up to ``most`` prompts, each with a number of its own; none where none is left for now.

        Answers make new ones: those of conversations that go on. With ``padded_tokens`` the prompts are of similar
        length, and padded to the longest of them they are together no longer.
        """
        ...


class Generator(Protocol):
    """One way to have the target answer. Used as a context manager, which loads the target."""

    def __enter__(self) -> Generator: ...

    def __exit__(self, *exc: object) -> None: ...

    @property
    def max_tokens(self) -> int | None:
        """The longest prompt with its answer, in tokens, where that is less than the target's positions allow."""
        ...

    def generate(self, take: TakePrompts, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Answer | Refused]]:
        """Answer what ``take`` gives, until it gives nothing; yields (number, answer) as each ends, in any order.

        Once ``should_stop`` is true the iterator ends; what is unfinished is dropped. Raises TargetError.
        """
        ...


class SampleSource(Protocol):
    """The prepared samples, by row. Memory-mapped: reading one row costs its bytes."""

    def __getitem__(self, row: int) -> TokenSample: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """The rows still to be captured, the same on every rank."""

    source: SampleSource
    rows: npt.NDArray[np.int64]  # [R] rows of source
    lengths: npt.NDArray[np.int64]  # [R] tokens of each
    everywhere: bool = False  # each worker captures and writes every row: canaries


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """Tokens went through the target (progress; nothing is durable yet)."""

    num_samples: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A shard is durable, with its ledger line."""

    shard: SealedShard


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A sample that could not be captured, and why. Never silently skipped."""

    sample_id: str
    reason: str


Event = Forwarded | Sealed | Rejected


class Prober(Protocol):
    """A serving engine that captures samples for this process to look at. Used as a context manager."""

    def __enter__(self) -> Prober: ...

    def __exit__(self, *exc: object) -> None: ...

    @property
    def label(self) -> str:
        """System and version, e.g. ``vllm 0.32.0``."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sample, in tokens."""
        ...

    def probe(self, samples: Sequence[TokenSample]) -> list[list[Probed]]:
        """What every worker captures of ``samples``: per worker, sample by sample."""
        ...


class Engine(Protocol):
    """One way to run a target. Used as a context manager; every rank of a launch runs the same calls in step."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...

    @property
    def target(self) -> TargetIdentity:
        """What is being run, as dataset.json records it."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, in tokens, that the target's positions allow; None where unlimited or unknown."""
        ...

    def self_test(self, probe: Sequence[TokenSample]) -> None:
        """Prove on ``probe`` that the captured tensors are the taps asked for, and that all ranks agree.

        Raises SelfTestError: nothing is written then.
        """
        ...

    def capture(self, work: Work, sink: Sink, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Capture ``work``, in an order of the engine's choosing.

        Each sample ends up in exactly one sealed shard or one Rejected event of exactly one rank (with
        ``work.everywhere``, in a shard of every worker, or rejected). ``should_stop`` is
        asked between batches; once true (ranks of one group decide together), what is complete is sealed and the
        iterator ends. The caller may also close the iterator early: nothing more is sealed then.
        """
        ...
