"""`eyas export`: write a draft, or its config alone, as an engine loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    from eyas.align.checks.subject import TargetFolder
    from eyas.align.engine import Engine
    from eyas.taps.notation import Tap


@click.command(name="export", short_help="Write a draft as an engine loads it.")
@click.argument("source", metavar="RUN|DATASET", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--engine",
    required=True,
    help="What will serve: sglang, vllm or trtllm, with @VERSION behind it; or speculators for its format.",
)
@click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The target's folder, for the sizes of the draft; default: the run's.",
)
@click.option("--source-engine", help="Whose reading of a foreign draft's layer ids counts, such as sglang@0.5.23.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    help="Of the weights written from a run.",
)
@click.option(
    "--draft-vocab-size", type=click.IntRange(1), help="From a dataset: ids that the draft proposes; default: all."
)
@click.option("--json", "as_json", is_flag=True, help="Print the readings as JSON.")
def command(**options: Any) -> None:
    """Write the draft of RUN (its best checkpoint; a checkpoint or any draft's folder, too) into OUT as the engine
    loads it: tensor names, shapes, config keys, layer ids in its convention. What the engine would not load as it was
    trained is refused. Then print what every engine makes of it.

    From a DATASET, OUT/config.json alone, for a draft that is fed its taps. Nothing is written where the engine cannot
    be told these taps.

    \b
    eyas export run draft --engine sglang@0.5.23
    eyas export run draft --engine speculators
    eyas export captured draft --engine vllm --target ./llama --draft-vocab-size 32000
    """
    from eyas.align.engine import parse_engine
    from eyas.shards.identity import IDENTITY_FILE
    from eyas.train.export import SPECULATORS

    name = options["engine"]
    if name.partition("@")[0] == "transformers":
        raise UsageError("--engine transformers serves no draft: give sglang, vllm, trtllm or speculators")
    is_dataset = (options["source"] / IDENTITY_FILE).is_file()
    if is_dataset and name == SPECULATORS:
        raise UsageError("--engine speculators writes a trained draft: give a run instead of a dataset")
    engine = None if name == SPECULATORS else parse_engine(name)
    if is_dataset:
        assert engine is not None
        _export_config(options, engine)
    else:
        _export_draft(options, engine)


def _export_config(options: dict[str, Any], engine: Engine) -> None:
    from eyas.align.checks.subject import TargetFolder
    from eyas.align.draft_config import make_draft_config, write_draft_config
    from eyas.shards.identity import read_identity

    if options["target"] is None:
        raise UsageError("--target is needed with a dataset: the sizes of the draft follow from it")
    if options["source_engine"] is not None:
        raise UsageError("--source-engine belongs to a draft, and this is a dataset")
    identity = read_identity(options["source"])
    target = TargetFolder(options["target"])
    made = make_draft_config(identity, target.text, target.facts, engine, draft_vocab_size=options["draft_vocab_size"])
    path = write_draft_config(options["out"], made.config)
    _report(options, target, path, made.config, identity.taps, made.serving)


def _export_draft(options: dict[str, Any], engine: Engine | None) -> None:
    import torch

    from eyas.align.checks.subject import TargetFolder
    from eyas.align.engine import parse_engine
    from eyas.train.draft_files import load_draft
    from eyas.train.export import export_draft
    from eyas.train.run import init_folder, read_run

    source = options["source"]
    if options["draft_vocab_size"] is not None:
        raise UsageError("--draft-vocab-size: a trained draft has its vocabulary; leave the option out")
    folder = options["target"]
    if folder is None:
        run = next((body for path in (source, *source.parents[:3]) if (body := read_run(path)) is not None), None)
        if run is None:
            raise UsageError(f"--target is needed: {source} is of no run, which would name it")
        folder = Path(run["target"])
    target = TargetFolder(folder)
    reading = None if options["source_engine"] is None else parse_engine(options["source_engine"])
    draft = load_draft(init_folder(str(source)), target=folder, engine=reading, dtype=torch.float32)
    dtype = getattr(torch, options["dtype"])
    made = export_draft(draft, options["out"], engine=engine, target=folder, facts=target.facts, dtype=dtype)
    config = json.loads((made.path / "config.json").read_bytes())
    _report(options, target, made.path, config, draft.taps, made.serving)


def _report(
    options: dict[str, Any],
    target: TargetFolder,
    path: Path,
    config: dict[str, Any],
    taps: tuple[Tap, ...],
    serving: str,
) -> None:
    from eyas.align.draft_config import all_readings
    from eyas.taps.notation import format_taps

    readings = all_readings(config, target.facts)
    if options["as_json"]:
        rows = [
            {"engine": r.label, "taps": None if r.taps is None else format_taps(r.taps), "source": r.source}
            for r in readings
        ]
        click.echo(json.dumps({"path": str(path), "serving": serving or None, "readings": rows}))
        return
    click.echo(f"{path}: for {options['engine']}, which feeds it {format_taps(taps)}")
    if serving:
        click.echo(f"start {options['engine']} with {serving}")
    click.echo("what each engine makes of it:")
    width = max((len(reading.label) for reading in readings), default=0)
    for reading in readings:
        outcome = format_taps(reading.taps) if reading.taps is not None else reading.problem
        right = reading.taps in (taps, None)
        click.echo(f"  {reading.label:<{width}}  {outcome}{'' if right else '  <- not these taps'}")
