"""Tiny drafts, targets and batches of several documents."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eyas.train.draft import DraftModel
from eyas.train.loss import TargetHead
from eyas.train.shape import DraftShape
from eyas.train.target_parts import TargetParts
from tests.train.reference import Document

TARGET_WIDTH, VOCAB, DRAFT_VOCAB, TAPS = 16, 29, 17, 3


def make_shape(**changes: Any) -> DraftShape:
    sizes: dict[str, Any] = {
        "hidden_size": TARGET_WIDTH, "target_hidden_size": TARGET_WIDTH, "num_taps": TAPS, "intermediate_size": 24,
        "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
        "rope_scaling": None, "max_positions": 64, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
    }  # fmt: skip
    return DraftShape(**{**sizes, **changes})


def make_model(shape: DraftShape, seed: int = 0) -> DraftModel:
    """Every weight random, norms too, so that none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    model = DraftModel(shape)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.dim() == 1 else noise * (1.5 / parameter.shape[1] ** 0.5)
        assert parameter.requires_grad == (
            name not in ("embed_tokens.weight", "lm_head.weight") or not shape.shares_target_width
        )
    return model


def make_documents(lengths: Sequence[int], seed: int = 1) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            input_ids=torch.randint(VOCAB, (length,), generator=generator),
            loss_mask=torch.rand(length, generator=generator) < 0.7,
            features=torch.randn(length, TAPS * TARGET_WIDTH, generator=generator),
            final=torch.randn(length, TARGET_WIDTH, generator=generator),
        )
        for length in lengths
    ]


def make_head(seed: int = 2, *, full: bool = False) -> tuple[TargetHead, Tensor]:
    """A target's head, and its whole lm_head [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(VOCAB, TARGET_WIDTH, generator=generator)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    parts = TargetParts(
        embedding=torch.zeros(VOCAB, TARGET_WIDTH), head=whole, head_bias=None, norm_weight=torch.ones(TARGET_WIDTH),
        norm_bias=None, norm_kind="rms", norm_eps=1e-6, logit_scale=1.0, softcap=None,
    )  # fmt: skip
    head = TargetHead(parts=parts.rows(ids), ids=ids, last_hidden_is_final=True, full=parts if full else None)
    return head, whole


def pack(documents: Sequence[Document], whole_head: Tensor | None, *, padding: int = 0) -> Any:
    """One batch; with ``whole_head`` the target's statistics are stored where DESIGN.md says they are."""
    lengths = [len(document.input_ids) for document in documents]
    total = sum(lengths)

    def rows(parts: list[Tensor], fill: float) -> Tensor:
        joined = torch.cat(parts)
        return torch.cat([joined, joined.new_full((padding, *joined.shape[1:]), fill)])

    top1 = lse = None
    if whole_head is not None:
        tops, sums = [], []
        for document in documents:
            logits = document.final @ whole_head.T
            is_set = torch.cat([document.loss_mask[1:], torch.tensor([False])])
            tops.append(torch.where(is_set, logits.argmax(-1), -1))
            sums.append(torch.where(is_set, logits.logsumexp(-1), torch.nan))
        top1, lse = rows(tops, -1), rows(sums, torch.nan)
    return SimpleNamespace(
        input_ids=rows([document.input_ids for document in documents], 0),
        loss_mask=rows([document.loss_mask for document in documents], 0),
        document=rows([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)], -1),
        position=rows([torch.arange(n) for n in lengths], 0),
        features=rows([document.features for document in documents], 0),
        last_hidden=rows([document.final for document in documents], 0),
        target_top1=top1,
        target_lse=lse,
        num_tokens=total,
    )
