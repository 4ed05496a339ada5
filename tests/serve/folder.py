"""`eyas serve` from outside, on one folder."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from click.testing import CliRunner, Result

from eyas.cli.main import main

ROOT = Path(__file__).parents[2]


class Folder:
    def __init__(self, path: Path, target: Path, port: int) -> None:
        self.path = path
        self.target = target
        self.port = port
        self.seen: set[psutil.Process] = set()  # with their start times

    def arguments(self, *options: object, engine: str = "vllm") -> list[str]:
        """Of a start. Options behind "--" are the fake's."""
        behind = options.index("--") if "--" in options else len(options)
        given = ["--engine", engine, "--target", self.target, "--port", self.port, *options[:behind]]
        return ["serve", "start", str(self.path), *map(str, given), *map(str, options[behind:])]

    def start(self, *options: object, **more: Any) -> Result:
        return self.run(*self.arguments(*options, **more))

    def run(self, *arguments: object) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        if self.path.is_dir():
            self.status()
        return result

    def restart(self, *options: object) -> Result:
        return self.run("serve", "restart", self.path, *options)

    def stop(self, *options: object) -> Result:
        return self.run("serve", "stop", self.path, *options)

    def status(self) -> dict[str, Any]:
        result = CliRunner().invoke(main, ["serve", "status", str(self.path), "--json"])
        if not result.stdout:
            return {"error": result.stderr}
        body: dict[str, Any] = json.loads(result.stdout)
        assert result.exit_code == {"healthy": 0, "running": 75}.get(body["condition"], 1)
        pids = [*body.get("pids", ()), (body.get("supervisor") or {"pid": None})["pid"]]
        self.seen |= {psutil.Process(pid) for pid in pids if pid is not None and psutil.pid_exists(pid)}
        return body

    def edit_state(self, change: Callable[[dict[str, Any]], None]) -> None:
        file = self.path / "serve.json"
        state = json.loads(file.read_text())
        change(state)
        file.write_text(json.dumps(state))

    def spawn(self, arguments: list[str]) -> subprocess.Popen[str]:
        """The command as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "eyas.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool]) -> None:
    """Wait for what is about to happen; fails where it does not."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
