"""Reading a target's configuration (as transformers does), and what SGLang is started with.

Names of SGLang's options are those of its command line; what eyas must decide itself is refused by name.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.engines.transformers.load import hash_weights, read_outline
from eyas.capture.errors import TargetError
from eyas.taps.errors import UsageError

__all__ = [
    "answering_arguments",
    "check_options",
    "hash_weights",
    "installed_version",
    "parse_options",
    "read_outline",
    "server_arguments",
]

# Run with both. Earlier ones pin a transformers that is older than eyas needs (those before 0.5.14 do not tell a model
# which request a row is of, either); later ones are tried, and the self-test decides.
FIRST_RELEASE, LAST_RELEASE = "0.5.22", "0.5.23"

EXTRA_POSITIONS = 8  # of the context, which SGLang keeps for what it would generate (managers/tp_worker.py)
WATCHDOG_SECONDS = 3600.0  # a forward may wait for the disk
# A GPU needs many tokens to be busy; on a CPU a batch should stay in cache.
BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}

# SGLang's options that eyas sets, and the option of eyas that decides each.
DECIDED = {
    "model": "--target",
    "model_path": "--target",
    "revision": "--revision",
    "trust_remote_code": "--trust-remote-code",
    "dtype": "--dtype",
    "device": "--device",
    "tp": "--tp",
    "tp_size": "--tp",
    "tensor_parallel_size": "--tp",
}
_DECIDED = {
    **DECIDED,
    "chunked_prefill_size": "--batch-tokens",
    "max_prefill_tokens": "--batch-tokens",
}
_REFUSED = {
    "pp": "a stage would hold only its own taps: spread the target with --tp",
    "pp_size": "a stage would hold only its own taps: spread the target with --tp",
    "pipeline_parallel_size": "a stage would hold only its own taps: spread the target with --tp",
    "dp": "give eyas capture --dp instead",
    "dp_size": "give eyas capture --dp instead",
    "data_parallel_size": "give eyas capture --dp instead",
    "enable_dp_attention": "a rank would hold only its own rows: spread the target with --tp",
    "attn_dp_size": "a rank would hold only its own rows: spread the target with --tp",
    "attn_cp_size": "a rank would hold only its own rows",
    "attention_context_parallel_size": "a rank would hold only its own rows",
    "enable_prefill_context_parallel": "a rank would hold only its own rows",
    "enable_layernorm_sp": "a rank would hold only its own rows",
    "nnodes": "workers on other nodes cannot reach this process: --engine vllm takes several nodes for one copy",
    "node_rank": "workers on other nodes cannot reach this process: --engine vllm takes several nodes for one copy",
    "enable_mixed_chunk": "nothing is decoded",
    "enable_two_batch_overlap": "a forward in halves would mix the rows",
    "enable_single_batch_overlap": "what is overlapped may be incomplete when it is captured",
    "enable_pdmux": "a forward in parts would mix the rows",
    "enable_torch_compile": "the model runs eagerly: a compiled one would not call the hooks",
    "cuda_graph_config": "the model runs eagerly: a graph would not call the hooks",
    "cuda_graph_backend_prefill": "the model runs eagerly: a graph would not call the hooks",
    "enable_lora": "the target is captured as it is",
    "json_model_override_args": "it makes another model of the target: change the config.json of a copy of it, and "
    "capture that",
    "lora_paths": "the target is captured as it is",
    "is_embedding": "the target generates",
    "disaggregation_mode": "what another engine computed could not be captured",
    "enable_hierarchical_cache": "a cached prefix is not computed, so it could not be captured",
    "forward_hooks": "eyas' own stand there",
    "config": "give the options themselves",
    "skip_tokenizer_init": "eyas gives tokens",
    "tokenizer_worker_num": "eyas gives tokens",
}
_REFUSED_PREFIXES = {"speculative_": "the target is captured without a draft"}
# What holds whatever is given. Names that a release does not have are left out.
_FIXED: dict[str, Any] = {
    "disable_radix_cache": True,  # a cached prefix is not computed
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "disable_decode_cuda_graph": True,
    "disable_overlap_schedule": True,
}
_TOKENS_ONLY: dict[str, Any] = {"skip_tokenizer_init": True, "skip_server_warmup": True}


def installed_version() -> str:
    """The version of SGLang here. Raises TargetError, naming the extra, where there is none that can be used."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = ""
    if not found or find_spec("sglang") is None:
        raise TargetError("SGLang is not installed here. Install it with: pip install 'eyas[sglang]'")
    if Version(found) < Version(FIRST_RELEASE):
        raise TargetError(
            f"--engine sglang: SGLang {found} is here, which needs an older transformers than eyas does: pip install "
            f"'sglang>={FIRST_RELEASE}'"
        )
    return found


