"""Every defect, injected alone into good states, is found and named; good states give no alarm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.taps.notation import EMBED, FINAL, Tap, after
from tests.align.states import FAMILIES, LAYERS, World, build_target, make_world, replay, store

TAPS = (after(0), after(2), after(4))
LAST = after(LAYERS - 1)
TARGETS = [("LlamaForCausalLM", "float32"), *((family, "bfloat16") for family in FAMILIES)]


# Edits.


def put_taps(*taps: Tap) -> Any:
    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        for k, tap in enumerate(taps):
            stored[f"slot {k}"] = world.states(n)[tap]

    return edit


def on_slot(slot: str, change: Callable[[World, int, Tensor], Tensor]) -> Any:
    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        stored[slot] = change(world, n, stored[slot].clone())

    return edit


def on_all(change: Callable[[World, int, Tensor], Tensor]) -> Any:
    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        for name in ("slot 0", "slot 1", "slot 2", "last_hidden"):
            stored[name] = change(world, n, stored[name].clone())

    return edit


def rolled(k: int) -> Callable[[World, int, Tensor], Tensor]:
    return lambda world, n, rows: rows.roll(k, 0)


def without_first(k: int) -> Callable[[World, int, Tensor], Tensor]:
    """The first k rows are lost, the rest moved up, nothing behind them."""

    def change(world: World, n: int, rows: Tensor) -> Tensor:
        rows = rows.roll(-k, 0)
        rows[-k:] = 0
        return rows

    return change


def set_rows(where: slice, value: float) -> Callable[[World, int, Tensor], Tensor]:
    def change(world: World, n: int, rows: Tensor) -> Tensor:
        rows[where] = value
        return rows

    return change


def noise_in(where: slice) -> Callable[[World, int, Tensor], Tensor]:
    def change(world: World, n: int, rows: Tensor) -> Tensor:
        rows[where] = torch.randn(rows[where].shape, generator=torch.Generator().manual_seed(n)).to(rows.dtype)
        return rows

    return change


def swap_two_samples(world: World, n: int, stored: dict[str, Tensor]) -> None:
    """Samples 1 and 3 got each other's states, as far as they go."""
    if n in (1, 3):
        other = world.states(4 - n)
        for k, tap in enumerate(TAPS):
            rows = min(len(stored[f"slot {k}"]), len(other[tap]))
            stored[f"slot {k}"][:rows] = other[tap][:rows]


def tail_of_another(world: World, n: int, stored: dict[str, Tensor]) -> None:
    """The last 12 rows of sample 2 are the first ones of sample 5."""
    if n == 2:
        for k, tap in enumerate(TAPS):
            stored[f"slot {k}"][-12:] = world.states(5)[tap][1:13]


def late_in_two(world: World, n: int, stored: dict[str, Tensor]) -> None:
    """Another worker's samples."""
    if n in (2, 5):
        for k, tap in enumerate((after(1), after(3), LAST)):
            stored[f"slot {k}"] = world.states(n)[tap]


def zero_rest(weight: Tensor, dim: int, rank: int, ranks: int) -> None:
    size = weight.shape[dim] // ranks
    keep = torch.zeros(weight.shape[dim], dtype=torch.bool)
    keep[rank * size : (rank + 1) * size] = True
    weight.index_fill_(dim, torch.nonzero(~keep).flatten(), 0.0)


def partial_mlp(layer: int, rank: int, ranks: int) -> Callable[[World, int, Tensor], Tensor]:
    def change_model(model: Any) -> None:
        mlp = model.model.layers[layer].mlp
        for name, weight in mlp.named_parameters():
            if "down_proj" in name:
                zero_rest(weight, weight.dim() - 1, rank, ranks)

    return lambda world, n, rows: world.run_changed(n, change_model)[after(layer)]


def all_but_one(layer: int, rank: int, ranks: int) -> Callable[[World, int, Tensor], Tensor]:
    """Attention's sum without one rank's part; the MLP saw the whole one."""
    only = partial_attention(layer, rank, ranks)

    def change(world: World, n: int, rows: Tensor) -> Tensor:
        whole, nothing = world.states(n)[after(layer)], partial_attention(layer, ranks, ranks)(world, n, rows)
        return whole - (only(world, n, rows) - nothing)

    return change


