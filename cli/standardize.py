"""`eyas standardize`: the captured shards that one draft will be trained on, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.cli.parameters import format_bytes, size
from eyas.cli.progress import Progress
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.shards.report import plain_bytes_per_token
from eyas.taps.errors import EXIT_STOPPED_EARLY
from eyas.taps.notation import format_taps

if TYPE_CHECKING:
    from eyas.shards.identity import TargetIdentity
    from eyas.standardize.cat import Plan, Request, Summary
    from eyas.taps.notation import Tap


@click.command(name="standardize", short_help="Make the verified shards that one draft is trained on.")
@click.argument("captured", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--taps",
    help="The draft's taps in ascending depth (embed, after:J, final), or 'default'; without: all captured.",
)
@click.option("--layers", help="Layer numbers instead of --taps; they need --convention.")
@click.option(
    "--from-config",
    type=click.Path(path_type=Path),
    help="The draft's config.json, whose layer numbers to take; needs --convention.",
)
@click.option(
    "--convention", help="The system whose numbers --layers or --from-config are, e.g. vllm or sglang@0.5.23."
)
@click.option(
    "--last-hidden", default="captured", help="captured (as it is), after:last (pre-norm), final (post-norm) or none."
)
@click.option(
    "--dtype",
    type=click.Choice(["captured", "bfloat16", "float16", "float32"]),
    default="captured",
    help="What is stored.",
)
@click.option(
    "--codec",
    type=click.Choice(["captured", "raw", "zstd"]),
    default="captured",
    help="zstd is lossless and needs bfloat16.",
)
@click.option("--shard-size", type=size, default="1GiB", help="About the size of a shard that is written anew.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=4,
    help="Threads. Each that writes shards anew holds up to two in memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Make the standard dataset OUT from CAPTURED: exactly the draft's taps, one dtype and codec, every shard verified.

    Shards that already are that are hard-linked (copied across filesystems). CAPTURED is never changed. Run it again
    after any interruption, or once more is captured: what is there stays, and every sample is there exactly once.

    \b
    eyas standardize captured standard
    eyas standardize captured standard --taps after:1,after:14,after:26 --codec zstd
    eyas standardize captured standard --from-config draft/config.json --convention vllm
    """
    from eyas.capture.session import stop_on_signals
    from eyas.standardize.cat import plan

    request = _request(options)
    if options["dry_run"]:
        print_dry_run(_plan_facts(request, plan(request)))
        return
    with stop_on_signals() as stopping:
        summary = _run(request, options["workers"], options["shard_size"], stopping.is_set)
    if options["as_json"]:
        click.echo(json.dumps({**asdict(summary), "out": str(request.out), "identity": request.identity.to_json()}))
    else:
        _print_summary(request, summary)
    if summary.stopped_early:
        raise SystemExit(EXIT_STOPPED_EARLY)
    if summary.failures:
        names = ", ".join(sorted(summary.failures))
        raise click.ClickException(
            f"{request.source}: {len(summary.failures):,} captured shards could not be used: {names}. Set each aside "
            f"(mv SHARD SHARD.corrupt), run the same eyas capture again, which captures their samples anew, and then "
            f"this command"
        )


def _request(options: dict[str, Any]) -> Request:
    from eyas.shards.identity import read_identity
    from eyas.standardize.cat import request
    from eyas.taps.notation import after, parse_tap

    target = read_identity(options["captured"]).target
    chosen = options["last_hidden"]
    return request(
        options["captured"],
        options["out"],
        taps=_taps(options, target),
        last_hidden=(
            chosen
            if chosen in ("captured", "none")
            else after(target.num_layers - 1)
            if chosen == "after:last"
            else parse_tap(chosen)
        ),
        dtype=None if options["dtype"] == "captured" else options["dtype"],
        codec=None if options["codec"] == "captured" else options["codec"],
    )


def _taps(options: dict[str, Any], target: TargetIdentity) -> tuple[Tap, ...] | None:
    """The draft's taps; None for all that were captured."""
    from eyas.taps.selection import select_taps
    from eyas.taps.target import TargetFacts

    chosen = {name: options[name] for name in ("taps", "layers", "from_config", "convention")}
    if not any(chosen.values()):
        return None
    return select_taps(TargetFacts(num_layers=target.num_layers, model_class=target.model_class), **chosen)


