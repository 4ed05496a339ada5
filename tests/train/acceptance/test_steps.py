"""How many tokens to draft."""

from __future__ import annotations

import pytest

from eyas.train.acceptance.decoding import expected_length
from eyas.train.acceptance.steps import Costs, best_choice, choose_steps


def test_expected_length_is_the_sum_of_products() -> None:
    assert expected_length([]) == 1
    assert expected_length([0.5, 0.5, 1.0]) == 1 + 0.5 + 0.25 + 0.25


def test_two_steps_are_best_where_each_row_costs_the_verify_more_than_it_gives() -> None:
    """The case of the story: a verify of 21 to 28 ms is nearly the whole cycle, and the third step does not pay."""
    costs = Costs({1: 21.0, 2: 23.0, 3: 26.0, 4: 28.0}, 0.4)
    choices = choose_steps((1, 2, 3, 4), [0.72, 0.68, 0.45, 0.4], costs)
    assert best_choice(choices).steps == 2
    for n, choice in enumerate(choices, start=1):
        assert choice.tokens_per_second == pytest.approx(1000 * choice.accepted_length / (costs.verify_ms[n] + n * 0.4))
    assert choices[1].verify_share > 0.95
    free = choose_steps((1, 2, 3, 4), [0.72, 0.68, 0.45, 0.4], Costs(dict.fromkeys(range(1, 5), 21.0), 0.4))
    assert best_choice(free).steps == 4
    useless = choose_steps((1, 2), [0.0, 0.0], Costs({1: 21.0, 2: 21.0}, 1.0))
    assert best_choice(useless).steps == 1
