"""Good datasets, and ways to spoil one: each injector leaves the format honest and only the meaning wrong.

States come from transformers' own ``output_hidden_states`` (and a hook, since its last entry is post-norm), not from
eyas: the detector is judged by another hand's numbers. Checksums, sample ids and ledgers are always right.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import Tensor

from eyas.cli.main import main
from eyas.shards import open_dataset
from eyas.shards.identity import DatasetIdentity, create_or_match
from eyas.shards.sample import Sample, sample_id
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import EMBED, FINAL, Tap, after
from tests.tiny import VOCAB_SIZE, make_target, write_jsonl

FAMILIES = ("llama", "qwen3-moe", "deepseek-v3")
_OVERRIDES = {
    "qwen3-moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "deepseek-v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@dataclass(frozen=True, kw_only=True)
class States:
    """What one forward of one sample gives, alone and unpadded, in the target's dtype."""

    taps: dict[Tap, Tensor]  # every tap of the target, [T, H]
    logits: Tensor  # float32 [T, V]


@dataclass(frozen=True, kw_only=True)
class Good:
    """A dataset in memory whose meaning is what its identity says, with the target that it came from."""

    target: Path
    model: Any
    identity: DatasetIdentity
    samples: list[Sample]

    @property
    def num_layers(self) -> int:
        return self.identity.target.num_layers

    def states(self, sample: Sample, model: Any = None) -> States:
        return run(model or self.model, sample.input_ids)


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    """What an injector leaves: samples (and an identity) with one defect in them."""

    identity: DatasetIdentity
    samples: list[Sample]


# ---------------------------------------------------------------------------------------------------- good datasets


