"""A picture of how many tokens to draft: speed and accepted length over the number of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas.train.acceptance.steps import StepChoice, best_choice
from eyas.train.plot import check_plot


def plot_steps(steps: Mapping[str, Sequence[StepChoice]], out: Path) -> None:
    """Draw the choices of each draft into ``out``. Raises EyasError where it cannot be drawn."""
    check_plot(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speeds, lengths = figure.subplots(1, 2)
    for name, choices in steps.items():
        numbers = [choice.steps for choice in choices]
        (line,) = speeds.plot(numbers, [choice.tokens_per_second for choice in choices], "o-", label=name)
        best = best_choice(choices)
        speeds.plot([best.steps], [best.tokens_per_second], "*", markersize=16, color=line.get_color())
        lengths.plot(numbers, [choice.accepted_length for choice in choices], "o-", label=name)
    speeds.set(title="tokens per second (star: best)", xlabel="drafted tokens a cycle", ylim=(0, None))
    lengths.set(title="accepted length (tokens per target forward)", xlabel="drafted tokens a cycle", ylim=(1, None))
    for axes in (speeds, lengths):
        axes.legend(fontsize="small")
    figure.savefig(out, dpi=120)