def experts_and_shared(layer: int, rank: int, ranks: int, width: int) -> Callable[[World, int, Tensor], Tensor]:
    """One rank's part where experts are split by expert, each ``width`` ways by width, and shared experts ``ranks``
    ways by width."""

    def change_model(model: Any) -> None:
        mlp = model.model.layers[layer].mlp
        zero_rest(mlp.experts.down_proj, 0, rank // width, ranks // width)
        zero_rest(mlp.experts.down_proj, 2, rank % width, width)
        if hasattr(mlp, "shared_experts"):
            zero_rest(mlp.shared_experts.down_proj.weight, 1, rank, ranks)

    return lambda world, n, rows: world.run_changed(n, change_model)[after(layer)]


def partial_experts(layer: int, rank: int, ranks: int) -> Callable[[World, int, Tensor], Tensor]:
    def change_model(model: Any) -> None:
        zero_rest(model.model.layers[layer].mlp.experts.down_proj, 0, rank, ranks)

    return lambda world, n, rows: world.run_changed(n, change_model)[after(layer)]


def partial_attention(layer: int, rank: int, ranks: int) -> Callable[[World, int, Tensor], Tensor]:
    """Attention's part of one rank in the stored row, the whole one in what the MLP saw."""

    def change(world: World, n: int, rows: Tensor) -> Tensor:
        seen: list[Tensor] = []
        projection = world.layers[layer].self_attn.o_proj
        handle = projection.register_forward_hook(lambda m, a, o: seen.extend((a[0][0], o[0])))
        whole = world.run(world.samples[n])[after(layer)]
        handle.remove()
        given, full = seen
        size = given.shape[1] // ranks
        part = slice(rank * size, (rank + 1) * size)
        return whole - full + given[:, part] @ projection.weight[:, part].T.detach()

    return change


def mlp_output(layer: int) -> Callable[[World, int, Tensor], Tensor]:
    def change(world: World, n: int, rows: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = world.layers[layer].mlp.register_forward_hook(lambda m, a, o: seen.append(o.reshape(-1, o.shape[-1])))
        world.run(world.samples[n])
        handle.remove()
        return seen[0].detach()

    return change


def next_norm(layer: int) -> Callable[[World, int, Tensor], Tensor]:
    return lambda world, n, rows: world.layers[layer + 1].input_layernorm(world.states(n)[after(layer)]).detach()


def residual_times(layer: int, times: int) -> Callable[[World, int, Tensor], Tensor]:
    return lambda world, n, rows: rows + (times - 1) * world.states(n)[after(layer - 1)]


def other_weights(size: float) -> Any:
    def change_model(model: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        for parameter in model.model.layers.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(size * parameter.float().std().to(parameter.dtype) * noise)

    return changed_model(change_model)


def changed_model(change_model: Callable[[Any], None]) -> Any:
    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        states = world.run_changed(n, change_model)
        for k, tap in enumerate(TAPS):
            stored[f"slot {k}"] = states[tap]
        stored["last_hidden"] = states[LAST]

    return edit


def fp8_weights(model: Any) -> None:
    """Linear weights of the layers through float8_e4m3fn, one scale per output channel."""
    for module in model.model.layers.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if (isinstance(module, torch.nn.Linear) and name == "weight") or parameter.dim() == 3:
                scale = parameter.abs().amax(-1, keepdim=True).float() / 448
                parameter.copy_((parameter.float() / scale).to(torch.float8_e4m3fn).float() * scale)


def int8_weights(model: Any) -> None:
    for module in model.model.layers.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if (isinstance(module, torch.nn.Linear) and name == "weight") or parameter.dim() == 3:
                scale = parameter.abs().amax(-1, keepdim=True).float() / 127
                parameter.copy_((parameter.float() / scale).round() * scale)


def without_prefix(world: World, n: int, stored: dict[str, Tensor]) -> None:
    """Tokens from 16 on were run without the tokens before them."""
    states = world.run(world.samples[n][16:])
    for k, tap in enumerate(TAPS):
        stored[f"slot {k}"][16:] = states[tap]
    stored["last_hidden"][16:] = states[LAST]


def of_other_tokens(world: World, n: int, stored: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(100 + n)
    states = world.run(torch.randint(3, 100, (len(world.samples[n]),), generator=generator))
    for k, tap in enumerate(TAPS):
        stored[f"slot {k}"] = states[tap]
    stored["last_hidden"] = states[LAST]


def tap_after_tap(world: World, n: int, stored: dict[str, Tensor]) -> None:
    whole = torch.stack([stored[f"slot {k}"] for k in range(3)])  # [A, T, H]
    for k, rows in enumerate(whole.reshape(len(world.samples[n]), 3, -1).unbind(1)):
        stored[f"slot {k}"] = rows


def shift_mask(world: World, n: int, stored: dict[str, Tensor]) -> None:
    stored["loss_mask"] = stored["loss_mask"].roll(1)


def shift_statistics(world: World, n: int, stored: dict[str, Tensor]) -> None:
    top1 = world.logits(world.states(n)[FINAL]).argmax(-1).roll(1)
    stored["target_top1"] = torch.where(stored["target_top1"] >= 0, top1, -1)


def labels(world: World, n: int, stored: dict[str, Tensor]) -> None:
    stored["target_top1"] = torch.where(stored["target_top1"] >= 0, world.samples[n].roll(-1), -1)


def warm_lse(world: World, n: int, stored: dict[str, Tensor]) -> None:
    lse = (world.logits(world.states(n)[FINAL]) / 0.5).logsumexp(-1)
    stored["target_lse"] = torch.where(stored["target_lse"].isnan(), torch.nan, lse)


def half_channels(world: World, n: int, rows: Tensor) -> Tensor:
    rows[:, rows.shape[1] // 2 :] = 0
    return rows


def noise_on_rows(world: World, n: int, rows: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return rows + 0.3 * rows.float().std() * torch.randn(rows.shape, generator=generator).to(rows.dtype)


def swapped_halves(world: World, n: int, rows: Tensor) -> Tensor:
    return rows.roll(rows.shape[1] // 2, 1)


def through_fp8(world: World, n: int, rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True).float() / 448
    return ((rows.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


# name -> (edit, words of the finding, its check)
DEFECTS: dict[str, tuple[Any, str, str]] = {
    "late": (put_taps(after(1), after(3), LAST), "off by one, one layer late", "slots 0, 1, 2"),
    "early": (put_taps(EMBED, after(1), after(3)), "embedding where a layer was meant, off by one", "slots 0, 1, 2"),
    "late in two": (late_in_two, "off by one, one layer late: after:1,after:3,after:5, in 2 of 8", "slots 0, 1, 2"),
    "one early": (put_taps(after(0), after(1), after(4)), "off by one, one layer early", "slot 1"),
    "swapped": (put_taps(after(2), after(0), after(4)), "swapped order", "slots 0, 1"),
    "reversed": (put_taps(after(4), after(2), after(0)), "swapped order", "slots 0, 2"),
    "embedding": (put_taps(after(0), EMBED, after(4)), "embedding where a layer was meant", "slot 1"),
    "twice": (put_taps(after(0), after(4), after(4)), "the same tap twice", "slot 1"),
    "far": (put_taps(after(0), after(2), LAST), "off by one, one layer late", "slot 2"),
    "final as last": (
        on_slot("last_hidden", lambda world, n, rows: world.states(n)[FINAL]),
        "pre-norm and post-norm mixed up",
        "last_hidden",
    ),
    "normed": (on_slot("slot 1", next_norm(2)), "normed", "slot 1"),
    "tensor parallel half": (on_slot("slot 1", partial_mlp(2, 1, 2)), "partial sum", "slot 1"),
    "tensor parallel eighth": (on_slot("slot 2", partial_mlp(4, 5, 8)), "partial sum", "slot 2"),
    "attention quarter": (on_slot("slot 1", partial_attention(2, 0, 4)), "partial sum", "slot 1"),
    "three quarters of attention": (
        on_slot("slot 1", all_but_one(2, 1, 4)),
        "partial sum: after:2 without rank 1 of 4 (tensor parallel) of its self_attn",
        "slot 1",
    ),
    "no residual": (on_slot("slot 1", mlp_output(2)), "part of a layer", "slot 1"),
    "residual twice": (on_slot("slot 1", residual_times(2, 2)), "counted 2 times", "slot 1"),
    "scaled": (on_slot("slot 0", lambda world, n, rows: rows * 3), "scaled", "slot 0"),
    "row late": (on_all(rolled(1)), "shifted rows: row t holds token t-1", "slots 0, 1, 2, last_hidden"),
    "row early from 12 on": (
        on_all(lambda world, n, rows: torch.cat([rows[:12], rows[12:].roll(-1, 0)])),
        "shifted rows: row t holds token t+1 from row 12 on",
        "slots 0, 1, 2, last_hidden",
    ),
    "row late from 20 on": (
        on_all(lambda world, n, rows: torch.cat([rows[:20], rows[18:-2]])),
        "shifted rows: row t holds token t-2 from row 20 on",
        "slots 0, 1, 2, last_hidden",
    ),
    "stale prefix": (
        on_all(noise_in(slice(0, 8))),
        "prefix missing: rows 0 to 7 of 40 are no token's states",
        "slots 0, 1, 2, last_hidden",
    ),
    "tail repeated": (
        on_all(lambda world, n, rows: torch.cat([rows[:-6], rows[-7:-6].expand(6, -1)])),
        "are copies of the row before",
        "slots 0, 1, 2, last_hidden",
    ),
    "row early": (on_all(rolled(-1)), "shifted rows: row t holds token t+1", "slots 0, 1, 2, last_hidden"),
    "one slot late": (on_slot("slot 2", rolled(1)), "shifted rows: row t holds token t-1", "slot 2"),
    "swapped samples": (swap_two_samples, "rows of another sample", "slots 0, 1, 2"),
    "tail of another": (tail_of_another, "rows of another sample", "slots 0, 1, 2"),
    "prefix zero": (on_all(set_rows(slice(0, 16), 0.0)), "prefix missing", "slots 0, 1, 2, last_hidden"),
    "prefix cut": (on_all(without_first(16)), "prefix missing: the first 16 rows", "slots 0, 1, 2, last_hidden"),
    "tail zero": (on_all(set_rows(slice(-9, None), 0.0)), "cut off at the end", "slots 0, 1, 2, last_hidden"),
    "tail never written": (on_all(noise_in(slice(-9, None))), "cut off at the end", "slots 0, 1, 2, last_hidden"),
    "reversed rows": (on_slot("slot 0", lambda world, n, rows: rows.flip(0)), "rows out of order", "slot 0"),
    "other tokens": (of_other_tokens, "other tokens", "slots 0, 1, 2, last_hidden"),
    "no prefix": (without_prefix, "context cut", "slots 0, 1, 2, last_hidden"),
    "other revision": (other_weights(0.15), "other weights", "slots 0, 1, 2, last_hidden"),
    "fp8 target": (changed_model(fp8_weights), "quantized target: fp8", "slots 0, 1, 2, last_hidden"),
    "int8 target": (changed_model(int8_weights), "quantized target: int8", "slots 0, 1, 2, last_hidden"),
    "noise": (on_slot("slot 1", noise_on_rows), "altered rows", "slot 1"),
    "fp8 states": (on_slot("slot 1", through_fp8), "coarser values: fp8", "slot 1"),
    "dead": (on_slot("slot 1", lambda world, n, rows: rows * 0), "dead", "slot 1"),
    "constant": (on_slot("slot 1", lambda world, n, rows: rows[5].expand_as(rows).clone()), "constant", "slot 1"),
    "nan": (on_slot("slot 1", set_rows(slice(7, 8), float("nan"))), "not finite", "slot 1"),
    "tap after tap": (tap_after_tap, "interleaved slots", "slots 0, 1, 2"),
    "half the channels": (on_slot("slot 1", half_channels), "missing channels", "slot 1"),
    "channels swapped": (on_slot("slot 1", swapped_halves), "permuted channels", "slot 1"),
    "mask shifted": (shift_mask, "loss mask shifted", "target_top1, target_lse"),
    "statistics shifted": (shift_statistics, "shifted rows: target_top1", "target_top1, target_lse"),
    "labels": (labels, "labels instead", "target_top1, target_lse"),
    "temperature": (warm_lse, "logsumexp differs", "target_top1, target_lse"),
}
MOE_ONLY: dict[str, tuple[Any, str, str]] = {
    "expert parallel half": (
        on_slot("slot 1", partial_experts(2, 0, 2)),
        "partial sum: after:2 with only rank 0 of 2 (expert parallel) of its mlp",
        "slot 1",
    ),
    "experts split, shared experts sliced": (
        on_slot("slot 1", experts_and_shared(2, 1, 2, 1)),
        "partial sum: after:2 with only rank 1 of 2 (expert parallel",
        "slot 1",
    ),
    "experts split both ways": (
        on_slot("slot 1", experts_and_shared(2, 1, 4, 2)),
        "partial sum: after:2 with only rank 1 of 4 (expert parallel 2 x tensor parallel 2",
        "slot 1",
    ),
}


@pytest.mark.parametrize(("family", "dtype"), TARGETS)
@pytest.mark.parametrize("name", [*DEFECTS, *MOE_ONLY])
def test_defect_is_named(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path, family: str, dtype: str, name: str
) -> None:
    if name in MOE_ONLY and family == "LlamaForCausalLM":
        pytest.skip("has no experts")
    if name == "int8 target" and (family, dtype) == ("DeepseekV3ForCausalLM", "bfloat16"):
        pytest.skip("below this target's noise: test_below_the_floor_nothing_is_accused")
    target, world = worlds(family, dtype)
    edit, words, check = (DEFECTS | MOE_ONLY)[name]
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=edit), target)
    wrong = [f for f in report.findings if f.status == "mismatch" and not f.check.startswith("replay lm_head")]
    named = [f for f in wrong if words in f.found]
    assert [f.check for f in named] == [f"replay {check}"], report.text()
    # What was not touched is not accused.
    assert [f for f in wrong if f not in named and not f.check.startswith("replay target_top1")] == [], report.text()


def test_below_the_floor_nothing_is_accused(worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path) -> None:
    """int8 weights in a target whose routers make bfloat16 noisier than they do."""
    target, world = worlds("DeepseekV3ForCausalLM", "bfloat16")
    dataset = store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=changed_model(int8_weights), says_weights=False)
    report = replay(dataset, target)
    assert report.count("mismatch") == 0, report.text()
    assert report.count("unknown") > 0
    assert "detection floor" in report.text()


@pytest.mark.parametrize(("family", "dtype"), TARGETS)
def test_unproven_weights_are_unknown_below_the_floor(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path, family: str, dtype: str
) -> None:
    """Good states of which nothing says what weights made them: the floor is stated, and --strict does not pass."""
    target, world = worlds(family, dtype)
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST, says_weights=False), target)
    (unknown,) = [finding for finding in report.findings if finding.status != "ok"]
    assert (unknown.check, unknown.status) == ("replay weights", "unknown"), report.text()
    assert re.search(
        r"from \d+\.\d\d% and certain from \d+\.\d\d% at after:5 on \(the detection floor\)", unknown.found
    )
    assert re.search(r"weights that all differ by less than \d+\.\d% of their spread stay below it", unknown.found)
    assert (report.exit_status(), report.exit_status(strict=True)) == (0, 3)


@pytest.mark.parametrize("size", [1e-3, 3e-3])
def test_a_revision_below_the_floor_is_unknown(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path, size: float
) -> None:
    target, world = worlds("LlamaForCausalLM", "bfloat16")
    dataset = store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=other_weights(size), says_weights=False)
    report = replay(dataset, target)
    assert [(f.check, f.status) for f in report.findings if f.status != "ok"] == [("replay weights", "unknown")]


def test_the_stated_floor_is_where_doubt_begins(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path
) -> None:
    """Weights that differ by a fifth of the stated change stay below it; by more than the whole, they do not."""
    target, world = worlds("LlamaForCausalLM", "bfloat16")
    good = replay(store(tmp_path / "good", world, TAPS, last_hidden=LAST, says_weights=False), target)
    stated = float(re.findall(r"less than (\d+\.\d)% of their spread", good.text())[0]) / 100
    for share, expected in ((0.2, "deviations are rounding"), (1.6, "undecided")):
        edit = other_weights(share * stated)
        report = replay(store(tmp_path / str(share), world, TAPS, last_hidden=LAST, edit=edit), target)
        assert expected in report.text()


def fp8_checkpoint(target: Path) -> Path:
    """Make ``target`` a checkpoint as DeepSeek-V3's: e4m3 in blocks of 128 x 128, activations quantized too."""
    weights = load_file(target / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights[name].shape
        blocks = weights[name].view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        weights[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
        weights[name.replace("weight", "weight_scale_inv")] = scale
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_good_states_of_an_fp8_target_give_no_alarm(tmp_path: Path) -> None:
    """Served with fp8 activations, and replayed without them."""
    target = fp8_checkpoint(
        build_target(tmp_path / "t", "LlamaForCausalLM", hidden_size=128, intermediate_size=256, head_dim=32)
    )
    world = make_world(target, "bfloat16")

    def quantize_input(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        blocks = args[0].float().unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1, keepdim=True) / 448
        return (((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(args[0].dtype),)

    for module in world.model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(quantize_input)
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST), target)
    assert {finding.status for finding in report.findings} == {"ok"}, report.text()


GOOD_TAPS = (
    (after(1), after(3)),
    (after(0), after(2), after(4)),
    (EMBED, after(2), after(5)),
    (after(0), after(1), after(2), FINAL),
    (EMBED, after(0), after(2), after(3), after(5)),
)


@pytest.mark.parametrize(("family", "dtype"), TARGETS)
@pytest.mark.parametrize("taps", GOOD_TAPS, ids=lambda taps: ",".join(map(str, taps)))
def test_good_states_give_no_alarm(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path, family: str, dtype: str, taps: tuple[Tap, ...]
) -> None:
    target, world = worlds(family, dtype)
    report = replay(store(tmp_path / "d", world, taps, last_hidden=FINAL), target)
    assert {finding.status for finding in report.findings} == {"ok"}, report.text()
    assert len(report.findings) == len(taps) + 4
