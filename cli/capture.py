"""`eyas capture`: run the target over prepared samples and store its hidden states."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.capture.engines import ENGINES, SERVING_ENGINES, num_processes
from eyas.cli.main import ARGUMENTS
from eyas.cli.parameters import duration, format_bytes, model, size
from eyas.cli.progress import Progress, format_seconds
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.cli.signals import stop_on_signals
from eyas.taps.errors import EXIT_STOPPED_EARLY

if TYPE_CHECKING:
    from eyas.align.verdict import Report
    from eyas.capture.engines.base import TargetOutline
    from eyas.capture.nodes import Leader, Node
    from eyas.capture.session import CaptureConfig, CaptureSummary, Plan, Tally
    from eyas.shards.identity import DatasetIdentity
    from eyas.shards.ledger import Problem

FIRST_SAMPLES = 8  # sealed and replayed, with --draft, before the rest is captured


@click.command(name="capture", short_help="Run the target over prepared samples and store its hidden states.")
@click.argument("prepared", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE OPTIONS]")
@click.option("--target", type=model, required=True, help="The model that is captured: a folder or a name on the hub.")
@click.option("--revision", help="The target's revision on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the target.")
@click.option("--taps", help="What to store: taps in ascending depth (embed, after:J, final), or 'default'.")
@click.option("--layers", help="Layer numbers instead of --taps; they need --convention.")
@click.option("--convention", help="The system whose numbers --layers are, e.g. vllm or sglang@0.5.23.")
@click.option("--last-hidden", default="after:last", help="after:last (pre-norm), final (post-norm) or none.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    help="Of the target's activations and what is stored; auto is the checkpoint's.",
)
@click.option("--codec", type=click.Choice(["raw", "zstd"]), default="raw", help="zstd is lossless and needs bfloat16.")
@click.option("--target-statistics/--no-target-statistics", default=True, help="Store target_top1 and target_lse.")
@click.option("--engine", type=click.Choice(ENGINES), default="transformers", help="What runs the target.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: cuda if there is one."
)
@click.option("--tp", type=click.IntRange(1), default=1, help="Processes (GPUs) that share one copy of the target.")
@click.option("--dp", type=click.IntRange(1), default=1, help="Independent groups, each with its own copy.")
@click.option(
    "--batch-tokens", type=click.IntRange(1), help="Tokens in one forward pass, at most; default: 16384, on a CPU 2048."
)
@click.option("--shard-size", type=size, default="1GiB", help="About the size of a shard.")
@click.option("--codec-threads", type=click.IntRange(1), default=8, help="Threads that compress, per process.")
@click.option("--worker", help="The name shards start with; default: this host's.")
@click.option("--max-samples", type=click.IntRange(1), help="Capture only the first so many prepared samples.")
@click.option("--max-runtime", type=duration, help="Seal and exit 75 after this time, e.g. 11h30m.")
@click.option("--max-rejects", type=click.FloatRange(0, 1), default=0.01, help="Share of samples that may fail.")
@click.option("--retry-rejects", is_flag=True, help="Try the samples again that were rejected before.")
@click.option(
    "--draft",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The draft that is to be trained: check first that these taps are what it will be fed.",
)
@click.option("--serving-engine", help="What will serve the draft, for that check: sglang, vllm, ... with @VERSION.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Run the target over PREPARED and store the taps in the dataset OUT.

    Run it again after any interruption, with another batch size or number of processes: what is sealed stays, and
    every sample is captured exactly once. SIGTERM, Ctrl-C and --max-runtime seal what is complete and exit 75.

    With --draft, eyas check runs before the first token and a replay after the first samples are sealed; exit status
    3 where what is captured is not what the draft will be fed.

    \b
    eyas capture prepared captured --target ./llama --taps after:1,after:15,after:28
    eyas capture prepared captured --target ./llama --layers 2,16,29 --convention vllm --tp 4 --dp 2
    eyas capture prepared captured --target ./kimi --engine vllm --tp 8 -- --enable-expert-parallel

    With --engine vllm (pip install 'eyas[vllm]') or sglang (pip install 'eyas[sglang]'), the engine's own workers write
    the shards; options after -- are the engine's.
    """
    from eyas.capture.ranks import is_launched
    from eyas.capture.session import this_node

    with stop_on_signals() as stopping:  # from here on: loading libraries and a tokenizer takes seconds
        config, outline, planned = _resolve(options)
        checked = options["draft"] is not None or options["serving_engine"] is not None
        node = this_node(config, planned)
        if options["dry_run"]:
            print_dry_run(_plan_facts(config, outline, tp=options["tp"], dp=options["dp"]))
            if checked:
                _check_plan(planned, options)
            return
        if node is not None and node.rank > 0:
            raise SystemExit(_follow(node, config, outline, stopping))
        if is_launched():
            _finish(_capture(config, stopping, None), as_json=options["as_json"])
            return
        if checked:
            _check_plan(planned, options)
        with nullcontext() if node is None else _lead(node, config, stopping) as leader:
            _drive(config, options, stopping, leader, checked=checked)


