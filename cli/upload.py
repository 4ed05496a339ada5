"""`eyas upload`: a dataset to where others, or other machines, can get it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from eyas.cli.parameters import format_bytes
from eyas.cli.progress import Progress
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.cli.signals import stop_on_signals
from eyas.taps.errors import EXIT_STOPPED_EARLY

if TYPE_CHECKING:
    from eyas.shards.remote import Store
    from eyas.shards.transfer import Summary

WORKERS = 8  # one connection hands over some 50 to 200 MB/s


@click.command(name="upload", short_help="Bring a dataset to hf://, s3://, gs:// or another folder, verified.")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("url")
@click.option("--workers", type=click.IntRange(1), default=WORKERS, help="Shards that are under way at once.")
@click.option(
    "--verify",
    is_flag=True,
    help="Read every shard back from URL, those that were there before too; send again what is not whole there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(dataset: Path, url: str, workers: int, verify: bool, as_json: bool, dry_run: bool) -> None:
    """Bring to URL what it has not got of DATASET, shard by shard.

    Each shard is hashed as it is sent, and one that is not what its ledger line says is never stored. What is done is
    what URL holds, so run this again after any interruption, or while DATASET is still being captured: at any instant
    whoever reads URL sees a whole dataset. s3:// needs the extra eyas[s3], gs:// the extra eyas[gs].

    \b
    eyas upload standard hf://datasets/user/kimi-k25-standard
    eyas upload captured s3://bucket/kimi-k25 --workers 16
    eyas upload standard gs://bucket/kimi-k25 --verify
    """
    from eyas.shards.remote import FolderStore, open_store

    run_transfer("upload", FolderStore(dataset), open_store(url), workers, verify, as_json, dry_run)


def run_transfer(
    verb: str, source: Store, destination: Store, workers: int, verify: bool, as_json: bool, dry_run: bool
) -> None:
    """Do it, show it, and leave with the exit status that says how it ended."""
    from eyas.shards.transfer import plan_transfer

    if dry_run:
        plan = plan_transfer(source, destination)
        print_dry_run(
            {
                f"to {verb}": f"{len(plan.missing):,} shards, {format_bytes(plan.num_bytes)}",
                "there already": f"{len(plan.there):,} shards",
                "cannot be transferred": ", ".join(plan.failures) or "-",
                "problems": len(plan.notes),
            }
        )
        return
    with stop_on_signals() as stopping:
        summary = _run(verb, source, destination, workers, verify, stopping.is_set)
    if as_json:
        click.echo(json.dumps({**asdict(summary), "source": source.url, "destination": destination.url}))
    else:
        _print_summary(destination, summary, verify)
    if summary.stopped_early:
        raise SystemExit(EXIT_STOPPED_EARLY)
    if summary.failures:
        raise click.ClickException(
            f"{source.url}: {len(summary.failures):,} shards could not be transferred: "
            f"{', '.join(sorted(summary.failures))}. A damaged one is made anew by the command that made the dataset, "
            f"once it is set aside (mv SHARD SHARD.corrupt)"
        )


def _run(
    verb: str, source: Store, destination: Store, workers: int, verify: bool, should_stop: Callable[[], bool]
) -> Summary:
    """Show events on stderr until the summary comes."""
    from eyas.shards.transfer import Advanced, Failed, Noticed, Placed, Planned, Summary, transfer

    progress: Progress | None = None
    num_placed = 0
    try:
        for event in transfer(source, destination, workers=workers, verify=verify, should_stop=should_stop):
            if isinstance(event, Planned):
                plan = event.plan
                click.echo(
                    f"{verb}: {len(plan.missing):,} shards, {format_bytes(plan.num_bytes)} from {source.url} to "
                    f"{destination.url}; {len(plan.there):,} are there already",
                    err=True,
                )
                progress = Progress(verb, event.num_bytes, "bytes")
            elif isinstance(event, Advanced) and progress is not None:
                progress.update(event.num_bytes, f"{num_placed:,} shards")
            elif isinstance(event, Placed):
                num_placed += 1
            elif isinstance(event, Failed):
                click.echo(f"failed: {event.reason}", err=True)
            elif isinstance(event, Noticed):
                click.echo(event.message, err=True)
            elif isinstance(event, Summary):
                return event
    finally:
        if progress is not None:
            progress.__exit__(None, None, None)
    raise AssertionError("transfer() ends with a Summary")


def _print_summary(destination: Store, summary: Summary, verify: bool) -> None:
    click.echo(
        f"{destination.url}: {summary.num_samples:,} samples, {format_bytes(summary.num_bytes)} in "
        f"{summary.num_shards:,} shards"
    )
    click.echo(
        f"this run: {summary.num_placed:,} shards, {format_bytes(summary.placed_bytes)}; {summary.num_there:,} were "
        f"there before" + (f"; {summary.num_verified:,} read back and whole" if verify else "")
    )
    if summary.stopped_early:
        click.echo("stopped early: run the same command again to go on", err=True)
