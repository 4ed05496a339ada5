"""Mistakes that were reported in public, each rebuilt small: the verdict's own line names the root cause.

One test for each report, named in its docstring. What was captured is real where the report is about states (tiny
random targets of the reported class, run by transformers); elsewhere it is a dataset's identity that counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.align.engine import parse_engine
from eyas.align.identify import identify
from eyas.align.static import check_static
from eyas.align.verdict import Finding, Report
from eyas.taps.notation import FINAL, after
from tests.align.made import (
    H,
    bad,
    draft_config,
    draft_tensors,
    make_dataset,
    make_draft,
    make_identity,
    make_sample,
)
from tests.align.states import LAYERS, World, build_target, make_world, replay, store
from tests.align.test_engines import mla_config, mla_tensors, speculators_config, speculators_tensors
from tests.align.test_masks import IDENTITY as CHAT
from tests.align.test_masks import conversation
from tests.align.test_replay_defects import LAST, TAPS, on_all, on_slot, partial_mlp, without_first
from tests.align.test_target import captured_from
from tests.tiny import make_target

IDS = "eagle_aux_hidden_state_layer_ids"
KIMI = {"model_class": "KimiK25ForConditionalGeneration", "num_layers": 61}
GPT_OSS = {"model_class": "GptOssForCausalLM", "num_layers": 36}
LLAMA_70B = {"model_class": "LlamaForCausalLM", "num_layers": 80}

THINKING = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% if enable_thinking is false %}<think> </think> {% endif %}"
    "{% endif %}"
)


def check(
    tmp_path: Path,
    taps: str,
    target: Mapping[str, Any],
    engine: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor] | None = None,
) -> Report:
    """`eyas check` of a dataset of ``taps`` and a draft, for one engine."""
    dataset = make_dataset(tmp_path / "dataset", make_identity(taps, **target))
    draft = make_draft(tmp_path / "draft", config, tensors)
    return check_static(dataset, draft=draft, engine=parse_engine(engine))


def nested(ids: list[int]) -> dict[str, Any]:
    return draft_config(eagle_config={IDS: ids})


def named(report: Report, check: str, *words: str) -> Finding:
    """The mismatch about ``check``, whose text holds all of ``words``."""
    finding = bad(report)[check]
    assert finding.status == "mismatch", report.text()
    whole = f"{finding.found}\n{finding.expected}\n{finding.consequence}\n{finding.mend}\n{finding.source}"
    for word in words:
        assert word in whole, f"{word!r} not in:\n{whole}"
    return finding


def fine(report: Report, check: str = "taps") -> None:
    assert check not in bad(report), report.text()


@pytest.mark.parametrize("engine", ["sglang@0.5.9", "sglang@0.5.12.post1"])
def test_kimi_ids_before_pr_25454(tmp_path: Path, engine: str) -> None:
    """Kimi-K2.5, [2, 30, 58], SGLang before sgl-project/sglang pull 25454: outputs of layers 2, 30, 58. A draft of the
    other convention (lightseekorg/kimi-k2.5-eagle3-mla, fed after:1,29,57 in training) is fed one layer late."""
    fine(check(tmp_path / "a", "after:2,after:30,after:58", KIMI, engine, nested([2, 30, 58])))
    report = check(tmp_path / "b", "after:1,after:29,after:57", KIMI, engine, nested([2, 30, 58]))
    named(report, "taps", "every tap is 1 layer too late", f'{{"{IDS}": [1, 29, 57]}}', "srt/models/deepseek_v2.py")


@pytest.mark.parametrize("engine", ["sglang@0.5.13", "sglang@0.5.23"])
def test_kimi_ids_after_pr_25454(tmp_path: Path, engine: str) -> None:
    """The same ids with sgl-project/sglang pull 25454 ("drop +1 offset on aux layer ids when first id != 1"): right for
    that draft, one layer early for one that was trained with the older SGLang."""
    fine(check(tmp_path / "a", "after:1,after:29,after:57", KIMI, engine, nested([2, 30, 58])))
    report = check(tmp_path / "b", "after:2,after:30,after:58", KIMI, engine, nested([2, 30, 58]))
    named(
        report,
        "taps",
        "[2, 30, 58] as after:1,after:29,after:57",
        "every tap is 1 layer too early",
        f'{engine}: "eagle_config": {{"{IDS}": [3, 31, 59]}}',
        f'vllm: "{IDS}": [3, 31, 59]',
        "srt/models/deepseek_v2.py",
    )


def test_kimi_ids_where_the_release_is_not_given(tmp_path: Path) -> None:
    """The same: which side of the pull request it is decides, so both readings are shown."""
    finding = bad(check(tmp_path, "after:2,after:30,after:58", KIMI, "sglang", nested([2, 30, 58])))["taps"]
    assert finding.status == "unknown"
    assert "sglang 0.5.6 to 0.5.12.post1: reads" in finding.found
    assert "sglang 0.5.13 to 0.5.23: reads" in finding.found


@pytest.mark.parametrize("engine", ["sglang@0.5.12", "sglang@0.5.23"])
def test_kimi_ids_with_the_embedding_put_in_front(tmp_path: Path, engine: str) -> None:
    """Kimi-K2.5, -1 put in front of [2, 30, 58] since an embedding seemed to be missing (docs/alignment.md)."""
    report = check(tmp_path, "after:2,after:30,after:58", KIMI, engine, nested([-1, 2, 30, 58]), draft_tensors())
    named(report, "taps", "-1 in front adds a slot that was never captured", "after:2,after:30,after:58, which were")
    named(report, "fc taps", "builds fc for 4 taps")


def test_gpt_oss_boundaries_before_pr_32334(tmp_path: Path) -> None:
    """GPT-OSS (36 layers), [24, 30, 36] of nvidia/gpt-oss-120b-Eagle3-v3, SGLang before sgl-project/sglang pull 32334:
    shifted to 25, 31 and 37, so that only two states come (issue 32226)."""
    report = check(tmp_path, "after:23,after:29,after:35", GPT_OSS, "sglang@0.5.16", nested([24, 30, 36]))
    named(report, "taps", "id 36 is outside", "layer L is never met", "srt/models/gpt_oss.py")


def test_gpt_oss_boundaries_after_pr_32334(tmp_path: Path) -> None:
    """The same ids with the pull request: boundaries, the last one behind all 36 layers."""
    fine(check(tmp_path / "a", "after:23,after:29,after:35", GPT_OSS, "sglang@0.5.17", nested([24, 30, 36])))
    report = check(tmp_path / "b", "after:24,after:30,after:35", GPT_OSS, "sglang@0.5.17", nested([24, 30, 36]))
    named(report, "taps", "it feeds after:23 for after:24, after:29 for after:30")


@pytest.mark.parametrize("engine", ["sglang@0.5.16", "sglang@0.5.17", "sglang@0.5.23"])
def test_gpt_oss_outputs_before_and_after_pr_32334(tmp_path: Path, engine: str) -> None:
    """GPT-OSS, [1, 17, 32]: outputs of layers on both sides of the pull request, since no id is 36."""
    fine(check(tmp_path / "a", "after:1,after:17,after:32", GPT_OSS, engine, nested([1, 17, 32])))
    report = check(tmp_path / "b", "after:0,after:16,after:31", GPT_OSS, engine, nested([1, 17, 32]))
    named(report, "taps", "every tap is 1 layer too late")


def test_ids_in_eagle_config_alone_served_by_vllm(tmp_path: Path) -> None:
    """Ids as SGLang and the trainers write them, served by vLLM: one model runner takes them raw, one layer early, and
    the other does not look there (v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py)."""
    report = check(tmp_path, "after:3,after:10,after:20", {}, "vllm@0.32.0", nested([3, 10, 20]))
    named(
        report,
        "taps",
        "model runner V1: every tap is 1 layer too early",
        f"model runner V2: the ids stand in eagle_config.{IDS}, which it does not look at",
        f'vllm@0.32.0: "{IDS}": [4, 11, 21]',
    )


def test_ids_absent(tmp_path: Path) -> None:
    """vllm-project/vllm pull 50170: nvidia/Llama-3.3-70B-Instruct-Eagle3 names no layers, so (2, 40, 77) are taken, and
    1.2 % of its tokens are accepted."""
    report = check(tmp_path, "after:4,after:39,after:70", LLAMA_70B, "vllm@0.32.0", draft_config())
    named(
        report,
        "taps",
        "takes its default: after:1,after:39,after:76",
        "no ids are configured: it feeds after:1 for after:4, after:76 for after:70",
        f'"{IDS}": [5, 40, 71]',
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    target = build_target(tmp_path_factory.mktemp("llama") / "target", "LlamaForCausalLM")
    return target, make_world(target, "bfloat16")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    target = build_target(tmp_path_factory.mktemp("deepseek") / "target", "DeepseekV3ForCausalLM")
    return target, make_world(target, "bfloat16")


def test_last_hidden_captured_before_the_norm_and_used_as_after_it(tmp_path: Path, llama: tuple[Path, World]) -> None:
    """vllm-project/speculators pull 313: data generation through vLLM stored the last hidden state before the final
    norm, and the trainer went to lm_head with it as if it were after it (25 % acceptance instead of 40 %)."""
    target, world = llama
    edit = on_slot("last_hidden", lambda world, n, rows: world.states(n)[after(LAYERS - 1)])
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=FINAL, edit=edit), target)
    named(report, "replay last_hidden", "pre-norm and post-norm mixed up", f"after:{LAYERS - 1}")


@pytest.mark.parametrize("rank", [0, 1])
def test_partial_sums_under_fused_all_reduce(tmp_path: Path, deepseek: tuple[Path, World], rank: int) -> None:
    """sgl-project/sglang pull 28343: on Kimi-K2.5 with tp > 1 the MLP's all-reduce is deferred into the next layer's
    norm, and the capture read one rank's partial sum before it."""
    target, world = deepseek
    edit = on_slot("slot 1", partial_mlp(2, rank, 2))
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=edit), target)
    named(report, "replay slot 1", "partial sum")