def _drive(
    config: CaptureConfig, options: dict[str, Any], stopping: threading.Event, leader: Leader | None, *, checked: bool
) -> None:
    """Capture, where ``checked`` the first samples alone, which are replayed before the rest."""
    from eyas.capture.launch import launch_ranks

    world_size = num_processes(options["engine"], tp=options["tp"], dp=options["dp"])
    arguments = click.get_current_context().meta[ARGUMENTS]
    first_samples = None
    if checked:
        first = min(FIRST_SAMPLES, options["max_samples"] or FIRST_SAMPLES)
        if world_size > 1:
            status = launch_ranks([*arguments, "--max-samples", str(first), "--max-rejects", "1"], world_size)
            if status != 0:
                raise SystemExit(status)
        else:
            first_samples = _capture(replace(config, max_samples=first, max_rejects=1.0), stopping, leader)
            if first_samples.stopped is not None:
                _finish(first_samples, as_json=options["as_json"])
        _check_first_samples(config, as_json=options["as_json"])
    if world_size > 1:
        raise SystemExit(EXIT_STOPPED_EARLY if stopping.is_set() else launch_ranks(arguments, world_size))
    summary = _capture(config, stopping, leader)
    _finish(summary if first_samples is None else _joined(first_samples, summary), as_json=options["as_json"])


def _lead(node: Node, config: CaptureConfig, stopping: threading.Event) -> Leader:
    from eyas.capture.nodes import Leader

    return Leader(node, config.dataset, stopping=stopping, say=_say)


def _follow(node: Node, config: CaptureConfig, outline: TargetOutline, stopping: threading.Event) -> int:
    from eyas.capture.engines import run_workers
    from eyas.capture.nodes import follow

    return follow(
        node,
        config.dataset,
        lambda: run_workers(config.engine, config.settings, outline),
        stopping=stopping,
        say=_say,
    )


def _say(message: str) -> None:
    click.echo(message, err=True)


def _joined(first: CaptureSummary, rest: CaptureSummary) -> CaptureSummary:
    """One summary of a capture whose first samples were checked before the rest."""
    names = ("num_new_samples", "num_new_tokens", "num_new_bytes", "seconds", "capture_seconds")
    return replace(rest, **{name: getattr(first, name) + getattr(rest, name) for name in names})


def _capture(config: CaptureConfig, stopping: threading.Event, leader: Leader | None) -> CaptureSummary:
    from eyas.capture.session import run_capture

    with _Display() as display:
        return run_capture(
            config,
            should_stop=stopping.is_set,
            on_plan=display.plan,
            on_progress=display.progress,
            other_nodes=leader,
        )


