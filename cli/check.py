"""`eyas check`: is what was captured what the engine will feed the draft?"""

from __future__ import annotations

import json
from pathlib import Path

import click

_COLOURS = {"ok": "green", "warning": "yellow", "mismatch": "red", "unknown": "cyan"}
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(name="check", short_help="Check that what was captured is what an engine feeds the draft.")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--draft", type=_FOLDER, help="The draft's folder: config.json, and its weights if it has any.")
@click.option("--engine", help="What will serve: sglang, vllm, trtllm or transformers, with @VERSION behind it.")
@click.option("--target", type=_FOLDER, help="The target's folder, to compare its config, weights and tokenizer.")
@click.option("--trust-remote-code", is_flag=True, help="Run tokenizer code that comes with the target.")
@click.option("--engine-live", type=click.Choice(["vllm", "sglang"]), help="Ask the engine itself what it captures.")
@click.option("--strict", is_flag=True, help="Exit 3 on what is unknown, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(
    dataset: Path,
    draft: Path | None,
    engine: str | None,
    target: Path | None,
    trust_remote_code: bool,
    engine_live: str | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Compare DATASET with the draft, the engine that will serve it and the target, without running any of them.

    Prints one line for each check and, where it is not ok, what was expected, what follows, the line that mends it and
    the source of the claim. Exit status 3: something does not match (with --strict also: something is unknown).

    \b
    eyas check captured --draft ./eagle3 --engine sglang@0.5.23
    eyas check captured --draft ./eagle3 --engine vllm@0.32.0 --target ./llama --strict
    """
    from eyas.align.engine import parse_engine
    from eyas.align.live import open_live
    from eyas.align.static import check_static
    from eyas.align.verdict import Status
    from eyas.taps.errors import UsageError

    if engine_live is not None:
        if draft is None or target is None:
            raise UsageError(f"--engine-live {engine_live} loads the target and the draft: give --target and --draft")
        open_live(engine_live, target=str(target), draft=draft)
    report = check_static(
        dataset,
        draft=draft,
        engine=None if engine is None else parse_engine(engine),
        target=target,
        trust_remote_code=trust_remote_code,
    )

    def paint(text: str, status: Status) -> str:
        return click.style(text, fg=_COLOURS[status])

    click.echo(json.dumps(report.to_json()) if as_json else report.text(paint))
    raise SystemExit(report.exit_status(strict=strict))
