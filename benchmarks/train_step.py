"""One training step alone, on random data that lies on the device: what the reader of `eyas train` has to keep up with.

    python benchmarks/train_step.py [--loss kl|tv|lk] [--steps 20] [--ttt-steps 3] [--batch-tokens 8192]
        [--document-tokens 2048] [--trained 1.0] [--layers 1] [--profile TRACE.json]
    python benchmarks/train_step.py --tiny

The draft is Llama-3.1-8B-shaped: hidden size 4096, three taps, 32 heads and 8 key/value heads of 128, MLP 14 336,
frozen lm_head of 32 000 ids; bf16 with float32 master weights, torch's fused AdamW. --tiny is a draft that a CPU runs
at once, to see that it works. The first two steps compile and are not timed.

TFLOP/s counts what the mathematics needs (2 per multiply-add; forward, and both gradients where both exist; attention
causal), whatever is computed twice or saved. Forward includes the losses' gradients with respect to hidden states.
"""

from __future__ import annotations

import argparse
import math
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eyas.train.draft import DraftModel
from eyas.train.loss import LOSSES, TargetHead
from eyas.train.rope import rotary_table
from eyas.train.shape import DraftShape
from eyas.train.target_parts import TargetParts
from eyas.train.ttt import loss_rows, ttt_forward

WARM_UP = 2


def llama_8b(num_layers: int) -> DraftShape:
    return DraftShape(
        hidden_size=4096, target_hidden_size=4096, num_taps=3, intermediate_size=14336, num_layers=num_layers,
        num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None,
        max_positions=131072, vocab_size=128256, draft_vocab_size=32000,
    )  # fmt: skip


def tiny(num_layers: int) -> DraftShape:
    return DraftShape(
        hidden_size=64, target_hidden_size=64, num_taps=3, intermediate_size=128, num_layers=num_layers, num_heads=4,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_positions=512,
        vocab_size=512, draft_vocab_size=256,
    )  # fmt: skip


def flops(shape: DraftShape, num_tokens: int, document_tokens: int, num_rows: int, num_steps: int) -> float:
    """Of one step: forward, gradients of trained weights, gradients of activations."""
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    key_values = 2 * shape.num_kv_heads * shape.head_dim
    per_layer = width * (heads + key_values) + heads * width + 3 * width * shape.intermediate_size
    layers = shape.num_layers * per_layer + width * (heads + key_values)  # the first layer's input is twice as wide
    attention = shape.num_layers * 2 * heads * document_tokens / 2  # multiply-adds of a row, scores and values
    fc = shape.num_taps * shape.target_hidden_size * width
    head = shape.draft_vocab_size * width
    steps = num_steps * (num_tokens * (3 * layers + 3 * attention) + num_rows * 2 * head)
    target = num_rows * shape.draft_vocab_size * shape.target_hidden_size
    return 2 * (steps + num_tokens * 2 * fc + target)


def random_batch(
    shape: DraftShape, num_tokens: int, document_tokens: int, trained: float, dtype: torch.dtype, device: str
) -> tuple[Any, Tensor]:
    """A batch as the reader leaves it on the device, and its target rows."""
    drawn = torch.Generator().manual_seed(0)
    rows = torch.arange(num_tokens)
    batch = SimpleNamespace(
        input_ids=torch.randint(shape.vocab_size, (num_tokens,), generator=drawn),
        loss_mask=torch.rand(num_tokens, generator=drawn) < trained,
        document=(rows // document_tokens).int(),
        position=rows % document_tokens,
        features=torch.randn(num_tokens, shape.num_taps * shape.target_hidden_size, generator=drawn).to(dtype),
        last_hidden=torch.randn(num_tokens, shape.target_hidden_size, generator=drawn).to(dtype),
        target_top1=torch.randint(shape.vocab_size, (num_tokens,), generator=drawn),
        target_lse=torch.full((num_tokens,), math.log(shape.vocab_size) + 0.5),  # of normal logits
        num_tokens=num_tokens,
    )
    target_rows = loss_rows(batch.loss_mask, batch.document)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(batch).items()}
    return SimpleNamespace(**moved), target_rows.to(device)


