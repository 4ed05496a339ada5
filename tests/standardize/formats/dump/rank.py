"""One rank of a tensor-parallel Llama whose patch dumps taps. Run by test_parallel.py with torchrun's environment.

The model is written out by hand: heads and the MLP's columns are split, each layer's two outputs are partial sums that
an all-reduce makes whole, and prefill goes in chunks over a cache of keys and values.

T tokens of a chunk, H hidden size, D of a head, N heads of this rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

PLACEMENTS = ("replicated", "token-sharded", "hidden-sharded", "partial-sums")
LAYERS = (1, 3, 6)
CHUNK = 5


class ParallelLlama:
    def __init__(self, target: Path) -> None:
        self.config = json.loads((target / "config.json").read_text())
        self.weights = load_file(target / "model.safetensors")
        self.rank, self.tp = dist.get_rank(), dist.get_world_size()
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def columns(self, name: str) -> torch.Tensor:
        return self.weights[name].chunk(self.tp, dim=0)[self.rank]

    def rows(self, name: str) -> torch.Tensor:
        return self.weights[name].chunk(self.tp, dim=1)[self.rank]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x [T, N, D], tokens from position ``start``."""
        width = x.shape[-1]
        theta = self.config["rope_parameters"]["rope_theta"]
        turn = theta ** -(torch.arange(0, width, 2).float() / width)
        angles = (torch.arange(start, start + len(x)).float()[:, None] * turn).repeat(1, 2)[:, None]  # [T, 1, D]
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()

    def attention(self, x: torch.Tensor, n: int, start: int) -> torch.Tensor:
        """The partial sum of layer n's attention, [T, H]."""
        name = f"model.layers.{n}.self_attn."
        width = self.config["head_dim"]
        q, k, v = (
            (x @ self.columns(f"{name}{part}_proj.weight").T).unflatten(-1, (-1, width)) for part in "qkv"
        )  # [T, N, D]
        q, k = self.rotate(q, start), self.rotate(k, start)
        if start:
            k, v = torch.cat((self.cache[n][0], k)), torch.cat((self.cache[n][1], v))
        self.cache[n] = k, v
        mask = torch.ones(len(q), len(k)).tril(start).bool()
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask
        )
        return out.transpose(0, 1).flatten(1) @ self.rows(f"{name}o_proj.weight").T

    def forward(self, ids: torch.Tensor, start: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By layer: this rank's part before the all-reduce (the residual is rank 0's), and what that makes, [T, H]."""
        x = self.weights["model.embed_tokens.weight"][ids]
        taps = {}
        for n in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{n}."
            attended = self.attention(self.norm(x, f"{name}input_layernorm.weight"), n, start)
            dist.all_reduce(attended)
            x = x + attended
            normed = self.norm(x, f"{name}post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(normed @ self.columns(f"{name}mlp.gate_proj.weight").T)
            up = normed @ self.columns(f"{name}mlp.up_proj.weight").T
            part = (gate * up) @ self.rows(f"{name}mlp.down_proj.weight").T
            if self.rank == 0:
                part = part + x
            x = part.clone()
            dist.all_reduce(x)
            taps[n] = part, x
        return taps


def dump(out: Path, name: str, model: ParallelLlama, sample: dict[str, Any]) -> None:
    """A sample's chunks, as four patches would write them."""
    rank, tp = model.rank, model.tp
    ids = torch.tensor(sample["input_ids"])
    for step, start in enumerate(range(0, len(ids), CHUNK)):
        chunk = ids[start : start + CHUNK]
        taps = model.forward(chunk, start)
        rows = -(-len(chunk) // tp)
        for layer in (*LAYERS, model.config["num_hidden_layers"] - 1):
            part, whole = taps[layer]
            padded = torch.nn.functional.pad(whole, (0, 0, 0, rows * tp - len(chunk)), value=7.0)
            what = "last_hidden" if layer not in LAYERS else f"layer_{layer}"
            path = folder(out, "replicated", f"rank{rank}/{what}") / f"req-{name}_step{step}.pt"
            torch.save(whole[None], path)  # [1, T, H]
            path = folder(out, "token-sharded", name) / f"{what}.tp{rank}.chunk{step:03}.safetensors"
            save_file({"hidden_states": padded[rank * rows : (rank + 1) * rows].clone()}, path)
            path = folder(out, "hidden-sharded", what) / f"{name}-step{step}-rank{rank}.npy"
            np.save(path, whole.chunk(tp, dim=1)[rank].numpy())
            content = {"hidden_states": part.clone(), "token_ids": chunk.clone()}
            torch.save(content, folder(out, "partial-sums", f"rank_{rank}") / f"{name}.{what}.step{step}.pt")
        if rank == 0:
            mask = torch.tensor(sample["loss_mask"][start : start + CHUNK], dtype=torch.uint8)
            torch.save(chunk.clone(), folder(out, "replicated", "ids") / f"req-{name}_step{step}.pt")
            torch.save(mask, folder(out, "replicated", "loss_mask") / f"req-{name}_step{step}.pt")
            save_file({"ids": chunk.clone()}, folder(out, "token-sharded", name) / f"tokens.chunk{step:03}.safetensors")
            np.save(folder(out, "hidden-sharded", "input_ids") / f"{name}.npy", ids.numpy())


def folder(*parts: str | Path) -> Path:
    made = Path(*parts)
    made.mkdir(parents=True, exist_ok=True)
    return made


def main() -> None:
    target, samples, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for name, sample in json.loads(samples.read_text()).items():
        dump(out, name, ParallelLlama(target), sample)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
