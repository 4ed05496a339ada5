"""The options that say which taps are meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.taps.conventions import SYSTEMS, ConventionError
from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import TapError, format_taps
from eyas.taps.selection import TapOptionsError, select_taps
from eyas.taps.target import TargetFacts

KIMI = TargetFacts(num_layers=61, model_class="KimiK25ForConditionalGeneration")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "after:1,after:29,after:57"),
        ({"taps": "default"}, "after:1,after:29,after:57"),
        ({"taps": "embed, after:2 ,final"}, "embed,after:2,final"),
        ({"layers": "3,31,59", "convention": "vllm"}, "after:2,after:30,after:58"),
        ({"layers": "[3, 31, 59]", "convention": "vllm"}, "after:2,after:30,after:58"),
        ({"layers": "2,30,58", "convention": "sglang@0.5.9"}, "after:2,after:30,after:58"),
    ],
)
def test_options_that_mean_taps(options: dict[str, Any], expected: str) -> None:
    assert format_taps(select_taps(KIMI, **options)) == expected


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"taps": "after:1", "layers": "2", "convention": "vllm"}, TapOptionsError, "--taps and --layers"),
        ({"layers": "2", "from_config": Path("c.json"), "convention": "vllm"}, TapOptionsError, "--from-config"),
        ({"taps": "default", "from_config": Path("c.json")}, TapOptionsError, "give one of them"),
        ({"convention": "vllm"}, TapOptionsError, "--layers or --from-config"),
        ({"taps": "after:1", "convention": "vllm"}, TapOptionsError, "--convention vllm"),
        ({"from_config": Path("c.json")}, TapOptionsError, "--convention SYSTEM"),
        ({"layers": "after:2", "convention": "vllm"}, TapOptionsError, "--taps"),
        ({"layers": "", "convention": "vllm"}, TapOptionsError, "expected layer numbers"),
        ({"layers": "2,30,58", "convention": "sglang"}, ConventionError, "more than one way"),
        ({"layers": "2,30,58", "convention": "llama.cpp"}, ConventionError, "known are hf, vllm"),
        ({"taps": "after:61"}, TapError, "after:0 to after:60"),
        ({"taps": "after:3,after:2"}, TapError, "use after:2,after:3"),
        ({"taps": "middle"}, TapError, "no tap"),
        ({"taps": ""}, TapError, "no taps"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[EyasError], text: str) -> None:
    with pytest.raises(error, match=text):
        select_taps(KIMI, **options)


def test_contradictions_are_wrong_usage() -> None:
    assert issubclass(TapOptionsError, UsageError)
    assert issubclass(ConventionError, UsageError)
    assert issubclass(TapError, UsageError)


@pytest.mark.parametrize("options", [{"layers": "2,30,58"}, {"taps": "2,30,58"}])
def test_bare_integers_are_refused_with_every_reading(options: dict[str, str]) -> None:
    with pytest.raises(TapOptionsError) as refusal:
        select_taps(KIMI, **options)
    text = str(refusal.value)
    for system in SYSTEMS:
        assert f"\n  {system} " in text
    assert "after:2,after:30,after:58" in text
    assert "after:1,after:29,after:57" in text
    assert "--layers 2,30,58 --convention" in text


def test_from_config_takes_a_file_or_its_folder(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}))
    for path in (config, tmp_path):
        taps = select_taps(KIMI, from_config=path, convention="vllm")
        assert format_taps(taps) == "after:2,after:30,after:58"
    with pytest.raises(ConventionError, match="stand in"):
        select_taps(KIMI, from_config=config, convention="sglang@0.5.23")


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe{}"])
def test_a_config_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "draft.json"
    path.write_bytes(content)
    with pytest.raises(EyasError, match=r"draft\.json"):
        select_taps(KIMI, from_config=path, convention="vllm")


def test_a_config_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no such file"):
        select_taps(KIMI, from_config=tmp_path / "draft.json", convention="vllm")