def test_norm_before_fc_not_propagated(tmp_path: Path) -> None:
    """vllm-project/vllm pull 38111: speculators' ``norm_before_fc`` did not reach the draft's model, so the norm before
    fc was skipped in silence."""
    config = speculators_config(norm_before_fc=True)
    tensors = speculators_tensors(input_norm__weight=torch.ones(3 * H, dtype=torch.bfloat16))
    report = check(tmp_path / "a", "after:1,after:15,after:28", {}, "vllm@0.17.0", config, tensors)
    named(report, "norm_before_fc", "computes with it off", "the checkpoint has input_norm.weight", "vllm 0.32.0")
    fixed = check(tmp_path / "b", "after:1,after:15,after:28", {}, "vllm@0.24.0", config, tensors)
    fine(fixed, "norm_before_fc")


@pytest.mark.parametrize("engine", ["vllm@0.24.0", "sglang@0.5.23"])
def test_d2t_missing(tmp_path: Path, engine: str) -> None:
    """NVIDIA-NeMo/Automodel pull 2447: a compressed draft vocabulary was saved without d2t, and the engine took draft
    ids for the first target ids."""
    tensors = draft_tensors(d2t=None, t2d=None)
    report = check(tmp_path, "after:1,after:15,after:28", {}, engine, draft_config(), tensors)
    named(report, "draft d2t", "draft id i for target id i")


