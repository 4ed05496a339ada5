"""`eyas status`: how far a capture or a standardize run has come."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from eyas.cli.parameters import format_bytes
from eyas.cli.progress import format_seconds
from eyas.shards.status import DatasetStatus, dataset_status
from eyas.taps.notation import format_taps

_SHOWN = 20  # problems, workers and reasons in the text; --json has all


@click.command(name="status", short_help="Show done, left, rate, time left, rejects and problems of a dataset.")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(dataset: Path, as_json: bool) -> None:
    """Show how far DATASET has come, from its ledgers alone: it may be captured at this moment, on any machine.

    The rate is that of the workers that sealed a shard lately.

    \b
    eyas status captured
    eyas status captured --json | jq .seconds_left
    """
    status = dataset_status(dataset)
    if as_json:
        click.echo(json.dumps(_as_json(status)))
    else:
        _print(status)


def _as_json(status: DatasetStatus) -> dict[str, object]:
    return {**asdict(status), "identity": status.identity.to_json()}


def _print(status: DatasetStatus) -> None:
    share = 100 * status.num_samples / max(status.num_prepared, 1)
    finished = not status.num_left
    stage = f"{status.identity.stage}{', finished' if finished else ''}"
    click.echo(f"{status.dataset}: {stage}, taps {format_taps(status.identity.taps)}")
    click.echo(f"done      {status.num_samples:,} of {status.num_prepared:,} samples ({share:.1f} %)")
    click.echo(
        f"          {status.num_tokens:,} tokens, {status.num_trained_tokens:,} of them trained; "
        f"{format_bytes(status.num_bytes)} in {status.num_shards:,} shards"
    )
    click.echo(f"left      {status.num_left:,} samples")
    click.echo(f"rejected  {status.num_rejected:,} samples")
    for reason, count in Counter(status.rejects.values()).most_common(_SHOWN):
        click.echo(f"          {count:,} x {reason}")
    live = sum(worker.live for worker in status.workers)
    if finished:
        rate = "none, it is finished"
    elif status.is_at_rest:
        rate = "none: no run holds it, and the same command as before goes on"
    else:
        rate = f"{_rate(status)} ({live} of {len(status.workers)} workers live)"
    click.echo(f"rate      {rate}")
    click.echo(f"time left {format_seconds(status.seconds_left) if status.seconds_left is not None else 'unknown'}")
    now = time.time()
    for worker in status.workers[:_SHOWN]:
        state = "finished" if finished else "live" if worker.live else "idle"
        ago = format_seconds(max(now - worker.last_sealed_at, 0))
        click.echo(
            f"  {worker.worker}: {state}, last sealed {ago} ago, {worker.num_shards:,} shards, "
            f"{worker.num_samples:,} samples"
        )
    _print_rest(len(status.workers), "workers")
    click.echo(f"problems  {len(status.problems):,}")
    for problem in status.problems[:_SHOWN]:
        click.echo(f"  {problem}")
    _print_rest(len(status.problems), "problems")


def _rate(status: DatasetStatus) -> str:
    if status.samples_per_second is None or status.tokens_per_second is None or status.bytes_per_second is None:
        return "unknown"
    return (
        f"{status.samples_per_second:,.2f} samples/s, {status.tokens_per_second:,.0f} tokens/s, "
        f"{format_bytes(status.bytes_per_second)}/s"
    )


def _print_rest(count: int, what: str) -> None:
    if count > _SHOWN:
        click.echo(f"  and {count - _SHOWN:,} more {what} (--json lists all)")
