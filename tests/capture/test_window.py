"""How many answers a server is asked for at a time."""

from __future__ import annotations

from eyas.capture.endpoints.window import START, Window


def answer(window: Window, *, sent_at: float = 0.0, now: float = 1.0, was_full: bool = True, tokens: int = 10) -> None:
    window.answered(sent_at=sent_at, now=now, num_tokens=tokens, was_full=was_full)


def test_it_doubles_each_round_up_to_the_most() -> None:
    window = Window(100)
    sizes = []
    for _ in range(6):
        sizes.append(window.size)
        for _ in range(window.size):
            answer(window)
    assert sizes == [START, 16, 32, 64, 100, 100]


def test_a_window_that_is_not_full_does_not_grow() -> None:
    window = Window(100)
    for _ in range(50):
        answer(window, was_full=False)
    assert window.size == START


def test_what_failed_together_halves_once_and_then_it_grows_by_one_a_round() -> None:
    window = Window(100)
    for _ in range(START * 7):
        answer(window)
    before = window.size
    for _ in range(5):
        window.congested(sent_at=1.0, now=2.0)
    assert window.size == before // 2
    for _ in range(window.size):
        answer(window, sent_at=2.0, now=3.0)
    assert before // 2 <= window.size <= before // 2 + 1
    window.congested(sent_at=2.5, now=4.0)  # sent after the cut
    assert window.size <= before // 4 + 1
    for n in range(20):
        window.congested(sent_at=5.0 + n, now=5.5 + n)
    assert window.size == 1


def test_a_queue_in_the_server_is_taken_off() -> None:
    window = Window(500)
    for _ in range(START * 31):
        answer(window)
    assert window.size == START * 32
    window.queued(2, now=1.0)  # one that is not worth a cut: it stays
    for _ in range(100):
        answer(window)
    assert window.size == START * 32
    window.queued(100, now=2.0)
    assert window.size == START * 32 - 50
    window.queued(0, now=3.0)
    answer(window)
    assert window.size == START * 32 - 50  # by a fraction now


def test_without_a_queue_to_see_slow_tokens_are_the_sign() -> None:
    slow, seen = Window(500), Window(500)
    seen.queued(0, now=0.0)
    for window in (slow, seen):
        for n in range(200):
            answer(window, sent_at=n, now=n + 1.0)
        for n in range(200, 300):
            answer(window, sent_at=n, now=n + 60.0)
    assert slow.size < 250 < seen.size


def test_short_answers_are_not_slow_tokens() -> None:
    window = Window(500)
    for n in range(400):  # each takes as long, whatever its length
        answer(window, tokens=1 + n * 7 % 13)
    assert window.size > 400
