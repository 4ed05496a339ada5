"""`eyas train`: train an EAGLE-3 draft on a standard dataset."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from eyas.cli.main import ARGUMENTS
from eyas.cli.parameters import duration
from eyas.cli.progress import Progress, format_seconds
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.cli.signals import stop_on_signals
from eyas.taps.errors import EXIT_STOPPED_EARLY, UsageError

if TYPE_CHECKING:
    from eyas.train.loop import Start, TrainSummary
    from eyas.train.run import RunPlan, TrainConfig

DEFAULT_EPOCHS = 3
# What --trainer can tell another trainer, or needs itself.
_TRANSLATED = {
    "dataset", "run", "trainer", "trainer_options", "target", "trust_remote_code", "draft_vocab_size", "ttt_steps",
    "epochs", "batch_tokens", "optimizer", "learning_rate", "schedule", "validation", "seed", "dp", "dry_run",
}  # fmt: skip


def weights(value: str | None) -> tuple[float, ...] | None:
    """``1,0.8,0.6`` as numbers, none below 0 and not all 0."""
    if value is None:
        return None
    try:
        found = tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: expected numbers such as 1,0.8,0.64") from error
    if not all(0 <= weight < float("inf") for weight in found) or not any(found):
        raise click.BadParameter(f"{value!r}: expected numbers from 0 up, and not only 0")
    return found


@click.command(name="train", short_help="Train an EAGLE-3 draft on a standard dataset.")
@click.argument("dataset", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.argument("trainer_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAINER OPTIONS]")
@click.option(
    "--trainer",
    type=click.Choice(["eyas", "speculators", "specforge"]),
    default="eyas",
    help="Who trains: eyas, or another trainer on the same data, samples and vocabulary.",
)
@click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="The target's folder: its embedding, lm_head and final norm are read, and its config and tokenizer compared.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run tokenizer code that comes with the target.")
@click.option(
    "--draft-vocab-size",
    type=click.IntRange(1),
    help="Ids that the draft proposes, the most frequent targets; default: 32000, or all where the target has fewer.",
)
@click.option("--init-from", help="Start from this draft's weights: a run, a checkpoint, or any draft's folder.")
@click.option("--draft-layers", type=click.IntRange(1), help="Decoder layers of the draft; default: 1.")
@click.option("--draft-hidden-size", type=click.IntRange(1), help="Its hidden size; default: the target's.")
@click.option("--fc-norm", is_flag=True, help="A norm for each tap before fc (EAGLE-3.1).")
@click.option("--norm-before-fc", is_flag=True, help="One norm over all taps before fc.")
@click.option("--norm-output", is_flag=True, help="Carry the normed hidden state to the next step (EAGLE-3.1).")
@click.option("--norm-before-residual", is_flag=True, help="The first residual is the normed hidden state.")
@click.option(
    "--serving-engine",
    default="vllm@0.32.0",
    help="What will serve the draft: sglang, vllm, ... with @VERSION. It must know the norms asked for.",
)
@click.option("--ttt-steps", type=click.IntRange(1), default=3, help="Steps of training-time test.")
@click.option(
    "--loss",
    type=click.Choice(["kl", "tv", "lk"]),
    default="kl",
    help="kl: forward KL; tv: total variation, the rejection rate itself; lk: from the first to the second by rate.",
)
@click.option("--step-weights", type=weights, help="Weight of each step's loss, e.g. 1,0.8,0.64; default: 1 each.")
@click.option("--epochs", type=click.IntRange(1), help=f"Passes over the data; default: {DEFAULT_EPOCHS}.")
@click.option("--max-steps", type=click.IntRange(1), help="Updates to make, instead of --epochs.")
@click.option("--batch-tokens", type=click.IntRange(4), default=8192, help="Tokens of a batch, of whole samples.")
@click.option("--accumulate", type=click.IntRange(1), default=1, help="Batches of each rank in one update.")
@click.option(
    "--overlong",
    type=click.Choice(["truncate", "skip"]),
    default="truncate",
    help="What becomes of samples over --batch-tokens.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "muon"]),
    help="muon: for the matrices, adamw for the rest. Default: muon, with --shard adamw.",
)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=1e-3, help="The highest.")
@click.option("--schedule", type=click.Choice(["cosine", "linear", "constant"]), default="cosine", help="Its decay.")
@click.option("--warmup", type=click.FloatRange(0, 0.9), default=0.02, help="Share of the run in which it rises.")
@click.option("--weight-decay", type=click.FloatRange(0), default=0.0, help="Of all trained weights.")
@click.option("--clip", type=click.FloatRange(0), default=1.0, help="Norm of the gradient at most; 0: any.")
@click.option("--noise", type=click.FloatRange(0), default=0.0, help="Uniform noise on the features; EAGLE's is 0.2.")
@click.option("--validation", type=click.FloatRange(0, 0.5), default=0.05, help="Share of samples that is held out.")
@click.option("--validate-every", type=click.IntRange(1), help="Steps between validations; default: an epoch.")
@click.option("--save-every", type=click.IntRange(1), help="Steps between checkpoints, besides one a validation.")
@click.option("--keep", type=click.IntRange(1), default=2, help="Newest checkpoints to keep, besides the best.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the draft's weights and the order.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: cuda if there is one."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    help="What is computed in; auto: bfloat16 on cuda, float32 on a CPU. Weights are kept in float32.",
)
@click.option("--dp", type=click.IntRange(1), default=1, help="Processes (GPUs), each with its own batches.")
@click.option("--shard", is_flag=True, help="Split a large draft's weights and optimizer over the processes (FSDP2).")
@click.option("--compile/--no-compile", "compile_", default=True, help="Compile the draft (on cuda).")
@click.option("--reader-threads", type=click.IntRange(1), help="Of each process; default: one a core, at most 8.")
@click.option("--tensorboard", is_flag=True, help="Write RUN/tensorboard, too.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves into this file.")
@click.option("--max-runtime", type=duration, help="Save and exit 75 after this time, e.g. 11h30m.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Train an EAGLE-3 draft on the standard dataset DATASET, in the folder RUN.

    Run it again after any interruption: it goes on from the newest checkpoint with the same numbers, also with another
    number of processes as long as --accumulate times their number stays. SIGTERM, Ctrl-C and --max-runtime save and
    exit 75. A dataset that does not match the target or the draft is refused with exit status 3.

    RUN/checkpoints/best.json names the checkpoint with the highest expected accepted length on held-out samples.

    With --trainer, another trainer is started on the same data: it is written into RUN/data as that trainer reads it,
    those options that it has are translated, and what stands behind -- goes to it as it is. Its log is shown, and
    --dry-run prints its command line.

    \b
    eyas train standard run --target ./llama --draft-vocab-size 32000
    eyas train standard run --target ./llama --dp 8 --epochs 10 --max-runtime 11h30m
    eyas train standard run --target ./llama --trainer speculators -- --loss-implementation eager
    """
    from eyas.capture.launch import PARENT_PIPE, launch_ranks
    from eyas.capture.ranks import is_launched

    if options["trainer"] != "eyas":
        _train_elsewhere(options)
        return
    if options["trainer_options"]:
        raise UsageError(f"{options['trainer_options'][0]}: only another --trainer takes options behind --")
    with stop_on_signals() as stopping:
        config, plan = _resolve(options)
        if options["dry_run"]:
            print_dry_run(_plan_facts(config, plan))
            return
        first = os.environ.get("RANK", "0") == "0"
        if PARENT_PIPE not in os.environ and first:  # else whoever launched this has done it
            _check(config, plan)
        if options["dp"] > 1 and not is_launched():
            arguments = click.get_current_context().meta[ARGUMENTS]
            raise SystemExit(EXIT_STOPPED_EARLY if stopping.is_set() else launch_ranks(arguments, options["dp"]))
        summary = _train(config, plan, stopping)
    if summary.rank == 0:
        if options["plot"] is not None:
            from eyas.train.plot import plot_run

            plot_run(config.run, options["plot"])
        if options["as_json"]:
            click.echo(json.dumps(asdict(summary)))
        else:
            _print_summary(summary)
    status = 0 if summary.stopped is None else EXIT_STOPPED_EARLY
    if is_launched():
        # Everything is on disk and agreed on; gloo's threads now and then abort an interpreter that ends (SIGABRT).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def _resolve(options: dict[str, Any]) -> tuple[TrainConfig, RunPlan]:
    import torch

    from eyas.align.loaders.base import FLAGS
    from eyas.capture.ranks import is_launched
    from eyas.train.optimizer import OptimizerOptions
    from eyas.train.plot import check_plot
    from eyas.train.run import TrainConfig, match_run, plan_run

    world_size = int(os.environ["WORLD_SIZE"]) if is_launched() else options["dp"]
    if options["dp"] not in (1, world_size):
        raise UsageError(f"torchrun started {world_size} processes, and --dp is {options['dp']}: leave --dp out")
    if options["shard"] and world_size == 1:
        raise UsageError("--shard splits the draft over several processes, and this is one: give --dp, or leave it out")
    if options["plot"] is not None:
        check_plot(options["plot"])
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    dtype = options["dtype"]
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    epochs = options["epochs"]
    if epochs is None and options["max_steps"] is None:
        epochs = DEFAULT_EPOCHS
    config = TrainConfig(
        draft_vocab_size=options["draft_vocab_size"],
        init_from=options["init_from"],
        draft_layers=options["draft_layers"],
        draft_hidden_size=options["draft_hidden_size"],
        draft_switches=tuple(name for name in FLAGS if options[name]),
        serving_engine=options["serving_engine"],
        ttt_steps=options["ttt_steps"],
        loss=options["loss"],
        step_weights=options["step_weights"] or (1.0,) * options["ttt_steps"],
        batch_tokens=options["batch_tokens"],
        batches_per_step=options["accumulate"] * world_size,
        overlong=options["overlong"],
        optimizer=OptimizerOptions(
            optimizer=options["optimizer"] or _default_optimizer(options),
            learning_rate=options["learning_rate"],
            schedule=options["schedule"],
            warmup=options["warmup"],
            weight_decay=options["weight_decay"],
            clip=options["clip"] or None,
        ),
        noise=options["noise"],
        validation=options["validation"],
        seed=options["seed"],
        dtype=dtype,
        epochs=epochs,
        max_steps=options["max_steps"],
        dataset=options["dataset"],
        run=options["run"],
        target=options["target"],
        trust_remote_code=options["trust_remote_code"],
        validate_every=options["validate_every"],
        save_every=options["save_every"],
        keep=options["keep"],
        device=device,
        shard=options["shard"],
        compile=options["compile_"],
        reader_threads=options["reader_threads"],
        tensorboard=options["tensorboard"],
        max_runtime_seconds=options["max_runtime"],
    )
    if options["trainer"] == "eyas":
        match_run(config)
    return config, plan_run(config)


