"""A draft's config of any kind is judged or refused with a message, whatever stands in it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.align.engine import parse_engine
from eyas.align.static import check_static
from eyas.taps.errors import EyasError
from tests.align.made import draft_config, draft_tensors, make_dataset, make_draft, make_identity

KEYS = [
    *draft_config(),
    "eagle_config",
    "transformer_layer_config",
    "speculators_model_type",
    "eagle_aux_hidden_state_layer_ids",
    "rope_parameters",
    "rope_scaling",
    "num_aux_hidden_states",
    "norm_before_fc",
    "fc_norm",
    "target_hidden_size",
    "attention_bias",
    "kv_lora_rank",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 99),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.lists(st.integers(-2, 40), max_size=4),
    st.dictionaries(st.sampled_from([*KEYS, "rope_type", "factor"]), st.integers(0, 40), max_size=3),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("dataset"), make_identity("after:1,after:15,after:28"))


@settings(max_examples=100, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
    engine=st.sampled_from(["sglang@0.5.9", "sglang", "vllm@0.32.0", "trtllm"]),
)
def test_no_config_is_a_traceback(dataset: Path, changes: dict[str, Any], engine: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        draft = make_draft(Path(scratch), draft_config(**changes), draft_tensors())
        with contextlib.suppress(EyasError):
            assert check_static(dataset, draft=draft, engine=parse_engine(engine)).findings
