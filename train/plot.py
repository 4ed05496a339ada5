"""A picture of a run: loss, expected accepted length and conditional acceptance over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eyas.taps.errors import EyasError, UsageError
from eyas.train.metrics import read_metrics

_POINTS = 400  # of a curve at most: steps between them are averaged


def check_plot(out: Path) -> None:
    """Raises EyasError where ``out`` could not be drawn: no matplotlib, or a name of no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EyasError("--plot needs matplotlib, the extra `plot`: pip install 'eyas[plot]'") from error
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--plot {out}: there is no folder {out.absolute().parent}")
    if out.suffix.lstrip(".").lower() not in Figure().canvas.get_supported_filetypes():
        raise UsageError(f"--plot {out}: expected a file name that ends in .png, .svg or .pdf")


def plot_run(run: Path, out: Path) -> None:
    """Draw the metrics of ``run`` into ``out``. Raises EyasError as check_plot() does."""
    check_plot(out)
    from matplotlib.figure import Figure

    records = read_metrics(run)
    trained = [record for record in records if record["kind"] == "train"]
    validated = [record for record in records if record["kind"] == "validation"]
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    losses, lengths, acceptances = figure.subplots(1, 3)
    for axes, name, title in (
        (losses, "loss", "loss"),
        (lengths, "accepted_length", "expected accepted length (tokens per target forward)"),
    ):
        axes.plot(*_curve(trained, name), label="training", linewidth=1)
        axes.plot([r["step"] for r in validated], [r[name] for r in validated], "o-", label="validation")
        axes.set(title=title, xlabel="step")
        axes.legend(fontsize="small")
    num_steps = len(trained[0]["acceptance"]) if trained else 0
    for k in range(num_steps):
        (line,) = acceptances.plot(*_curve(trained, "acceptance", k), label=f"step {k}", linewidth=1)
        values = [record["acceptance"][k] for record in validated]
        acceptances.plot([record["step"] for record in validated], values, "o", color=line.get_color())
    acceptances.set(title="conditional acceptance (dots: validation)", xlabel="step", ylim=(0, 1))
    acceptances.legend(fontsize="small")
    figure.suptitle(run.name)
    figure.savefig(out, dpi=120)


def _curve(records: list[dict[str, Any]], name: str, k: int | None = None) -> tuple[list[float], list[float]]:
    """Steps and values, averaged down to a few hundred points."""
    parts = np.array_split(np.arange(len(records)), min(len(records), _POINTS) or 1)
    values = np.array([record[name] if k is None else record[name][k] for record in records], dtype=float)
    steps = np.array([record["step"] for record in records], dtype=float)
    filled = [part for part in parts if len(part)]
    return [float(steps[part].mean()) for part in filled], [float(values[part].mean()) for part in filled]
