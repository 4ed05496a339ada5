"""How many answers a server is asked for at a time: found by additive increase and multiplicative decrease.

As TCP does (RFC 5681): from START up by one an answer, which doubles each round, until the server first shows that it
has enough; from then on up by one a round. A refusal, an error or a timeout halves. A queue in the server takes half of
the queue off. Where the server shows no queue, a token that takes LATENCY_FACTOR times as long as at best is the sign:
batching itself makes a token slower, so the factor is large.
"""

from __future__ import annotations

START = 8
LATENCY_FACTOR = 8.0
LATENCY_WEIGHT = 0.05  # of the newest answer in the running means
LATENCY_ANSWERS = 32  # before they say anything: short answers are mostly their prompts
QUEUE_SHARE = 0.125  # of the window that may wait in the server


class Window:
    """The number of answers in flight at one server."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = float(min(START, most))
        self._doubling = True
        self._cut_at = float("-inf")
        self._holding = False  # the server has a queue that is not worth a cut
        self._sees_queue = False
        self._seconds = self._tokens = 0.0  # running means of an answer's
        self._num_answers = 0
        self._best = float("inf")  # seconds a token takes

    @property
    def size(self) -> int:
        """Answers that may be in flight, at least 1."""
        return max(1, int(self._size))

    def answered(self, *, sent_at: float, now: float, num_tokens: int, was_full: bool) -> None:
        """An answer came to a request of ``sent_at``; ``was_full``: as many as may be were in flight meanwhile."""
        if not self._sees_queue and self._is_slow(now - sent_at, num_tokens):
            self.congested(sent_at=sent_at, now=now)
            return
        if self._holding or not was_full:  # a window that is not used proves nothing
            return
        self._size = min(self._most, self._size + (1.0 if self._doubling else 1.0 / self._size))

    def _is_slow(self, seconds: float, num_tokens: int) -> bool:
        self._num_answers += 1
        weight = max(LATENCY_WEIGHT, 1 / self._num_answers)
        self._seconds += weight * (seconds - self._seconds)
        self._tokens += weight * (num_tokens - self._tokens)
        if self._num_answers < LATENCY_ANSWERS or not self._tokens:
            return False
        taken = self._seconds / self._tokens
        self._best = min(self._best, taken)
        return taken > LATENCY_FACTOR * self._best

    def congested(self, *, sent_at: float, now: float) -> None:
        """A request of ``sent_at`` failed for want of room. Those sent before the last cut are part of the same one."""
        if sent_at <= self._cut_at:
            return
        self._size = max(1.0, self._size / 2)
        self._doubling = False
        self._cut_at = now

    def queued(self, waiting: float, *, now: float) -> None:
        """The server says that ``waiting`` requests wait in it."""
        self._sees_queue = True
        self._holding = waiting > 0
        if waiting > max(1.0, QUEUE_SHARE * self._size):
            self._size = max(1.0, self._size - waiting / 2)
            self._doubling = False
            self._cut_at = now
