"""How many answers a server is asked for at a time: found by additive increase and multiplicative decrease.

As TCP does (RFC 5681): from START up by one an answer, which doubles each round, until the server first shows that it
has enough; from then on up by one a round. A refusal, an error or a timeout halves. A queue in the server takes half of
the queue off. Where the server shows no queue, a token that takes LATENCY_FACTOR times as long as at best is the sign:
batching itself makes a token slower, so the factor is large.
"""

from __future__ import annotations

START = 8
LATENCY_FACTOR = 8.0
LATENCY_WEIGHT = 0.1  # of the newest answer in the running mean
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
        self._mean: float | None = None  # seconds a token takes
        self._best = float("inf")

    @property
    def size(self) -> int:
        """Answers that may be in flight, at least 1."""
        return max(1, int(self._size))

    def answered(self, *, sent_at: float, now: float, num_tokens: int, in_flight: int) -> None:
        """An answer came to a request of ``sent_at``, while ``in_flight`` were asked for, it included."""
        if not self._sees_queue and num_tokens:
            taken = (now - sent_at) / num_tokens
            self._mean = taken if self._mean is None else self._mean + LATENCY_WEIGHT * (taken - self._mean)
            self._best = min(self._best, self._mean)
            if self._mean > LATENCY_FACTOR * self._best:
                self.congested(sent_at=sent_at, now=now)
                return
        if self._holding or in_flight < self.size:  # a window that is not used proves nothing
            return
        self._size = min(self._most, self._size + (1.0 if self._doubling else 1.0 / self._size))

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
