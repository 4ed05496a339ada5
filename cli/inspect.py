"""`eyas inspect`: what a folder holds, and whether it is still what was written."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.cli.parameters import format_bytes, model
from eyas.cli.progress import Progress
from eyas.shards.identity import IDENTITY_FILE
from eyas.shards.ledger import LedgerState, Problem, read_ledgers
from eyas.shards.report import DatasetReport, dataset_report
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.registry import READABLE
from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import format_taps

if TYPE_CHECKING:
    from eyas.shards.identity import DatasetIdentity
    from eyas.standardize.foreign_report import ForeignReport

_SHOWN = 20  # problems and reasons in the text; --json has all


@click.command(name="inspect", short_help="Show what a folder holds; --verify reads every byte again.")
@click.argument("dataset", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sample", metavar="ID|first", help="Show one sample decoded, its trained tokens marked.")
@click.option(
    "--target",
    type=model,
    help="The folder or hub name whose tokenizer decodes --sample; default: the dataset's. Of another system's folder: "
    "the model whose layers its numbers are.",
)
@click.option("--from", "from_format", type=click.Choice(READABLE), help="The format, if FOLDER looks like several.")
@click.option("--trust-remote-code", is_flag=True, help="Run tokenizer code that comes with the target.")
@click.option("--verify", is_flag=True, help="Read every byte again and compare checksums, shapes, taps and ids.")
@click.option("--workers", type=click.IntRange(1), default=4, help="Threads of --verify.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png",
              help="Draw norm distributions per tap, and sample lengths.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(dataset: Path, **options: Any) -> None:
    """Show what FOLDER holds. Of a dataset: its identity, counts, bytes, and each tap's norms and ranges, from the
    ledgers alone. Of another system's hidden states: which format and version, counts, lengths, shapes, dtype, which
    taps they may be, and what is wrong, from samples spread evenly (--verify: all). A prepared folder is described too.

    Exits 1 where --verify finds a file that is not what was written or cannot be used, and names every one.

    \b
    eyas inspect standard
    eyas inspect standard --verify
    eyas inspect standard --sample first --target ./target
    eyas inspect their-data --target ./llama
    """
    as_json: bool = options["as_json"]
    if (dataset / "prepared.json").exists():
        _inspect_prepared(dataset, as_json)
        return
    if not (dataset / IDENTITY_FILE).exists():
        _inspect_foreign(dataset, options)
        return
    state = read_ledgers(dataset)
    report = dataset_report(dataset, state)
    body = {**asdict(report), "identity": report.identity.to_json(), "compression": report.compression}
    if not as_json:
        _print_report(report)
    if options["sample"] is not None:
        body["sample"] = _sample(dataset, options)
        if not as_json:
            _print_sample(body["sample"])
    if options["plot"] is not None:
        from eyas.shards.plot import plot_dataset

        plot_dataset(dataset, options["plot"])
        click.echo(f"wrote {options['plot']}", err=True)
    bad = _verify(dataset, state, options["workers"]) if options["verify"] else []
    if as_json:
        verified = {"verified": not bad, "bad": [asdict(problem) for problem in bad]} if options["verify"] else {}
        click.echo(json.dumps({**body, **verified}))
    elif options["verify"]:
        for problem in bad:
            click.echo(f"bad       {dataset}/{problem}")
        if not bad:
            click.echo(f"verified  {report.num_shards:,} shards, {format_bytes(report.num_bytes)}: all as written")
    if bad:
        maker = "capture" if report.identity.stage == "captured" else "standardize"
        raise click.ClickException(
            f"{dataset}: {len(bad):,} bad: {', '.join(problem.where for problem in bad)}. Run the same eyas {maker} "
            f"again, which takes in shards without a line and makes what is lost anew; set a shard that is corrupt "
            f"aside first (mv SHARD SHARD.corrupt)"
        )


def _verify(dataset: Path, state: LedgerState, workers: int) -> list[Problem]:
    from eyas.shards.canaries import CANARIES_FOLDER, open_canaries
    from eyas.shards.verify import verify_dataset

    with Progress("verify", state.num_bytes, "bytes") as progress:
        bad = verify_dataset(dataset, state, workers=workers, on_shard=lambda entry: progress.update(entry.num_bytes))
    # What the ledgers alone show fails a verification too, but for what is a running capture's or harms no reader.
    harmless = ("leftover temporary", "duplicate sample", "set aside")
    problems = [problem for problem in state.problems if problem.kind not in harmless] + bad
    if (canaries := open_canaries(dataset)) is not None:
        state = canaries.ledgers
        bad = verify_dataset(canaries.path, state, workers=workers, on_shard=lambda entry: None)
        # They are no dataset to train on: nothing counts their tokens.
        found = [p for p in (*state.problems, *bad) if p.kind not in (*harmless, "token counts", "wrong counts")]
        problems += [replace(problem, where=f"{CANARIES_FOLDER}/{problem.where}") for problem in found]
    return problems


def _inspect_foreign(folder: Path, options: dict[str, Any]) -> None:
    from eyas.cli.foreign import facts_of, guessed_taps, layout_json, target_identity
    from eyas.standardize.foreign_report import LOOKED_AT, report_foreign
    from eyas.standardize.formats.registry import detect, open_reader

    for option in ("sample", "plot"):
        if options[option] is not None:
            raise UsageError(f"--{option}: {folder} is no eyas dataset")
    try:
        layout = detect(folder, options["from_format"])
    except FormatError as error:
        raise FormatError(f"{error} (it is no eyas dataset: no {IDENTITY_FILE} is there)") from error
    facts = None
    if options["target"] is not None:
        facts = facts_of(target_identity(options["target"], trust_remote_code=options["trust_remote_code"])[1])
    reader, everything = open_reader(folder, layout), options["verify"]
    total = len(reader.items()) if everything else min(LOOKED_AT, len(reader.items()))
    with Progress("inspect", total, "samples") as progress:
        report = report_foreign(
            reader, everything=everything, workers=options["workers"], on_item=lambda: progress.update(1)
        )
    taps = guessed_taps(layout, facts)
    if options["as_json"]:
        click.echo(json.dumps({"folder": str(folder), **asdict(report), "layout": layout_json(layout), "taps": taps}))
    else:
        _print_foreign(folder, report, taps)
    if report.bad and everything:
        names = ", ".join(list(report.bad)[:_SHOWN])
        raise click.ClickException(f"{folder}: {len(report.bad):,} of {report.num_items:,} samples are bad: {names}")


def _print_foreign(folder: Path, report: ForeignReport, taps: list[str]) -> None:
    layout = report.layout
    beside = f", and a {layout.last_hidden} last hidden state" if layout.last_hidden else ""
    click.echo(f"{folder}: {layout.format} {layout.version}")
    click.echo(f"states    {layout.num_taps} slots of {layout.hidden_size or 'unknown'}{beside}, {layout.dtype}")
    for line in taps:
        click.echo(f"taps      {line}")
    click.echo(f"samples   {report.num_items:,} in {layout.num_files:,} files, {report.num_read:,} of them read")
    if report.num_read:
        trained = (
            "no loss mask"
            if report.num_trained_tokens is None
            else f"{100 * report.num_trained_tokens / report.num_tokens:.1f} % of them trained"
        )
        click.echo(
            f"tokens    {report.num_tokens / report.num_read:,.0f} a sample ({report.shortest:,} to "
            f"{report.longest:,}), {trained}, ids up to {report.highest_id:,}"
        )
        for slot in report.slots:
            click.echo(f"{slot['name']:<12} mean norm {slot['mean_norm']:.5g}, max abs {slot['max_abs']:.5g}, "
                       f"{slot['nonfinite']:,} NaN/Inf")  # fmt: skip
    for problem in layout.problems:
        click.echo(f"problem   {problem}")
    for item, what in list(report.bad.items())[:_SHOWN]:
        click.echo(f"bad       {item}: {what}")
    if len(report.bad) > _SHOWN:
        click.echo(f"bad       and {len(report.bad) - _SHOWN:,} more (--json lists all)")


def _inspect_prepared(folder: Path, as_json: bool) -> None:
    from eyas.capture.prepared import read_prepared_json

    body = read_prepared_json(folder)
    assert body is not None  # the caller saw the file
    if as_json:
        click.echo(json.dumps(body))
        return
    click.echo(f"{folder}: a prepared folder (samples for eyas capture, no tensors), of target {body['target']}")
    for name, count in body["counts"].items():
        click.echo(f"  {name}: {count:,}" if isinstance(count, int) else f"  {name}: {count}")
    click.echo(f"  fingerprint: {body['fingerprint']}")


def _print_report(report: DatasetReport) -> None:
    identity, target = report.identity, report.identity.target
    last_hidden = f", last_hidden {identity.last_hidden}" if identity.last_hidden is not None else ", no last_hidden"
    click.echo(f"{report.dataset}: {identity.stage} dataset")
    click.echo(f"target    {target.name} ({target.model_class}, {target.num_layers} layers, hidden "
               f"{target.hidden_size}, vocabulary {target.vocab_size:,}), config {target.config_hash}")  # fmt: skip
    click.echo(f"tokenizer {identity.tokenizer.files_hash}, template {identity.tokenizer.chat_template_hash or 'none'}")
    click.echo(f"taps      {format_taps(identity.taps)}{last_hidden}")
    click.echo(f"stored as {identity.dtype}, codec {identity.codec}, "
               f"target statistics {'yes' if identity.target_statistics else 'no'}")  # fmt: skip
    click.echo(f"samples   {report.num_samples:,} of {identity.prepared.num_samples:,} prepared")
    if report.num_samples:
        click.echo(
            f"tokens    {report.num_tokens:,}, {report.num_trained_tokens:,} of them trained "
            f"({100 * report.num_trained_tokens / report.num_tokens:.1f} %), "
            f"{report.num_tokens / report.num_samples:,.0f} a sample"
        )
        click.echo(
            f"bytes     {report.num_bytes:,} ({format_bytes(report.num_bytes)}) in {report.num_shards:,} shards, "
            f"{report.num_bytes / report.num_tokens:,.0f} a token, compression {report.compression:.3f}x"
        )
        width = max(len(tap.tap) for tap in report.taps)
        click.echo(f"{'tap':<{width}}  {'mean norm':>10}  {'of shards':>21}  {'max abs':>10}  {'zeros':>8}  NaN/Inf")
        for tap in report.taps:
            spread = f"{tap.lowest_mean_norm:.5g} to {tap.highest_mean_norm:.5g}"
            click.echo(f"{tap.tap:<{width}}  {tap.mean_norm:>10.5g}  {spread:>21}  {tap.max_abs:>10.5g}  "
                       f"{100 * tap.zeros:>6.3f} %  {tap.nonfinite:,}")  # fmt: skip
    click.echo(f"rejected  {report.num_rejected:,} samples")
    for reason, count in list(report.reject_reasons.items())[:_SHOWN]:
        click.echo(f"  {count:,} x {reason}")
    click.echo(f"problems  {len(report.problems):,}")
    for problem in report.problems[:_SHOWN]:
        click.echo(f"  {problem}")
    if len(report.problems) > _SHOWN:
        click.echo(f"  and {len(report.problems) - _SHOWN:,} more (--json lists all)")


def _sample(dataset: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One sample as JSON has it, in ``text`` its trained tokens marked."""
    from eyas.capture.conversations.show import COLOUR_MARKS, PLAIN_MARKS, marked_text
    from eyas.shards.dataset import Dataset
    from eyas.shards.sample import TokenSample

    data, wanted = Dataset.open(dataset), options["sample"]
    try:
        sample = next(iter(data)) if wanted == "first" else data.sample(wanted)
    except StopIteration:
        raise EyasError(f"{dataset} holds no samples yet: --sample has nothing to show") from None
    except (KeyError, ValueError) as error:
        raise EyasError(
            f"--sample {wanted}: not in {dataset}; expected 16 hex digits of one there, or first"
        ) from error
    tokens = TokenSample(
        sample_id=sample.sample_id, input_ids=sample.input_ids.numpy(), loss_mask=sample.loss_mask.numpy()
    )
    tokenizer, note = _tokenizer(data.identity, options["target"], options["trust_remote_code"])
    colour = sys.stdout.isatty() and not options["as_json"]
    return {
        "sample_id": sample.sample_id,
        "input_ids": tokens.input_ids.tolist(),
        "loss_mask": tokens.loss_mask.tolist(),
        "text": tokenizer and marked_text(tokens, tokenizer, COLOUR_MARKS if colour else PLAIN_MARKS),
        "note": note,
    }


