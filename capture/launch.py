"""Start the ranks of a capture on this machine, pass signals on, and make one exit status of theirs.

The ranks get torchrun's environment. torchrun itself is not used for a single machine, since it turns every failure
into exit status 1 and kills ranks 30 seconds after a signal, while they may still be sealing. For several nodes the
user starts torchrun: `torchrun --nnodes ... -m eyas.cli.main capture ...`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO

from eyas.taps.errors import EXIT_STOPPED_EARLY

PARENT_PIPE = "EYAS_PARENT_PIPE"
SECONDS_AFTER_A_FAILURE = 30.0  # for the other ranks to seal what they have, once one rank has failed
SECONDS_BETWEEN_POLLS = 0.2
STDERR_TAIL_BYTES = 8192


def launch_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run ``eyas ARGUMENTS`` as ``num_ranks`` processes and return their common exit status.

    Rank 0 has this process's stdout and stderr; the stderr of another rank is shown only if that rank was the first to
    fail. Status: that of the first rank that failed, else 75 if any rank stopped early, else 0.
    """
    read_end, write_end = os.pipe()
    logs: list[IO[bytes]] = []
    ranks: list[subprocess.Popen[bytes]] = []
    port = _free_port()
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    asked_to_stop = threading.Event()

    def forward(number: int, _: object) -> None:
        asked_to_stop.set()
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    try:
        for number in previous:
            signal.signal(number, forward)
        for index in range(num_ranks):
            log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed below, once its tail is no longer needed)
            logs.append(log)
            environment = {
                "OMP_NUM_THREADS": threads,
                **os.environ,
                "RANK": str(index),
                "LOCAL_RANK": str(index),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                PARENT_PIPE: str(read_end),
            }
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "eyas.cli.main", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=None if index == 0 else subprocess.DEVNULL,
                    stderr=None if index == 0 else log,
                    pass_fds=[read_end],
                    start_new_session=True,  # a terminal's Ctrl-C reaches them once, through forward()
                )
            )
        return _wait(ranks, logs, asked_to_stop)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        for log in logs:
            log.close()
        os.close(read_end)
        os.close(write_end)


def follow_parent() -> None:
    """In a rank: when the launching process is gone, behave as if told to stop, so that nothing is orphaned."""
    pipe = os.environ.get(PARENT_PIPE)
    if pipe is None:
        return

    def watch() -> None:
        os.read(int(pipe), 1)  # returns only at end of file: nobody writes
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="eyas-follow-parent", daemon=True).start()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[bytes]], asked_to_stop: threading.Event) -> int:
    def has_failed(rank: subprocess.Popen[bytes]) -> bool:
        status = rank.poll()
        # A rank that was still starting up dies of the signal that asked it to stop.
        stopped = asked_to_stop.is_set() and status in (-signal.SIGTERM, -signal.SIGINT)
        return status not in (None, 0, EXIT_STOPPED_EARLY) and not stopped

    def first_failure() -> int | None:
        """One that a signal ended before those that fail because it is gone."""
        return min(
            (i for i, rank in enumerate(ranks) if has_failed(rank)), key=lambda i: ranks[i].returncode, default=None
        )

    failed: int | None = None
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks):
        time.sleep(SECONDS_BETWEEN_POLLS)
        if failed is None:
            failed = first_failure()
            if failed is not None:
                deadline = time.monotonic() + SECONDS_AFTER_A_FAILURE
                for rank in ranks:
                    if rank.poll() is None:
                        rank.terminate()
        if time.monotonic() > deadline:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
    statuses = [rank.returncode for rank in ranks]
    if failed is None:
        failed = first_failure()
    if failed is None:
        return EXIT_STOPPED_EARLY if any(statuses) else 0
    if failed > 0:
        _show_tail(failed, statuses[failed], logs[failed])
    elif statuses[0] < 0:
        print(f"eyas: rank 0 {_ended(statuses[0])}", file=sys.stderr)
    return statuses[failed] if statuses[failed] > 0 else 1


def _show_tail(rank: int, status: int, log: IO[bytes]) -> None:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - STDERR_TAIL_BYTES))
    tail = log.read().decode(errors="replace").strip()
    said = f"eyas: rank {rank} said:\n{tail}\n" if tail else ""
    print(f"{said}eyas: rank {rank} {_ended(status)}", file=sys.stderr)


def _ended(status: int) -> str:
    if status > 0:
        return f"failed with exit status {status}"
    memory = " (if nobody sent it, for memory)" if status == -signal.SIGKILL else ""
    return (
        f"was ended by {_signal_name(status)}{memory}. What was written before is kept: run the same command again to "
        f"go on"
    )


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