def _finish(summary: CaptureSummary, *, as_json: bool) -> None:
    if summary.rank == 0:
        if as_json:
            click.echo(json.dumps(asdict(summary)))
        else:
            _print_summary(summary)
    if summary.stopped is not None:
        raise SystemExit(EXIT_STOPPED_EARLY)


def _check_plan(planned: DatasetIdentity, options: dict[str, Any]) -> None:
    from eyas.align.engine import parse_engine
    from eyas.align.static import check_plan
    from eyas.train.run import init_folder

    named = options["serving_engine"]
    draft = None if options["draft"] is None else init_folder(str(options["draft"]))
    report = check_plan(planned, draft=draft, engine=None if named is None else parse_engine(named))
    _refuse_mismatch(report, "before the first token", as_json=options["as_json"])


def _check_first_samples(config: CaptureConfig, *, as_json: bool) -> None:
    from eyas.align.replay import replay_dataset
    from eyas.align.verdict import Report

    findings = replay_dataset(
        config.dataset, config.settings.target, trust_remote_code=config.settings.trust_remote_code
    )
    _refuse_mismatch(Report(tuple(findings)), f"after {FIRST_SAMPLES} samples", as_json=as_json)


def _refuse_mismatch(report: Report, when: str, *, as_json: bool) -> None:
    """Show the verdict on stderr; exit 3 on a mismatch, which is then the command's result."""
    click.echo(f"check {when}:\n{report.text()}", err=True)
    if report.exit_status(strict=False):
        if as_json:
            click.echo(json.dumps(report.to_json()))
        raise SystemExit(report.exit_status(strict=False))


def _resolve(options: dict[str, Any]) -> tuple[CaptureConfig, TargetOutline, DatasetIdentity]:
    import socket

    from eyas.capture.engines import check_settings, read_nodes, read_outline
    from eyas.capture.engines.base import EngineSettings
    from eyas.capture.prepared import PreparedSamples
    from eyas.capture.ranks import check_world_size
    from eyas.capture.session import CaptureConfig, check_identity_early, check_tokenizer, planned_identity
    from eyas.taps.errors import UsageError
    from eyas.taps.notation import after, parse_tap
    from eyas.taps.selection import select_taps
    from eyas.taps.target import TargetFacts

    engine, target = options["engine"], options["target"]
    if options["engine_options"] and engine not in SERVING_ENGINES:
        raise UsageError(
            f"{' '.join(options['engine_options'])}: unexpected after PREPARED and OUT; options after -- are those of "
            f"--engine {' or '.join(SERVING_ENGINES)}, and this is --engine {engine}"
        )
    serving = engine in SERVING_ENGINES
    check_world_size(tp=1 if serving else options["tp"], dp=options["dp"])
    prepared = PreparedSamples.open(options["prepared"])
    revision, trust_remote_code = options["revision"], options["trust_remote_code"]
    outline = read_outline(engine, target=target, revision=revision, trust_remote_code=trust_remote_code)
    chosen = options["last_hidden"]
    last_hidden = (
        None if chosen == "none" else after(outline.num_layers - 1) if chosen == "after:last" else parse_tap(chosen)
    )
    settings = EngineSettings(
        target=target,
        revision=revision,
        trust_remote_code=trust_remote_code,
        taps=select_taps(
            TargetFacts.from_config(outline.config.to_dict(), where=target),
            taps=options["taps"],
            layers=options["layers"],
            convention=options["convention"],
        ),
        last_hidden=last_hidden,
        dtype=outline.dtype if options["dtype"] == "auto" else options["dtype"],
        target_statistics=options["target_statistics"],
        device=options["device"],
        tp=options["tp"],
        batch_tokens=options["batch_tokens"],
        engine_options=options["engine_options"],
    )
    num_nodes = read_nodes(engine, settings)[0]
    if num_nodes > 1 and options["dp"] > 1:
        raise UsageError(
            f"--dp {options['dp']} with --nnodes {num_nodes} after --: either one copy over several nodes, or several "
            f"copies (on several machines torchrun starts them)"
        )
    check_settings(engine, outline, settings)
    config = CaptureConfig(
        prepared=options["prepared"],
        dataset=options["out"],
        engine=engine,
        settings=settings,
        codec=options["codec"],
        worker=options["worker"] or socket.gethostname(),
        shard_bytes=options["shard_size"],
        codec_threads=options["codec_threads"],
        max_samples=options["max_samples"],
        max_runtime_seconds=options["max_runtime"],
        max_rejects=options["max_rejects"],
        retry_rejects=options["retry_rejects"],
    )
    check_tokenizer(config, prepared)
    planned = planned_identity(config, prepared, outline)
    check_identity_early(config, planned)
    return config, outline, planned