def check_options(
    options: Sequence[str],
    *,
    command: str = "capture",
    decided: Mapping[str, str] = _DECIDED,
    refused: Mapping[str, str] = _REFUSED,
    refused_prefixes: Mapping[str, str] = _REFUSED_PREFIXES,
) -> None:
    """Refuse options of SGLang that eyas must decide. Raises UsageError. Does not import SGLang."""
    given = {option.partition("=")[0].lstrip("-").replace("-", "_") for option in options if option.startswith("--")}
    for name in sorted(given):
        shown = "--" + name.replace("_", "-")
        if name in decided:
            raise UsageError(f"{shown} after --: give eyas {command} {decided[name]} instead")
        reasons = [refused.get(name)] + [why for prefix, why in refused_prefixes.items() if name.startswith(prefix)]
        for why in filter(None, reasons):
            raise UsageError(f"{shown} after --: not with eyas {command}, {why}")


def server_arguments(settings: EngineSettings, outline: TargetOutline, serving: Mapping[str, Any] | None = None) -> Any:
    """SGLang's ServerArgs for a capture, with the fields in ``serving`` as they are given there.

    Raises UsageError for options that SGLang does not know or refuses.
    """
    on_cuda = _on_cuda(settings)
    batch_tokens = settings.batch_tokens or BATCH_TOKENS["cuda" if on_cuda else "cpu"]
    wanted = {**_FIXED, "chunked_prefill_size": batch_tokens, "max_prefill_tokens": batch_tokens, **(serving or {})}
    return _arguments(settings, outline, wanted, shift=settings.tp * _local_rank() if on_cuda else 0)


def answering_arguments(settings: EngineSettings, outline: TargetOutline) -> Any:
    """SGLang's ServerArgs to answer with. Raises UsageError for options that SGLang does not know or refuses."""
    return _arguments(settings, outline, {"dp_size": settings.dp}, shift=0)


def parse_options(settings: EngineSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """SGLang's defaults, and these with ``settings``' options. Raises UsageError for options it does not know."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang", add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    required = ["--model-path", settings.target]
    return vars(parser.parse_args(required)), vars(parser.parse_args([*required, *settings.engine_options]))


def _arguments(settings: EngineSettings, outline: TargetOutline, wanted: Mapping[str, Any], *, shift: int) -> Any:
    """``wanted``: what holds whatever is given; ``shift``: of the first GPU."""
    from sglang.srt.server_args import ServerArgs

    defaults, given = parse_options(settings)
    fixed: dict[str, Any] = {
        **_TOKENS_ONLY,
        **wanted,
        "tp_size": settings.tp,
        "base_gpu_id": given["base_gpu_id"] + shift,
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "device": "cuda" if _on_cuda(settings) else "cpu",
    }
    likely: dict[str, Any] = {"watchdog_timeout": WATCHDOG_SECONDS, "log_level": "error"}
    if outline.max_positions is not None:
        likely["context_length"] = outline.max_positions + EXTRA_POSITIONS
    fixed |= {name: value for name, value in likely.items() if given[name] == defaults[name] and name not in wanted}
    fields = inspect.signature(ServerArgs).parameters
    try:
        return ServerArgs(**{name: value for name, value in {**given, **fixed}.items() if name in fields})
    except (ValueError, AssertionError, TypeError) as error:
        raise UsageError(f"{' '.join(settings.engine_options)}: SGLang refuses these options: {error}") from error


def _on_cuda(settings: EngineSettings) -> bool:
    import torch

    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def _local_rank() -> int:
    """This process's place among the copies (--dp) on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


class _Parser(argparse.ArgumentParser):
    """SGLang's command line, whose mistakes are the user's."""

    def error(self, message: str) -> Any:
        raise UsageError(f"options after --: SGLang says {message}")
