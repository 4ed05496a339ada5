"""`eyas export`: write a draft's config as an engine reads it."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(name="export", short_help="Write a draft's config as an engine reads it.")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--engine", required=True, help="What will serve: sglang, vllm or trtllm, with @VERSION behind it.")
@click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="The target's folder, for the sizes of the draft.",
)
@click.option("--draft-vocab-size", type=click.IntRange(1), help="Ids that the draft proposes; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the readings as JSON.")
def command(dataset: Path, out: Path, engine: str, target: Path, draft_vocab_size: int | None, as_json: bool) -> None:
    """Write OUT/config.json for a draft that is fed DATASET's taps, and print what every engine makes of it.

    Nothing is written where the engine cannot be told these taps.

    \b
    eyas export captured draft --engine sglang@0.5.23 --target ./llama
    eyas export captured draft --engine vllm --target ./llama --draft-vocab-size 32000
    """
    from eyas.align.checks.subject import TargetFolder
    from eyas.align.draft_config import all_readings, make_draft_config, write_draft_config
    from eyas.align.engine import parse_engine
    from eyas.shards.identity import read_identity
    from eyas.taps.notation import format_taps

    identity = read_identity(dataset)
    folder = TargetFolder(target)
    made = make_draft_config(
        identity, folder.text, folder.facts, parse_engine(engine), draft_vocab_size=draft_vocab_size
    )
    path = write_draft_config(out, made.config)
    readings = all_readings(made.config, folder.facts)
    if as_json:
        rows = [
            {"engine": r.label, "taps": None if r.taps is None else format_taps(r.taps), "source": r.source}
            for r in readings
        ]
        click.echo(json.dumps({"config": str(path), "serving": made.serving or None, "readings": rows}))
        return
    click.echo(f"{path}: for {engine}, which feeds it {format_taps(identity.taps)}")
    if made.serving:
        click.echo(f"start {engine} with {made.serving}")
    click.echo("what each engine makes of it:")
    width = max((len(reading.label) for reading in readings), default=0)
    for reading in readings:
        right = reading.taps == identity.taps
        outcome = format_taps(reading.taps) if reading.taps is not None else reading.problem
        right = right or reading.taps is None
        click.echo(f"  {reading.label:<{width}}  {outcome}{'' if right else '  <- not these taps'}")