def _run(request: Request, workers: int, shard_bytes: int, should_stop: Callable[[], bool]) -> Summary:
    """Show events on stderr until the summary comes."""
    from eyas.standardize.cat import Advanced, Counted, Counting, Failed, Noticed, Planned, Sealed, Summary, standardize

    num_shards = num_bytes = 0
    with ExitStack() as stack:
        bar: Progress | None = None
        for event in standardize(request, workers=workers, shard_bytes=shard_bytes, should_stop=should_stop):
            if isinstance(event, Planned) and event.plan.tasks:
                _say_plan(request, event.plan)
                bar = stack.enter_context(Progress("standardize", event.plan.num_tokens, "tokens"))
            elif isinstance(event, Counting):
                bar = stack.enter_context(Progress("counting targets", event.num_shards, "shards"))
            elif isinstance(event, Sealed):
                num_shards += 1
                num_bytes += event.shard.num_bytes
            elif isinstance(event, Advanced) and bar is not None:
                bar.update(event.num_tokens, f"{num_shards:,} shards, {format_bytes(num_bytes)}")
            elif isinstance(event, Counted) and bar is not None:
                bar.update(1)
            elif isinstance(event, Failed):
                click.echo(f"corrupt: {event.reason}", err=True)
            elif isinstance(event, Noticed):
                click.echo(event.message, err=True)
            elif isinstance(event, Summary):
                return event
    raise AssertionError("standardize() ends with a Summary")


def _say_plan(request: Request, plan: Plan) -> None:
    num_links = sum(task.link for task in plan.tasks)
    done = f", {plan.num_done_samples:,} samples done before" if plan.num_done_samples else ""
    click.echo(
        f"standardizing {plan.num_samples:,} samples, {plan.num_tokens:,} tokens: {num_links:,} shards to link, "
        f"{len(plan.tasks) - num_links:,} to work through{done}",
        err=True,
    )


def _plan_facts(request: Request, plan: Plan) -> dict[str, object]:
    identity = request.identity
    num_links = sum(task.link for task in plan.tasks)
    anew = sum(task.entry.num_tokens for task in plan.tasks if not task.link) * plain_bytes_per_token(identity)
    return {
        "taps": format_taps(identity.taps),
        "last hidden": identity.last_hidden or "none",
        "stored as": f"{identity.dtype}, codec {identity.codec}",
        "samples": f"{plan.num_samples:,} left, {plan.num_done_samples:,} done",
        "shards": f"{num_links:,} to hard-link, {len(plan.tasks) - num_links:,} to work through",
        "bytes": f"{format_bytes(anew)} to write, before compression; hard links take none, but copies where "
        f"{request.out} is on another filesystem",
        "problems": len(plan.problems),
    }


def _print_summary(request: Request, summary: Summary) -> None:
    identity = request.identity
    click.echo(
        f"{request.out}: {summary.num_samples:,} samples, {summary.num_tokens:,} tokens "
        f"({summary.num_trained_tokens:,} trained), {format_bytes(summary.num_bytes)} in {summary.num_shards:,} shards"
    )
    click.echo(
        f"taps {format_taps(identity.taps)}, last_hidden {identity.last_hidden or 'none'}, {identity.dtype}, "
        f"codec {identity.codec}"
    )
    click.echo(
        f"this run: {summary.num_linked:,} shards linked, {summary.num_copied:,} copied, "
        f"{summary.num_written:,} written"
    )
    if summary.num_missing and not summary.failures and not summary.stopped_early:
        click.echo(
            f"{summary.num_missing:,} prepared samples are not captured yet: once eyas capture has them, run this "
            f"command again",
            err=True,
        )
    if summary.num_rejected:
        click.echo(
            f"{summary.num_rejected:,} samples were rejected by the capture; {request.out}/rejects says why", err=True
        )
    if summary.stopped_early:
        click.echo("stopped early: run the same command again to go on", err=True)
