"""Where a server listens: whether the port is free, who has it, and whether the server answers."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from eyas.serve.processes import pids

SECONDS_TO_ANSWER = 25.0  # SGLang's /health generates a token, and takes up to 20 s to say that it cannot

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on ``host``."""
    host = _ANY.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_free(host: str, port: int) -> bool:
    """Whether a server may listen there. Raises OSError where ``host`` is no address of this machine."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        # As servers do: connections of an earlier server that are still being closed do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def listener(port: int) -> int | None:
    """The pid that listens on TCP ``port``; None where there is none, or it is another user's and out of sight."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # TCP_LISTEN
                sockets.add(f"socket:[{fields[9]}]")
    return next((pid for pid in pids() if not sockets.isdisjoint(_open_files(pid))), None) if sockets else None


def unhealthy(host: str, port: int) -> str | None:
    """Ask GET /health, as both engines have it. None: it is well; else what it said, in a few words."""
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=SECONDS_TO_ANSWER)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"/health: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if status == http.client.OK else f"/health answers {status}"


def _open_files(pid: int) -> Iterator[str]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # ended, or another user's
        return
    for fd in descriptors:
        with contextlib.suppress(OSError):  # closed since
            yield os.readlink(f"/proc/{pid}/fd/{fd}")
