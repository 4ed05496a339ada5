"""`eyas standardize`: the shards that one draft will be trained on; foreign folders in, and other trainers' out."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.cli.parameters import format_bytes, model, size
from eyas.cli.progress import Progress
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.cli.signals import stop_on_signals
from eyas.shards.identity import IDENTITY_FILE
from eyas.shards.report import plain_bytes_per_token
from eyas.standardize.formats.registry import READABLE, WRITABLE
from eyas.taps.errors import EXIT_STOPPED_EARLY, EyasError, UsageError
from eyas.taps.notation import format_taps

if TYPE_CHECKING:
    from eyas.shards.identity import TargetIdentity
    from eyas.standardize.events import Event, Summary
    from eyas.standardize.foreign import ForeignRequest
    from eyas.standardize.formats.base import Writer
    from eyas.standardize.formats.write_rows import RowsPlan, RowsSummary
    from eyas.standardize.plan import Plan, Request
    from eyas.taps.notation import Tap

_MIB = 1 << 20
# A run's memory is the shard that fills, those that are sealed, and a sample a thread: of a foreign folder below 2 GiB.
_FOREIGN_SHARD_BYTES = 512 * _MIB
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(name="standardize", short_help="Make the verified shards that one draft is trained on.")
@click.argument("source", metavar="CAPTURED|FOREIGN", required=False, type=_FOLDER)
@click.argument("out", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--taps",
    help="The draft's taps in ascending depth (embed, after:J, final), or 'default'; without: all captured. Of "
    "FOREIGN: what its slots are, in their order, or 'identify' to find it by replaying --target.",
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
@click.option("--shard-size", type=size, help="About the size of a shard that is written anew; default: 1GiB, of "
              "FOREIGN 512MiB.")  # fmt: skip
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=4,
    help="Threads. Each that writes shards anew holds up to two in memory; of FOREIGN and for --format one sample.",
)
@click.option(
    "--from", "from_format", type=click.Choice(READABLE), help="The format of FOREIGN, if it looks like several."
)
@click.option(
    "--target",
    type=model,
    help="FOREIGN's target: a folder or a name on the hub. With --format: whose norm is applied.",
)
@click.option(
    "--prepared", type=_FOLDER, help="Where the loss masks are that FOREIGN does not keep, found by the tokens."
)
@click.option(
    "--max-rejects", type=click.FloatRange(0, 1), default=0.01, help="Share of FOREIGN's samples that may fail."
)
@click.option("--format", "to_format", type=click.Choice(WRITABLE), help="Write the dataset as this trainer reads one.")
@click.option(
    "--max-disk", type=size, help="With --format: exit 75 once OUT holds this much; move it away, run it again."
)
@click.option(
    "--draft-vocab-size", type=click.IntRange(1), help="With --format: ids that the draft proposes; default: all."
)
@click.option(
    "--describe", type=_FOLDER, metavar="DIR", help="Guess the description of a dump of your own and print it."
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the target.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Make the standard dataset OUT from CAPTURED: exactly the draft's taps, one dtype and codec, every shard verified.

    Shards that already are that are hard-linked (copied across filesystems). CAPTURED is never changed. Run it again
    after any interruption, or once more is captured: what is there stays, and every sample is there exactly once.

    FOREIGN, a folder of another system's hidden states, becomes the standard dataset OUT as it is: its slots are the
    taps. With --format, a dataset is written as another trainer reads it (docs/formats.md).

    \b
    eyas standardize captured standard
    eyas standardize captured standard --taps after:1,after:14,after:26 --codec zstd
    eyas standardize captured standard --from-config draft/config.json --convention vllm
    eyas standardize their-data standard --target ./llama --layers 2,16,29 --convention vllm
    eyas standardize standard for-speculators --format speculators --draft-vocab-size 32000 --target ./llama
    """
    if options["describe"] is not None:
        _describe(options)
        return
    source, out = options["source"], options["out"]
    if source is None or out is None:
        raise UsageError("give the dataset or the foreign folder, and OUT")
    with stop_on_signals() as stopping:
        is_dataset = (source / IDENTITY_FILE).exists()
        _refuse_misplaced(options, is_dataset)
        if not is_dataset:
            _standardize_foreign(options, stopping.is_set)
        elif options["to_format"] is not None:
            _write_format(options, stopping.is_set)
        else:
            _standardize_captured(options, stopping.is_set)


