"""Document-causal attention with its log-sum-exp, and the attention of training-time-test steps made of it.

At step k the draft has, for row t, the keys of step 0 up to t (features of the target, as in the engine's cache) and
its own keys of steps 1..k at row t. So the first part is the same attention at every step, only the query moves, and
each later step adds one scalar logit per head: no mask K times as long is needed. The parts are merged by their
log-sum-exp, through which the gradient flows.

On CUDA the first part is FlexAttention, whose backward takes the gradient of the log-sum-exp. On the CPU neither
FlexAttention has a backward nor scaled_dot_product_attention a log-sum-exp, so a small autograd function does both.

Shapes: T rows, heads = kv_heads * G (query head h reads key head h // G), d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

_BLOCK = 128  # rows of a block of FlexAttention's mask
_CPU_QUERY_ROWS = 256  # rows of queries whose scores exist at one time on the CPU

Bounds: TypeAlias = tuple[tuple[int, int], ...]
Documents: TypeAlias = BlockMask | Bounds  # what may attend to what: on CUDA, and on the CPU


def prepare_documents(document: Tensor) -> Documents:
    """What every step and layer of a batch shares. document: int [T], ascending, -1 in the padding at the end.

    A padding row attends to itself alone.
    """
    return block_mask(document) if document.is_cuda else document_bounds(document)


def document_bounds(document: Tensor) -> Bounds:
    """(first row, row after the last) of each document; each padding row is its own."""
    starts = torch.ones(len(document), dtype=torch.bool)
    starts[1:] = (document[1:] != document[:-1]) | (document[1:] < 0)
    edges = [*torch.nonzero(starts).flatten().tolist(), len(document)]
    return tuple(pairwise(edges))


def block_mask(document: Tensor) -> BlockMask:
    """The mask for FlexAttention, straight from the documents' order: no [T, T] mask is made, nothing waits for the
    device, and shapes depend on T alone."""
    num_rows = len(document)
    rows = torch.arange(num_rows, device=document.device)
    own = torch.where(document < 0, -1 - rows, document.long())  # a padding row is a document of its own
    num_blocks = -(-num_rows // _BLOCK)
    none = torch.iinfo(torch.int64).max  # the number of padding, so that numbers ascend
    padded = F.pad(document.long(), (0, num_blocks * _BLOCK - num_rows), value=-1)
    padded = torch.where(padded < 0, none, padded).view(num_blocks, _BLOCK)
    first, last = padded[:, 0], padded[:, -1]  # [blocks] each
    blocks = torch.arange(num_blocks, device=document.device)
    before = blocks[:, None] > blocks  # [query blocks, key blocks]
    touch = (blocks[:, None] == blocks) | (before & (first[:, None] <= last) & (first[:, None] < none))
    full = before & (last[:, None] == first) & (first < none)  # both of one document throughout

    def ordered(kept: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and indices of the kept key blocks of each query block, int32 [1, 1, Q] and [1, 1, Q, KV]."""
        order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
        return kept.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (own[query] == own[key]) & (query >= key)

    return BlockMask.from_kv_blocks(
        *ordered(touch & ~full),
        *ordered(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_rows, num_rows),
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """query [T, heads, d], key and value [T, kv_heads, d] -> output [T, heads, d], natural log-sum-exp of the scaled
    scores [T, heads] (float32 at least). Both are differentiable."""
    if not isinstance(documents, BlockMask):
        return _DocumentAttention.apply(query, key, value, documents)  # type: ignore[no-any-return, no-untyped-call]
    output, aux = flex_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        block_mask=documents,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )  # [1, heads, T, d]
    assert aux.lse is not None
    return output[0].transpose(0, 1), aux.lse[0].transpose(0, 1)


def merge_own_keys(
    query: Tensor, output: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Tensor:
    """Add to an attention (output [T, heads, d], lse [T, heads]) one key and value per row for each later step.

    query [T, heads, d], keys and values [T, kv_heads, d] each -> [T, heads, d]; computed in float32 at least.
    """
    num_rows, num_heads, width = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).view(num_rows, keys[0].shape[1], -1, width)  # [T, kv_heads, G, d]
    own = [(grouped * key.to(wide)[:, :, None]).sum(-1) / math.sqrt(width) for key in keys]  # [T, kv_heads, G]
    logits = torch.stack([lse, *(scores.view(num_rows, num_heads) for scores in own)], dim=-1)
    shares = logits.softmax(-1).view(*grouped.shape[:3], -1)  # [T, kv_heads, G, 1 + k]
    merged = shares[..., :1] * output.to(wide).view_as(grouped)
    for j, value in enumerate(values, 1):
        merged = merged + shares[..., j : j + 1] * value.to(wide)[:, :, None]
    return merged.view_as(query).to(query.dtype)


