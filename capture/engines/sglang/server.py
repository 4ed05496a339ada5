"""SGLang's engine with its worker processes, in a thread of this process.

SGLang is started through its Python entry point. In a thread of its own it installs no signal handlers (SGLang's would
kill this process and all of its children), and its event loop runs on while this process waits for something else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.capture.errors import TargetError
from eyas.taps.errors import EyasError

SECONDS_BETWEEN_LOOKS = 0.1


class Server:
    """SGLang's engine, started and running in its own thread. Used as a context manager."""

    def __init__(self, arguments: Any, environment: dict[str, str]) -> None:
        self._arguments = arguments
        self._environment = environment
        self._engine: Future[tuple[Any, asyncio.AbstractEventLoop]] = Future()
        self._thread = threading.Thread(target=self._run, name="eyas-sglang", daemon=True)
        self._handler: Any = None
        self.worker_failed = threading.Event()  # SGLang's processes signal SIGQUIT when they fail

    def __enter__(self) -> Server:
        """Begin to start SGLang; ``started`` says when it has."""
        os.environ.update(self._environment)
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGQUIT, lambda *_: self.worker_failed.set())
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._engine.done() and self._engine.exception() is None:
            _, loop = self._engine.result()
            loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        if self._handler is not None:
            signal.signal(signal.SIGQUIT, self._handler)

    @property
    def started(self) -> bool:
        """Whether SGLang takes requests. Raises what went wrong while it started."""
        if not self._engine.done():
            return False
        self._engine.result()
        return True

    def wait_until_started(self) -> None:
        """Raises what went wrong; TargetError where one of SGLang's processes failed."""
        while not self.started:
            if self.worker_failed.is_set():
                raise TargetError("a process of SGLang failed as it started; what it said stands above")
            time.sleep(SECONDS_BETWEEN_LOOKS)

    @property
    def max_tokens(self) -> int:
        """The longest prompt, in tokens, that SGLang takes with the memory it has."""
        engine, _ = self._engine.result()
        return int(engine.tokenizer_manager.max_req_input_len) - 1

    def generate(
        self,
        rid: str,
        input_ids: npt.NDArray[np.int32],
        sampling: Mapping[str, Any],
        *,
        return_hidden_states: bool = False,
    ) -> Future[dict[str, Any]]:
        """Have the target read ``input_ids`` [T] and go on by ``sampling``, in its words; the result is its own."""
        engine, loop = self._engine.result()
        request = engine.async_generate(
            input_ids=input_ids.tolist(),
            sampling_params=dict(sampling),
            rid=rid,
            return_hidden_states=return_hidden_states,
        )
        return asyncio.run_coroutine_threadsafe(request, loop)

    def _run(self) -> None:
        # Inherited by SGLang's processes: a terminal's Ctrl-C and a job scheduler's SIGTERM reach all of them, and are
        # for this process, which ends them by SIGKILL. The resource tracker unblocks both as it starts, so it starts
        # first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            from sglang.srt.entrypoints.engine import Engine

            engine = Engine(server_args=self._arguments)
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            wrapped = error if isinstance(error, EyasError) else TargetError(f"SGLang does not start: {error}")
            wrapped.__cause__ = error
            self._engine.set_exception(wrapped)
            return
        self._engine.set_result((engine, loop))
        loop.run_forever()
        engine.shutdown()
        tasks = asyncio.all_tasks(loop)  # SGLang's own, which wait for messages that no longer come
        for task in tasks:
            task.cancel()
        if tasks:  # a gather of none belongs to no loop
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
