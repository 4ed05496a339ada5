"""Every way to spoil a dataset is found by `eyas check` and called by its name; good datasets raise nothing.

Each defect runs on one family and dtype in turn. EYAS_CORRUPTION_SWEEP=1 runs every defect on every family in bfloat16,
and on Llama in float32, and prints the table (about five minutes on one core).
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.taps.notation import after, format_taps, parse_taps
from tests.align.corruption.matrix import (
    DEFECTS,
    FAMILIES,
    Good,
    Outcome,
    Spoiled,
    capture_good,
    check,
    with_slots,
    write,
)

COMBINATIONS = [(family, dtype) for dtype in ("float32", "bfloat16") for family in FAMILIES]

# What a mismatch has to say. The taps are after:1, after:3, after:4 of 8 layers, and the samples are 8.
NAMED = {
    "one slot a layer late": r"slot 0\b.*off by one, one layer late: after:2\b.*every sample",
    "one slot a layer early": r"slot 1\b.*off by one, one layer early: after:2\b.*every sample",
    "all slots a layer late": r"off by one, one layer late: after:2,after:4,after:5, in every sample",
    "all slots a layer early": r"off by one, one layer early: after:0,after:2,after:3, in every sample",
    "two neighbouring slots swapped": r"slots 1, 2\b.*swapped order: after:4,after:3, in every",
    "first and last slot swapped": r"slots 0, 2\b.*swapped order: after:4,after:1, in every",
    "embedding for a layer": r"slot 0\b.*embedding where a layer was meant",
    "post-norm declared pre-norm": r"last_hidden\b.*pre-norm and post-norm mixed up: final",
    "pre-norm declared post-norm": r"last_hidden\b.*pre-norm and post-norm mixed up: after:7",
    "final for after:L-1": r"slot 2\b.*pre-norm and post-norm mixed up: final",
    "after:L-1 for final": r"slot 2\b.*pre-norm and post-norm mixed up: after:7",
    "partial attention, all slots": r"partial sum: after:4 with only rank 0 of 2.*self_attn",
    "partial attention, one slot": r"slot 1\b.*partial sum: after:3 with only rank 0 of 2.*self_attn",
    "partial attention, 1 of 4 ranks": r"partial sum: after:4 with only rank 2 of 4.*self_attn",
    "partial MLP, all slots": r"partial sum: after:4 with only rank 0 of 2.*mlp",
    "partial MLP, one slot": r"slot 1\b.*partial sum: after:3 with only rank 0 of 2.*mlp",
    "partial MLP, 1 of 4 ranks": r"partial sum: after:4 with only rank 2 of 4.*mlp",
    "partial experts (expert parallel)": r"partial sum: after:4 with only rank 0 of 2.*mlp",
    "all ranks but one, attention": r"partial sum: after:4 without rank 3 of 4 \(tensor parallel\) of its self_attn",
    "all ranks but one, MLP": r"partial sum: after:4 without rank 3 of 4 \(tensor parallel\) of its mlp",
    "layer's output without residual": r"part of a layer: after:3 without layer 3's residual",
    "rows one late": r"shifted rows: row t holds token t-1, in every",
    "rows one early": r"shifted rows: row t holds token t\+1, in every",
    "rows one late, one slot": r"slot 1\b.*shifted rows: row t holds token t-1",
    "rows one late, zero first": r"shifted rows: row t holds token t-1",
    "mask one late": r"mask begins one token late",
    "mask one early": r"mask begins one token early",
    "mask on the user": r"the prompts are trained",
    "rows of another sample": r"rows of another sample: .*every sample",
    "half the rows of another sample": r"rows of another sample",
    "two samples mixed up": r"rows of another sample.*2 of 8 samples",
    "prefix zero": r"prefix missing: rows 0 to 7 of \d+ are zero",
    "prefix zero, one sample": r"prefix missing: rows 0 to 7 of \d+ are zero, in 1 of 8",
    "prefix stale": r"prefix missing: rows 0 to 7 of \d+ are no token's states",
    "prefix missing": r"the first 8 rows are missing",
    "prefix not attended": r"context cut: rows from token 8 on",
    "tail zero": r"cut off at the end: .* are zero",
    "tail garbage": r"cut off at the end: .* are no token's states",
    "tail garbage, one sample": r"cut off at the end: .* are no token's states, in 1 of 8",
    "tail repeated": r"copies of the row before",
    "revision 1e-1": r"other weights",
    "revision 1e-1 in one layer": r"other weights",
    "weights int8": r"quantized target: int8 weights",
    "weights fp8": r"quantized target: fp8 weights",
    "features through fp8": r"coarser values: fp8 e4m3",
    "dead tap": r"after:3.*nothing but zeros",
    "constant tap": r"after:3.*every row is the same",
    "two identical taps": r"after:1 and after:3.*the same tensor",
    "NaN": r"NaN and Inf.*after:3: 1 values",
    "Inf": r"NaN and Inf.*after:3: 1 values",
    "top-1 one row late": r"target_top1.*shifted rows: target_top1 of row t is that of row t-1",
    "logits of the pre-norm state": r"lm_head was applied before the final norm",
    "before the MLP": r"part of a layer: after:3 without layer 3's mlp",
    "after the next norm": r"normed: the output of layer 4's input_layernorm",
    "scaled by 2": r"scaled: after:1 times 2\b",
    "ranks' halves swapped": r"permuted channels: .*in 2 blocks",
    "taps interleaved": r"interleaved slots",
    "one sample a layer late": r"off by one, one layer late: .*in 1 of 8 samples",
    "half the samples a layer late": r"off by one, one layer late: .*in 4 of 8 samples",
    "one sample swapped": r"slots 1, 2\b.*swapped order: .*in 1 of 8 samples",
    "one sample's rows late": r"shifted rows: row t holds token t-1, in 1 of 8 samples",
    "rows late from 12 on": r"shifted rows: row t holds token t-1 from row 1[23] on",
    "rows early from 12 on": r"shifted rows: row t holds token t\+1 from row 12 on",
    "last_hidden one late": r"last_hidden\b.*shifted rows: row t holds token t-1",
    "rows three late": r"shifted rows: row t holds token t-3",
    "one garbage row": r"slot 1\b.*damaged rows: row 9 of \d+ of sample [0-9a-f]{16}.*in 1 of 8 samples",
    "three garbage rows": r"slot 1\b.*damaged rows: rows 6, 11, 15 of \d+ of sample [0-9a-f]{16}.*in 1 of 8 samples",
    "half a row overwritten": r"slot 1\b.*damaged rows: row 9 of \d+ of sample [0-9a-f]{16}.*in 1 of 8 samples",
    "all ranks but one of 8, attention": r"partial sum: after:4 without rank 5 of 8 .* of its self_attn",
}
# May be below the detection floor: named, or unknown with the floor stated, and never a mismatch of another name.
FAINT = {
    "revision 1e-2": r"other weights|undecided",
    "revision 1e-3": r"other weights|undecided",
    "features through fp16": r"coarser values: float16",
    "features through bf16": r"coarser values: bfloat16",
}
LOSSLESS = {("features through fp16", "bfloat16"), ("features through bf16", "bfloat16")}  # no defect at all
FLOOR = r"detection floor|undecided: rows deviate more than rounding"
# What stands in the tensors alone, whatever target they are of: the sweep takes one target of each.
OF_ANY_TARGET = (
    "mask one late", "mask one early", "mask on the user", "prefix zero", "prefix zero, one sample", "tail zero",
    "features through fp8", "dead tap", "constant tap", "two identical taps", "NaN", "Inf", "scaled by 2",
    "taps interleaved", "ranks' halves swapped",
)  # fmt: skip


def verdict(defect: str, outcome: Outcome) -> str:
    """named, misnamed, "below floor: unknown", missed; a crash is misnamed."""
    said = {status: outcome.text(status) for status in ("mismatch", "unknown", "warning")}
    if outcome.exit_code not in (0, 3):
        return "misnamed"
    if outcome.exit_code == 3:
        return "named" if re.search((NAMED | FAINT)[defect], said["mismatch"]) else "misnamed"
    if re.search((NAMED | FAINT)[defect], said["warning"]):
        return "named"
    return "below floor: unknown" if re.search(FLOOR, said["unknown"]) else "missed"


@pytest.fixture(scope="session")
def goods(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Good]:
    return {
        (family, dtype): capture_good(tmp_path_factory.mktemp(f"{family}-{dtype}"), family, dtype=dtype, seed=seed)
        for seed, (family, dtype) in enumerate(COMBINATIONS)
    }


@pytest.mark.parametrize("defect", NAMED)
def test_a_defect_is_named(defect: str, goods: dict[tuple[str, str], Good], tmp_path: Path) -> None:
    good = goods[COMBINATIONS[list(DEFECTS).index(defect) % len(COMBINATIONS)]]
    outcome = check(write(tmp_path / "spoiled", DEFECTS[defect](good)), good.target)
    assert verdict(defect, outcome) == "named", outcome.output


@pytest.mark.parametrize("defect", FAINT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_faint_is_named_or_unknown(
    defect: str, dtype: str, goods: dict[tuple[str, str], Good], tmp_path: Path
) -> None:
    if (defect, dtype) in LOSSLESS:
        pytest.skip("changes no bit that matters")
    good = goods["llama", dtype]
    outcome = check(write(tmp_path / "spoiled", DEFECTS[defect](good)), good.target)
    assert verdict(defect, outcome) in ("named", "below floor: unknown"), outcome.output


@pytest.mark.parametrize(
    "taps",
    [
        "after:0,after:6",
        "embed,after:2,after:5",
        "after:1,after:2,after:3,final",
        "embed,after:0,after:3,after:7,final",
    ],
)
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_a_good_dataset_raises_nothing(
    combination: tuple[str, str], taps: str, goods: dict[tuple[str, str], Good], tmp_path: Path
) -> None:
    good = goods[combination]
    identity = replace(good.identity, taps=parse_taps(taps), last_hidden=after(good.num_layers - 1))
    samples = []
    for sample in good.samples:
        states = good.states(sample)
        last = states.taps[after(good.num_layers - 1)]
        samples.append(replace(with_slots(sample, [states.taps[t] for t in identity.taps]), last_hidden=last.clone()))
    outcome = check(write(tmp_path / "good", Spoiled(identity=identity, samples=samples)), good.target)
    assert outcome.exit_code == 0, f"{format_taps(identity.taps)}\n{outcome.output}"
    assert outcome.text("mismatch", "unknown", "warning") == "", outcome.output


SWEEP = [("llama", "float32"), ("llama", "bfloat16"), ("qwen3-moe", "bfloat16"), ("deepseek-v3", "bfloat16")]


@pytest.mark.skipif("EYAS_CORRUPTION_SWEEP" not in os.environ, reason="the whole matrix takes minutes")
@pytest.mark.timeout(3600)
def test_the_whole_matrix(
    goods: dict[tuple[str, str], Good], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table: dict[tuple[str, tuple[str, str]], str] = {}
    for number, defect in enumerate(DEFECTS):
        for combination in SWEEP if defect not in OF_ANY_TARGET else [SWEEP[number % len(SWEEP)]]:
            if (defect, combination[1]) in LOSSLESS:
                continue
            good = goods[combination]
            folder = tmp_path / f"{number}-{'-'.join(combination)}"
            table[defect, combination] = verdict(defect, check(write(folder, DEFECTS[defect](good)), good.target))
    with capsys.disabled():
        print(f"\n{'':36}", *(f"{'-'.join(combination):21}" for combination in SWEEP))
        for defect in DEFECTS:
            print(f"{defect:36}", *(f"{table.get((defect, combination), ''):21}" for combination in SWEEP))
        print(len(table), "cells:", {value: list(table.values()).count(value) for value in set(table.values())})
    wrong = {
        key: value
        for key, value in table.items()
        if value != "named" and not (value == "below floor: unknown" and key[0] in FAINT)
    }
    assert not wrong
