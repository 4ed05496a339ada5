"""The notation: what parses, what sorts, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.taps.notation import (
    EMBED,
    FINAL,
    Tap,
    TapError,
    after,
    all_taps,
    default_taps,
    format_taps,
    parse_tap,
    parse_taps,
    validate_taps,
)

some_tap = st.one_of(st.just(EMBED), st.just(FINAL), st.integers(0, 10_000).map(after))


@given(st.lists(some_tap))
def test_taps_are_read_back_as_written(taps: list[Tap]) -> None:
    assert parse_taps(format_taps(taps)) == tuple(taps)


@given(st.integers(1, 200), st.data())
def test_every_subset_in_depth_order_is_valid_and_no_other_order_is(num_layers: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(all_taps(num_layers)), min_size=1, max_size=5, unique=True))
    validate_taps(sorted(chosen), num_layers)
    shuffled = data.draw(st.permutations(chosen))
    if shuffled != sorted(chosen):
        with pytest.raises(TapError, match=format_taps(sorted(chosen))):
            validate_taps(shuffled, num_layers)


@given(st.integers(1, 200))
def test_all_taps_are_every_boundary_once(num_layers: int) -> None:
    taps = all_taps(num_layers)
    assert len(set(taps)) == len(taps) == num_layers + 2
    assert list(taps) == sorted(taps)
    assert after(num_layers) not in taps


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        tap = parse_tap(text)
    except TapError:
        return
    assert parse_tap(str(tap)) == tap


@pytest.mark.parametrize(
    "text", ["", "after", "after:", "after:-1", "after:1.0", "After:1", "after: 1", "last", "after:²"]
)
def test_what_is_no_tap(text: str) -> None:
    with pytest.raises(TapError):
        parse_tap(text)


@pytest.mark.parametrize("text", ["3", "-1", "31"])
def test_a_bare_integer_is_sent_to_its_convention(text: str) -> None:
    with pytest.raises(TapError, match="--convention"):
        parse_tap(text)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(61, "after:1,after:29,after:57"), (30, "after:1,after:14,after:26"), (7, "after:1,after:2,after:3")],
)
def test_default_taps(num_layers: int, expected: str) -> None:
    assert format_taps(default_taps(num_layers)) == expected


@pytest.mark.parametrize("num_layers", range(1, 7))
def test_too_few_layers_for_the_default(num_layers: int) -> None:
    with pytest.raises(TapError, match="--taps"):
        default_taps(num_layers)


def test_a_tap_beyond_the_last_layer_is_refused_with_the_range() -> None:
    with pytest.raises(TapError, match="after:0 to after:29"):
        validate_taps((after(30),), 30)
