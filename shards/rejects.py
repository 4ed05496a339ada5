"""Rejects: samples that could not be captured, and why. They are tried again only on request.

``rejects/<worker>.jsonl`` gets one JSON object a line, ``{"sample_id": ..., "reason": ...}``, appended and fsynced.
What a foreign folder holds that is no sample has no id, and stands there by its name (``"item"``) in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from eyas.shards.atomic import publish
from eyas.shards.ledger import LedgerState, read_ledgers

REJECTS_FOLDER = "rejects"


def append_reject(dataset: Path, worker: str, sample_id: str, reason: str) -> None:
    """Record durably that ``sample_id`` was not captured, and why."""
    folder = dataset / REJECTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"sample_id": sample_id, "reason": reason}).encode() + b"\n"
    with open(folder / f"{worker}.jsonl", "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line  # ends the torn line that a kill left
        file.write(line)
        os.fsync(file.fileno())


def write_item_rejects(dataset: Path, worker: str, rejects: Mapping[str, str]) -> None:
    """Replace what ``worker`` rejected of a foreign folder, item to reason, in one step."""
    folder = dataset / REJECTS_FOLDER
    path = folder / f"{worker}.jsonl"
    if not rejects:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    publish(path, b"".join(json.dumps({"item": item, "reason": reason}).encode() + b"\n"
                           for item, reason in rejects.items()))  # fmt: skip


def read_rejects(dataset: Path, ledgers: LedgerState | None = None) -> dict[str, str]:
    """The samples that are rejected and not sealed: sample id (or a foreign item's name) to its last reason.

    ``ledgers`` is what read_ledgers(dataset) gave, where the caller has it already. Torn lines are passed over: their
    samples are simply tried again.
    """
    rejects: dict[str, str] = {}
    items: dict[str, str] = {}
    for path in sorted((dataset / REJECTS_FOLDER).glob("[!.]*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                body = json.loads(line)
                if "item" in body:
                    items[str(body["item"])] = str(body["reason"])
                else:
                    rejects[str(body["sample_id"])] = str(body["reason"])
            except (ValueError, KeyError, TypeError):
                continue
    if rejects:
        sealed = read_ledgers(dataset) if ledgers is None else ledgers
        rejects = {sample_id: reason for sample_id, reason in rejects.items() if sample_id not in sealed}
    return {**items, **rejects}
