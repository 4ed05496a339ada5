"""`eyas prepare`: conversations to tokens and loss masks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.cli.parameters import model
from eyas.cli.progress import Progress
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.taps.errors import EXIT_STOPPED_EARLY

if TYPE_CHECKING:
    from eyas.capture.conversations.prepare import Prepared

MOST_WORKERS = 16  # unless asked for: each holds a tokenizer and the libraries around it, about half a GiB


@click.command(name="prepare", short_help="Turn conversations into tokens and loss masks.")
@click.argument("conversations")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--target", type=model, required=True, help="The model that will be captured: a folder or a name on the hub."
)
@click.option("--revision", help="The target's revision on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run tokenizer code that comes with the target.")
@click.option("--split", help="Split of a dataset from the hub (default: train) or of a saved one with several.")
@click.option("--last-turn-only", is_flag=True, help="Train only the last answer of each conversation.")
@click.option("--max-tokens", type=click.IntRange(2), help="Longest sample, in tokens.")
@click.option(
    "--overlong",
    type=click.Choice(["truncate", "skip"]),
    default="truncate",
    help="What becomes of samples over --max-tokens.",
)
@click.option("--min-trained-tokens", type=click.IntRange(1), default=1, help="Skip samples with fewer trained tokens.")
@click.option("--max-samples", type=click.IntRange(1), help="Stop after so many samples.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=f"Processes that render and encode (default: one a core, at most {MOST_WORKERS}).",
)
@click.option("--strict", is_flag=True, help="Exit 1 if any row was malformed (all others are prepared all the same).")
@click.option("--show", type=click.IntRange(0), default=0, help="Print so many samples, trained tokens highlighted.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Turn CONVERSATIONS into tokens and loss masks for --target, in the folder OUT.

    CONVERSATIONS: JSON lines or a JSON array (also .gz), Parquet, a folder saved by datasets, a hub name
    (owner/dataset), or - for JSON lines on standard input. Its rows: ShareGPT (conversations: from, value), OpenAI
    (messages: role, content, tool_calls; tools), or tokens (input_ids, loss_mask).

    The loss mask marks the assistant's tokens with the end token of each answer, and only those that are certain. Rows
    that become no sample are listed in OUT/rejects.jsonl.

    \b
    eyas prepare sharegpt.json prepared --target ./llama --max-tokens 4096
    zcat chats.jsonl.gz | eyas prepare - prepared --target ./llama --show 2
    """
    from eyas.capture.conversations.prepare import PrepareOptions, TargetTokenizer, prepare
    from eyas.capture.conversations.reading import Reader
    from eyas.capture.tokenizer import load_tokenizer

    if options["show"] and options["as_json"]:
        raise click.UsageError("--show prints text and --json prints JSON: give one of them")
    out = options["out"]
    tokenizer = TargetTokenizer(
        target=options["target"], revision=options["revision"], trust_remote_code=options["trust_remote_code"]
    )
    choices = PrepareOptions(
        **{
            name: options[name]
            for name in ("last_turn_only", "max_tokens", "overlong", "min_trained_tokens", "max_samples")
        }
    )
    workers = options["workers"] or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    reader = Reader(options["conversations"], options["split"])
    if options["dry_run"]:
        size = "unknown" if reader.total is None else f"{reader.total:,} {reader.unit}"
        print_dry_run({"input": size, "processes": workers, "writes": f"{out}/"})
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress("prepare", reader.total, reader.unit) as progress:
            prepared = prepare(
                reader, out, tokenizer=tokenizer, options=choices, workers=workers, on_progress=progress.update
            )
    except KeyboardInterrupt:
        click.echo(f"eyas: stopped before {out} was finished; run the same command again", err=True)
        raise SystemExit(EXIT_STOPPED_EARLY) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
    _report(prepared, out, as_json=options["as_json"])
    if options["show"]:
        loaded = load_tokenizer(tokenizer.target, tokenizer.revision, tokenizer.trust_remote_code)
        _show(prepared, loaded, options["show"])
    if options["strict"] and prepared.num_rejected:
        raise click.ClickException(
            f"--strict: {prepared.num_rejected:,} rows are malformed, see {out}/rejects.jsonl; {out} holds all others"
        )


def _report(prepared: Prepared, out: Path, *, as_json: bool) -> None:
    from eyas.capture.conversations.prepare import NOTES

    samples, counts = prepared.samples, prepared.samples.counts
    if as_json:
        identity = {"out": str(out), "fingerprint": samples.identity.fingerprint, "was_done": prepared.was_done}
        click.echo(json.dumps({**identity, **counts}))
    else:
        click.echo(
            f"{out}: {counts['num_samples']:,} samples, {counts['num_tokens']:,} tokens, "
            f"{counts['num_trained_tokens']:,} of them trained"
            + (" (finished before, from the same input and options)" if prepared.was_done else "")
        )
    faults = {**counts["rejected"], **counts["skipped"]}
    facts = [("rows read", counts["num_rows"]), ("duplicates", counts["num_duplicates"])]
    facts += [(f"rejected, {kind}", number) for kind, number in faults.items()]
    facts += [(NOTES[note], number) for note, number in counts["notes"].items()]
    for label, number in facts:
        if number:
            click.echo(f"  {number:>9,}  {label}", err=as_json)
    for message in counts["cut_off"]:
        click.echo(f"eyas: {message}", err=True)
    if faults:
        click.echo(f"eyas: each rejected row and its reason: {out / 'rejects.jsonl'}", err=True)


def _show(prepared: Prepared, tokenizer: Any, number: int) -> None:
    from eyas.capture.conversations.show import COLOUR_MARKS, PLAIN_MARKS, marked_text

    marks = COLOUR_MARKS if sys.stdout.isatty() else PLAIN_MARKS
    for row in range(min(number, len(prepared.samples))):
        sample = prepared.samples[row]
        source = prepared.samples.row_text(row)["source"]
        trained = int(sample.loss_mask.sum())
        click.echo(f"\n--- {sample.sample_id} ({source}): {sample.num_tokens:,} tokens, {trained:,} trained")
        click.echo(marked_text(sample, tokenizer, marks), color=True)
