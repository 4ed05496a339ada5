"""`eyas regenerate`: conversations with the target's own answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from eyas.capture.engines import ENGINES, SERVING_ENGINES
from eyas.cli.parameters import duration, model
from eyas.cli.progress import Progress, format_seconds
from eyas.cli.recipe import dry_run_option, print_dry_run
from eyas.cli.signals import stop_on_signals
from eyas.taps.errors import EXIT_STOPPED_EARLY

if TYPE_CHECKING:
    from eyas.capture.regenerate.session import RegenerateSummary


@click.command(name="regenerate", short_help="Replace the answers in conversations by the target's own.")
@click.argument("conversations")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE OPTIONS]")
@click.option("--target", type=model, required=True, help="The model that answers: a folder or a name on the hub.")
@click.option("--revision", help="The target's revision on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the target.")
@click.option("--split", help="Split of a dataset from the hub (default: train) or of a saved one with several.")
@click.option("--engine", type=click.Choice(ENGINES), default="transformers", help="What runs the target.")
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="URL",
    help="An OpenAI-compatible server (vLLM, SGLang) that runs the target; may be given several times.",
)
@click.option(
    "--request-timeout", type=duration, default="10m", show_default=True, help="Longest wait for one --endpoint answer."
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: cuda if there is one."
)
@click.option("--tp", type=click.IntRange(1), default=1, help="GPUs that share a copy of the target: vllm, sglang.")
@click.option("--dp", type=click.IntRange(1), default=1, help="Copies of the target: sglang.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    help="Of the target; auto is the checkpoint's.",
)
@click.option("--temperature", type=click.FloatRange(0), default=0.7, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, help="Nucleus sampling.")
@click.option("--seed", type=int, default=0, help="Each answer draws its own random numbers from it.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=1024, help="Longest answer, in tokens.")
@click.option("--max-tokens", type=click.IntRange(2), help="Longest conversation; default: the target's positions.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Answers generated at a time; default: 128, on a CPU 32; vllm and sglang decide it themselves. At each "
    "--endpoint at most so many; default: 512.",
)
@click.option("--max-samples", type=click.IntRange(1), help="Regenerate only the first so many conversations.")
@click.option("--max-runtime", type=duration, help="Stop and exit 75 after this time, e.g. 11h30m.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Answer the questions in CONVERSATIONS with --target itself, and append the conversations to the file OUT.

    A draft learns to foretell its target, so it is trained on what the target says. CONVERSATIONS is whatever eyas
    prepare reads; each answer is replaced by the target's own to the conversation so far. Questions alone do, too: at
    the end of a conversation each user message gets an answer, and so do the "turns" of MT-bench and its like. OUT is
    JSON lines that eyas prepare reads, with the very tokens that were generated. A conversation ends with an answer
    that is cut at --max-new-tokens ("finish": "length"), and before an answer that calls tools.

    With --engine vllm (pip install 'eyas[vllm]') or sglang (pip install 'eyas[sglang]') that engine answers, started
    with all that makes it serve fast; options after -- are its own. SGLang heeds --seed only with
    --enable-deterministic-inference among them.

    With --endpoint, running servers answer: each is asked as many at a time as it can take, lost requests are asked
    again, and one that dies is left and tried again later. Their tokenizer must be --target's, whose folder needs no
    weights then. vLLM and SGLang are given tokens and give tokens back; of others, prepare tokenizes the answers. A key
    is read from the variable EYAS_API_KEY.

    Run it again after any interruption, with another batch size too: finished conversations stay. SIGTERM, Ctrl-C and
    --max-runtime stop it with exit status 75.

    \b
    eyas regenerate sharegpt.json answers.jsonl --target ./llama --max-new-tokens 512
    eyas regenerate sharegpt.json answers.jsonl --target ./kimi --engine vllm --tp 8 -- --enable-expert-parallel
    eyas regenerate sharegpt.json answers.jsonl --target ./llama --endpoint http://node1:8000 --endpoint http://node2:8000
    eyas prepare answers.jsonl prepared --target ./llama
    """
    from eyas.capture.conversations.reading import Reader
    from eyas.capture.endpoints.server import normalise_url
    from eyas.capture.engines import check_generation, read_outline
    from eyas.capture.engines.base import EngineSettings
    from eyas.capture.regenerate.session import RegenerateConfig, regenerate

    endpoints = tuple(dict.fromkeys(normalise_url(url) for url in options["endpoints"]))
    _refuse_engine_options(endpoints, options["engine"], options["engine_options"])
    with stop_on_signals() as stopping:
        target, revision, trust = options["target"], options["revision"], options["trust_remote_code"]
        outline = read_outline(options["engine"], target=target, revision=revision, trust_remote_code=trust)
        settings = EngineSettings(
            target=target,
            taps=(),
            dtype=outline.dtype if options["dtype"] == "auto" else options["dtype"],
            revision=revision,
            trust_remote_code=trust,
            device=options["device"],
            tp=options["tp"],
            dp=options["dp"],
            engine_options=options["engine_options"],
        )
        if not endpoints:
            check_generation(options["engine"], settings)
        config = RegenerateConfig(
            settings=settings,
            temperature=options["temperature"],
            top_p=options["top_p"],
            seed=options["seed"],
            max_new_tokens=options["max_new_tokens"],
            max_tokens=options["max_tokens"],
            engine=options["engine"],
            endpoints=endpoints,
            timeout_seconds=options["request_timeout"],
            batch_size=options["batch_size"],
            max_samples=options["max_samples"],
            max_runtime_seconds=options["max_runtime"],
        )
        reader = Reader(options["conversations"], options["split"])
        if options["dry_run"]:
            size = "unknown" if reader.total is None else f"{reader.total:,} {reader.unit}"
            print_dry_run({"input": size, "temperature used": config.temperature, "writes": options["out"]})
            return
        with Progress("regenerate", options["max_samples"], "conversations") as progress:
            summary = regenerate(
                reader,
                options["out"],
                config,
                should_stop=stopping.is_set,
                on_progress=progress.update,
                on_note=lambda line: click.echo(f"eyas: {line}", err=True),
            )
    _report(summary, as_json=options["as_json"])
    if summary.stopped is not None:
        click.echo(f"stopped early ({summary.stopped}): run the same command again to go on", err=True)
        raise SystemExit(EXIT_STOPPED_EARLY)