def _default_optimizer(options: dict[str, Any]) -> Literal["adamw", "muon"]:
    """Muon, except where it cannot be had: it needs whole matrices, and SpecForge does not know it."""
    return "adamw" if options["shard"] or options["trainer"] == "specforge" else "muon"


def _train_elsewhere(options: dict[str, Any]) -> None:
    import shlex

    from eyas.train.peers.launch import command_line, launch, settings_of

    trainer = options["trainer"]
    ctx = click.get_current_context()
    given = [parameter.opts[-1] for parameter in ctx.command.params if (name := parameter.name) not in _TRANSLATED
             and ctx.get_parameter_source(name or "") is ParameterSource.COMMANDLINE]  # fmt: skip
    if given:
        raise UsageError(f"{', '.join(given)}: not translated for {trainer}: give its own option behind --")
    config, plan = _resolve(options)
    settings = settings_of(config, plan, processes=options["dp"], extra=options["trainer_options"])
    if options["dry_run"]:
        print_dry_run({**_plan_facts(config, plan), trainer: shlex.join(command_line(trainer, settings, plan))})
        return
    _check(config, plan)
    command_line(trainer, settings, plan)  # what it does not do is refused before anything is written
    with Progress(f"write {config.run / 'data'}", plan.dataset.num_tokens, "tokens") as progress:
        status = launch(trainer, settings, config, plan, progress.update)
    if status:
        raise click.ClickException(f"{trainer} ended with status {status}: its log stands above")


