"""How systems read ids: the documented reading of each, both ways, and what is refused.

The expected taps are written out from the systems' own sources (named in taps/conventions/*.py), not computed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.taps.conventions import (
    SYSTEMS,
    ConventionError,
    default_taps,
    ids_for,
    read_draft_config,
    readings,
    resolve,
)
from eyas.taps.conventions.numbering import Rule
from eyas.taps.notation import Tap, all_taps, format_taps, parse_taps
from eyas.taps.target import TargetFacts

KIMI = TargetFacts(num_layers=61, model_class="KimiK25ForConditionalGeneration", model_types=("kimi_k25", "kimi_k2"))
DEEPSEEK = TargetFacts(num_layers=61, model_class="DeepseekV3ForCausalLM", model_types=("deepseek_v3",))
LLAMA = TargetFacts(num_layers=32, model_class="LlamaForCausalLM", model_types=("llama",))
QWEN3_MOE = TargetFacts(num_layers=48, model_class="Qwen3MoeForCausalLM", model_types=("qwen3_moe",))
GPT_OSS = TargetFacts(num_layers=36, model_class="GptOssForCausalLM", model_types=("gpt_oss",))
GEMMA3 = TargetFacts(num_layers=34, model_class="Gemma3ForConditionalGeneration", model_types=("gemma3",))
MINIMAX_M2 = TargetFacts(num_layers=62, model_class="MiniMaxM2ForCausalLM")
MINIMAX_M3_VL = TargetFacts(num_layers=60, model_class="MiniMaxM3SparseForConditionalGeneration")
GLM_LITE = TargetFacts(num_layers=47, model_class="Glm4MoeLiteForCausalLM")
OTHER = TargetFacts(num_layers=40, model_class="NobodyHasReadForCausalLM")
UNNAMED = TargetFacts(num_layers=61)

REFUSED = None

MATRIX: list[tuple[str, TargetFacts, str, str | None]] = [
    # hf
    ("hf", LLAMA, "0,1,32", "embed,after:0,final"),
    ("hf", LLAMA, "3,-1", "after:2,final"),
    ("hf", OTHER, "3,20", "after:2,after:19"),
    ("hf", LLAMA, "33", REFUSED),
    ("hf", LLAMA, "-2", REFUSED),
    # vllm
    ("vllm", KIMI, "3,31,59", "after:2,after:30,after:58"),
    ("vllm", LLAMA, "2,16,29", "after:1,after:15,after:28"),
    ("vllm@0.32.0", LLAMA, "0,32", "embed,after:31"),
    ("vllm@0.32", OTHER, "1,40", "after:0,after:39"),
    ("vllm@0.32", OTHER, "0,40", REFUSED),  # by its own code embed, by the transformers backend nothing
    ("vllm@0.17.0", LLAMA, "0,16", REFUSED),
    ("vllm@0.17.0", LLAMA, "16,32", REFUSED),
    ("vllm", LLAMA, "0,16", REFUSED),  # read differently by releases
    ("vllm@0.20.0", LLAMA, "16", "after:15"),  # between two that were read and agree
    ("vllm@0.20.0", LLAMA, "0,16", REFUSED),  # between two that disagree
    ("vllm@0.32.0", DEEPSEEK, "0,31", REFUSED),
    ("vllm@0.32.0", DEEPSEEK, "31,61", "after:30,after:60"),
    ("vllm@0.24.0", DEEPSEEK, "31,61", REFUSED),
    ("vllm@0.17.0", DEEPSEEK, "31", REFUSED),  # had no EAGLE-3 for it
    ("vllm@0.32.0", LLAMA, "33", REFUSED),
    # speculators
    ("speculators@0.9.0", LLAMA, "2,16,29", "after:1,after:15,after:28"),
    ("speculators@0.9.0", LLAMA, "0,32", "embed,after:31"),
    ("speculators@0.4.0", LLAMA, "2,16,29", "after:2,after:16,after:29"),
    ("speculators", LLAMA, "2,16,29", REFUSED),
    # sglang, most models
    ("sglang", LLAMA, "1,15,28", "after:1,after:15,after:28"),
    ("sglang@0.5.23", LLAMA, "0,30", "after:0,after:30"),
    ("sglang@0.5.23", LLAMA, "31", REFUSED),
    ("sglang@0.5.23", LLAMA, "-1,15", REFUSED),
    ("sglang", QWEN3_MOE, "1,46", "after:1,after:46"),
    ("sglang", QWEN3_MOE, "47", REFUSED),
    ("sglang", GEMMA3, "2,33", "after:2,after:33"),
    ("sglang", MINIMAX_M2, "2,30,58", "after:2,after:30,after:58"),
    ("sglang@0.5.9", GEMMA3, "2", REFUSED),  # before the first release that has it
    ("sglang", OTHER, "2", REFUSED),  # unknown
    # sglang, deepseek_v2
    ("sglang@0.5.9", KIMI, "2,30,58", "after:2,after:30,after:58"),
    ("sglang@0.5.9", DEEPSEEK, "2,30,58", "after:2,after:30,after:58"),
    ("sglang@0.5.12.post1", KIMI, "2,30,58", "after:2,after:30,after:58"),
    ("sglang@0.5.13", KIMI, "2,30,58", "after:1,after:29,after:57"),
    ("sglang@0.5.23", KIMI, "2,30,58", "after:1,after:29,after:57"),
    ("sglang@0.5.23", KIMI, "3,31,59", "after:2,after:30,after:58"),
    ("sglang@0.5.23", KIMI, "1,29,57", "after:1,after:29,after:57"),
    ("sglang@0.5.23+cu129", KIMI, "1,29,57", "after:1,after:29,after:57"),
    ("sglang@0.5.23", KIMI, "0,2,30,58", "embed,after:1,after:29,after:57"),
    ("sglang@0.5.23", KIMI, "-1,2,30,58", REFUSED),
    ("sglang@0.5.23", KIMI, "3,61", REFUSED),
    ("sglang@0.5.13rc1", KIMI, "2,30,58", REFUSED),  # on the boundary
    ("sglang@0.5.24", KIMI, "2,30,58", REFUSED),  # not read
    ("sglang@0.5.5", KIMI, "2,30,58", REFUSED),  # not read
    ("sglang", KIMI, "2,30,58", REFUSED),
    ("sglang", DEEPSEEK, "2,30,58", REFUSED),
    ("sglang", KIMI, "1,29,57", "after:1,after:29,after:57"),  # every release agrees on these
    ("sglang@0.5.9", GLM_LITE, "2,22", "after:2,after:22"),
    ("sglang@0.5.14", GLM_LITE, "2,22", "after:1,after:21"),
    ("sglang@0.5.23", UNNAMED, "2,30,58", REFUSED),
    ("sglang@0.5.23", UNNAMED, "1,29,57", "after:1,after:29,after:57"),
    # sglang, gpt_oss
    ("sglang@0.5.16", GPT_OSS, "24,30,36", REFUSED),
    ("sglang@0.5.17", GPT_OSS, "24,30,36", "after:23,after:29,after:35"),
    ("sglang@0.5.16", GPT_OSS, "1,17,32", "after:1,after:17,after:32"),
    ("sglang@0.5.23", GPT_OSS, "1,17,32", "after:1,after:17,after:32"),
    ("sglang", GPT_OSS, "1,17,32", "after:1,after:17,after:32"),
    ("sglang", GPT_OSS, "24,30,36", REFUSED),
    # sglang, minimax_m3_vl
    ("sglang@0.5.23", MINIMAX_M3_VL, "2,30,57", "after:2,after:30,after:57"),
    # trainers
    ("specforge", KIMI, "2,30,58", "after:1,after:29,after:57"),  # through SGLang 0.5.14
    ("specforge", KIMI, "2,30", REFUSED),
    ("torchspec", KIMI, "0,59", "after:0,after:59"),
    ("torchspec", KIMI, "0,60", REFUSED),  # never met through SGLang
    ("modelopt", KIMI, "2,30,58", "after:2,after:30,after:58"),
    ("modelopt", KIMI, "61", REFUSED),
    ("trtllm", KIMI, "2,30,60", "after:2,after:30,after:60"),
    ("trtllm", KIMI, "2,30,-1", REFUSED),  # with one model -1 goes first
    ("trtllm", KIMI, "-2", REFUSED),
    ("trtllm@1.2.0", KIMI, "2", REFUSED),  # no release is tied to what was read
    ("eagle", LLAMA, "2,16,29", "after:1,after:15,after:28"),
    ("eagle", LLAMA, "0,32", REFUSED),
]


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@pytest.mark.parametrize(("convention", "target", "ids", "expected"), MATRIX)
def test_reading_of_ids(convention: str, target: TargetFacts, ids: str, expected: str | None) -> None:
    if expected is REFUSED:
        with pytest.raises(ConventionError):
            resolve(convention, _ids(ids), target)
    else:
        assert format_taps(resolve(convention, _ids(ids), target)) == expected


@pytest.mark.parametrize(("convention", "target", "ids", "expected"), [row for row in MATRIX if row[3] is not REFUSED])
def test_the_taps_that_ids_name_have_ids_that_name_them(
    convention: str, target: TargetFacts, ids: str, expected: str
) -> None:
    written = ids_for(convention, parse_taps(expected), target)
    assert format_taps(resolve(convention, written, target)) == expected


# Each rule once, named by the first entry that has it.
RULES = {entry.rule: f"{s.name}-{entry.versions}" for s in reversed(SYSTEMS.values()) for entry in reversed(s.entries)}
EVERY_RULE = [pytest.param(rule, id=name) for rule, name in RULES.items()]


@pytest.mark.parametrize("rule", EVERY_RULE)
@settings(max_examples=25)
@given(data=st.data())
def test_taps_to_ids_to_taps_is_the_identity(rule: Rule, data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 64))
    taps = tuple(sorted(data.draw(st.sets(st.sampled_from(all_taps(num_layers)), min_size=1, max_size=5))))
    try:
        ids = rule.ids(taps, num_layers)
    except ConventionError:
        return  # not every system can say every tap
    assert rule.taps(ids, num_layers) == taps


@pytest.mark.parametrize("rule", EVERY_RULE)
@settings(max_examples=25)
@given(data=st.data())
def test_ids_to_taps_to_ids_says_the_same(rule: Rule, data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 64))
    ids = data.draw(st.lists(st.integers(-3, num_layers + 3), min_size=1, max_size=5))
    try:
        taps = rule.taps(ids, num_layers)
    except ConventionError:
        return
    assert list(taps) == sorted(set(taps))
    assert all(tap in all_taps(num_layers) for tap in taps)
    assert rule.taps(rule.ids(taps, num_layers), num_layers) == taps


@pytest.mark.parametrize("convention", list(SYSTEMS))
@pytest.mark.parametrize("ids", [(30, 2, 58), (2, 2, 30), (2, 30, 30), (2, 30, 900)])
def test_unsorted_repeated_or_missing_ids_are_refused_everywhere(convention: str, ids: tuple[int, ...]) -> None:
    with pytest.raises(ConventionError):
        resolve(convention, ids, LLAMA)


def test_unsorted_ids_are_shown_in_order() -> None:
    with pytest.raises(ConventionError, match="write 2,30,58"):
        resolve("modelopt", (30, 2, 58), KIMI)


def test_after_0_first_cannot_be_said_to_newer_sglang_on_deepseek() -> None:
    with pytest.raises(ConventionError, match="after:0,after:29 cannot be said"):
        ids_for("sglang@0.5.23", parse_taps("after:0,after:29"), DEEPSEEK)
    assert ids_for("sglang@0.5.9", parse_taps("after:0,after:29"), DEEPSEEK) == (0, 29)


def test_the_incident_of_kimi_is_mended_by_other_ids() -> None:
    """Data of after:2,30,58: what each engine must be told to feed the same."""
    taps = parse_taps("after:2,after:30,after:58")
    assert ids_for("vllm", taps, KIMI) == (3, 31, 59)
    assert ids_for("sglang@0.5.9", taps, KIMI) == (2, 30, 58)
    assert ids_for("sglang@0.5.23", taps, KIMI) == (3, 31, 59)
    assert ids_for("modelopt", taps, KIMI) == (2, 30, 58)


def test_ambiguous_refusal_shows_each_reading() -> None:
    with pytest.raises(ConventionError) as refusal:
        resolve("sglang", (2, 30, 58), KIMI)
    text = str(refusal.value)
    assert "sglang 0.5.6 to 0.5.12.post1" in text
    assert "after:2,after:30,after:58" in text
    assert "sglang 0.5.13 to 0.5.23" in text
    assert "after:1,after:29,after:57" in text
    assert "--convention SYSTEM@VERSION" in text


def test_readings_name_every_system_and_say_what_is_unknown() -> None:
    labels = {reading.label.split()[0] for reading in readings((2, 30), OTHER)}
    assert labels == set(SYSTEMS)
    (sglang,) = [reading for reading in readings((2, 30), OTHER) if reading.label.startswith("sglang")]
    assert sglang.value is None
    assert "unknown" in sglang.problem


@pytest.mark.parametrize("convention", ["", "sgl", "vllm@", "vllm@latest", "@0.5", "SGLANG"])
def test_what_is_no_convention(convention: str) -> None:
    with pytest.raises(ConventionError, match="--convention"):
        resolve(convention, (2,), LLAMA)


@pytest.mark.parametrize(
    ("convention", "target", "expected"),
    [
        ("vllm", KIMI, "after:1,after:29,after:57"),
        ("sglang", KIMI, "after:1,after:29,after:57"),
        ("sglang", LLAMA, "after:1,after:15,after:28"),
        ("sglang@0.5.23", MINIMAX_M3_VL, "after:2,after:30,after:57"),
        ("speculators@0.9.0", LLAMA, "after:1,after:15,after:28"),
        ("specforge", LLAMA, "after:1,after:15,after:28"),
        ("torchspec", LLAMA, "after:1,after:15,after:28"),
        ("modelopt", LLAMA, "after:1,after:15,after:28"),
        ("trtllm", LLAMA, "after:1,after:15,after:28"),
        ("eagle", LLAMA, "after:1,after:15,after:28"),
    ],
)
def test_default_of_a_system(convention: str, target: TargetFacts, expected: str) -> None:
    assert format_taps(default_taps(convention, target)) == expected


def test_hf_has_no_default() -> None:
    with pytest.raises(ConventionError, match="no default"):
        default_taps("hf", LLAMA)


TOP: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}
NESTED: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}
MISPLACED = "stand in"
READ_DIFFERENTLY = "more than one way"

CONFIGS: list[tuple[dict[str, Any], str, str, str]] = [
    # config, convention, taps, or error
    (TOP, "vllm", "after:2,after:30,after:58", ""),
    (TOP, "speculators@0.9.0", "after:2,after:30,after:58", ""),
    (TOP, "sglang@0.5.23", "", MISPLACED),
    (TOP, "sglang@0.5.9", "", MISPLACED),
    (TOP, "modelopt", "", MISPLACED),
    (TOP, "specforge", "", MISPLACED),
    (TOP, "torchspec", "", MISPLACED),
    (TOP, "trtllm", "", MISPLACED),
    (TOP, "eagle", "", MISPLACED),
    (TOP, "hf", "", "reads no draft config"),
    (NESTED, "sglang@0.5.9", "after:2,after:30,after:58", ""),
    (NESTED, "sglang@0.5.23", "after:1,after:29,after:57", ""),
    (NESTED, "sglang", "", READ_DIFFERENTLY),
    (NESTED, "modelopt", "after:2,after:30,after:58", ""),
    (NESTED, "specforge", "after:1,after:29,after:57", ""),
    (NESTED, "speculators@0.9.0", "", MISPLACED),
    # vLLM 0.32: one runner takes the nested ids raw, the other ignores them and takes its default
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}}, "vllm@0.32.0", "", "model runner V2"),
    ({"eagle_config": {"layer_ids": [3, 31, 59]}}, "vllm@0.32.0", "", "model runner V1"),
    ({"eagle_config": {"layer_ids": [3, 31, 59]}}, "sglang@0.5.23", "", MISPLACED),
    (TOP | NESTED, "vllm", "after:2,after:30,after:58", ""),
    (TOP | NESTED, "sglang@0.5.23", "after:1,after:29,after:57", ""),
    ({}, "vllm", "after:1,after:29,after:57", ""),
    ({}, "sglang", "after:1,after:29,after:57", ""),
    ({}, "modelopt", "after:1,after:29,after:57", ""),
    ({"eagle_config": None}, "sglang", "after:1,after:29,after:57", ""),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, "sglang", "after:1,after:29,after:57", ""),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "modelopt", "after:1,after:29,after:57", ""),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "sglang", "", "no ids"),
    ({"eagle_aux_hidden_state_layer_ids": []}, "vllm", "after:1,after:29,after:57", ""),
    ({"eagle_aux_hidden_state_layer_ids": "3,31"}, "vllm", "", "list of integers"),
    ({"eagle_aux_hidden_state_layer_ids": [3.0, 31]}, "vllm", "", "list of integers"),
    ({"eagle_aux_hidden_state_layer_ids": [True, 31]}, "vllm", "", "list of integers"),
    ({"eagle_aux_hidden_state_layer_ids": [31, 3, 59]}, "vllm", "", "write 3,31,59"),
    ({"eagle_aux_hidden_state_layer_ids": [3, 3, 59]}, "vllm", "", "write 3,59"),
    ({"inference": {"aux_hidden_states_layers": [2, 30, 58]}}, "torchspec", "after:2,after:30,after:58", ""),
    ({"speculative_config": {"eagle3_layers_to_capture": [2, 30, -1]}}, "trtllm", "", "two models"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "convention", "expected", "error"), CONFIGS)
def test_reading_of_a_draft_config(config: dict[str, Any], convention: str, expected: str, error: str) -> None:
    if error:
        with pytest.raises(ConventionError, match=error) as refusal:
            read_draft_config(config, convention, KIMI, where="draft/config.json")
        assert "draft/config.json" in str(refusal.value)
    else:
        assert format_taps(read_draft_config(config, convention, KIMI)) == expected


def test_an_older_vllm_ignores_the_nested_key() -> None:
    with pytest.raises(ConventionError, match=MISPLACED):
        read_draft_config(NESTED, "vllm@0.17.0", LLAMA)


def test_a_misplaced_key_says_where_it_stands_what_is_read_and_what_would_be_captured() -> None:
    with pytest.raises(ConventionError) as refusal:
        read_draft_config(TOP, "sglang@0.5.23", KIMI, where="draft/config.json")
    text = str(refusal.value)
    assert "stand in eagle_aux_hidden_state_layer_ids" in text
    assert "sglang reads eagle_config.eagle_aux_hidden_state_layer_ids" in text
    assert "takes its default" in text
    assert "after:1,after:29,after:57" in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32},
            TargetFacts(num_layers=32, model_class="LlamaForCausalLM", model_types=("llama",)),
        ),
        (
            {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "model_type": "kimi_k25",
                "text_config": {
                    "architectures": ["DeepseekV3ForCausalLM"],
                    "model_type": "kimi_k2",
                    "num_hidden_layers": 61,
                },
            },
            KIMI,
        ),
        ({"model_type": "gpt2", "n_layer": 12}, TargetFacts(num_layers=12, model_types=("gpt2",))),
    ],
)
def test_facts_from_a_target_config(config: dict[str, Any], expected: TargetFacts) -> None:
    assert TargetFacts.from_config(config) == expected


def test_facts_without_layers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"target/config\.json: found no number of decoder layers"):
        TargetFacts.from_config({"model_type": "t5"}, where="target/config.json")


def test_a_model_is_found_by_its_type_where_its_class_is_not_known() -> None:
    target = TargetFacts(num_layers=61, model_types=("kimi_k25", "kimi_k2"))
    taps: tuple[Tap, ...] = resolve("sglang@0.5.23", (2, 30, 58), target)
    assert format_taps(taps) == "after:1,after:29,after:57"
