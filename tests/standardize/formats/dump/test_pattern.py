"""A pattern and a path say the same in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.standardize.formats.dump.pattern import FIELDS, Fields, PatternError, parse_pattern

LAYERS = (2, 12, 29, "final")
separators = st.sampled_from(["_", "-", ".", "/", "_x_", "/d/", "--", " "])
names = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
numbers = st.tuples(st.integers(0, 9999), st.integers(1, 4)).map(lambda pair: f"{pair[0]:0{pair[1]}d}")


@st.composite
def patterns(draw: st.DrawFn) -> str:
    chosen = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4, unique=True))
    text = draw(st.sampled_from(["", "hs_", "dump/", "tp"]))
    for n, field in enumerate(chosen):
        text += (draw(separators) if n else "") + f"{{{field}}}"
    return text + draw(st.sampled_from([".pt", "/x.npy", "_h.safetensors", ".ckpt.gz"]))


@given(patterns(), numbers, st.sampled_from(["2", "12", "012", "29", "final"]), numbers, names)
def test_a_path_made_from_fields_is_read_as_them(text: str, rank: str, layer: str, step: str, sample: str) -> None:
    pattern = parse_pattern(text, LAYERS)
    given_fields = Fields(rank, layer, step, sample)
    fields = Fields(*(getattr(given_fields, name) if name in pattern.fields else "" for name in FIELDS))
    path = pattern.path(fields)
    found = pattern.match(path)
    assert found is not None
    assert pattern.path(found) == path  # whatever was read, it is this file
    if sample.isalpha() and "final" not in sample:  # nothing in it that could be a separator or a number
        assert found == fields


@given(st.text(max_size=30), st.text(max_size=30))
def test_whatever_the_text_no_path_leads_outside(text: str, sample: str) -> None:
    try:
        pattern = parse_pattern(f"{text}/{{sample}}.pt", LAYERS)
    except PatternError:
        return
    assert not text.startswith("/")
    assert ".." not in Path(text).parts
    found = pattern.match(f"{text}/{sample}.pt")
    if found is not None:
        assert "/" not in found.sample


def test_other_layers_and_other_files_are_none_of_it() -> None:
    pattern = parse_pattern("rank{rank}/layer_{layer}/req-{sample}_step{step}.pt", LAYERS)
    assert pattern.match("rank0/layer_12/req-abc_step3.pt") == Fields("0", "12", "3", "abc")
    assert pattern.match("rank0/layer_12/req-a_step1_step3.pt") == Fields("0", "12", "3", "a_step1")
    for path in (
        "rank0/layer_13/req-abc_step3.pt",
        "rank0/layer_12/req-abc_step3.pt.tmp",
        "rank0/layer_12/deeper/req-abc_step3.pt",
        "x/rank0/layer_12/req-abc_step3.pt",
        "rank0/layer_12/req-_step3.pt",
    ):
        assert pattern.match(path) is None


def test_a_field_that_stands_twice_says_the_same_twice() -> None:
    pattern = parse_pattern("{sample}/{sample}_layer{layer}.pt", LAYERS)
    assert pattern.match("a/a_layer2.pt") == Fields("", "2", "", "a")
    assert pattern.match("a/b_layer2.pt") is None


@pytest.mark.parametrize(
    "text", ["", "a", "{sample}", "a//{sample}.pt", "./{sample}.pt", "C:/{sample}.pt", "{sample.pt"]
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        parse_pattern(text, LAYERS)