def _check(config: TrainConfig, plan: RunPlan) -> None:
    """Exit 3, with the report on stderr, where the data is not what the draft will be fed."""
    from eyas.train.run import check_run

    report = check_run(config, plan)
    if report.exit_status(strict=False):
        click.echo(f"check before the first step:\n{report.text()}", err=True)
        raise SystemExit(report.exit_status(strict=False))


def _train(config: TrainConfig, plan: RunPlan, stopping: threading.Event) -> TrainSummary:
    from eyas.train.loop import train

    with _Display(plan) as display:
        return train(config, plan, should_stop=stopping.is_set, listener=display)


def _plan_facts(config: TrainConfig, plan: RunPlan) -> dict[str, object]:
    from eyas.taps.notation import format_taps

    length = f"{config.epochs} epochs" if config.epochs is not None else f"{config.max_steps:,} updates"
    return {
        "dataset": f"{plan.dataset.num_samples:,} samples, {plan.dataset.num_tokens:,} tokens, "
        f"taps {format_taps(plan.identity.taps)}",
        "draft vocabulary": _vocabulary(plan),
        "draft": f"{plan.shape.num_layers} layers, hidden {plan.shape.hidden_size}, computed in {config.dtype} on "
        f"{config.device}",
        "length": f"{length}, {config.batches_per_step} batches of {config.batch_tokens:,} tokens an update",
    }