def make_head(shape: DraftShape, dtype: torch.dtype, device: str) -> TargetHead:
    hidden_size = shape.target_hidden_size
    parts = TargetParts(
        embedding=torch.randn(shape.vocab_size, hidden_size, device=device, dtype=dtype),
        head=torch.randn(shape.draft_vocab_size, hidden_size, device=device, dtype=dtype) * hidden_size**-0.5,
        head_bias=None, norm_weight=torch.ones(hidden_size, device=device), norm_bias=None, norm_kind="rms",
        norm_eps=1e-5, logit_scale=1.0, softcap=None,
    )  # fmt: skip
    ids = torch.linspace(0, shape.vocab_size - 1, shape.draft_vocab_size).long().to(device)
    return TargetHead(parts=parts, ids=ids, last_hidden_is_final=False)


class Clock:
    """Milliseconds between marks, on the device's own clock where it has one."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        if self._on_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=LOSSES, default="kl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--document-tokens", type=int, default=2048)
    parser.add_argument("--trained", type=float, default=1.0, help="share of tokens that are training targets")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a small draft and batch, on the CPU where there is no GPU")
    parser.add_argument("--profile", help="write a trace of one step there, for chrome://tracing or Perfetto")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("no GPU here: give --tiny")
    dtype = torch.bfloat16
    if options.tiny:
        options.batch_tokens, options.document_tokens = 512, 128
    shape = (tiny if options.tiny else llama_8b)(options.layers)
    torch.manual_seed(0)
    with torch.device(device):
        model = DraftModel(shape)
    head = make_head(shape, dtype, device)
    model.use_target(head.parts.embedding, head.parts.head)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
    batch, rows = random_batch(
        shape, options.batch_tokens, options.document_tokens, options.trained, dtype, device
    )  # fmt: skip
    rotary = rotary_table(shape, options.document_tokens + options.ttt_steps, device)

    def step(clock: Clock) -> Tensor:
        clock.mark()
        out = ttt_forward(
            model, batch, head, rows=rows, rotary=rotary, num_steps=options.ttt_steps, loss=options.loss
        )  # fmt: skip
        clock.mark()
        out.loss.backward()  # type: ignore[no-untyped-call]
        clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
        return out.loss.detach()

    started = time.perf_counter()
    for _ in range(WARM_UP):
        loss = step(Clock(device))
    print(f"first {WARM_UP} steps, compiling: {time.perf_counter() - started:.1f} s, loss {float(loss):.4f}")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clocks = [Clock(device) for _ in range(options.steps)]
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for clock in clocks:
        loss = step(clock)
    if device == "cuda":
        torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / options.steps
    forward, backward, update = (sum(gaps) / options.steps for gaps in zip(*(c.gaps() for c in clocks), strict=True))
    done = flops(shape, options.batch_tokens, options.document_tokens, int((rows >= 0).sum()), options.ttt_steps)
    print(f"{wall * 1e3:.1f} ms a step: forward {forward:.1f}, backward {backward:.1f}, optimizer {update:.1f}")
    print(f"{options.batch_tokens / wall:,.0f} tokens/s")
    print(f"{done / wall / 1e12:.1f} TFLOP/s ({done / 1e12:.2f} TFLOP a step)")
    print(f"loss {float(loss):.4f}, {sum(p.numel() for p in trained) / 1e6:.1f} M trained parameters")
    if device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB on {torch.cuda.get_device_name()}")
    if options.profile:
        with torch.profiler.profile() as profile:
            step(Clock(device))
        profile.export_chrome_trace(options.profile)
        key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=60))


if __name__ == "__main__":
    main()
