"""`eyas check`: is what was captured what the engine will feed the draft?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.capture.engines import SERVING_ENGINES

if TYPE_CHECKING:
    from eyas.align.engine import Engine
    from eyas.align.verdict import Finding, Report
    from eyas.capture.engines.base import EngineSettings

_COLOURS = {"ok": "green", "warning": "yellow", "mismatch": "red", "unknown": "cyan"}
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_TRANSFORMERS = "transformers"


@click.command(name="check", short_help="Check that what was captured is what an engine feeds the draft.")
@click.argument("dataset", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE OPTIONS]")
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
    "--replay-in",
    type=click.Choice([_TRANSFORMERS, *SERVING_ENGINES]),
    help="What runs the replay. Default: with --replay N the --engine that will serve, where that is vllm or sglang "
    "and installed here; else transformers.",
)
@click.option(
    "--identify",
    "identified",
    type=_FOLDER,
    metavar="DIR",
    help="Instead of DATASET: say what the states in any folder of safetensors, npy or pt files are, by replay.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own code.")
@click.option(
    "--engine-live",
    type=click.Choice(SERVING_ENGINES),
    help="Start this engine with --draft as it serves one, and compare what it feeds the draft with DATASET.",
)
@click.option(
    "--tp",
    type=click.IntRange(1),
    default=1,
    help="Processes (GPUs) that share the target in a serving engine (--replay-in, --engine-live).",
)
@click.option("--strict", is_flag=True, help="Exit 3 on what is unknown, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(**options: Any) -> None:
    """Compare DATASET with the draft, the engine that will serve it and the target. Of these only the target is run,
    and the engine itself with --engine-live.

    Prints one line for each check and, where it is not ok, what was expected, what follows, the line that mends it and
    the source of the claim. Exit status 3: something does not match (with --strict also: something is unknown).

    \b
    eyas check captured --draft ./eagle3 --engine sglang@0.5.23
    eyas check captured --draft ./eagle3 --engine vllm@0.32.0 --target ./llama --strict
    eyas check captured --draft ./eagle3 --target ./kimi --replay 0 --engine-live vllm --tp 8
    eyas check captured --target ./kimi --replay 2 --replay-in sglang --tp 8 -- --trust-remote-code
    eyas check --identify ./states-of-someone --target ./llama

    A target that transformers cannot run is replayed in vLLM or SGLang (--replay-in), where they are installed; options
    after -- are theirs.
    """
    from eyas.align.verdict import Status

    report = _identified(options) if options["identified"] is not None else _checked(options)

    def paint(text: str, status: Status) -> str:
        return click.style(text, fg=_COLOURS[status])

    click.echo(json.dumps(report.to_json()) if options["as_json"] else report.text(paint))
    raise SystemExit(report.exit_status(strict=options["strict"]))


def _identified(options: dict[str, Any]) -> Report:
    from eyas.align.identify import identify
    from eyas.align.replay import NUM_SAMPLES
    from eyas.align.verdict import Report
    from eyas.taps.errors import UsageError

    files, target = options["identified"], options["target"]
    if any(options[name] is not None for name in ("dataset", "draft", "engine", "engine_live")):
        raise UsageError("--identify says what files are without anything that describes them: give --target alone")
    if options["replay_in"] not in (None, _TRANSFORMERS):
        raise UsageError(f"--replay-in {options['replay_in']} with --identify: files are replayed in transformers only")
    if target is None:
        raise UsageError(f"--identify {files} runs the target that the states are of: give --target")
    return Report(
        tuple(
            identify(
                files,
                str(target),
                num_samples=options["num_replayed"] or NUM_SAMPLES,
                trust_remote_code=options["trust_remote_code"],
            )
        )
    )


def _checked(options: dict[str, Any]) -> Report:
    from eyas.align.engine import parse_engine
    from eyas.align.static import check_static
    from eyas.align.verdict import Report, merge
    from eyas.capture.engines import installed_version
    from eyas.taps.errors import UsageError
    from eyas.train.run import init_folder

    dataset, draft, target, live = options["dataset"], options["draft"], options["target"], options["engine_live"]
    if dataset is None:
        raise UsageError("give DATASET, or --identify DIR for files that are none")
    if live is not None:
        if draft is None or target is None:
            raise UsageError(f"--engine-live {live} loads the target and the draft: give --target and --draft")
        installed_version(live)
    for name, value in (("--replay", options["num_replayed"]), ("--replay-in", options["replay_in"])):
        if value and target is None:
            raise UsageError(f"{name} {value} runs the target: give --target")
    engine = None if options["engine"] is None else parse_engine(options["engine"])
    draft = None if draft is None else init_folder(str(draft))
    runs_replay = target is not None and options["num_replayed"] != 0
    replay_in, why = _replay_engine(options, engine) if runs_replay else (None, "")
    for_engine = [f"--tp {options['tp']}"] * (options["tp"] > 1) + list(options["engine_options"])
    if for_engine and live is None and replay_in in (None, _TRANSFORMERS):
        raise UsageError(f"{' '.join(for_engine)}: no serving engine is started: give --engine-live or --replay-in")
    reports = [
        check_static(dataset, draft=draft, engine=engine, target=target, trust_remote_code=options["trust_remote_code"])
    ]
    if live is not None:
        assert draft is not None
        reports.append(Report(tuple(_live(options, draft))))
    if replay_in is not None:
        reports.append(Report(tuple(_replayed(options, replay_in, why))))
    return merge(reports)


def _replay_engine(options: dict[str, Any], engine: Engine | None) -> tuple[str, str]:
    """What runs the replay, and why, where that is worth saying. Raises TargetError where it is not installed."""
    from packaging.version import Version

    from eyas.capture.engines import installed_version
    from eyas.capture.errors import TargetError

    if options["replay_in"] == _TRANSFORMERS:
        return _TRANSFORMERS, ""
    if options["replay_in"] is not None:
        installed_version(options["replay_in"])
        return options["replay_in"], "as --replay-in says"
    if options["num_replayed"] is None or engine is None or engine.system not in SERVING_ENGINES:
        return _TRANSFORMERS, ""
    try:
        installed = installed_version(engine.system)
    except TargetError:
        return _TRANSFORMERS, f"{engine.system} is not installed here"
    if engine.version is not None and engine.version.public != Version(installed).public:
        return _TRANSFORMERS, f"{engine.system} {installed} is installed here, and not {engine.version}"
    return engine.system, "which will serve (--engine)"


def _settings(options: dict[str, Any]) -> EngineSettings:
    """All taps, in the dtype of the dataset."""
    from eyas.capture.engines.base import EngineSettings
    from eyas.capture.engines.transformers.load import read_outline
    from eyas.shards.identity import read_identity
    from eyas.taps.notation import all_taps

    target, trusted = str(options["target"]), options["trust_remote_code"]
    outline = read_outline(target, revision=None, trust_remote_code=trusted)
    return EngineSettings(
        target=target,
        taps=all_taps(outline.num_layers),
        dtype=read_identity(options["dataset"]).dtype,
        target_statistics=False,
        trust_remote_code=trusted,
        tp=options["tp"],
        engine_options=options["engine_options"],
    )


def _live(options: dict[str, Any], draft: Path) -> list[Finding]:
    from eyas.align.live.compare import live_findings
    from eyas.shards.dataset import Dataset

    return live_findings(Dataset.open(options["dataset"]), options["engine_live"], _settings(options), draft)


def _replayed(options: dict[str, Any], replay_in: str, why: str) -> list[Finding]:
    from eyas.align.replay import NUM_SAMPLES, replay_dataset
    from eyas.align.serving import ServedTarget
    from eyas.align.verdict import Finding

    num_samples = options["num_replayed"] or NUM_SAMPLES
    if replay_in == _TRANSFORMERS:
        found = replay_dataset(
            options["dataset"],
            str(options["target"]),
            num_samples=num_samples,
            trust_remote_code=options["trust_remote_code"],
        )
        return [*([Finding(check="replay", status="ok", found=f"ran in transformers: {why}")] if why else []), *found]
    with ServedTarget(replay_in, _settings(options)) as target:
        return [target.finding(why), *replay_dataset(options["dataset"], target, num_samples=num_samples)]