def _plan_facts(config: CaptureConfig, outline: TargetOutline, *, tp: int, dp: int) -> dict[str, object]:
    from eyas.capture.prepared import PreparedSamples
    from eyas.capture.session import bytes_per_token, plan_capture
    from eyas.taps.notation import format_taps

    plan = plan_capture(
        PreparedSamples.open(config.prepared),
        config.dataset,
        max_samples=config.max_samples,
        retry_rejects=config.retry_rejects,
    )
    left_tokens = plan.num_left_tokens
    per_token = bytes_per_token(config, outline)
    return {
        "taps": f"{format_taps(config.settings.taps)} of {outline.num_layers} layers",
        "last hidden": config.settings.last_hidden or "none",
        "dtype": config.settings.dtype,
        "processes": f"{tp * dp} (groups: {dp}, processes in each: {tp})",
        "samples": f"{plan.num_samples:,} wanted, {plan.num_done:,} done, {plan.num_rejected:,} rejected, "
        f"{plan.num_left:,} left",
        "tokens left": f"{left_tokens:,}",
        "bytes left": f"{format_bytes(left_tokens * per_token)} before compression ({per_token:,} bytes a token)",
    }


class _Display:
    """What rank 0 shows: problems and progress on stderr, the summary on stdout."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._shown_tokens = 0
        self._started = 0.0

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def plan(self, plan: Plan, problems: list[Problem]) -> None:
        for problem in problems:
            click.echo(f"recovered: {problem.where}: {problem.message}", err=True)
        already = f", {plan.num_done:,} done before" if plan.num_done else ""
        rejected = f", {plan.num_rejected:,} rejected before (--retry-rejects)" if plan.num_rejected else ""
        tokens = plan.num_left_tokens
        click.echo(f"capturing {plan.num_left:,} samples, {tokens:,} tokens{already}{rejected}", err=True)
        if plan.num_left:
            self._bar = Progress("capture", tokens, "tokens")
            self._started = time.monotonic()

    def progress(self, tally: Tally) -> None:
        if self._bar is None:
            return
        rate = tally.num_bytes / max(time.monotonic() - self._started, 1e-9)
        note = f"{format_bytes(tally.num_bytes)} sealed, {format_bytes(rate)}/s"
        if tally.num_rejects:
            note += f", {tally.num_rejects:,} rejected"
        self._bar.update(tally.num_tokens - self._shown_tokens, note)
        self._shown_tokens = tally.num_tokens


def _print_summary(summary: CaptureSummary) -> None:
    rate = summary.num_new_tokens / max(summary.capture_seconds, 1e-9)
    click.echo(
        f"captured {summary.num_new_samples:,} samples, {summary.num_new_tokens:,} tokens, "
        f"{format_bytes(summary.num_new_bytes)} in {format_seconds(summary.seconds)} ({rate:,.0f} tokens/s)"
    )
    click.echo(
        f"{summary.dataset}: {summary.num_done:,} of {summary.num_samples:,} samples done, "
        f"{summary.num_rejected:,} rejected, {summary.num_left:,} left"
    )
    if summary.stopped is not None:
        click.echo(f"stopped early ({summary.stopped}): run the same command again to go on", err=True)