def _refuse_misplaced(options: dict[str, Any], is_dataset: bool) -> None:
    """Options of one of the three uses that were given for another. Raises UsageError."""
    given = click.get_current_context().get_parameter_source
    exporting = options["to_format"] is not None
    foreign = {"from_format": "--from", "prepared": "--prepared", "max_rejects": "--max-rejects"}
    export = {"max_disk": "--max-disk", "draft_vocab_size": "--draft-vocab-size"}
    cat = {
        name: f"--{name.replace('_', '-')}"
        for name in ("taps", "layers", "from_config", "convention", "last_hidden", "dtype", "codec", "shard_size")
    }
    if not is_dataset:
        wrong, why = (
            {**export, "to_format": "--format", "dtype": "--dtype"},
            (f"{options['source']} is no eyas dataset: standardize it first, then the result"),
        )
    elif exporting:
        wrong, why = {**foreign, **cat}, "with --format the dataset is written as it is: standardize it first"
    else:
        wrong, why = {**foreign, **export, "target": "--target"}, f"{options['source']} is an eyas dataset"
    for name, option in wrong.items():
        source = given(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{option}: {why}")


def _describe(options: dict[str, Any]) -> None:
    from eyas.standardize.formats.registry import describe

    sizes: dict[str, int] = {}
    if options["target"] is not None:
        from eyas.capture.engines.transformers.load import read_outline

        outline = read_outline(options["target"], trust_remote_code=options["trust_remote_code"])
        sizes = {"hidden_size": outline.hidden_size, "vocab_size": outline.vocab_size}
    click.echo(describe(options["describe"], **sizes))


def _last_hidden(options: dict[str, Any], num_layers: int) -> Any:
    from eyas.taps.notation import after, parse_tap

    chosen = options["last_hidden"]
    if chosen in ("captured", "none"):
        return chosen
    return after(num_layers - 1) if chosen == "after:last" else parse_tap(chosen)


# --- a captured dataset -------------------------------------------------------------------------


def _standardize_captured(options: dict[str, Any], should_stop: Callable[[], bool]) -> None:
    from eyas.standardize.cat import standardize
    from eyas.standardize.plan import plan

    request = _request(options)
    if options["dry_run"]:
        print_dry_run(_plan_facts(request, plan(request)))
        return
    shard_bytes = options["shard_size"] or 1024 * _MIB
    summary = _show(
        standardize(request, workers=options["workers"], shard_bytes=shard_bytes, should_stop=should_stop), request
    )
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
    from eyas.standardize.plan import request

    target = read_identity(options["source"]).target
    return request(
        options["source"],
        options["out"],
        taps=_taps(options, target),
        last_hidden=_last_hidden(options, target.num_layers),
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


def _show(events: Any, request: Request | ForeignRequest) -> Summary:
    """Show events on stderr until the summary comes."""
    from eyas.standardize.events import (
        Advanced,
        Counted,
        Counting,
        Failed,
        Importing,
        Noticed,
        Planned,
        Rejected,
        Sealed,
        Summary,
        Surveyed,
        Surveying,
    )  # fmt: skip

    num_shards = num_bytes = num_rejected = 0
    event: Event
    with ExitStack() as stack:
        bar: Progress | None = None
        for event in events:
            if isinstance(event, Planned) and event.plan.tasks:
                _say_plan(event.plan)
                bar = stack.enter_context(Progress("standardize", event.plan.num_tokens, "tokens"))
            elif isinstance(event, Surveying):
                bar = stack.enter_context(Progress("reading tokens", event.num_items, "samples"))
            elif isinstance(event, Importing):
                _say_importing(event)
                bar = stack.enter_context(Progress("standardize", event.num_tokens, "tokens"))
            elif isinstance(event, Counting):
                bar = stack.enter_context(Progress("counting targets", event.num_shards, "shards"))
            elif isinstance(event, Sealed):
                num_shards += 1
                num_bytes += event.shard.num_bytes
            elif isinstance(event, Advanced) and bar is not None:
                bar.update(event.num_tokens, f"{num_shards:,} shards, {format_bytes(num_bytes)}")
            elif isinstance(event, Counted | Surveyed) and bar is not None:
                bar.update(1)
            elif isinstance(event, Failed):
                click.echo(f"corrupt: {event.reason}", err=True)
            elif isinstance(event, Rejected):
                num_rejected += 1
                if num_rejected <= _SHOWN_REJECTS:
                    click.echo(f"rejected: {request.source}/{event.item}: {event.reason}", err=True)
            elif isinstance(event, Noticed):
                click.echo(event.message, err=True)
            elif isinstance(event, Summary):
                return event
    raise AssertionError("a run ends with a Summary")


_SHOWN_REJECTS = 20


def _say_plan(plan: Plan) -> None:
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
    _print_dataset(request, summary)
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


def _print_dataset(request: Request | ForeignRequest, summary: Summary) -> None:
    identity = request.identity
    click.echo(
        f"{request.out}: {summary.num_samples:,} samples, {summary.num_tokens:,} tokens "
        f"({summary.num_trained_tokens:,} trained), {format_bytes(summary.num_bytes)} in {summary.num_shards:,} shards"
    )
    click.echo(
        f"taps {format_taps(identity.taps)}, last_hidden {identity.last_hidden or 'none'}, {identity.dtype}, "
        f"codec {identity.codec}"
    )


# --- a foreign folder ---------------------------------------------------------------------------


def _standardize_foreign(options: dict[str, Any], should_stop: Callable[[], bool]) -> None:
    from eyas.cli.foreign import layout_json
    from eyas.standardize.foreign import import_folder

    request = _foreign_request(options)
    if options["dry_run"]:
        print_dry_run(_foreign_facts(request))
        return
    shard_bytes = options["shard_size"] or _FOREIGN_SHARD_BYTES
    summary = _show(
        import_folder(request, workers=options["workers"], shard_bytes=shard_bytes, should_stop=should_stop), request
    )
    if options["as_json"]:
        click.echo(json.dumps({**asdict(summary), "out": str(request.out), "layout": layout_json(request.layout)}))
    else:
        _print_dataset(request, summary)
        click.echo(f"this run: {summary.num_written:,} shards written, from {request.layout.format} "
                   f"{request.layout.version}")  # fmt: skip
    if summary.num_duplicates:
        click.echo(f"{summary.num_duplicates:,} samples are there several times, and were taken once", err=True)
    if summary.num_rejected:
        click.echo(f"{summary.num_rejected:,} samples were rejected; {request.out}/rejects says why", err=True)
    if summary.stopped_early:
        click.echo("stopped early: run the same command again to go on", err=True)
        raise SystemExit(EXIT_STOPPED_EARLY)
    num_items = len(request.reader.items())
    if summary.num_rejected > options["max_rejects"] * num_items:
        raise click.ClickException(
            f"{summary.num_rejected:,} of {num_items:,} samples were rejected, more than --max-rejects "
            f"{options['max_rejects']:g} allows; the reasons are in {request.out}/rejects. What could be used is kept: "
            f"mend the cause and run it again, or allow more with --max-rejects"
        )


def _foreign_request(options: dict[str, Any]) -> ForeignRequest:
    from eyas.cli.foreign import (
        IDENTIFY,
        declared_taps,
        facts_of,
        identified_taps,
        masks_of,
        refuse_contradiction,
        stated_taps,
        target_identity,
        tokenizer_of,
    )  # fmt: skip
    from eyas.standardize.foreign import foreign_request, refuse_without_mask
    from eyas.standardize.formats.registry import open_reader

    source, target = options["source"], options["target"]
    trust = options["trust_remote_code"]
    layout = _detect(source, options["from_format"])
    if target is None:
        raise UsageError(
            f"{source} is in the format of {layout.format} {layout.version}, and not in eyas's: give its --target"
        )
    for problem in layout.problems:
        click.echo(f"{source}: {problem}", err=True)
    reader = open_reader(source, layout)
    identity, outline = target_identity(target, trust_remote_code=trust)
    facts = facts_of(outline)
    tokenizer = tokenizer_of(target, trust_remote_code=trust)
    prepared = options["prepared"]
    mask_of = None if prepared is None else masks_of(prepared, tokenizer, target)
    refuse_without_mask(source, layout, mask_of)
    beside = layout.last_hidden
    if options["taps"] == IDENTIFY:
        taps, beside = identified_taps(
            reader, target, facts, trust_remote_code=trust, say=lambda line: click.echo(line, err=True)
        )
        refuse_contradiction(source, stated_taps(source, layout), taps)
    else:
        taps = declared_taps(options, source, layout, facts)
    return foreign_request(
        source,
        options["out"],
        reader,
        target=identity,
        tokenizer=tokenizer,
        taps=taps,
        last_hidden=_last_hidden(options, identity.num_layers),
        beside=beside,
        codec="raw" if options["codec"] == "captured" else options["codec"],
        mask_of=mask_of,
    )


def _detect(source: Path, name: str | None) -> Any:
    from eyas.standardize.formats.base import FormatError
    from eyas.standardize.formats.registry import detect

    try:
        return detect(source, name)
    except FormatError as error:
        raise FormatError(f"{error} (it is no eyas dataset: no {IDENTITY_FILE} is there)") from error


def _say_importing(event: Any) -> None:
    done = f", {event.num_done_samples:,} done before" if event.num_done_samples else ""
    twice = f", {event.num_duplicates:,} there again" if event.num_duplicates else ""
    rejected = f", {event.num_rejected:,} rejected" if event.num_rejected else ""
    click.echo(
        f"standardizing {event.num_samples:,} samples, {event.num_tokens:,} tokens{done}{twice}{rejected}", err=True
    )


def _foreign_facts(request: ForeignRequest) -> dict[str, object]:
    identity, layout = request.identity, request.layout
    return {
        "format": f"{layout.format} {layout.version}",
        "taps": format_taps(identity.taps),
        "last hidden": identity.last_hidden or "none",
        "loss mask": "the format's" if layout.has_loss_mask else "joined by the tokens",
        "stored as": f"{identity.dtype}, codec {identity.codec}",
        "samples": f"{len(request.reader.items()):,}, before duplicates and rejects",
        "problems": "; ".join(layout.problems) or "none",
    }


# --- another trainer's layout -------------------------------------------------------------------


def _write_format(options: dict[str, Any], should_stop: Callable[[], bool]) -> None:
    from eyas.shards.dataset import Dataset
    from eyas.standardize.formats.write_rows import plan_rows, write_rows

    dataset, out, name = Dataset.open(options["source"]), options["out"], options["to_format"]
    if out.resolve() == dataset.path.resolve() or dataset.path.resolve() in out.resolve().parents:
        raise EyasError(f"{out} is the dataset {dataset.path} or inside it: name another")
    if not dataset.num_samples:
        raise EyasError(f"{dataset.path} holds no samples yet")
    writer, vocabulary = _writer(options, dataset)
    writer.check(dataset.identity)
    if options["dry_run"]:
        print_dry_run(_rows_facts(plan_rows(dataset, out, format=name, options=vocabulary)))
        return
    with ExitStack() as stack:
        bars: list[Progress] = []

        def start(plan: RowsPlan) -> None:
            done = f", {plan.num_rows - plan.num_left:,} done before" if plan.num_left < plan.num_rows else ""
            click.echo(
                f"writing {plan.num_left:,} samples for {name}, about {format_bytes(plan.num_bytes)}{done}", err=True
            )
            bars.append(stack.enter_context(Progress(f"write {name}", plan.num_tokens, "tokens")))

        summary = write_rows(
            dataset,
            out,
            writer,
            format=name,
            options=vocabulary,
            threads=options["workers"],
            max_disk=options["max_disk"],
            should_stop=should_stop,
            on_plan=start,
            written=lambda tokens: bars[0].update(tokens),
        )
    if options["as_json"]:
        click.echo(json.dumps({**asdict(summary), "out": str(out), "format": name}))
    else:
        _print_rows(out, name, summary)
    if summary.stopped is not None:
        raise SystemExit(EXIT_STOPPED_EARLY)


def _writer(options: dict[str, Any], dataset: Any) -> tuple[Writer, dict[str, str]]:
    """The format's writer, and what else than the dataset its bytes depend on."""
    import torch

    from eyas.standardize.formats.registry import POST_NORM, create_writer
    from eyas.taps.notation import FINAL

    identity, target = dataset.identity, options["target"]
    norm, bytes_depend_on = None, {}
    if target is not None and identity.last_hidden not in (None, FINAL) and options["to_format"] in POST_NORM:
        from eyas.train.target_parts import load_target_parts

        _check_target(target, identity.target, options["trust_remote_code"])
        dtype = getattr(torch, identity.dtype)
        # lm_head is not needed, and may be large.
        parts = load_target_parts(target, rows=torch.empty(0, dtype=torch.int64), dtype=dtype)
        norm = parts.as_captured(identity.target).final
        bytes_depend_on["norm"] = "applied"
    size = options["draft_vocab_size"]
    if size is None or size == identity.target.vocab_size:
        return create_writer(options["to_format"], final_norm=norm), bytes_depend_on
    if target is None or not Path(target).is_dir():
        raise UsageError(f"--draft-vocab-size {size}: the target's end tokens must be in it: give its folder, --target")
    from eyas.align.checks.subject import TargetFolder
    from eyas.shards.token_counts import read_token_counts
    from eyas.train.vocabulary import always_ids, build_vocabulary

    counts = read_token_counts(dataset.path)
    vocabulary = build_vocabulary(
        counts, size, always_ids(TargetFolder(Path(target), options["trust_remote_code"]), counts)
    )
    writer = create_writer(options["to_format"], final_norm=norm, d2t=vocabulary.d2t, t2d=vocabulary.t2d)
    return writer, {**bytes_depend_on, "draft vocabulary": vocabulary.fingerprint}


def _check_target(target: str, captured: TargetIdentity, trust_remote_code: bool) -> None:
    from eyas.capture.engines.transformers.load import read_outline

    found = read_outline(target, trust_remote_code=trust_remote_code).config_hash
    if found != captured.config_hash:
        raise EyasError(
            f"--target {target} is not the dataset's target {captured.name}: its config.json is another "
            f"({found} instead of {captured.config_hash})"
        )


def _rows_facts(plan: RowsPlan) -> dict[str, object]:
    return {
        "samples": f"{plan.num_left:,} left, {plan.num_rows - plan.num_left:,} done",
        "bytes": f"about {format_bytes(plan.num_bytes)} to write",
    }


def _print_rows(out: Path, name: str, summary: RowsSummary) -> None:
    click.echo(f"{out}: {summary.num_done:,} of {summary.num_rows:,} samples written for {name}")
    click.echo(
        f"this run: {summary.num_new:,} samples, {summary.num_new_tokens:,} tokens, "
        f"{format_bytes(summary.num_new_bytes)}"
    )
    if summary.changed is not None:
        click.echo(summary.changed, err=True)
    if summary.stopped == "max disk":
        click.echo(
            f"{out} holds what --max-disk allows: move its files elsewhere (but for .eyas-rows) and run the same "
            f"command again",
            err=True,
        )
    elif summary.stopped is not None:
        click.echo("stopped early: run the same command again to go on", err=True)
