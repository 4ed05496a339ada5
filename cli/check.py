"""`eyas check`: is what was captured what the engine will feed the draft?"""

from __future__ import annotations

import json
from pathlib import Path

import click

_COLOURS = {"ok": "green", "warning": "yellow", "mismatch": "red", "unknown": "cyan"}
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(name="check", short_help="Check that what was captured is what an engine feeds the draft.")
@click.argument("dataset", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--draft", type=_FOLDER, help="The draft's folder: config.json, and its weights if it has any.")
@click.option("--engine", help="What will serve: sglang, vllm, trtllm or transformers, with @VERSION behind it.")
@click.option(
    "--target",
    type=_FOLDER,
    help="The target's folder: its config, weights and tokenizer are compared, and it is run (--replay).",
)
@click.option(
    "--replay",
    "num_replayed",
    type=click.IntRange(min=0),
    metavar="N",
    help="Run N samples through the target and find which tap every slot really is. Default: 8 with --target; 0: none.",
)
@click.option(
    "--identify",
    "identified",
    type=_FOLDER,
    metavar="DIR",
    help="Instead of DATASET: say what the states in any folder of safetensors, npy or pt files are, by replay.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own code.")
@click.option("--engine-live", type=click.Choice(["vllm", "sglang"]), help="Ask the engine itself what it captures.")
@click.option("--strict", is_flag=True, help="Exit 3 on what is unknown, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(
    dataset: Path | None,
    draft: Path | None,
    engine: str | None,
    target: Path | None,
    num_replayed: int | None,
    identified: Path | None,
    trust_remote_code: bool,
    engine_live: str | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Compare DATASET with the draft, the engine that will serve it and the target. Of these only the target is run.

    Prints one line for each check and, where it is not ok, what was expected, what follows, the line that mends it and
    the source of the claim. Exit status 3: something does not match (with --strict also: something is unknown).

    \b
    eyas check captured --draft ./eagle3 --engine sglang@0.5.23
    eyas check captured --draft ./eagle3 --engine vllm@0.32.0 --target ./llama --strict
    eyas check --identify ./states-of-someone --target ./llama
    """
    from eyas.align.engine import parse_engine
    from eyas.align.identify import identify
    from eyas.align.live import open_live
    from eyas.align.replay import NUM_SAMPLES, replay_dataset
    from eyas.align.static import check_static
    from eyas.align.verdict import Report, Status, merge
    from eyas.taps.errors import UsageError
    from eyas.train.run import init_folder

    if engine_live is not None:
        if draft is None or target is None:
            raise UsageError(f"--engine-live {engine_live} loads the target and the draft: give --target and --draft")
        open_live(engine_live, target=str(target), draft=draft)
    if identified is not None:
        if dataset is not None or draft is not None or engine is not None:
            raise UsageError("--identify says what files are without anything that describes them: give --target alone")
        if target is None:
            raise UsageError(f"--identify {identified} runs the target that the states are of: give --target")
        report = Report(
            tuple(
                identify(
                    identified,
                    str(target),
                    num_samples=num_replayed or NUM_SAMPLES,
                    trust_remote_code=trust_remote_code,
                )
            )
        )
    elif dataset is None:
        raise UsageError("give DATASET, or --identify DIR for files that are none")
    else:
        if num_replayed and target is None:
            raise UsageError(f"--replay {num_replayed} runs the target: give --target")
        report = check_static(
            dataset,
            draft=None if draft is None else init_folder(str(draft)),
            engine=None if engine is None else parse_engine(engine),
            target=target,
            trust_remote_code=trust_remote_code,
        )
        if target is not None and num_replayed != 0:
            replayed = replay_dataset(
                dataset,
                str(target),
                num_samples=num_replayed or NUM_SAMPLES,
                trust_remote_code=trust_remote_code,
            )
            report = merge([report, Report(tuple(replayed))])

    def paint(text: str, status: Status) -> str:
        return click.style(text, fg=_COLOURS[status])

    click.echo(json.dumps(report.to_json()) if as_json else report.text(paint))
    raise SystemExit(report.exit_status(strict=strict))