def _vocabulary(plan: RunPlan) -> str:
    vocabulary = plan.vocabulary
    covered = "" if vocabulary.coverage != vocabulary.coverage else f", {vocabulary.coverage:.2%} of the targets"
    return f"{len(vocabulary):,} of {vocabulary.vocab_size:,} ids{covered}"


class _Display:
    """What rank 0 shows on stderr."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._bar: Progress | None = None
        self._shown = 0

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def start(self, start: Start) -> None:
        before = f", going on after step {start.step:,}" if start.step else ""
        click.echo(
            f"training on {start.num_training:,} samples, {start.num_tokens:,} tokens an epoch in "
            f"{start.num_batches:,} batches ({start.fill:.1%} full), {start.num_validation:,} samples held out{before}",
            err=True,
        )
        click.echo(
            f"draft: {start.num_trained_parameters:,} trained parameters, vocabulary {_vocabulary(self._plan)}",
            err=True,
        )
        if start.num_overlong:
            click.echo(f"{start.num_overlong:,} samples are longer than --batch-tokens: {start.overlong}", err=True)
        self._bar = Progress("train", start.num_steps, "steps")
        self._shown = start.step
        self._bar.update(start.step)

    def step(self, record: dict[str, Any]) -> None:
        if record["kind"] == "validation":
            click.echo(f"validation after step {record['step']:,}: {_quality(record)}", err=True)
            return
        if self._bar is not None:
            note = f"loss {record['loss']:.4f}, accepted length {record['accepted_length']:.2f}"
            note += f", {record['tokens_per_second']:,.0f} tokens/s"
            note += f", data wait {record['data_wait']:.1%}" if record["data_wait"] > 0.01 else ""
            self._bar.update(record["step"] - self._shown, note)
            self._shown = record["step"]


def _quality(measured: dict[str, Any]) -> str:
    acceptance = " / ".join(f"{share:.3f}" for share in measured["acceptance"])
    return (
        f"expected accepted length {measured['accepted_length']:.3f}, conditional acceptance {acceptance}, "
        f"loss {measured['loss']:.4f}, target mass outside the draft vocabulary {measured['out_of_vocabulary']:.2%}"
    )


def _print_summary(summary: TrainSummary) -> None:
    rate = summary.num_tokens / max(summary.seconds, 1e-9)
    state = "finished" if summary.finished else "stopped"
    click.echo(
        f"{summary.run}: {state} after {summary.step:,} updates, {summary.num_tokens:,} tokens in "
        f"{format_seconds(summary.seconds)} ({rate:,.0f} tokens/s, data wait {summary.data_wait:.1%})"
    )
    if summary.validation is not None:
        click.echo(f"held-out samples: {_quality(summary.validation)}")
    if summary.best is not None:
        best = summary.best
        click.echo(
            f"best: {summary.run}/checkpoints/{best['checkpoint']}, accepted length {best['accepted_length']:.3f}"
        )
    if summary.stopped is not None:
        click.echo(f"stopped early ({summary.stopped}): run the same command again to go on", err=True)
