"""A target's frozen parts, a standard dataset of random states, and the same data as speculators reads it.

The target is a config, a tokenizer of a few words, and random bfloat16 embedding, lm_head and final norm: no trainer
needs more of it. States are standard normal; target_top1 and target_lse are those of the random lm_head.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eyas.capture.engines.transformers.load import hash_weights, read_outline
from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity
from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TargetIdentity, create_or_match
from eyas.shards.ledger import read_ledgers
from eyas.shards.sample import Sample, sample_id
from eyas.shards.token_counts import count_targets, write_token_counts
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import after

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512, "rope_theta": 10_000.0,
}  # fmt: skip
TAPS = (after(1), after(15), after(28))


def make_target(folder: Path, shape: dict[str, int | float]) -> None:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {key: value for key, value in shape.items() if key != "rope_theta"}
    theta = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    config = LlamaConfig(**sizes, rope_parameters=theta, tie_word_embeddings=False, eos_token_id=2, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    draw = torch.Generator(device).manual_seed(0)
    V, H = int(shape["vocab_size"]), int(shape["hidden_size"])

    def matrix() -> torch.Tensor:  # [V, H]
        return (torch.randn(V, H, device=device, generator=draw) * 0.02).bfloat16().cpu()

    save_file(
        {
            "model.embed_tokens.weight": matrix(),
            "lm_head.weight": matrix(),
            "model.norm.weight": torch.ones(H, dtype=torch.bfloat16),
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def make_dataset(folder: Path, target: Path, *, num_samples: int, length: int) -> None:
    """A standard dataset of ``num_samples`` random samples; every token but the first is trained."""
    from safetensors.torch import load_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    outline = read_outline(str(target))
    V, H = outline.vocab_size, outline.hidden_size
    identity = DatasetIdentity(
        stage="standard",
        taps=TAPS,
        last_hidden=after(outline.num_layers - 1),
        dtype="bfloat16",
        codec="raw",
        target_statistics=True,
        target=TargetIdentity(
            name=str(target),
            revision=None,
            config_hash=outline.config_hash,
            weights_hash=hash_weights(str(target), None),
            model_class=outline.model_class,
            num_layers=outline.num_layers,
            hidden_size=H,
            vocab_size=V,
            weight_dtype="bfloat16",
            quantization=None,
            final_norm="LlamaRMSNorm",
            final_norm_eps=1e-6,
            logit_scale=1.0,
            logit_softcap=None,
            lm_head_bias=False,
            lm_head_rows=V,
        ),
        tokenizer=tokenizer_identity(target, load_tokenizer(target, None, False)),
        prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=num_samples),
    )
    create_or_match(folder, identity)
    head = load_file(target / "model.safetensors")["lm_head.weight"].to(device)  # [V, H]
    draw = torch.Generator(device).manual_seed(1)
    with ShardWriter(folder, identity=identity, worker="random", metadata={}) as writer:
        for row in range(num_samples):
            # Zipf-like ids, so that a draft vocabulary covers most of them.
            ids = np.minimum(np.random.default_rng(row).zipf(1.2, length) + 2, V - 1).astype(np.int32)
            mask = (np.arange(length) >= 1).astype(np.uint8)
            states = torch.randn(length, len(TAPS) + 1, H, device=device, generator=draw).bfloat16()  # [T, A+1, H]
            last = states[:, -1].float()
            final = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-6)
            logits = final.bfloat16() @ head.T  # [T, V]
            judged = torch.zeros(length, dtype=torch.bool)
            judged[:-1] = torch.from_numpy(mask[1:] == 1)
            top1 = torch.where(judged, logits.argmax(-1).int().cpu(), -1)
            lse = torch.where(judged, logits.float().logsumexp(-1).cpu(), torch.nan)
            writer.add(
                Sample(
                    sample_id=sample_id(ids, mask),
                    input_ids=torch.from_numpy(ids),
                    loss_mask=torch.from_numpy(mask),
                    features=states[:, :-1].flatten(1).cpu(),
                    last_hidden=states[:, -1].cpu().contiguous(),
                    target_top1=top1.int(),
                    target_lse=lse.float(),
                )
            )
    entries = read_ledgers(folder).entries
    counts = np.zeros(V, dtype=np.int64)
    for ids_and_counts in count_targets(folder, entries, V, workers=4):
        np.add.at(counts, ids_and_counts[0], ids_and_counts[1])
    write_token_counts(folder, counts, entries)


def speculators_layer_ids() -> list[int]:
    return [int(str(tap).split(":")[1]) + 1 for tap in TAPS]
