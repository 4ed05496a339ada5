"""System and release x model class x kind of ids: each reading as it was read from the system's own source by hand.

Nothing here is computed by the code under test. Taps are written by their layer: ``15`` is after:15, ``e`` embed, ``f``
final. ``-`` stands for ids that are refused since the system does not read them or no source was read, ``?`` for ids
that its releases or code paths read differently, so that both readings are shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.taps.conventions import ConventionError, default_taps, ids_for, read_draft_config, resolve
from eyas.taps.notation import all_taps, format_taps
from eyas.taps.target import TargetFacts

KIMI_CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
    },
    "vision_config": {"num_hidden_layers": 27},
}
TARGETS = {
    "llama": TargetFacts(num_layers=32, model_class="LlamaForCausalLM", model_types=("llama",)),
    "qwen3": TargetFacts(num_layers=36, model_class="Qwen3ForCausalLM", model_types=("qwen3",)),
    "qwen3-moe": TargetFacts(num_layers=48, model_class="Qwen3MoeForCausalLM", model_types=("qwen3_moe",)),
    "deepseek": TargetFacts(num_layers=61, model_class="DeepseekV3ForCausalLM", model_types=("deepseek_v3",)),
    "deepseek-v32": TargetFacts(num_layers=61, model_class="DeepseekV32ForCausalLM", model_types=("deepseek_v32",)),
    "kimi": TargetFacts.from_config(KIMI_CONFIG),
    # A wrapper that nobody has read around a language model that was: found by its type.
    "wrapped": TargetFacts(num_layers=61, model_class="NewVisionForAnything", model_types=("new_vision", "kimi_k2")),
    "gpt-oss": TargetFacts(num_layers=36, model_class="GptOssForCausalLM", model_types=("gpt_oss",)),
    "gemma3": TargetFacts(num_layers=34, model_class="Gemma3ForConditionalGeneration", model_types=("gemma3",)),
    "gemma4": TargetFacts(num_layers=30, model_class="Gemma4ForCausalLM", model_types=("gemma4_text",)),
    "glm-lite": TargetFacts(num_layers=47, model_class="Glm4MoeLiteForCausalLM", model_types=("glm4_moe_lite",)),
    "minimax-m2": TargetFacts(num_layers=62, model_class="MiniMaxM2ForCausalLM", model_types=("minimax_m2",)),
    "m3-vl": TargetFacts(num_layers=60, model_class="MiniMaxM3SparseForConditionalGeneration"),
    "deepseek-v4": TargetFacts(num_layers=61, model_class="DeepseekV4ForCausalLM", model_types=("deepseek_v4",)),
    "new": TargetFacts(num_layers=40, model_class="NobodyHasReadForCausalLM", model_types=("new",)),
}


@dataclass
class Row:
    """What one release makes of ids for one target."""

    convention: str
    target: str
    default: str
    ids: str  # explicit ids
    taps: str  # what they are
    edges: tuple[str, str, str]  # of [0], [L-1] and [L], each alone
    more: dict[str, str] = field(default_factory=dict)  # other explicit ids

    def __str__(self) -> str:
        return f"{self.convention}-{self.target}"


NOTHING = ("-", "-", "-")
ROWS = [
    # SGLang: adds 1 and keeps inputs of layers; the input of layer L is met by a few models alone.
    Row("sglang@0.5.9", "llama", "1,15,28", "2,16,29", "2,16,29", ("0", "-", "-")),
    Row("sglang@0.5.23", "llama", "1,15,28", "2,16,29", "2,16,29", ("0", "-", "-"), {"-1,16": "-"}),
    Row("sglang@0.5.23", "qwen3", "1,17,32", "2,18,33", "2,18,33", ("0", "-", "-")),
    Row("sglang@0.5.9", "qwen3-moe", "1,23,44", "2,24,45", "2,24,45", ("0", "-", "-")),
    Row("sglang@0.5.23", "qwen3-moe", "1,23,44", "2,24,45", "2,24,45", ("0", "-", "-")),
    # PR 25454, released in 0.5.13: as they are, unless the first is 1.
    Row("sglang@0.5.9", "kimi", "1,29,57", "2,30,58", "2,30,58", ("0", "-", "-"), {"-1,2,30,58": "-"}),
    Row("sglang@0.5.12.post1", "kimi", "1,29,57", "2,30,58", "2,30,58", ("0", "-", "-")),
    Row("sglang@0.5.13", "kimi", "1,29,57", "2,30,58", "1,29,57", ("e", "59", "-"), {"1,29,57": "1,29,57"}),
    Row("sglang@0.5.23", "kimi", "1,29,57", "2,30,58", "1,29,57", ("e", "59", "-"), {"-1,2,30,58": "-"}),
    Row("sglang@0.5.23", "kimi", "1,29,57", "3,31,59", "2,30,58", ("e", "59", "-"), {"0,3,31": "e,2,30", "1,60": "-"}),
    Row("sglang", "kimi", "1,29,57", "2,30,58", "?", ("?", "?", "?"), {"1,29,57": "1,29,57"}),
    Row("sglang@0.5.9", "wrapped", "1,29,57", "2,30,58", "2,30,58", ("0", "-", "-")),
    Row("sglang@0.5.23", "wrapped", "1,29,57", "2,30,58", "1,29,57", ("e", "59", "-")),
    Row("sglang@0.5.9", "deepseek", "1,29,57", "2,30,58", "2,30,58", ("0", "-", "-")),
    Row("sglang@0.5.14", "deepseek", "1,29,57", "2,30,58", "1,29,57", ("e", "59", "-")),
    Row("sglang@0.5.9", "glm-lite", "1,22,43", "2,23,44", "2,23,44", ("0", "-", "-")),
    Row("sglang@0.5.13", "glm-lite", "1,22,43", "2,23,44", "1,22,43", ("e", "45", "-")),
    # PR 32334, released in 0.5.17: boundaries if the largest is L.
    Row("sglang@0.5.16", "gpt-oss", "1,17,32", "24,30,36", "-", ("0", "-", "-"), {"1,17,32": "1,17,32"}),
    Row("sglang@0.5.17", "gpt-oss", "1,17,32", "24,30,36", "23,29,35", ("0", "35", "35"), {"1,17,32": "1,17,32"}),
    Row("sglang@0.5.23", "gpt-oss", "1,17,32", "24,30,36", "23,29,35", ("0", "35", "35"), {"-1,17": "e,17"}),
    Row("sglang@0.5.12", "gemma3", "1,16,30", "2,17,31", "2,17,31", ("0", "33", "-")),
    Row("sglang@0.5.9", "gemma3", "-", "2,17,31", "-", NOTHING),
    Row("sglang@0.5.23", "minimax-m2", "1,30,58", "2,31,59", "2,31,59", ("0", "-", "-")),
    Row("sglang@0.5.18", "m3-vl", "2,30,57", "2,30,57", "2,30,57", ("0", "-", "-")),
    Row("sglang@0.5.23", "m3-vl", "2,30,57", "2,30,57", "2,30,57", ("0", "59", "-")),
    Row("sglang@0.5.23", "new", "-", "2,20,37", "-", NOTHING),
    Row("sglang@0.5.24", "llama", "-", "2,16,29", "-", NOTHING),
    Row("sglang@0.5.0", "llama", "-", "2,16,29", "-", NOTHING),
    # vLLM: boundaries.
    Row("vllm@0.17.0", "llama", "1,15,28", "2,16,29", "1,15,28", ("-", "30", "-")),
    Row("vllm@0.17.0", "qwen3", "1,17,32", "2,18,33", "1,17,32", ("-", "34", "-")),
    Row("vllm@0.17.0", "qwen3-moe", "1,23,44", "2,24,45", "1,23,44", ("e", "46", "-")),
    Row("vllm@0.17.0", "gpt-oss", "1,17,32", "24,30,35", "23,29,34", ("e", "34", "-"), {"24,30,36": "-"}),
    Row("vllm@0.17.0", "kimi", "-", "3,31,59", "-", NOTHING),
    Row("vllm@0.17.0", "new", "1,19,36", "3,20,37", "2,19,36", ("?", "38", "?")),
    Row("vllm@0.24.0", "llama", "1,15,28", "2,16,29", "1,15,28", ("e", "30", "31")),
    Row("vllm@0.24.0", "kimi", "1,29,57", "3,31,59", "2,30,58", ("-", "59", "-")),
    Row("vllm@0.24.0", "deepseek-v32", "1,29,57", "3,31,59", "2,30,58", ("-", "59", "-")),
    Row("vllm@0.28.0", "llama", "1,15,28", "2,16,29", "1,15,28", ("e", "30", "31")),
    Row("vllm@0.28.0", "kimi", "1,29,57", "3,31,59", "2,30,58", ("?", "59", "?")),
    Row("vllm@0.32.0", "llama", "1,15,28", "2,16,29", "1,15,28", ("e", "30", "31"), {"-1,16": "-", "16,33": "-"}),
    Row("vllm@0.32.0", "qwen3-moe", "1,23,44", "2,24,45", "1,23,44", ("e", "46", "47")),
    Row("vllm@0.32.0", "kimi", "1,29,57", "3,31,59", "2,30,58", ("-", "59", "60"), {"2,30,58": "1,29,57"}),
    Row("vllm@0.32.0", "wrapped", "1,29,57", "3,31,59", "2,30,58", ("-", "59", "60")),
    Row("vllm@0.32.0", "deepseek", "1,29,57", "3,31,59", "2,30,58", ("-", "59", "60")),
    Row("vllm@0.32.0", "deepseek-v32", "1,29,57", "3,31,59", "2,30,58", ("?", "59", "?")),
    Row("vllm@0.32.0", "gpt-oss", "1,17,32", "24,30,36", "23,29,35", ("e", "34", "35"), {"1,17,32": "0,16,31"}),
    Row("vllm@0.32.0", "gemma4", "1,14,26", "3,15,27", "2,14,26", ("e", "28", "29")),
    Row("vllm@0.32.0", "minimax-m2", "1,30,58", "3,31,59", "2,30,58", ("e", "60", "61")),
    Row("vllm@0.32.0", "deepseek-v4", "-", "3,31,59", "-", NOTHING),
    Row("vllm@0.32.0", "new", "1,19,36", "3,20,37", "2,19,36", ("?", "38", "39")),
    Row("vllm@0.33.0", "llama", "-", "2,16,29", "-", NOTHING),
    # Trainers.
    Row("speculators@0.4.0", "llama", "2,16,29", "2,16,29", "2,16,29", ("0", "31", "-")),
    Row("speculators@0.9.0", "llama", "1,15,28", "2,16,29", "1,15,28", ("e", "30", "31")),
    Row("speculators@0.9.0", "kimi", "1,29,57", "3,31,59", "2,30,58", ("e", "59", "60")),
    Row("speculators", "llama", "?", "2,16,29", "?", ("?", "?", "?")),
    # SpecForge takes three ids and captures through SGLang 0.5.14.
    Row("specforge", "llama", "1,15,28", "2,16,29", "2,16,29", NOTHING, {"0,15,28": "0,15,28", "1,15,31": "-"}),
    Row("specforge", "kimi", "1,29,57", "2,30,58", "1,29,57", NOTHING, {"1,29,57": "1,29,57", "0,30,60": "e,29,59"}),
    Row("specforge", "gpt-oss", "1,17,32", "24,30,36", "-", NOTHING, {"1,17,32": "1,17,32", "1,17": "-"}),
    Row("specforge", "m3-vl", "-", "2,30,57", "-", NOTHING),  # not in 0.5.14
    Row("specforge", "new", "-", "2,20,37", "-", NOTHING),
    Row("torchspec", "llama", "1,15,28", "2,16,29", "2,16,29", ("0", "?", "?")),
    Row("torchspec", "kimi", "1,29,57", "2,30,58", "2,30,58", ("0", "?", "?")),
    Row("modelopt@0.35.0", "llama", "1,15,28", "2,16,29", "2,16,29", ("0", "31", "-")),
    Row("modelopt@0.47.0", "kimi", "1,29,57", "2,30,58", "2,30,58", ("0", "60", "-")),
    Row("trtllm", "llama", "1,15,28", "2,16,29", "2,16,29", ("0", "31", "?"), {"2,16,-1": "?", "2,-2": "?"}),
    Row("trtllm", "kimi", "1,29,57", "2,30,58", "2,30,58", ("0", "60", "?")),
    Row("trtllm@1.2.0", "llama", "-", "2,16,29", "-", NOTHING),
    Row("eagle@3.0.0", "llama", "1,15,28", "2,16,29", "1,15,28", ("e", "30", "-")),
    Row("hf@5.24.0", "llama", "-", "2,16,29", "1,15,28", ("e", "30", "f"), {"3,-1": "2,f", "-2": "-"}),
    Row("hf@5.24.0", "new", "-", "3,20", "2,19", ("e", "38", "f")),
]  # fmt: skip


def layers(taps: Any) -> str:
    """after:1,embed,final as 1,e,f."""
    return format_taps(taps).replace("after:", "").replace("embed", "e").replace("final", "f")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def reading(convention: str, ids: tuple[int, ...], target: TargetFacts) -> str:
    try:
        return layers(resolve(convention, ids, target))
    except ConventionError as error:
        return "?" if "more than one way" in str(error) else "-"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ids(row: Row) -> None:
    target = TARGETS[row.target]
    last = target.num_layers
    assert reading(row.convention, numbers(row.ids), target) == row.taps
    found = tuple(reading(row.convention, (edge,), target) for edge in (0, last - 1, last))
    assert found == row.edges
    for ids, taps in row.more.items():
        assert reading(row.convention, numbers(ids), target) == taps, ids


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_default(row: Row) -> None:
    try:
        found = layers(default_taps(row.convention, TARGETS[row.target]))
    except ConventionError as error:
        found = "?" if "more than one way" in str(error) else "-"
    assert found == row.default


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_unsorted_and_repeated_ids_are_refused(row: Row) -> None:
    ids = numbers(row.ids)
    for wrong in (ids[::-1], (ids[0], *ids), (*ids, ids[-1])):
        assert reading(row.convention, wrong, TARGETS[row.target]) in ("-", "?"), wrong


@pytest.mark.parametrize("row", [row for row in ROWS if row.taps not in ("-", "?")], ids=str)
def test_taps_have_ids_that_name_them(row: Row) -> None:
    target = TARGETS[row.target]
    taps = resolve(row.convention, numbers(row.ids), target)
    assert resolve(row.convention, ids_for(row.convention, taps, target), target) == taps


@pytest.mark.parametrize("row", ROWS, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_taps_to_ids_to_taps_is_the_identity_where_it_is_defined(row: Row, data: st.DataObject) -> None:
    target = TARGETS[row.target]
    chosen = data.draw(st.sets(st.sampled_from(all_taps(target.num_layers)), min_size=1, max_size=4))
    taps = tuple(sorted(chosen))
    try:
        ids = ids_for(row.convention, taps, target)
    except ConventionError:
        return  # it has no ids for some of these, or its releases have different ones
    assert resolve(row.convention, ids, target) == taps


IDS = "eagle_aux_hidden_state_layer_ids"
TOP, NESTED = "top", "nested"


def draft(place: str, ids: list[int]) -> dict[str, Any]:
    return {IDS: ids} if place == TOP else {"eagle_config": {IDS: ids}}


# convention, target, where the ids stand, ids, and what is said: "taps" if they are fed; "ignored: taps" where the
# ids are not looked at, with the default that is taken; "ways: ..." with each reading where code paths differ.
KEYS = [
    ("sglang@0.5.9", "llama", NESTED, [2, 16, 29], "2,16,29"),
    ("sglang@0.5.9", "llama", TOP, [2, 16, 29], "ignored: 1,15,28"),
    ("sglang@0.5.23", "kimi", NESTED, [3, 31, 59], "2,30,58"),
    ("sglang@0.5.23", "kimi", TOP, [3, 31, 59], "ignored: 1,29,57"),
    ("sglang@0.5.23", "gpt-oss", TOP, [24, 30, 36], "ignored: 1,17,32"),
    ("sglang@0.5.23", "m3-vl", TOP, [3, 31, 58], "ignored: 2,30,57"),
    ("vllm@0.17.0", "llama", TOP, [4, 18, 30], "3,17,29"),
    ("vllm@0.17.0", "llama", NESTED, [4, 18, 30], "ignored: 1,15,28"),
    ("vllm@0.24.0", "llama", NESTED, [4, 18, 30], "ways: 3,17,29 | 1,15,28"),  # runner V1 | V2
    ("vllm@0.32.0", "llama", NESTED, [4, 18, 30], "ways: 3,17,29 | 1,15,28"),
    ("vllm@0.32.0", "kimi", TOP, [3, 31, 59], "2,30,58"),
    ("vllm@0.32.0", "kimi", NESTED, [3, 31, 59], "ways: 2,30,58 | 1,29,57"),
    ("vllm@0.32.0", "kimi", NESTED, [2, 30, 58], "1,29,57"),  # raw in V1, and by chance V2's default
    ("speculators@0.9.0", "llama", TOP, [4, 18, 30], "3,17,29"),
    ("speculators@0.9.0", "llama", NESTED, [4, 18, 30], "ignored: 1,15,28"),
    ("specforge", "llama", NESTED, [4, 18, 30], "4,18,30"),
    ("specforge", "kimi", NESTED, [2, 30, 58], "1,29,57"),
    ("specforge", "llama", TOP, [4, 18, 30], "ignored: 1,15,28"),
    ("torchspec", "llama", NESTED, [4, 18, 30], "ignored: 1,15,28"),
    ("modelopt@0.47.0", "llama", NESTED, [4, 18, 30], "4,18,30"),
    ("modelopt@0.47.0", "llama", NESTED, [], "1,15,28"),
    ("modelopt@0.47.0", "llama", TOP, [4, 18, 30], "ignored: 1,15,28"),
    ("trtllm", "llama", NESTED, [4, 18, 30], "ignored: 1,15,28"),
    ("eagle@3.0.0", "llama", NESTED, [4, 18, 30], "ignored: 1,15,28"),
]


@pytest.mark.parametrize(("convention", "target", "place", "ids", "expected"), KEYS)
def test_place_of_the_ids(convention: str, target: str, place: str, ids: list[int], expected: str) -> None:
    said = what_is_said(draft(place, ids), convention, TARGETS[target])
    assert said == expected


@pytest.mark.parametrize("row", [row for row in ROWS if not row.convention.startswith("hf")], ids=str)
def test_no_ids_at_all(row: Row) -> None:
    try:
        found = layers(read_draft_config({}, row.convention, TARGETS[row.target]))
    except ConventionError as error:
        found = "?" if "more than one way" in str(error) else "-"
    assert found == row.default


# DFlash: ids of its own are outputs of layers, and vLLM adds 1; speculators keeps vLLM's numbers under another key.
SPECULATORS_DFLASH = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 16, 29]}
DFLASH = {"dflash_config": {"target_layer_ids": [1, 15, 28]}}
OTHER_KEYS = [
    ("vllm@0.24.0", DFLASH, "1,15,28"),
    ("vllm@0.32.0", DFLASH, "1,15,28"),
    ("vllm@0.32.0", {"dflash_config": {"target_layer_ids": [3, 17, 31]}}, "3,17,31"),
    ("vllm@0.17.0", {"dflash_config": {"target_layer_ids": [3, 17, 31]}}, "ignored: 1,15,28"),
    ("vllm@0.32.0", {**DFLASH, IDS: [4, 18, 30]}, "3,17,29"),
    ("vllm@0.32.0", {**DFLASH, "eagle_config": {IDS: [4, 18, 30]}}, "ways: 3,17,29 | 1,15,28"),
    ("vllm@0.32.0", {"dflash_config": {"layer_ids": [4, 18, 30]}}, "ways: 1,15,28 | 3,17,29"),
    ("vllm@0.32.0", {"eagle_config": {"layer_ids": [4, 18, 30]}}, "ways: 1,15,28 | 3,17,29"),
    ("vllm@0.24.0", SPECULATORS_DFLASH, "1,15,28"),
    ("vllm@0.32.0", SPECULATORS_DFLASH, "1,15,28"),
    ("vllm@0.32.0", {"aux_hidden_state_layer_ids": [4, 18, 30]}, "ignored: 1,15,28"),  # in no speculators' format
    ("speculators@0.9.0", SPECULATORS_DFLASH, "1,15,28"),
    ("torchspec", {"inference": {"aux_hidden_states_layers": [4, 18, 30]}}, "4,18,30"),
    ("torchspec", {"aux_hidden_states_layers": [4, 18, 30]}, "4,18,30"),
    ("trtllm", {"speculative_config": {"eagle3_layers_to_capture": [4, 18, 30]}}, "4,18,30"),
]


@pytest.mark.parametrize(("convention", "config", "expected"), OTHER_KEYS)
def test_other_keys(convention: str, config: dict[str, Any], expected: str) -> None:
    assert what_is_said(config, convention, TARGETS["llama"]) == expected


def what_is_said(config: dict[str, Any], convention: str, target: TargetFacts) -> str:
    try:
        return layers(read_draft_config(config, convention, target))
    except ConventionError as error:
        text = str(error)
    lists = [found.replace("after:", "") for found in re.findall(r"(?:after:\d+,?)+", text)]
    shown = " | ".join(dict.fromkeys(lists))
    return f"ways: {shown}" if "more than one way" in text else f"ignored: {shown}"


def test_the_language_model_inside_a_multimodal_config() -> None:
    assert TARGETS["kimi"] == TargetFacts(
        num_layers=61, model_class="KimiK25ForConditionalGeneration", model_types=("kimi_k25", "kimi_k2")
    )


def test_pipeline_stages_are_told_where_they_change_what_an_id_means() -> None:
    from eyas.align.engine import parse_engine
    from eyas.align.readings import read_config

    for engine, target, local in (
        ("vllm@0.24.0", "llama", True),
        ("vllm@0.32.0", "llama", False),
        ("vllm@0.32.0", "gemma4", True),
        ("vllm@0.32.0", "minimax-m2", True),
        ("vllm@0.32.0", "gpt-oss", False),
    ):
        found = read_config({IDS: [2, 15, 20]}, parse_engine(engine), TARGETS[target])
        assert all(("last stage's layers alone" in reading.outcome) == local for reading in found), (engine, target)