def _tokenizer(identity: DatasetIdentity, target: str | None, trust_remote_code: bool) -> tuple[Any, str | None]:
    """The tokenizer to decode with, and what the user should know about it. None where there is none to be had."""
    name = target or identity.target.name
    if target is None and not Path(name).is_dir():
        return None, f"not decoded: the dataset's target {name} is no folder here; give its tokenizer with --target"
    from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity

    revision = identity.target.revision
    tokenizer = load_tokenizer(name, revision, trust_remote_code)
    if tokenizer_identity(name, tokenizer, revision).probe_hash != identity.tokenizer.probe_hash:
        return tokenizer, f"the tokenizer of {name} is not the dataset's: it reads the probe text as other ids"
    return tokenizer, None


def _print_sample(sample: dict[str, Any]) -> None:
    mask: list[int] = sample["loss_mask"]
    click.echo(f"sample    {sample['sample_id']}: {len(mask):,} tokens, {sum(mask):,} of them trained")
    if sample["note"]:
        click.echo(f"          {sample['note']}")
    if sample["text"] is not None:
        click.echo(sample["text"], color=True)
        return
    start = 0
    for trained, run in groupby(mask):
        end = start + len(list(run))
        click.echo(f"          tokens {start:,} to {end - 1:,}: {'trained' if trained else 'not trained'}")
        start = end