def build_target(
    folder: Path, family: str, *, dtype: str, seed: int = 0, num_layers: int = 8, hidden_size: int = 64
) -> Any:
    """A tiny random target with a tokenizer in ``folder``. Its residual stream grows slowly from layer to layer, and
    its norms have gains of their own, as a trained target's do. Returns the model."""
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    make_target(folder, seed=seed, **{k: v for k, v in common.items() if k != "num_hidden_layers"})  # the tokenizer
    config_class, model_class = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    }[family]
    config = getattr(transformers, config_class)(**(common | _OVERRIDES.get(family, {})))
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def run(model: Any, input_ids: Tensor) -> States:
    """Every tap of ``input_ids`` [T], by transformers' own output and a hook on the last layer."""
    inner, last = model.model, {}
    hook = inner.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last.update(state=output[0] if isinstance(output, tuple) else output)
    )
    try:
        out = model(input_ids[None].long(), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    hidden = [state.reshape(len(input_ids), -1) for state in out.hidden_states]  # L+1 of [T, H]; the last is final
    num_layers = len(inner.layers)
    taps = {EMBED: hidden[0], FINAL: hidden[num_layers], after(num_layers - 1): last["state"].reshape_as(hidden[0])}
    taps |= {after(layer): hidden[layer + 1] for layer in range(num_layers - 1)}
    return States(taps=taps, logits=out.logits[0].float())


def chats(num_samples: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of one or two turns, 20 to 60 tokens each in tests.tiny's words."""
    draw = random.Random(seed)

    def words(low: int, high: int) -> str:
        return " ".join(f"w{draw.randrange(VOCAB_SIZE - 6)}" for _ in range(draw.randint(low, high)))

    rows = []
    for _ in range(num_samples):
        turns = []
        for _ in range(draw.randint(1, 2)):
            turns += [
                {"role": "user", "content": words(5, 10)},
                {"role": "assistant", "content": words(8, 12)},
            ]
        rows.append({"messages": turns})
    return rows


def cli(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def capture_good(
    folder: Path,
    family: str,
    *,
    dtype: str,
    taps: str = "after:1,after:3,after:4",
    last_hidden: str = "after:last",
    num_samples: int = 8,
    seed: int = 0,
    **shape: int,
) -> Good:
    """`eyas prepare` and `eyas capture` of tiny conversations, into ``folder``/captured."""
    model = build_target(folder / "target", family, dtype=dtype, seed=seed, **shape)
    source = write_jsonl(folder / "chats.jsonl", chats(num_samples, seed))
    prepared = cli("prepare", source, folder / "prepared", "--target", folder / "target")
    assert prepared.exit_code == 0, prepared.output
    captured = cli(
        *("capture", folder / "prepared", folder / "captured", "--target", folder / "target", "--taps", taps),
        *("--last-hidden", last_hidden, "--device", "cpu"),
    )
    assert captured.exit_code == 0, captured.output
    dataset = open_dataset(folder / "captured")
    return Good(target=folder / "target", model=model, identity=dataset.identity, samples=list(dataset.iter_samples()))


def write(folder: Path, spoiled: Spoiled | Good, *, tp: int = 1) -> Path:
    create_or_match(folder, spoiled.identity)
    with ShardWriter(folder, identity=spoiled.identity, worker="host-0", metadata={"tp": str(tp)}) as writer:
        for sample in spoiled.samples:
            writer.add(sample)
    return folder


# ---------------------------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What `eyas check` said: exit status, and its findings as they stand in --json."""

    exit_code: int
    findings: list[dict[str, Any]]
    output: str

    def text(self, *statuses: str) -> str:
        """All that the findings of those statuses say, as one text."""
        return "\n".join(json.dumps(f, ensure_ascii=False) for f in self.findings if f["status"] in statuses)


def check(dataset: Path, target: Path) -> Outcome:
    result = cli("check", dataset, "--target", target, "--json")
    try:
        body = json.loads(result.stdout)
    except json.JSONDecodeError:
        return Outcome(exit_code=result.exit_code, findings=[], output=f"{result.output}\n{result.exception!r}")
    findings = body if isinstance(body, list) else body["findings"]
    return Outcome(exit_code=result.exit_code, findings=findings, output=result.output)


# --------------------------------------------------------------------------------------------------------- injectors


def slots(good: Good, sample: Sample) -> list[Tensor]:
    """The features' taps, [T, H] each; copies."""
    cat = sample.features.view(sample.num_tokens, len(good.identity.taps), -1)
    return [slot.clone() for slot in cat.unbind(1)]


def with_slots(sample: Sample, parts: Sequence[Tensor]) -> Sample:
    return replace(sample, features=torch.cat([part.to(sample.features.dtype) for part in parts], dim=-1))


def each_slot(
    good: Good, spoil: Callable[[Sample, int, Tensor], Tensor], which: Sequence[int], only: Sequence[int] | None = None
) -> Spoiled:
    """``spoil(sample, slot, [T, H])`` for the slots ``which``, in all samples or only in those at ``only``."""
    spoiled = []
    for n, sample in enumerate(good.samples):
        if only is None or n in only:
            parts = slots(good, sample)
            for slot in which:
                parts[slot] = spoil(sample, slot, parts[slot])
            sample = with_slots(sample, parts)
        spoiled.append(sample)
    return Spoiled(identity=good.identity, samples=spoiled)


def _all(good: Good) -> range:
    return range(len(good.identity.taps))


def tap_instead(tap: Callable[[Good, int], Tap], which: Sequence[int] | None = None) -> Callable[[Good], Spoiled]:
    """Another tap's rows in the slots ``which`` (None: all)."""
    return lambda good: each_slot(
        good,
        lambda sample, slot, _: good.states(sample).taps[tap(good, slot)],
        _all(good) if which is None else which,
    )


def layers_off(by: int) -> Callable[[Good, int], Tap]:
    return lambda good, slot: after(good.identity.taps[slot].layer + by)


def swapped(a: int, b: int) -> Callable[[Good], Spoiled]:
    def spoil(good: Good) -> Spoiled:
        samples = []
        for sample in good.samples:
            parts = slots(good, sample)
            parts[a], parts[b] = parts[b], parts[a]
            samples.append(with_slots(sample, parts))
        return Spoiled(identity=good.identity, samples=samples)

    return spoil


def norm_state(declared: str) -> Callable[[Good], Spoiled]:
    """last_hidden that is the other one than declared: 'after' holds final, 'final' holds after:L-1."""

    def spoil(good: Good) -> Spoiled:
        if declared == "final":
            return Spoiled(identity=replace(good.identity, last_hidden=FINAL), samples=good.samples)
        samples = [replace(s, last_hidden=_normed(good, s)) for s in good.samples]
        return Spoiled(identity=good.identity, samples=samples)

    return spoil


@torch.no_grad()
def _normed(good: Good, sample: Sample) -> Tensor:
    """The final norm on what was stored: the same run, whose routers chose the same experts."""
    normed: Tensor = good.model.model.norm(sample.last_hidden)
    return normed


def final_in_features(declared: str) -> Callable[[Good], Spoiled]:
    """The last slot is declared after:L-1 and holds final, or the reverse."""

    def spoil(good: Good) -> Spoiled:
        last = after(good.num_layers - 1)
        identity = replace(good.identity, taps=(*good.identity.taps[:-1], last if declared == "after" else FINAL))
        holds = [_normed(good, s) if declared == "after" else s.last_hidden for s in good.samples]
        samples = [with_slots(s, [*slots(good, s)[:-1], state]) for s, state in zip(good.samples, holds, strict=True)]
        return Spoiled(identity=identity, samples=samples)

    return spoil


@contextmanager
def _zeroed(module: Any, part: str, rank: int, tp: int) -> Iterator[None]:
    """``module`` with what other ranks than ``rank`` hold of its output projections at zero. part: 'tp' splits the
    input width of the projection, 'ep' splits experts."""
    kept = {}
    for name, parameter in module.named_parameters():
        if not name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
            continue
        kept[name] = parameter.data
        dim = 0 if part == "ep" and parameter.dim() == 3 else parameter.dim() - 1
        size = parameter.shape[dim] // tp
        share = torch.zeros_like(parameter.data)
        rows = [slice(None)] * parameter.dim()
        rows[dim] = slice(rank * size, (rank + 1) * size)
        share[tuple(rows)] = parameter.data[tuple(rows)]
        parameter.data = share
    try:
        yield
    finally:
        for name, parameter in module.named_parameters():
            if name in kept:
                parameter.data = kept[name]


@torch.no_grad()
def partial_outputs(good: Good, sample: Sample, layer: int, block: str, part: str, rank: int, tp: int) -> Tensor:
    """What the ranks other than ``rank`` add to the residual stream in ``block`` of ``layer``: [T, H]."""
    module = getattr(good.model.model.layers[layer], block)
    seen: dict[str, Any] = {}

    def keep(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.update(args=args, kwargs=kwargs, output=output[0] if isinstance(output, tuple) else output)

    hook = module.register_forward_hook(keep, with_kwargs=True)
    try:
        good.states(sample)
    finally:
        hook.remove()
    with _zeroed(module, part, rank, tp):
        own = module(*seen["args"], **seen["kwargs"])
    own = own[0] if isinstance(own, tuple) else own
    return (seen["output"] - own).reshape(sample.num_tokens, -1)


def partial_sum(
    block: str, which: Sequence[int] | None, *, part: str = "tp", rank: int = 0, tp: int = 2
) -> Callable[[Good], Spoiled]:
    """Only one rank's share of a block's output was in the residual stream when it was captured."""

    def spoil(good: Good) -> Spoiled:
        def missing(sample: Sample, slot: int, part_: Tensor) -> Tensor:
            layer = good.identity.taps[slot].layer
            return part_ - partial_outputs(good, sample, layer, block, part, rank, tp)

        return each_slot(good, missing, _all(good) if which is None else which)

    return spoil


def no_residual(good: Good) -> Spoiled:
    """What the layer adds, without the stream that it is added to (the pair of a fused norm, half of it)."""

    def alone(sample: Sample, slot: int, part: Tensor) -> Tensor:
        return part - good.states(sample).taps[after(good.identity.taps[slot].layer - 1)]

    return each_slot(good, alone, _all(good))


def rolled(by: int, which: Sequence[int] | None = None, *, fill: str = "wrap") -> Callable[[Good], Spoiled]:
    """Row t holds token t-by. fill: what the first rows then get, where by is positive: wrap or zero."""

    def shift(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
        part = part.roll(by, 0)
        if fill == "zero":
            part[:by] = 0
        return part

    def spoil(good: Good) -> Spoiled:
        result = each_slot(good, shift, _all(good) if which is None else which)
        if which is None:
            samples = [
                replace(s, last_hidden=s.last_hidden.roll(by, 0)) if s.last_hidden is not None else s
                for s in result.samples
            ]
            result = replace(result, samples=samples)
        return result

    return spoil


def mask_shifted(by: int) -> Callable[[Good], Spoiled]:
    """The loss mask by one to the left or right, and all that follows from it: ids, top-1 and logsumexp."""

    def spoil(good: Good) -> Spoiled:
        return Spoiled(identity=good.identity, samples=[_remasked(good, s, s.loss_mask.roll(by)) for s in good.samples])

    return spoil


def mask_of_users(good: Good) -> Spoiled:
    """Trained where it should not be and the reverse: the user's turns."""
    samples = []
    for s in good.samples:
        mask = 1 - s.loss_mask
        mask[0] = 0
        samples.append(_remasked(good, s, mask))
    return Spoiled(identity=good.identity, samples=samples)


def _remasked(good: Good, sample: Sample, mask: Tensor, model: Any = None) -> Sample:
    logits = good.states(sample, model).logits
    trained = torch.cat([mask[1:], mask.new_zeros(1)]).bool()
    return replace(
        sample,
        sample_id=sample_id(sample.input_ids.numpy(), mask.numpy()),
        loss_mask=mask,
        target_top1=torch.where(trained, logits.argmax(-1).int(), -1),
        target_lse=torch.where(trained, logits.logsumexp(-1), torch.nan),
    )


def rows_of_another(start: int, stop: int) -> Callable[[Good], Spoiled]:
    """Rows start:stop of every sample's features come from the next sample."""

    def spoil(good: Good) -> Spoiled:
        samples = []
        for n, sample in enumerate(good.samples):
            other = good.samples[(n + 1) % len(good.samples)]
            features = sample.features.clone()
            end = min(stop, sample.num_tokens, other.num_tokens)
            features[start:end] = other.features[start:end]
            samples.append(replace(sample, features=features))
        return Spoiled(identity=good.identity, samples=samples)

    return spoil


def batch_mixed(good: Good) -> Spoiled:
    """Two samples of the same length have each other's tensors (the second one's tokens are cut to fit)."""
    first, second = sorted(good.samples, key=lambda s: s.num_tokens)[-2:]
    T = first.num_tokens
    ids, mask = second.input_ids[:T], second.loss_mask[:T]
    short = Sample(
        sample_id=sample_id(ids.numpy(), mask.numpy()),
        input_ids=ids,
        loss_mask=mask,
        features=second.features[:T],
        last_hidden=None if second.last_hidden is None else second.last_hidden[:T],
        target_top1=None,
        target_lse=None,
    )
    short = _remasked(good, short, mask)
    a = replace(first, features=short.features, last_hidden=short.last_hidden)
    b = replace(short, features=first.features, last_hidden=first.last_hidden)
    rest = [s for s in good.samples if s.sample_id not in (first.sample_id, second.sample_id)]
    return Spoiled(identity=good.identity, samples=[a, b, *rest])


def leading(rows: int, how: str, only: Sequence[int] | None = None) -> Callable[[Good], Spoiled]:
    """The first rows came from a prefix cache and were never computed. how: zero, stale (noise of the same size), or
    missing (all other rows move up, the end is zero)."""

    def cut(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
        if how == "zero":
            part[:rows] = 0
        elif how == "stale":
            part[:rows] = torch.randn_like(part[:rows]) * part.float().std().to(part.dtype)
        else:
            part = part.roll(-rows, 0)
            part[-rows:] = 0
        return part

    return lambda good: each_slot(good, cut, _all(good), only)


def prefix_forgotten(rows: int) -> Callable[[Good], Spoiled]:
    """Rows after the prefix were computed without it: position 0 and an empty cache at row ``rows``."""

    def spoil(good: Good) -> Spoiled:
        def alone(sample: Sample, slot: int, part: Tensor) -> Tensor:
            part[rows:] = run(good.model, sample.input_ids[rows:]).taps[good.identity.taps[slot]]
            return part

        return each_slot(good, alone, _all(good))

    return spoil


def tail(rows: int, how: str, only: Sequence[int] | None = None) -> Callable[[Good], Spoiled]:
    """The end of a sample was never written: zeros, noise, or a row repeated."""

    def cut(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
        if how == "zero":
            part[-rows:] = 0
        elif how == "garbage":
            part[-rows:] = torch.randn_like(part[-rows:]) * part.float().std().to(part.dtype)
        else:
            part[-rows:] = part[-rows - 1]
        return part

    return lambda good: each_slot(good, cut, _all(good), only)


def captured_by(change: Callable[[str, Tensor], Tensor]) -> Callable[[Good], Spoiled]:
    """Captured with other weights under the same name, and nobody kept their checksum: change(name, weight) gives each
    parameter's."""

    def spoil(good: Good) -> Spoiled:
        torch.manual_seed(99)
        other = copy.deepcopy(good.model)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(change(name, parameter))
        samples = []
        for sample in good.samples:
            states = good.states(sample, other)
            parts = [states.taps[tap] for tap in good.identity.taps]
            spoiled = with_slots(_remasked(good, sample, sample.loss_mask, other), parts)
            last = good.identity.last_hidden
            samples.append(spoiled if last is None else replace(spoiled, last_hidden=states.taps[last].clone()))
        identity = replace(good.identity, target=replace(good.identity.target, weights_hash=None))
        return Spoiled(identity=identity, samples=samples)

    return spoil


def revised(relative: float) -> Callable[[str, Tensor], Tensor]:
    def change(_name: str, weight: Tensor) -> Tensor:
        noise = torch.randn_like(weight, dtype=torch.float32)
        return weight + relative * weight.float().std() * noise if weight.dim() > 1 else weight

    return change


def int8(name: str, weight: Tensor) -> Tensor:
    """Symmetric, per output channel, layers' matrices alone."""
    if weight.dim() < 2 or "layers." not in name:
        return weight
    scale = weight.float().abs().amax(-1, keepdim=True) / 127
    return (weight.float() / scale).round() * scale


def fp8(name: str, weight: Tensor) -> Tensor:
    """e4m3 with one scale a matrix, layers' matrices alone."""
    if weight.dim() < 2 or "layers." not in name:
        return weight
    scale = weight.float().abs().max() / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def rounded(dtype: torch.dtype) -> Callable[[Good], Spoiled]:
    """Features went through another dtype on their way."""
    return lambda good: each_slot(good, lambda _s, _n, part: part.to(dtype).to(part.dtype), _all(good))


def _dead(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
    return torch.zeros_like(part)


def constant(slot: int) -> Callable[[Good], Spoiled]:
    def spoil(good: Good) -> Spoiled:
        row = slots(good, good.samples[0])[slot][3]
        return each_slot(good, lambda _s, _n, part: row.expand_as(part), [slot])

    return spoil


def identical(a: int, b: int) -> Callable[[Good], Spoiled]:
    return lambda good: each_slot(good, lambda s, _n, _p: slots(good, s)[a], [b])


def poisoned(value: float) -> Callable[[Good], Spoiled]:
    """One element of one sample."""

    def spoil(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
        part[5, 7] = value
        return part

    return lambda good: each_slot(good, spoil, [1], only=[2])


def damaged(rows: Sequence[int], how: str, slot: int = 1, only: int = 3) -> Callable[[Good], Spoiled]:
    """A few rows of one sample. how: noise of the rows' size, or half of each overwritten."""

    def spoil(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(5)
        for row in rows:
            if how == "noise":
                part[row] = torch.randn(part[row].shape, generator=draw).to(part.dtype) * part.float().std()
            else:
                part[row, : part.shape[1] // 2] = part[row + 4, : part.shape[1] // 2].clone()
        return part

    return lambda good: each_slot(good, spoil, [slot], [only])


def top1_shifted(good: Good) -> Spoiled:
    """target_top1 and target_lse one row late, as if row t held what is predicted at t-1."""
    samples = []
    for s in good.samples:
        logits = good.states(s).logits.roll(1, 0)
        unset = s.target_top1 < 0
        samples.append(
            replace(
                s,
                target_top1=torch.where(unset, -1, logits.argmax(-1).int()),
                target_lse=torch.where(unset, torch.nan, logits.logsumexp(-1)),
            )
        )
    return Spoiled(identity=good.identity, samples=samples)


def logits_of_pre_norm(good: Good) -> Spoiled:
    """lm_head applied to the pre-norm state."""
    samples = []
    for s in good.samples:
        with torch.no_grad():
            logits = good.model.lm_head(good.states(s).taps[after(good.num_layers - 1)]).float()
        unset = s.target_top1 < 0
        samples.append(
            replace(
                s,
                target_top1=torch.where(unset, -1, logits.argmax(-1).int()),
                target_lse=torch.where(unset, torch.nan, logits.logsumexp(-1)),
            )
        )
    return Spoiled(identity=good.identity, samples=samples)


def all_ranks_but(missing: int, tp: int, block: str) -> Callable[[Good], Spoiled]:
    """One rank's share of the sum is lost, all others are there."""

    def spoil(good: Good) -> Spoiled:
        def lose(sample: Sample, slot: int, part: Tensor) -> Tensor:
            layer = good.identity.taps[slot].layer
            others = partial_outputs(good, sample, layer, block, "tp", missing, tp)  # all but the missing rank's
            whole = partial_outputs(good, sample, layer, block, "tp", tp, tp)  # a rank that holds nothing
            return part - (whole - others)

        return each_slot(good, lose, _all(good))

    return spoil


def before_mlp(good: Good) -> Spoiled:
    """Taken in the middle of the layer: attention added, the MLP not yet."""

    def middle(sample: Sample, slot: int, part: Tensor) -> Tensor:
        layer = good.identity.taps[slot].layer
        return part - partial_outputs(good, sample, layer, "mlp", "tp", 2, 2)

    return each_slot(good, middle, _all(good))


def after_next_norm(good: Good) -> Spoiled:
    """Taken behind the next layer's input norm."""

    @torch.no_grad()
    def normed(_sample: Sample, slot: int, part: Tensor) -> Tensor:
        return good.model.model.layers[good.identity.taps[slot].layer + 1].input_layernorm(part)

    return each_slot(good, normed, _all(good))


def scaled(by: float) -> Callable[[Good], Spoiled]:
    return lambda good: each_slot(good, lambda _s, _n, part: part * by, _all(good))


def halves_swapped(good: Good) -> Spoiled:
    """The two ranks' parts of a hidden state gathered in the wrong order."""
    return each_slot(good, lambda _s, _n, part: part.roll(part.shape[-1] // 2, -1), _all(good))


def interleaved(good: Good) -> Spoiled:
    """[T, H, A] where the cat is [T, A, H]."""
    samples = []
    for s in good.samples:
        cat = s.features.view(s.num_tokens, len(good.identity.taps), -1)
        samples.append(replace(s, features=cat.transpose(1, 2).reshape(s.num_tokens, -1).contiguous()))
    return Spoiled(identity=good.identity, samples=samples)


def some_samples(spoil: Callable[[Good], Spoiled], which: Sequence[int]) -> Callable[[Good], Spoiled]:
    """The same defect in a few of the samples only, e.g. one worker's."""

    def part(good: Good) -> Spoiled:
        spoiled = spoil(good)
        pairs = enumerate(zip(good.samples, spoiled.samples, strict=True))
        return replace(spoiled, samples=[bad if n in which else fine for n, (fine, bad) in pairs])

    return part


def rows_from(start: int, by: int) -> Callable[[Good], Spoiled]:
    """Rows are right up to ``start`` and one late (by 1) or early (-1) from there: a chunk's border counts one twice,
    or leaves one out."""

    def shift(_sample: Sample, _slot: int, part: Tensor) -> Tensor:
        part[start:] = part[start - 1 : -1].clone() if by > 0 else part[start:].roll(-1, 0)
        return part

    return lambda good: each_slot(good, shift, _all(good))


def last_hidden_shifted(good: Good) -> Spoiled:
    return Spoiled(
        identity=good.identity, samples=[replace(s, last_hidden=s.last_hidden.roll(1, 0)) for s in good.samples]
    )


def one_layer_of(relative: float) -> Callable[[str, Tensor], Tensor]:
    """Another revision that differs in layer 2 alone."""
    change = revised(relative)
    return lambda name, weight: change(name, weight) if "layers.2." in name else weight


DEFECTS: dict[str, Callable[[Good], Spoiled]] = {
    "one slot a layer late": tap_instead(layers_off(1), [0]),
    "one slot a layer early": tap_instead(layers_off(-1), [1]),
    "all slots a layer late": tap_instead(layers_off(1)),
    "all slots a layer early": tap_instead(layers_off(-1)),
    "two neighbouring slots swapped": swapped(1, 2),
    "first and last slot swapped": swapped(0, 2),
    "embedding for a layer": tap_instead(lambda good, slot: EMBED, [0]),
    "post-norm declared pre-norm": norm_state("after"),
    "pre-norm declared post-norm": norm_state("final"),
    "final for after:L-1": final_in_features("after"),
    "after:L-1 for final": final_in_features("final"),
    "partial attention, all slots": partial_sum("self_attn", None),
    "partial attention, one slot": partial_sum("self_attn", [1]),
    "partial attention, 1 of 4 ranks": partial_sum("self_attn", None, rank=2, tp=4),
    "partial MLP, all slots": partial_sum("mlp", None),
    "partial MLP, one slot": partial_sum("mlp", [1]),
    "partial MLP, 1 of 4 ranks": partial_sum("mlp", None, rank=2, tp=4),
    "partial experts (expert parallel)": partial_sum("mlp", None, part="ep"),
    "layer's output without residual": no_residual,
    "rows one late": rolled(1),
    "rows one early": rolled(-1),
    "rows one late, one slot": rolled(1, [1]),
    "rows one late, zero first": rolled(1, fill="zero"),
    "mask one late": mask_shifted(1),
    "mask one early": mask_shifted(-1),
    "mask on the user": mask_of_users,
    "rows of another sample": rows_of_another(0, 10_000),
    "half the rows of another sample": rows_of_another(10, 10_000),
    "two samples mixed up": batch_mixed,
    "prefix zero": leading(8, "zero"),
    "prefix zero, one sample": leading(8, "zero", [3]),
    "prefix stale": leading(8, "stale"),
    "prefix missing": leading(8, "missing"),
    "prefix not attended": prefix_forgotten(8),
    "tail zero": tail(6, "zero"),
    "tail garbage": tail(6, "garbage"),
    "tail garbage, one sample": tail(6, "garbage", [3]),
    "tail repeated": tail(6, "repeated"),
    "revision 1e-1": captured_by(revised(1e-1)),
    "revision 1e-2": captured_by(revised(1e-2)),
    "revision 1e-3": captured_by(revised(1e-3)),
    "weights int8": captured_by(int8),
    "weights fp8": captured_by(fp8),
    "features through fp16": rounded(torch.float16),
    "features through bf16": rounded(torch.bfloat16),
    "features through fp8": rounded(torch.float8_e4m3fn),
    "dead tap": lambda good: each_slot(good, _dead, [1]),
    "constant tap": constant(1),
    "two identical taps": identical(0, 1),
    "NaN": poisoned(float("nan")),
    "Inf": poisoned(float("inf")),
    "top-1 one row late": top1_shifted,
    "logits of the pre-norm state": logits_of_pre_norm,
    "all ranks but one, attention": all_ranks_but(3, 4, "self_attn"),
    "all ranks but one, MLP": all_ranks_but(3, 4, "mlp"),
    "before the MLP": before_mlp,
    "after the next norm": after_next_norm,
    "scaled by 2": scaled(2.0),
    "ranks' halves swapped": halves_swapped,
    "taps interleaved": interleaved,
    "one sample a layer late": some_samples(tap_instead(layers_off(1)), [4]),
    "half the samples a layer late": some_samples(tap_instead(layers_off(1)), range(4)),
    "one sample swapped": some_samples(swapped(1, 2), [4]),
    "one sample's rows late": some_samples(rolled(1), [4]),
    "rows late from 12 on": rows_from(12, 1),
    "rows early from 12 on": rows_from(12, -1),
    "last_hidden one late": last_hidden_shifted,
    "revision 1e-1 in one layer": captured_by(one_layer_of(1e-1)),
    "rows three late": rolled(3),
    "one garbage row": damaged([9], "noise"),
    "three garbage rows": damaged([6, 11, 15], "noise"),
    "half a row overwritten": damaged([9], "half"),
    "all ranks but one of 8, attention": all_ranks_but(5, 8, "self_attn"),
}
