"""One rank of a launch: captures a list of jobs. Run by test_transformers_parallel.py with torchrun's environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from eyas.capture.engines.base import EngineSettings, Forwarded, Rejected, Sealed
from eyas.capture.engines.transformers.engine import TransformersEngine
from eyas.capture.ranks import open_store
from eyas.taps.errors import EyasError
from eyas.taps.notation import parse_tap, parse_taps
from tests.capture.engines.families import sink_for, token_samples, work_of


def capture(job: dict[str, Any]) -> dict[str, Any]:
    samples = token_samples(job["lengths"])
    settings = EngineSettings(
        target=job["target"],
        taps=parse_taps(job["taps"]),
        last_hidden=parse_tap(job["last_hidden"]),
        dtype="float32",
        device="cpu",
        tp=job["tp"],
        batch_tokens=job["batch_tokens"],
    )
    with TransformersEngine(settings) as engine:
        engine.self_test(samples[:4])
        events = list(engine.capture(work_of(samples), sink_for(engine, settings, Path(job["dataset"])), lambda: False))
    return {
        "sealed": [i for event in events if isinstance(event, Sealed) for i in event.shard.sample_ids],
        "rejected": [event.sample_id for event in events if isinstance(event, Rejected)],
        "forwarded": sum(event.num_tokens for event in events if isinstance(event, Forwarded)),
    }


def main() -> None:
    jobs_file = Path(sys.argv[1])
    store = open_store()  # rank 0 hosts it, for one job after another
    outcomes = []
    for job in json.loads(jobs_file.read_text()):
        try:
            outcomes.append(capture(job))
        except EyasError as error:
            outcomes.append({"error": str(error)})
    jobs_file.with_name(f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
    store.add("done", 1)
    while int(os.environ["RANK"]) == 0 and store.add("done", 0) < int(os.environ["WORLD_SIZE"]):
        pass


if __name__ == "__main__":
    main()