def test_lm_head_missing_with_a_draft_vocabulary_declared(tmp_path: Path) -> None:
    """sgl-project/sglang pull 27908 (issue 27829): nvidia/Kimi-K2.6-Eagle3 ships no lm_head and declares
    draft_vocab_size, so the head is left random: accept len 1.00."""
    tensors = mla_tensors(lm_head__weight=None)
    report = check(tmp_path, "after:1,after:29,after:57", KIMI, "sglang@0.5.23", mla_config(), tensors)
    named(report, "draft lm_head", "leaves it random", '"draft_vocab_size": null', "kimi_k25_eagle3.py")


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_dropped(tmp_path: Path, place: str) -> None:
    """vllm-project/speculators pull 574: the converter built the draft's layer config without the rope_scaling that it
    was trained with; transformers keeps it in two places."""
    target = make_target(tmp_path / "target", hidden_size=16, num_attention_heads=4)
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = target / "config.json"
    kept = {"rope_scaling": scaling, "rope_theta": 500000.0, "rope_parameters": None}
    if place == "rope_parameters":
        kept = {"rope_parameters": {**scaling, "rope_theta": 500000.0}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **kept}))
    draft = make_draft(tmp_path / "draft", draft_config(vocab_size=128, rope_theta=500000.0))
    dataset = make_dataset(tmp_path / "dataset", captured_from(target))
    report = check_static(dataset, draft=draft, engine=parse_engine("vllm@0.32.0"), target=target)
    finding = bad(report)["rope of the target"]
    assert finding.status == "warning"  # a draft may have been trained with other positions than its target
    assert "theta 500000, no scaling: the scaling was dropped" in finding.found
    assert '"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", "factor": 8.0' in finding.mend


