"""Stands in for an engine's server: the fixture installs it as the module that eyas starts. Its options are its script.

/health answers 200, or 503 until a file appears. SIGTERM ends it, unless it is told to ignore that.
"""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import subprocess
import sys
from pathlib import Path

# How a worker is started: each loses one more sign of where it comes from.
WORKERS = {
    "child": {"args": ["sleep", "600"]},
    "no-environment": {"args": ["sleep", "600"], "env": {}},
    "orphan": {"args": ["sh", "-c", "sleep 600 &"], "env": {"PATH": os.environ["PATH"]}},
    "own-session": {"args": ["setsid", "--fork", "sleep", "600"]},
    "own-session-no-environment": {"args": ["setsid", "--fork", "sleep", "600"], "env": {}},
    "ignores-sigterm": {"args": ["sh", "-c", "trap '' TERM; sleep 600 & wait"]},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exit-with", type=int)
    parser.add_argument("--last-words", type=Path)
    parser.add_argument("--healthy-when", type=Path)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--workers", nargs="*", default=[])
    options, _ = parser.parse_known_args()
    print("the fake engine starts", flush=True)
    if options.exit_with is not None:
        print(options.last_words.read_text() if options.last_words else "no such weights", file=sys.stderr)
        raise SystemExit(options.exit_with)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for kind in options.workers:
        subprocess.Popen(**WORKERS[kind])

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_well = options.healthy_when is None or options.healthy_when.exists()
            self.send_response(200 if is_well else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http.server.HTTPServer((options.host, options.port), Health).serve_forever()


if __name__ == "__main__":
    main()
