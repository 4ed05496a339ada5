"""What a run writes down about itself: metrics.jsonl, metrics.csv, TensorBoard; and the numbers in them.

metrics.jsonl has a line for every step and for every validation, in order. Resuming cuts it back to the checkpoint's
step, so that a killed run leaves the lines of an uninterrupted one. metrics.csv holds the same, a column a number.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.shards.atomic import publish
from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from eyas.train.shape import DraftShape

METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"

# Sums over loss rows per TTT step, in the order in which the loop stacks them (train/ttt.py, StepResult).
STATISTICS = ("loss", "num_rows", "greedy_accepted", "greedy_reached", "overlap", "out_of_vocabulary")

# Dense bf16 matrix products, FLOP/s, from the vendor's data sheets; without an entry MFU is left out.
_PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Acceptance:
    """What a draft's sums over rows amount to; lists have an entry per TTT step."""

    loss: float  # weighted over steps, per row of step 0, as trained
    acceptance: list[float]  # conditional, greedy: argmax equal given that all former steps' were
    overlap: list[float]  # sum_v min(p, q) per row: acceptance of speculative sampling
    out_of_vocabulary: float  # the target's mass outside the draft vocabulary, per row
    accepted_length: float  # expected tokens per target forward, the bonus token included (greedy)

    @classmethod
    def from_sums(cls, sums: Sequence[Sequence[float]], step_weights: Sequence[float]) -> Acceptance:
        """sums: [K][len(STATISTICS)]"""
        steps = [dict(zip(STATISTICS, row, strict=True)) for row in sums]
        num_rows = max(steps[0]["num_rows"], 1)
        acceptance = [step["greedy_accepted"] / max(step["greedy_reached"], 1) for step in steps]
        return cls(
            loss=sum(w * step["loss"] for w, step in zip(step_weights, steps, strict=True)) / num_rows,
            acceptance=acceptance,
            overlap=[step["overlap"] / max(step["num_rows"], 1) for step in steps],
            out_of_vocabulary=steps[0]["out_of_vocabulary"] / num_rows,
            accepted_length=1 + sum(math.prod(acceptance[: k + 1]) for k in range(len(acceptance))),
        )


def flops(shape: DraftShape, *, num_steps: int, num_tokens: int, square_tokens: int, num_rows: float) -> float:
    """Floating point operations that training on some documents takes, forward and backward, recomputation left out.

    square_tokens: sum of the documents' squared lengths; num_rows: rows that carry loss. Frozen weights and inputs
    need no gradient of their own: fc takes 2 products, a layer 3, lm_head 2, the target's lm_head 1.
    """
    attention_width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    fc = shape.num_taps * shape.target_hidden_size * shape.hidden_size
    layers = sum(
        shape.hidden_size * ((2 if layer == 0 else 1) * (attention_width + 2 * kv_width) + attention_width)
        + 3 * shape.hidden_size * shape.intermediate_size
        for layer in range(shape.num_layers)
    )
    attention = shape.num_layers * 2 * attention_width * square_tokens / 2  # scores and values, causal
    heads = num_rows * shape.draft_vocab_size * (2 * num_steps * shape.hidden_size + shape.target_hidden_size)
    return 2 * (2 * num_tokens * fc + num_steps * (3 * num_tokens * layers + 3.5 * attention) + heads)


def peak_flops(device_name: str) -> float | None:
    """Of a GPU by the name torch gives it; None where it is not known."""
    return next((flops for name, flops in _PEAK_FLOPS.items() if name in device_name), None)


class MetricsWriter:
    """Appends records. Lines of a torn tail and of steps after ``step`` are dropped at the start."""

    def __init__(self, run: Path, *, step: int, tensorboard: bool) -> None:
        records = [record for record in read_metrics(run) if record["step"] <= step]
        publish(run / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in records).encode())
        publish(run / CSV_FILE, b"")
        self._csv = open(run / CSV_FILE, "a", newline="")  # noqa: SIM115  closed by close()
        self._columns: list[str] = []
        for record in records:
            self._write_row(record)
        self._lines = open(run / METRICS_FILE, "a")  # noqa: SIM115  closed by close()
        self._board = _open_board(run / TENSORBOARD_FOLDER, step) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """One line. ``record`` has kind (train or validation) and step; lists get a column an entry."""
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        self._write_row(record)
        if self._board is not None:
            for name, value in _flat(record):
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._lines.close()
        self._csv.close()
        if self._board is not None:
            self._board.close()

    def _write_row(self, record: Mapping[str, Any]) -> None:
        row = dict(_flat(record))
        if not self._columns:  # a step's; a validation's are among them
            self._columns = list(row)
            self._csv.write(_csv_line(self._columns))
        self._csv.write(_csv_line([row.get(name, "") for name in self._columns]))
        self._csv.flush()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Every whole line of metrics.jsonl, in order; none where there is no such file."""
    path = run / METRICS_FILE
    if not path.is_file():
        return []
    content = path.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, list):
            yield from ((f"{name}_{k}", inner) for k, inner in enumerate(value))
        else:
            yield name, value


def _csv_line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(values)
    return text.getvalue()


def _open_board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise EyasError("--tensorboard needs the extra `tensorboard`: pip install 'eyas[tensorboard]'") from error
    return SummaryWriter(str(folder), purge_step=step + 1)