def _refuse_engine_options(endpoints: tuple[str, ...], engine: str, engine_options: tuple[str, ...]) -> None:
    """Options of what runs the target here say nothing to a server, and the other way round."""
    ctx = click.get_current_context()

    def given(name: str) -> bool:
        return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    if endpoints and (wrong := [name for name in ("engine", "device", "dtype", "tp", "dp") if given(name)]):
        raise click.UsageError(f"--{wrong[0]} says how the target runs here: leave it out with --endpoint")
    if engine_options and engine not in SERVING_ENGINES:
        raise click.UsageError(
            f"{' '.join(engine_options)}: unexpected after CONVERSATIONS and OUT; options after -- are those of "
            f"--engine {' or '.join(SERVING_ENGINES)}"
        )
    if not endpoints and given("request_timeout"):
        raise click.UsageError("--request-timeout belongs to --endpoint")


def _report(summary: RegenerateSummary, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(summary)))
    else:
        rate = summary.num_new_tokens / max(summary.seconds, 1e-9)
        click.echo(
            f"{summary.out}: {summary.num_done:,} conversations, {summary.num_new:,} of them new: "
            f"{summary.num_answers:,} answers, {summary.num_new_tokens:,} tokens in {format_seconds(summary.seconds)} "
            f"({rate:,.0f} tokens/s)"
        )
    facts = [("duplicates", summary.num_duplicates)]
    facts += [(f"rejected, {kind}", number) for kind, number in summary.rejected.items()]
    facts += [
        ("end with an answer that was cut off", summary.num_cut),
        ("start with the assistant: that answer is left out", summary.num_leading_dropped),
        ("have earlier answers that the template rewrites: not trained", summary.num_rewritten),
        ("came without token ids: eyas prepare tokenizes their answers again", summary.num_retokenized),
    ]
    for label, number in facts:
        if number:
            click.echo(f"  {number:>9,}  {label}", err=as_json)
    for tally in summary.endpoints:
        click.echo(
            f"  {tally.url}: {tally.num_answers:,} answers, {tally.num_tokens:,} tokens, up to "
            f"{tally.largest_window:,} at a time; {tally.num_lost:,} lost and asked again, {tally.num_busy:,} times "
            f"busy, {tally.num_rests:,} times left",
            err=as_json,
        )
    for message in summary.cut_off:
        click.echo(f"eyas: {message}", err=True)
    if summary.rejected:
        click.echo(f"eyas: each rejected row and its reason: {summary.out}.rejects.jsonl", err=True)