def test_thinking_template_differs(tmp_path: Path) -> None:
    """sgl-project/SpecForge issue 296: answers generated without thinking were rendered by Qwen3's template with an
    empty thinking block, while the target that serves thinks by default."""
    from transformers import AutoTokenizer

    target = make_target(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(target)
    blank = tuple(tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))
    samples = [make_sample(CHAT, *conversation(seed, thinking=blank), seed=seed) for seed in range(4)]
    found = bad(check_static(make_dataset(tmp_path / "dataset", CHAT, samples), target=target))
    assert found["thinking"].status == "warning"  # right for a target that is served with thinking off
    assert "8 answers begin with an empty thinking block" in found["thinking"].found
    assert "enable_thinking false" in found["thinking"].mend
    assert "mask position" not in found


def test_loss_mask_not_shifted_with_the_tokens(tmp_path: Path) -> None:
    """sgl-project/SpecForge issue 885: preprocessing shifts tokens and targets left by one, and leaves the loss mask
    where it was."""
    target = make_target(tmp_path / "target")
    samples = []
    for seed in range(6):
        ids, mask = conversation(seed)
        samples.append(make_sample(CHAT, [*ids[1:], 0], mask, seed=seed))
    report = check_static(make_dataset(tmp_path / "dataset", CHAT, samples), target=target)
    named(report, "mask position", "the mask begins one token late in 12 of 12 answers", "torch.roll(loss_mask, -1)")


def test_prefix_caching_cut_the_states(tmp_path: Path, llama: tuple[Path, World]) -> None:
    """vllm-project/vllm issue 44485: with prefix caching on, a request's file holds the states of the tokens that were
    computed for it, fewer than its token ids; files of requests that hit no cache are whole. Seen in the files
    themselves, and in a dataset made of them, whose rows moved up."""
    target, world = llama
    cut = on_all(without_first(16))
    (tmp_path / "files").mkdir()
    for n, ids in enumerate(world.samples):
        states = torch.stack([world.states(n)[tap] for tap in TAPS], 1)  # [T, A, H]
        states = states[16:].clone() if n % 2 else states
        save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "files" / f"{n}.safetensors")

    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        if n % 2:
            cut(world, n, stored)

    words = ("prefix missing: the first 16 rows", "in 4 of 8 samples", "--no-enable-prefix-caching")
    slots = ", ".join(f"hidden_states[{n}]" for n in range(3))
    named(Report(tuple(identify(tmp_path / "files", str(target), num_samples=8))), f"replay {slots}", *words)
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=edit), target)
    named(report, "replay slots 0, 1, 2, last_hidden", *words)
