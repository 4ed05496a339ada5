"""`eyas eval`: how many tokens of a draft does the target accept?"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from eyas.cli.progress import Progress
from eyas.cli.recipe import dry_run_option, print_dry_run

if TYPE_CHECKING:
    from eyas.train.acceptance.decoding import Decoding, Tally
    from eyas.train.acceptance.endpoint import EndpointReport
    from eyas.train.acceptance.evaluate import EvalReport
    from eyas.train.acceptance.steps import StepChoice

_SHOWN_DIFFERENCES = 5


def steps_range(value: str | None) -> tuple[int, ...]:
    """``1..10`` or ``2,3,5`` as numbers of steps."""
    if value is None:
        return ()
    found = re.fullmatch(r"(\d+)\.\.(\d+)", value.strip())
    try:
        steps = range(int(found[1]), int(found[2]) + 1) if found else [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: expected 1..10 or numbers such as 2,3,5") from error
    if not steps or min(steps) < 1 or max(steps) > 64:
        raise click.BadParameter(f"{value!r}: expected numbers from 1 to 64, such as 1..10")
    return tuple(sorted(set(steps)))


def milliseconds(value: str | None) -> tuple[float, ...] | None:
    """``21``, ``21..28`` or one number for each of --steps."""
    if value is None:
        return None
    try:
        found = tuple(float(part) for part in re.split(r"\.\.|,", value))
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: expected milliseconds such as 21, 21..28 or 21,23,28") from error
    if not all(0 < number < float("inf") for number in found) or (".." in value and len(found) != 2):
        raise click.BadParameter(f"{value!r}: expected milliseconds such as 21, 21..28 or 21,23,28")
    return found


@click.command(name="eval", short_help="Measure how many tokens of a draft the target accepts.")
@click.argument("drafts", nargs=-1, metavar="[DRAFT...]", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The target's folder; default: the run's.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the target.")
@click.option(
    "--dataset",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Judge on this captured dataset; default without --decode: the run's.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1, max_open=True),
    help="Judge on the samples that a run with this --validation held out; 0: on all. Default: as the run, else 0.",
)
@click.option(
    "--decode",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Decode these prompts with the target: JSON lines with turns, or conversations.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="Judge the draft of this running vLLM or SGLang server, while it answers --decode.",
)
@click.option("--baselines", is_flag=True, help="Judge an untrained draft and a 2-gram table of the dataset too.")
@click.option("--engine", help="Whose reading of a foreign draft's layer ids counts, such as sglang@0.5.23.")
@click.option(
    "--draft-tokens", type=click.IntRange(1, 64), help="Tokens drafted a cycle; default: what the draft is trained for."
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="Of --decode; 0 is greedy.")
@click.option("--seed", type=int, default=0, help="Of --decode with a temperature.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, help="Longest answer of --decode, in tokens.")
@click.option("--max-prompts", type=click.IntRange(1), help="Decode only the first so many prompts.")
@click.option("--steps", help="Recommend one of these numbers of drafted tokens: 1..10, or 2,3,5.")
@click.option("--verify-ms", help="Cost of a verify for --steps: 21, 21..28 or one number each. Default: measured.")
@click.option("--draft-ms", type=click.FloatRange(0, min_open=True), help="Cost of one draft step. Default: measured.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw --steps (needs matplotlib).")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: cuda if there is one."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    help="Of target and draft; auto is the target checkpoint's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@dry_run_option
def command(**options: Any) -> None:
    """Measure how many tokens of each DRAFT the target accepts: a run (its best checkpoint), a checkpoint, or any
    draft's folder.

    On a dataset, from the captured hidden states alone: acceptance at each step and the expected accepted length. With
    --decode, by speculative decoding of one sequence at a time: tokens per target forward (the target's own token
    included, so 1 means that nothing was accepted), acceptance by position and category, speed against plain decoding,
    and whether greedy output is plain greedy output; exit status 1 where it is not and rounding does not explain it.

    With --endpoint no DRAFT is loaded: a running server answers the prompts of --decode with its own draft, and what
    it says of its speculation is reported: per answer where it does, else by its counters before and after. Where those
    hold requests of others too, only the acceptance of the whole server is reported, and a line says so.

    \b
    eyas eval run
    eyas eval run --decode mt_bench.jsonl --baselines
    eyas eval run exported --decode mt_bench.jsonl --target ./llama --engine sglang@0.5.23
    eyas eval run --steps 1..10 --verify-ms 21..28 --draft-ms 0.6
    eyas eval --endpoint http://localhost:8000 --target ./llama --decode mt_bench.jsonl
    """
    if options["endpoint"] is not None:
        _evaluate_endpoint(options)
        return
    if not options["drafts"]:
        raise click.UsageError("Missing argument 'DRAFT...' (or --endpoint, for the draft of a running server)")
    from eyas.align.engine import parse_engine
    from eyas.train.acceptance.evaluate import EvalConfig, evaluate, resolve

    steps = steps_range(options["steps"])
    for option in ("verify_ms", "draft_ms", "plot"):
        if options[option] is not None and not steps:
            raise click.UsageError(f"--{option.replace('_', '-')} belongs to --steps")
    if options["temperature"] and options["prompts"] is None:
        raise click.UsageError("--temperature belongs to --decode")
    if options["draft_tokens"] is not None and steps:
        raise click.UsageError("--steps drafts its largest number of tokens: leave --draft-tokens out")
    if options["plot"] is not None:
        from eyas.train.plot import check_plot

        check_plot(options["plot"])
    config = EvalConfig(
        drafts=options["drafts"],
        target=options["target"],
        dataset=options["dataset"],
        prompts=options["prompts"],
        engine=None if options["engine"] is None else parse_engine(options["engine"]),
        baselines=options["baselines"],
        validation=options["validation"],
        num_draft=options["draft_tokens"],
        steps=steps,
        verify_ms=_by_step(steps, milliseconds(options["verify_ms"])),
        draft_ms=options["draft_ms"],
        temperature=options["temperature"],
        seed=options["seed"],
        max_new_tokens=options["max_new_tokens"],
        max_prompts=options["max_prompts"],
        device=options["device"],
        dtype=None if options["dtype"] == "auto" else options["dtype"],
        trust_remote_code=options["trust_remote_code"],
    )
    resolved = resolve(config)
    if options["dry_run"]:
        drafts = ", ".join(map(str, resolved.folders.values()))
        held_out = f"{resolved.validation:.0%} of its samples" if resolved.validation else "all samples"
        print_dry_run(
            {
                "draft folders": drafts,
                "target": resolved.target,
                "dataset": "none" if resolved.dataset is None else f"{resolved.dataset}, {held_out}",
            }
        )
        return
    report = evaluate(config, resolved, Progress)
    if options["as_json"]:
        click.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    if options["plot"] is not None:
        from eyas.train.acceptance.plot import plot_steps

        plot_steps(report.steps, options["plot"])
    if report.unexplained:
        raise click.ClickException(
            f"{report.unexplained} greedy answers differ from plain greedy decoding where rounding does not explain it"
        )


_OF_DRAFTS = (
    "dataset", "validation", "baselines", "engine", "draft_tokens", "steps", "verify_ms", "draft_ms", "plot", "device",
    "dtype",
)  # fmt: skip


def _evaluate_endpoint(options: dict[str, Any]) -> None:
    from eyas.capture.endpoints.server import normalise_url
    from eyas.train.acceptance.endpoint import EndpointConfig, evaluate_endpoint

    if options["drafts"]:
        raise click.UsageError(f"--endpoint judges the server's own draft: leave {options['drafts'][0]} out")
    ctx = click.get_current_context()
    given = [name for name in _OF_DRAFTS if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} says nothing to a server: leave it out with --endpoint")
    for needed, name in (("prompts", "--decode"), ("target", "--target")):
        if options[needed] is None:
            raise click.UsageError(f"--endpoint needs {name}")
    config = EndpointConfig(
        url=normalise_url(options["endpoint"]),
        target=str(options["target"]),
        prompts=options["prompts"],
        temperature=options["temperature"],
        seed=options["seed"],
        max_new_tokens=options["max_new_tokens"],
        max_prompts=options["max_prompts"],
        trust_remote_code=options["trust_remote_code"],
    )
    if options["dry_run"]:
        print_dry_run({"server": config.url})
        return
    report = evaluate_endpoint(config, Progress, lambda line: click.echo(f"eyas: {line}", err=True))
    if options["as_json"]:
        click.echo(json.dumps(report.to_json()))
    else:
        _print_endpoint(report)
    if report.foreign_requests:
        click.echo(
            f"eyas: the server was busy with {report.foreign_requests:,} requests of others meanwhile"
            + (
                ": the acceptance is that of the whole server, and what our answers and their categories had of it is "
                "unknown. Measure again while it has no others"
                if report.is_of_the_server
                else ", which are not in these numbers"
            ),
            err=True,
        )


def _print_endpoint(report: EndpointReport) -> None:
    how = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}"
    tally = report.tally
    click.echo(
        f"{report.url} ({report.server or 'unknown'}) serves {report.model}, {tally.num_draft} tokens drafted a cycle"
    )
    click.echo(f"\ndecoding ({report.num_prompts:,} prompts, {tally.num_turns:,} turns, {how})")
    whole = report.is_of_the_server
    kept = "of the whole server" if whole else f"{tally.kept_length:.3f} within the answers"
    speed = "" if whole else f"{report.tokens_per_second:,.1f} tokens/s, "
    click.echo(
        f"  {tally.name}  accepted length {tally.accepted_length:.3f} ({kept})  "
        f"by position {_shares(tally.acceptance)}  {speed}up to {report.largest_window} answers at a time"
    )
    if len(tally.categories) > 1 and not whole:
        click.echo("\naccepted length by category")
        left = max(map(len, tally.categories))
        for category, (tokens, forwards) in tally.categories.items():
            click.echo(f"  {category:<{left}}  {tokens / max(forwards, 1):.3f}")
    click.echo(f"\nmeasured by {report.source}")


def _by_step(steps: Sequence[int], given: tuple[float, ...] | None) -> dict[int, float] | None:
    """Milliseconds for each number of steps: the same for all, from one end to the other, or one each."""
    if given is None:
        return None
    if len(given) == 1:
        return dict.fromkeys(steps, given[0])
    if len(given) == len(steps):
        return dict(zip(steps, given, strict=True))
    if len(given) == 2:
        first, last = steps[0], steps[-1]
        return {n: given[0] + (given[1] - given[0]) * (n - first) / max(last - first, 1) for n in steps}
    raise click.UsageError(f"--verify-ms: {len(given)} numbers for {len(steps)} of --steps: give one each")


def _print(report: EvalReport) -> None:
    click.echo(f"target {report.target}, {report.dtype} on {report.device}, {report.num_draft} tokens drafted a cycle")
    if report.held_out:
        _print_held_out(report)
    if report.decoding is not None:
        _print_decoding(report.decoding, report.num_prompts)
    for name, choices in report.steps.items():
        _print_steps(name, choices, "decoding" if report.steps_are_decoded else "the dataset")


def _print_held_out(report: EvalReport) -> None:
    first = next(iter(report.held_out.values()))
    which = f"held-out conversations ({report.validation:.1%}: " if report.validation else "all conversations ("
    click.echo(f"\n{which}{first.num_samples:,} samples, {first.num_rows:,} tokens)")
    if not report.validation:
        click.echo("  a draft that was trained on some of them looks better here than it is")
    width = max(len(name) for name in report.held_out)
    for name, found in report.held_out.items():
        for label, values, length in (
            ("greedy ", found.acceptance, found.accepted_length),
            ("sampled", found.overlap, found.sampled_length),
        ):
            click.echo(f"  {name:<{width}}  {label}  accepted length {length:.3f}  by step {_shares(values)}")
        click.echo(f"  {'':<{width}}  target's probability outside the draft vocabulary {found.out_of_vocabulary:.2%}")


def _print_decoding(decoding: Decoding, num_prompts: int) -> None:
    how = "greedy" if decoding.temperature == 0 else f"temperature {decoding.temperature:g}"
    plain = decoding.plain
    click.echo(f"\ndecoding ({num_prompts:,} prompts, {plain.num_turns:,} turns, {how})")
    width = max(len(tally.name) for tally in [*decoding.tallies, plain])
    for tally in decoding.tallies:
        click.echo(
            f"  {tally.name:<{width}}  accepted length {tally.accepted_length:.3f}  by position "
            f"{_shares(tally.acceptance)}  {_speed(tally)} ({tally.tokens_per_second / plain.tokens_per_second:.2f}x)"
        )
    click.echo(f"  {plain.name:<{width}}  accepted length 1.000  {_speed(plain)}")
    if len(plain.categories) > 1:
        click.echo("\naccepted length by category")
        widths = [max(8, len(tally.name)) for tally in decoding.tallies]
        left = max(map(len, plain.categories))
        heads = [f"{tally.name:>{room}}" for tally, room in zip(decoding.tallies, widths, strict=True)]
        click.echo("  ".join([f"  {'':<{left}}", *heads]))
        for category in plain.categories:
            cells = []
            for tally, room in zip(decoding.tallies, widths, strict=True):
                tokens, forwards = tally.categories[category]
                cells.append(f"{tokens / max(forwards, 1):>{room}.3f}")
            click.echo("  ".join([f"  {category:<{left}}", *cells]))
    if decoding.temperature == 0:
        _print_proof(decoding)


def _print_proof(decoding: Decoding) -> None:
    click.echo("\ngreedy output against plain greedy decoding")
    for tally in decoding.tallies:
        click.echo(f"  {tally.name}: {tally.num_identical:,} of {tally.num_turns:,} answers the same, token for token")
        for difference in tally.differences[:_SHOWN_DIFFERENCES]:
            gap = "which is none of its best" if difference.gap is None else f"its logits {difference.gap:.3g} apart"
            click.echo(
                f"    prompt {difference.prompt} turn {difference.turn}, token {difference.position}: "
                f"{difference.drafted} instead of {difference.plain}, {gap}; rounding moves logits by up to "
                f"{tally.rounding:.3g} here" + ("" if difference not in tally.unexplained else ": NOT EXPLAINED")
            )
        if len(tally.differences) > _SHOWN_DIFFERENCES:
            explained = len(tally.differences) - len(tally.unexplained)
            click.echo(f"    {len(tally.differences)} differences in all, {explained} within rounding")


def _print_steps(name: str, choices: list[StepChoice], source: str) -> None:
    from eyas.train.acceptance.steps import best_choice

    best = best_choice(choices)
    click.echo(f"\nhow many tokens to draft, {name} (acceptance of {source})")
    click.echo("  steps  accepted length  verify ms  draft ms  verify's share  tokens/s")
    for choice in choices:
        mark = "  <- best" if choice is best else ""
        click.echo(
            f"  {choice.steps:>5}  {choice.accepted_length:>15.3f}  {choice.verify_ms:>9.2f}  {choice.draft_ms:>8.2f}"
            f"  {choice.verify_share:>14.1%}  {choice.tokens_per_second:>8.1f}{mark}"
        )


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _speed(tally: Tally) -> str:
    return f"{tally.tokens_per_second:,.1f} tokens/s"
