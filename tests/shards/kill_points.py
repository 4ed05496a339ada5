"""Kills a writer, and then a recovery, at every system call that changes a file; run by test_kills.py in a process.

    python kill_points.py FOLDER CODEC

Each child is a fork that counts os.open, os.write, ... and ends itself by SIGKILL after the k-th, or, where that is a
write, in the middle of it. Prints one JSON line: how many kills, by call, and every fault found.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import Tiny, make_identity, same_sample
from killer import Killer

from eyas.shards.dataset import Dataset
from eyas.shards.ledger import SHARDS_FOLDER, lock_dataset, read_ledgers, recover
from eyas.shards.validate import validate
from eyas.shards.writer import ShardWriter


def in_child(k: int, torn: bool, work: Callable[[Callable[[str], None]], None]) -> list[str]:
    """Run ``work`` in a fork that dies at call k; returns the lines it reported before that."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        real_write = os.write

        def report(line: str) -> None:
            real_write(write_end, f"{line}\n".encode())

        Killer(k, torn, report)
        try:
            work(report)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reports it
            report(f"fault {error!r}")
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        reported = lines.read().splitlines()
    os.waitpid(child, 0)
    return reported


def main() -> None:
    folder, codec = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    identity = make_identity(codec=codec)
    samples = Tiny.samples(identity, 6)
    by_id = {sample.sample_id: sample for sample in samples}
    data, crashed = folder / "data", folder / "crashed"
    faults: list[str] = []
    kills: Counter[str] = Counter()

    def capture(report: Callable[[str], None]) -> None:
        from eyas.shards.identity import create_or_match

        create_or_match(data, identity)
        with lock_dataset(data):
            recover(data, identity)
            known = read_ledgers(data)
            with ShardWriter(data, identity=identity, worker="host-0", shard_bytes=1000, metadata={}) as writer:
                for sample in samples:
                    if sample.sample_id not in known:
                        for shard in writer.add(sample):
                            report("sealed " + " ".join(shard.sample_ids))
                for shard in writer.close():
                    report("sealed " + " ".join(shard.sample_ids))

    def check_end(where: str) -> None:
        capture(lambda line: None)
        found = Dataset.open(data)
        got = list(found.iter_samples())
        if found.problems:
            faults.append(f"{where}: left {found.problems}")
        if len(got) != len(by_id) or not all(same_sample(sample, by_id[sample.sample_id]) for sample in got):
            faults.append(f"{where}: samples lost, doubled or wrong")
        leftovers = {path.suffix for path in (data / SHARDS_FOLDER).iterdir()} - {".safetensors"}
        if leftovers or any(path.name.startswith(".tmp-") for path in data.rglob("*")):
            faults.append(f"{where}: leftovers {leftovers}")

    def killed(reported: list[str], where: str) -> str:
        names = [line.removeprefix("killed ") for line in reported if line.startswith("killed")]
        kills.update(names)
        faults.extend(f"{where}: {line}" for line in reported if line.startswith("fault"))
        return "".join(names)

    k, torn = 1, False
    while True:
        where = f"{'torn ' * torn}call {k}"
        shutil.rmtree(data, ignore_errors=True)
        reported = in_child(k, torn, capture)
        name = killed(reported, where)
        if not name:
            break
        acknowledged = {name for line in reported if line.startswith("sealed") for name in line.split()[1:]}
        state = read_ledgers(data)
        if lost := [name for name in acknowledged if name not in state]:
            faults.append(f"{where}: acknowledged and lost {lost}")
        for entry in state.entries:
            validate(data / SHARDS_FOLDER / entry.shard, identity, entry)
        if name == "rename" or (torn and k % 8 == 0):  # the next run is killed too, in the midst of its recovery
            shutil.rmtree(crashed, ignore_errors=True)
            shutil.copytree(data, crashed)
            for inner in (4, 7) if torn else range(3, 14):
                if not killed(in_child(inner, False, capture), f"{where}, then {inner}"):
                    break
                check_end(f"{where}, then {inner}")
                shutil.rmtree(data)
                shutil.copytree(crashed, data)
        check_end(where)
        k, torn = (k, True) if name == "write" else (k + 1, False)
    print(json.dumps({"kills": sum(kills.values()), "by_call": dict(sorted(kills.items())), "faults": faults}))


if __name__ == "__main__":
    main()
