"""Serving: the engine's own server as a supervised child, for pipelines that start, restart and stop it.

A folder holds one server::

    serve.json              what was started: configuration, command, process (pid and start time), engine release
    serve.lock              held while a command starts or stops the server, never while it waits for health
    logs/serve-<time>.log   what the engine and the supervisor said, one file a start; logs/serve.log is the latest
    logs/serve-<time>.json  how that start ended, written by its supervisor

The engine leads a session and process group of its own and carries its start's id in its environment. No process is
signalled that is not proven to be of that start (processes.py).
"""