class StepAttention:
    """The attention of one batch's training-time test, for all layers: called once a layer and step, in order.

    Each layer keeps its own keys and values of step 0, and of every later step.
    """

    def __init__(self, documents: Documents, num_layers: int) -> None:
        self._documents = documents
        self._keys: list[list[Tensor]] = [[] for _ in range(num_layers)]  # layer, step -> [T, kv_heads, d]
        self._values: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d], after RoPE -> [T, heads, d]."""
        keys, values = self._keys[layer], self._values[layer]
        keys.append(key)
        values.append(value)
        output, lse = causal_attention(query, keys[0], values[0], self._documents)
        return merge_own_keys(query, output, lse, keys[1:], values[1:]) if len(keys) > 1 else output


class _DocumentAttention(torch.autograd.Function):
    """On the CPU: document by document, a block of queries at a time; the backward computes the scores again.

    The query heads that share a key head are rows of one matrix product, so keys are never repeated.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (x.detach().to(wide) for x in (query, key, value))
        output = torch.empty_like(q)  # [T, heads, d]
        lse = torch.empty(q.shape[:2], dtype=wide)  # [T, heads]
        for start, begin, end in _blocks(bounds):
            scores = _scores(q[begin:end], k[start:end], begin - start)  # [kv_heads, G * rows, keys]
            sums = scores.logsumexp(-1, keepdim=True)
            output[begin:end] = _by_row((scores - sums).exp() @ v[start:end].transpose(0, 1), end - begin)
            lse[begin:end] = _by_row(sums, end - begin)[..., 0]
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.bounds, ctx.dtype = bounds, query.dtype
        return output.to(query.dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, lse = ctx.saved_tensors
        d_output, d_lse = (gradient.to(q.dtype) for gradient in gradients)
        # d score = share * (d share - sum of share * d share + d lse), and the sum is d_output . output.
        offset = (d_lse - (d_output * output).sum(-1))[..., None]  # [T, heads, 1]
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scale = 1 / math.sqrt(q.shape[-1])
        num_kv = k.shape[1]
        for start, begin, end in _blocks(ctx.bounds):
            rows = slice(begin, end)
            shares = (_scores(q[rows], k[start:end], begin - start) - _by_head(lse[rows][..., None], num_kv)).exp()
            d_out = _by_head(d_output[rows], num_kv)  # [kv_heads, G * rows, d]
            d_v[start:end] += (shares.mT @ d_out).transpose(0, 1)
            d_shares = d_out @ v[start:end].permute(1, 2, 0)
            d_scores = shares * (d_shares + _by_head(offset[rows], num_kv)) * scale
            d_q[rows] = _by_row(d_scores @ k[start:end].transpose(0, 1), end - begin)
            d_k[start:end] += (d_scores.mT @ _by_head(q[rows], num_kv)).transpose(0, 1)
        return d_q.to(ctx.dtype), d_k.to(ctx.dtype), d_v.to(ctx.dtype), None


def _blocks(bounds: Bounds) -> list[tuple[int, int, int]]:
    """(document's start, first row, row after the last) of every block of queries."""
    return [
        (start, begin, min(begin + _CPU_QUERY_ROWS, stop))
        for start, stop in bounds
        for begin in range(start, stop, _CPU_QUERY_ROWS)
    ]


def _by_head(x: Tensor, num_kv: int) -> Tensor:
    """[rows, heads, d] -> [kv_heads, G * rows, d]"""
    num_rows, num_heads, width = x.shape
    return x.view(num_rows, num_kv, num_heads // num_kv, width).permute(1, 2, 0, 3).reshape(num_kv, -1, width)


def _by_row(x: Tensor, num_rows: int) -> Tensor:
    """[kv_heads, G * rows, d] -> [rows, heads, d]"""
    num_kv, _, width = x.shape
    return x.view(num_kv, -1, num_rows, width).permute(2, 0, 1, 3).reshape(num_rows, -1, width)


def _scores(query: Tensor, key: Tensor, offset: int) -> Tensor:
    """query [rows, heads, d] at offset + 0, 1, ... of the document, key [keys, kv_heads, d] from its start ->
    scaled scores [kv_heads, G * rows, keys], -inf where the key is later than the query."""
    num_rows, num_keys = len(query), len(key)
    scores = _by_head(query, key.shape[1]) @ key.permute(1, 2, 0) / math.sqrt(query.shape[-1])
    later = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(offset + 1)
    return scores.view(key.shape[1], -1, num_rows, num_keys).masked_fill(later, -math.inf).view_as(scores)
