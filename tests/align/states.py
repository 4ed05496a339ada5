"""Datasets of hidden states made without eyas' own capture: transformers' output_hidden_states, and edits of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from eyas.align.replay import replay_report
from eyas.align.stored import DatasetSource
from eyas.align.verdict import Report
from eyas.capture.engines.transformers.load import hash_weights
from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TargetIdentity, TokenizerIdentity, create_or_match
from eyas.shards.sample import Sample, sample_id
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import EMBED, FINAL, Tap, after

VOCAB = 128
LAYERS = 6
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**TEXT),
    "Qwen3MoeForCausalLM": lambda: transformers.Qwen3MoeConfig(
        **TEXT, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True
    ),
    "DeepseekV3ForCausalLM": lambda: transformers.DeepseekV3Config(
        **TEXT,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
}


def build_target(folder: Path, family: str, seed: int = 0, **change: Any) -> Path:
    """A tiny random checkpoint in float32."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    for name, value in change.items():
        setattr(config, name, value)
    model = getattr(transformers, family)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh weights are so small that all layers would be alike; norms at exactly 1 hide a missed scale.
            parameter.add_(torch.randn_like(parameter) * (0.15 if "norm" in name else 0.1))
    model.save_pretrained(folder)
    return folder


@dataclass
class World:
    """A target run by transformers alone, and token samples: everything an edit may want."""

    model: Any
    samples: list[Tensor]  # int64 ids [T]
    masks: list[Tensor]  # uint8 [T]
    weights_hash: str | None = None  # of the target's files
    runs: dict[int, dict[Tap, Tensor]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def layers(self) -> Any:
        return self.model.model.layers

    def states(self, n: int) -> dict[Tap, Tensor]:
        """All taps of sample n, [T, H] in the model's dtype."""
        if n not in self.runs:
            self.runs[n] = self.run(self.samples[n])
        return self.runs[n]

    def run(self, ids: Tensor, model: Any = None) -> dict[Tap, Tensor]:
        model = self.model if model is None else model
        kept: list[Tensor] = []
        handle = model.model.layers[-1].register_forward_hook(lambda m, a, o: kept.append(o[0] if o.dim() == 3 else o))
        with torch.no_grad():
            output = model(ids[None], output_hidden_states=True, use_cache=False)
        handle.remove()
        hidden = [state[0] for state in output.hidden_states]
        last = len(hidden) - 2
        return {
            EMBED: hidden[0],
            **{after(j): hidden[j + 1] for j in range(last)},
            after(last): kept[0],
            FINAL: hidden[-1],
        }

    def run_changed(self, n: int, change: Callable[[Any], None]) -> dict[Tap, Tensor]:
        """All taps of sample n of a copy of the model that was changed."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            change(model)
        return self.run(self.samples[n], model)

    def logits(self, final: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.lm_head(final).float()  # type: ignore[no-any-return]


def make_world(
    target: Path, dtype: str, lengths: Sequence[int] = (40, 48, 33, 56, 37, 44, 60, 50), seed: int = 1
) -> World:
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    vocabulary = model.config.vocab_size
    ids = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    masks = [torch.randint(0, 2, (length,), generator=generator, dtype=torch.uint8) for length in lengths]
    return World(model, ids, masks, hash_weights(str(target), None))


# An edit changes what one sample stores: (world, index of the sample, stored tensors by name) -> None.
Edit = Callable[[World, int, dict[str, Tensor]], None]


def store(
    dataset: Path,
    world: World,
    taps: Sequence[Tap],
    *,
    last_hidden: Tap | None = None,
    dtype: str | None = None,
    edit: Edit | None = None,
    statistics: bool = True,
    says_weights: bool = True,
) -> Path:
    """Write the world's states as an eyas dataset that declares ``taps``; ``edit`` spoils them. Its identity holds the
    target's checksum, or none with says_weights=False."""
    config, model_dtype = world.model.config, str(world.model.dtype).removeprefix("torch.")
    dtype = dtype or model_dtype
    identity = DatasetIdentity(
        stage="captured",
        taps=tuple(taps),
        last_hidden=last_hidden,
        dtype=dtype,
        codec="raw",
        target_statistics=statistics,
        target=TargetIdentity(
            name="tiny",
            revision=None,
            config_hash="0" * 32,
            weights_hash=world.weights_hash if says_weights else None,
            model_class=type(world.model).__name__,
            num_layers=world.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            weight_dtype=model_dtype,
            quantization=None,
            final_norm="RMSNorm",
            final_norm_eps=1e-6,
            logit_scale=1.0,
            logit_softcap=None,
            lm_head_bias=False,
            lm_head_rows=config.vocab_size,
        ),
        tokenizer=TokenizerIdentity(files_hash="0" * 32, chat_template_hash=None, probe_hash="0" * 32),
        prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=len(world.samples)),
    )
    create_or_match(dataset, identity)
    with ShardWriter(dataset, identity=identity, worker="w", metadata={}) as writer:
        for n, (ids, mask) in enumerate(zip(world.samples, world.masks, strict=True)):
            states = world.states(n)
            stored = {f"slot {k}": states[tap].clone() for k, tap in enumerate(taps)}
            if last_hidden is not None:
                stored["last_hidden"] = states[last_hidden].clone()
            logits = world.logits(states[FINAL])
            predicts = torch.zeros(len(ids), dtype=torch.bool)
            predicts[:-1] = mask[1:].bool()
            stored["target_top1"] = torch.where(predicts, logits.argmax(-1), -1)
            stored["target_lse"] = torch.where(predicts, logits.logsumexp(-1), torch.nan)
            stored["loss_mask"] = mask.clone()
            if edit is not None:
                edit(world, n, stored)
            wide = getattr(torch, dtype)
            writer.add(
                Sample(
                    sample_id=sample_id(ids.int().numpy(), stored["loss_mask"].numpy()),
                    input_ids=ids.int(),
                    loss_mask=stored["loss_mask"],
                    features=torch.cat([stored[f"slot {k}"] for k in range(len(taps))], 1).to(wide).contiguous(),
                    last_hidden=None if last_hidden is None else stored["last_hidden"].to(wide).contiguous(),
                    target_top1=stored["target_top1"].int() if statistics else None,
                    target_lse=stored["target_lse"].float() if statistics else None,
                )
            )
    return dataset


def replay(dataset: Path, target: Path, **options: Any) -> Report:
    source = DatasetSource(Dataset.open(dataset))
    return Report(tuple(replay_report(source, str(target), device="cpu", **options)))
