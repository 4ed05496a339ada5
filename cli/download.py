"""`eyas download`: a dataset from where `eyas upload` brought it."""

from __future__ import annotations

from pathlib import Path

import click

from eyas.cli.recipe import dry_run_option
from eyas.cli.upload import WORKERS, run_transfer


@click.command(name="download", short_help="Fetch a dataset from hf://, s3://, gs:// or another folder, verified.")
@click.argument("url")
@click.argument("dataset", type=click.Path(file_okay=False, path_type=Path))
@click.option("--workers", type=click.IntRange(1), default=WORKERS, help="Shards that are under way at once.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(url: str, dataset: Path, workers: int, as_json: bool, dry_run: bool) -> None:
    """Fetch into DATASET what it has not got of the dataset at URL, shard by shard.

    Each shard is hashed as it comes, and gets its name and its ledger line only where it is what the ledger at URL
    says. Run it again after any interruption, or once more was uploaded: what is there stays. s3:// needs the extra
    eyas[s3], gs:// the extra eyas[gs].

    \b
    eyas download hf://datasets/user/kimi-k25-standard standard
    eyas download s3://bucket/kimi-k25 captured --workers 16
    """
    from eyas.shards.remote import FolderStore, open_store

    run_transfer("download", open_store(url), FolderStore(dataset), workers, False, as_json, dry_run)
