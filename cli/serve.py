"""`eyas serve`: the engine as a supervised child, for pipelines."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from eyas.cli.parameters import duration, format_bytes
from eyas.cli.progress import format_seconds
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.cli.signals import stop_on_signals
from eyas.taps.errors import EXIT_STOPPED_EARLY, UsageError

if TYPE_CHECKING:
    from eyas.serve.command import ServeConfig
    from eyas.serve.server import ServeStatus
    from eyas.serve.state import ServeState

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True)
_RUN_FOLDER = click.Path(file_okay=False, path_type=Path)
# Of the options these make the server; the others say what the command does.
_CONFIGURES = (
    "engine",
    "target",
    "draft",
    "dataset",
    "draft_tokens",
    "probe",
    "host",
    "port",
    "tp",
    "python",
    "options",
)


@click.group(name="serve", short_help="Run an engine's server as a supervised child: start, restart, stop, status.")
def command() -> None:
    """Run an engine's own server as a supervised child. RUN_FOLDER keeps its state and logs, one server a folder.

    The server survives the terminal and whoever started it. Only processes that are proven to be its own are ever
    signalled: SIGTERM first, SIGKILL to what is left.

    \b
    eyas serve start serving --engine vllm --target ./llama --draft ./eagle3 --dataset standard
    eyas serve status serving
    eyas serve restart serving --draft ./eagle3-better
    eyas serve stop serving
    """


def _server_options(required: bool) -> Callable[[Decorated], Decorated]:
    """The options that say what is served. For restart none is required: what is not given stays as it was."""

    def default(value: object) -> dict[str, Any]:
        return {"default": value} if required else {}

    decorators = [
        click.argument("run_folder", type=_RUN_FOLDER),
        click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE OPTIONS]"),
        click.option("--engine", type=click.Choice(["vllm", "sglang"]), required=required, help="Whose server."),
        click.option("--target", type=_FOLDER, required=required, help="The target's folder."),
        click.option("--draft", type=_FOLDER, help="The EAGLE-3 draft's folder, as eyas export writes it."),
        click.option(
            "--dataset",
            type=_FOLDER,
            help="What the draft was trained on: a draft that the engine would feed other taps is not served.",
        ),
        click.option(
            "--draft-tokens", type=click.IntRange(1, 64), **default(3), help="Tokens that the draft proposes a cycle."
        ),
        click.option(
            "--probe/--no-probe",
            **default(False),
            help="vLLM logs shape, norm and range of what the draft is fed, tap by tap. Where CUDA graphs are replayed "
            "it shows nothing: --enforce-eager behind the --.",
        ),
        click.option("--host", **default("127.0.0.1"), help="Where to listen; 0.0.0.0: on every address."),
        click.option(
            "--port", type=click.IntRange(1, 65535), help="Default: the engine's, 8000 of vLLM and 30000 of SGLang."
        ),
        click.option("--tp", type=click.IntRange(1), **default(1), help="Tensor-parallel ranks."),
        click.option("--python", help="Interpreter of the engine's environment; default: the one that runs eyas."),
        click.option(
            "--wait",
            type=duration,
            default="15m",
            help="How long to wait until the server is healthy; 0: do not. Exit status 75 where it is not by then: "
            "it goes on starting, and the same command goes on waiting.",
        ),
        dry_run_option,
        click.option("--json", "as_json", is_flag=True, help="Print the status as JSON."),
    ]

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_GRACE = click.option(
    "--grace", type=duration, default="30s", help="How long the server may take to end after SIGTERM, before SIGKILL."
)


@command.command(name="start", short_help="Start a server and wait until it is healthy.")
@_server_options(required=True)
def start(**options: Any) -> None:
    """Start the engine's own server and wait until it is healthy. Where that very server runs already, nothing is done;
    where another configuration runs, the difference is shown.

    With --draft, its config is first read as this release of the engine reads it, and refused where that cannot be
    right. The engine gets this command's environment; keys belong there (VLLM_API_KEY), since RUN_FOLDER keeps the
    command in readable files.

    \b
    eyas serve start serving --engine vllm --target ./llama --port 8010
    eyas serve start serving --engine sglang --target ./kimi --tp 8 --draft ./eagle3 --dataset standard
    eyas serve start serving --engine vllm --target ./llama --wait 40m -- --max-model-len 8192 --enforce-eager
    """
    from eyas.serve.command import ServeConfig
    from eyas.serve.server import start as start_server

    given = {name: options[name] for name in _CONFIGURES}
    config = ServeConfig(**{**given, "python": _interpreter(options["python"])})
    with stop_on_signals() as stopping:
        release = _prepare(config, options)
        state = start_server(options["run_folder"], config, release, _tell)
        _wait(options, state, stopping)


@command.command(name="restart", short_help="Stop the server and start it again, with changes or without.")
@_server_options(required=False)
@_GRACE
def restart(**options: Any) -> None:
    """Stop the server and start it as it was started before; options that are given replace what was (those behind --
    all of the engine's). Between the two, GPU memory is waited for: it has to be as free as before the first start.

    What can be known to be wrong is refused before the running server is stopped.

    \b
    eyas serve restart serving
    eyas serve restart serving --draft ./eagle3-better
    """
    from eyas.serve.command import ServeConfig
    from eyas.serve.server import restart as restart_server
    from eyas.serve.state import read_state

    state = read_state(options["run_folder"])
    given = {name: options[name] for name in _CONFIGURES if options[name] not in (None, ())}
    if state is not None:
        # What the server was started with goes before a recipe, of which that was made up.
        source = click.get_current_context().get_parameter_source
        given = {name: value for name, value in given.items() if source(name) is not ParameterSource.DEFAULT_MAP}
    elif not {"engine", "target"} <= set(given):
        raise UsageError(f"{options['run_folder']}: no server was started there, so --engine and --target are needed")
    if state is None or "python" in given:
        given["python"] = _interpreter(options["python"])
    config = ServeConfig(**given) if state is None else replace(state.config, **given)
    with stop_on_signals() as stopping:
        release = _prepare(config, options)
        # Relative paths among the engine's options mean what they meant where those were given.
        cwd = os.getcwd() if state is None or "options" in given else state.cwd
        state = restart_server(options["run_folder"], config, release, cwd=cwd, grace=options["grace"], tell=_tell)
        _wait(options, state, stopping)


@command.command(name="stop", short_help="Stop the server and everything it has started.")
@click.argument("run_folder", type=_RUN_FOLDER)
@_GRACE
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def stop(run_folder: Path, grace: float, as_json: bool) -> None:
    """Stop the server and everything it has started; fine where nothing runs. The server is asked to end (SIGTERM),
    then what it leaves; what has not ended after --grace is killed. No other process is ever signalled.

    \b
    eyas serve stop serving
    """
    from eyas.serve.server import look
    from eyas.serve.server import stop as stop_server

    if not stop_server(run_folder, grace=grace, tell=_tell):
        _tell("nothing was running")
    _print(look(run_folder), as_json=as_json)


@command.command(name="status", short_help="Show whether the server runs and is healthy.")
@click.argument("run_folder", type=_RUN_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def status(run_folder: Path, as_json: bool) -> None:
    """Show whether the server is healthy, runs without answering (yet), was stopped, or is dead and how it ended. Exit
    status 0: healthy; 75: it runs; 1: it does not.

    \b
    eyas serve status serving
    until eyas serve status serving --json | jq -e '.condition == "healthy"'; do sleep 5; done
    """
    from eyas.serve.server import look

    found = look(run_folder)
    _print(found, as_json=as_json)
    if found.condition != "healthy":
        raise SystemExit(EXIT_STOPPED_EARLY if found.is_running else 1)


def _prepare(config: ServeConfig, options: dict[str, Any]) -> str | None:
    """Refuse what is known to be wrong before anything runs; print and end with --dry-run. Returns the release."""
    from eyas.align.verdict import Report
    from eyas.serve.command import engine_release, server_command
    from eyas.serve.draft import check_served_draft

    if not (Path(config.target) / "config.json").is_file():
        raise UsageError(f"--target {config.target}: no config.json there; give the folder of the target")
    release = engine_release(config)
    report = Report(()) if config.draft is None else check_served_draft(config, release)
    if options["dry_run"]:
        print_dry_run(
            {"release": release or "unknown", "command": shlex.join(server_command(config)), "draft": report.text()}
        )
        raise SystemExit(report.exit_status())
    if report.findings:
        shown = report if report.exit_status() else Report(tuple(f for f in report.findings if f.status != "ok"))
        if shown.findings:
            click.echo(shown.text(), err=True)
    if report.exit_status():
        _tell(f"{config.draft} is not served")
        raise SystemExit(report.exit_status())
    return release


def _wait(options: dict[str, Any], state: ServeState, stopping: threading.Event) -> None:
    from eyas.serve.server import look, wait_for_health

    folder, seconds = options["run_folder"], options["wait"]
    healthy = seconds > 0 and wait_for_health(folder, state, seconds=seconds, stopping=stopping, tell=_tell)
    _print(look(folder), as_json=options["as_json"])
    if seconds > 0 and not healthy:
        when = "yet" if stopping.is_set() else f"after {format_seconds(seconds)}"
        _tell(f"not healthy {when}; it goes on starting: eyas serve start with the same options waits for it")
        raise SystemExit(EXIT_STOPPED_EARLY)


def _interpreter(given: str | None) -> str:
    """An absolute path. Symlinks stay: by its own path an interpreter finds its environment."""
    if given is None:
        return sys.executable
    found = shutil.which(given)
    if found is None:
        raise UsageError(f"--python {given}: no such program")
    return os.path.abspath(found)


def _tell(message: str) -> None:
    click.echo(f"eyas serve: {message}", err=True)


def _print(found: ServeStatus, *, as_json: bool) -> None:
    from eyas.serve.address import url

    state = found.state
    if as_json:
        click.echo(json.dumps(_as_json(found)))
        return
    if state is None:
        click.echo(f"{found.folder}: no server was started there")
        return
    config = state.config
    up = f", up {format_seconds(found.seconds_up)}" if found.seconds_up is not None else ""
    click.echo(f"{found.folder}: {found.condition}{up}" + (f" ({found.reason})" if found.reason else ""))
    click.echo(f"url      {url(config.host, config.listens_on)}")
    click.echo(f"engine   {config.engine} {state.engine_release or '(release unknown)'}")
    click.echo(f"target   {config.target}")
    if config.draft is not None:
        click.echo(f"draft    {config.draft}, {config.draft_tokens} tokens a cycle")
    if found.pids:
        label = "pids" if found.is_running else "left"
        memory = format_bytes(found.resident_bytes)
        if found.gpu_mib:
            memory += f", {format_bytes(found.gpu_mib * 2**20)} of GPUs"
        click.echo(f"{label:<8} {' '.join(map(str, found.pids))} ({memory})")
    click.echo(f"log      {found.log}")


def _as_json(found: ServeStatus) -> dict[str, object]:
    from eyas.serve.address import url

    state = found.state
    if state is None:
        return {"folder": str(found.folder), "condition": found.condition}
    return {
        "folder": str(found.folder),
        "condition": found.condition,
        "reason": found.reason or None,
        "url": url(state.config.host, state.config.listens_on),
        "pid": state.process.pid if state.process is not None else None,
        "process_group": state.process.pid if state.process is not None else None,  # it leads its own, and a session
        "pids": found.pids,
        "exit_status": found.outcome.exit_status if found.outcome is not None else None,
        "ended_at": found.outcome.ended_at if found.outcome is not None else None,
        "seconds_up": found.seconds_up,
        "resident_bytes": found.resident_bytes,
        "gpu_bytes": found.gpu_mib * 2**20,
        "log": str(found.log),
        **{key: value for key, value in asdict(state).items() if key not in ("version", "log", "process")},
    }
