"""``lm_head(final)`` against the stored target_top1 and target_lse.

Two comparisons: the logits of the replay's own final tap (are these this target's statistics, row by row?), and the
logits of the stored last_hidden through the target's norm and head (is what a trainer will recompute what is stored?).

Shapes: T tokens, K rows that predict a training target, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eyas.align.stored import LAST_HIDDEN, Slot, StoredSample
from eyas.align.verdict import RECAPTURE, Finding
from eyas.capture.engines.transformers.statistics import CHUNK_LOGITS
from eyas.taps.notation import FINAL

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.align.forward import ReplayTarget
    from eyas.align.noise import Noise
    from eyas.capture.engines.transformers.statistics import Head

# A stored argmax agrees where its replayed logit is within this of the largest, as a share of the spread of the logits:
# bfloat16 logits tie often.
TIE_SHARE = 0.05
AGREED = 0.95  # of the rows that rounding leaves alone, for statistics to be the target's
LSE_TOLERANCE = 0.05  # nats plus the same share of the logits' spread; bfloat16 hidden states move it by 0.01 to 0.05


def agree(head: Head, final: Tensor, top1: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Whether statistics [K] are those of the logits of ``final`` [K, H]: argmax and logsumexp, bool [K] each."""
    import torch

    tops, sums = [], []
    step = max(1, CHUNK_LOGITS // head.vocab_size)
    with torch.inference_mode():
        for start in range(0, len(final), step):
            logits = head.logits(final[start : start + step]).float()  # [step, V]
            own = top1[start : start + step].long().to(logits.device)
            inside = (own >= 0) & (own < logits.shape[-1])
            chosen = logits.gather(1, own.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
            spread = logits.std(-1)
            tops.append(inside & (logits.amax(-1) - chosen <= TIE_SHARE * spread))
            difference = lse[start : start + step].to(logits.device) - logits.logsumexp(-1)
            sums.append(difference.abs() <= LSE_TOLERANCE * (1 + spread))
    return torch.cat(tops).cpu(), torch.cat(sums).cpu()


@dataclass(frozen=True, kw_only=True)
class StoredStatistics:
    """One sample's, as stored; vectors of length T."""

    name: str
    ids: Tensor  # int64
    loss_mask: Tensor | None
    top1: Tensor  # int64, -1 where unset
    lse: Tensor  # float32, NaN where unset
    last_hidden: Tensor | None  # [T, H], and
    last_hidden_is_final: bool


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Shares over the set rows of all samples; NaN where nothing could be compared."""

    num_rows: int
    top1: float  # argmax agrees, ties allowed
    lse: float  # logsumexp agrees
    lse_offset: float  # median of stored - replayed, nats
    shifted: dict[int, float]  # k -> share of rows t whose top1 is the replay's of row t + k
    labels: float  # share of rows t whose top1 is the token t + 1 itself
    set_where: dict[int, float]  # k -> share of rows that are set exactly where loss_mask[t + 1 + k] is 1
    raw_top1: float  # agreement with lm_head of the state before the final norm


def compare_statistics(target: ReplayTarget, samples: Sequence[StoredStatistics], *, stored: bool = False) -> Agreement:
    """Compare the statistics of ``samples`` with the logits of the replayed final tap, or, with ``stored``, of the
    stored last_hidden."""
    import torch

    norm = target.stack.final_norm
    device, dtype = target.device, target.model.dtype
    counts: dict[str, float] = {"rows": 0, "top1": 0, "lse": 0, "labels": 0, "raw": 0}
    shifted = {-1: [0, 0], 1: [0, 0]}
    set_where: dict[int, list[int]] = {-1: [0, 0], 0: [0, 0], 1: [0, 0]}
    offsets = []
    for sample in samples:
        taps = target.taps(sample.ids)
        with torch.inference_mode():
            final = taps[-1]
            if stored:
                assert sample.last_hidden is not None
                final = sample.last_hidden.to(device, dtype)
                if not sample.last_hidden_is_final:
                    final = norm(final[None])[0]
            rows = torch.nonzero(sample.top1 >= 0).flatten()
            if len(rows):
                raw = target.head.top1_and_lse(taps[-2][rows.to(device)])[0].long().cpu()
                top1_all, lse_all = (values.cpu() for values in target.head.top1_and_lse(final))  # [T]
        if sample.loss_mask is not None:
            is_set = sample.top1 >= 0
            mask = sample.loss_mask.bool()
            for k, pair in set_where.items():
                wanted = torch.zeros_like(is_set)
                begin, end = max(0, -1 - k), min(len(mask), len(mask) - 1 - k)
                wanted[begin:end] = mask[begin + 1 + k : end + 1 + k]
                pair[0] += int((wanted == is_set)[1:-1].sum())
                pair[1] += max(0, len(mask) - 2)
        if not len(rows):
            continue
        top1, lse = sample.top1[rows], sample.lse[rows]
        tops, sums = agree(target.head, final[rows.to(device)], top1, lse)
        difference = lse - lse_all[rows]
        counts["rows"] += len(rows)
        counts["top1"] += int(tops.sum())
        counts["lse"] += int(sums.sum())
        counts["raw"] += int((raw == top1).sum())
        following = rows + 1 < len(sample.ids)
        counts["labels"] += int((sample.ids[(rows + 1)[following]] == top1[following]).sum())
        for k, pair in shifted.items():
            there = (rows + k >= 0) & (rows + k < len(top1_all))
            pair[0] += int((top1_all[(rows + k)[there]] == top1[there]).sum())
            pair[1] += int(there.sum())
        offsets.append(difference)
    num_rows = int(counts["rows"])

    def share(part: float, whole: float) -> float:
        return part / whole if whole else float("nan")

    every = torch.cat(offsets) if offsets else torch.zeros(0)
    every = every[every.isfinite()]
    return Agreement(
        num_rows=num_rows,
        top1=share(counts["top1"], num_rows),
        lse=share(counts["lse"], num_rows),
        lse_offset=float(every.median()) if len(every) else float("nan"),
        shifted={k: share(*pair) for k, pair in shifted.items()},
        labels=share(counts["labels"], num_rows),
        set_where={k: share(*pair) for k, pair in set_where.items()},
        raw_top1=share(counts["raw"], num_rows),
    )


def statistics_findings(
    target: ReplayTarget, slots: Sequence[Slot], samples: Sequence[StoredSample], window: int | None, noise: Noise
) -> list[Finding]:
    """Whether stored target_top1 and target_lse are the target's, and follow from last_hidden."""
    last = next((n for n, slot in enumerate(slots) if slot.name == LAST_HIDDEN), None)
    stored = [
        StoredStatistics(
            name=sample.name,
            ids=sample.input_ids[:window],
            loss_mask=None if sample.loss_mask is None else sample.loss_mask[:window],
            top1=sample.target_top1[:window],
            lse=sample.target_lse[:window],
            last_hidden=None if last is None else sample.slots[last][:window],
            last_hidden_is_final=last is not None and slots[last].declared == FINAL,
        )
        for sample in samples
        if sample.target_top1 is not None and sample.target_lse is not None
    ]
    if not stored:
        return []
    own = compare_statistics(target, stored)
    findings = [_statistics_finding(own, noise)]
    if last is not None and own.num_rows:
        declared_final = slots[last].declared == FINAL
        again, other = (
            compare_statistics(target, [replace(sample, last_hidden_is_final=final) for sample in stored], stored=True)
            for final in (declared_final, not declared_final)
        )
        findings.append(_recomputed_finding(again, other, own, noise, declared_final))
    return findings


def _statistics_finding(own: Agreement, noise: Noise) -> Finding:
    check = "replay target_top1, target_lse"
    enough_top1, enough_lse = AGREED * noise.top1 - (1 - noise.top1), AGREED * noise.lse - (1 - noise.lse)
    expected = (
        f"the argmax and logsumexp of lm_head(final), in {enough_top1:.0%} and {enough_lse:.0%} of the rows at least"
    )
    consequence = "the loss would be computed against other probabilities than the target's"

    def wrong(found: str, mend: str = RECAPTURE) -> Finding:
        return Finding(
            check=check, status="mismatch", found=found, expected=expected, consequence=consequence, mend=mend
        )

    best = max(own.set_where, key=lambda k: own.set_where[k] if own.set_where[k] == own.set_where[k] else -1)
    if own.set_where[best] > 0.98 and own.set_where[0] < own.set_where[best] - 0.02:
        return wrong(
            f"loss mask shifted: statistics are set where loss_mask[t{best + 1:+d}] is 1, not loss_mask[t+1]",
            "shift loss_mask with the tokens (a row's logits predict the next token), and " + RECAPTURE,
        )
    if not own.num_rows:
        return Finding(check=check, status="unknown", found="no row of the replayed samples has them set")
    text = f"argmax agrees in {own.top1:.1%}, logsumexp in {own.lse:.1%} of {own.num_rows} rows"
    if own.top1 >= enough_top1 and own.lse >= enough_lse:
        return Finding(check=check, status="ok", found=text)
    shift = max(own.shifted, key=lambda k: own.shifted[k])
    if own.top1 < enough_top1 and own.shifted[shift] > max(0.8, own.top1):
        return wrong(f"shifted rows: target_top1 of row t is that of row t{shift:+d} ({text})")
    if own.top1 < enough_top1 and own.labels > max(0.9, own.top1):
        return wrong(f"labels instead of the target's argmax: target_top1 is the next token itself ({text})")
    if own.top1 < enough_top1 and own.raw_top1 > max(0.9, own.top1):
        return wrong(f"pre-norm and post-norm mixed up: lm_head was applied before the final norm ({text})")
    if own.top1 >= enough_top1:
        return wrong(
            f"logsumexp differs: stored is {own.lse_offset:+.3g} nats from the target's ({text}); another temperature, "
            f"logit scale, softcap or part of the vocabulary"
        )
    if own.top1 >= 0.7:
        return Finding(
            check=check,
            status="unknown",
            found=f"{text}: between what rounding and what other weights would do",
            expected=expected,
        )
    return wrong(f"statistics of other states: {text}")


def _recomputed_finding(
    again: Agreement, other: Agreement, own: Agreement, noise: Noise, declared_final: bool
) -> Finding:
    """again: statistics of last_hidden as declared; other: with the norm applied where it was not, or the reverse."""
    check = "replay lm_head(last_hidden)"
    enough_top1, enough_lse = AGREED * noise.top1 - (1 - noise.top1), AGREED * noise.lse - (1 - noise.lse)
    text = f"argmax agrees in {again.top1:.1%}, logsumexp in {again.lse:.1%} of {again.num_rows} rows"
    if again.top1 >= enough_top1 and again.lse >= enough_lse:
        return Finding(check=check, status="ok", found=text)
    if other.top1 >= enough_top1 and other.lse >= enough_lse:
        applied = "without the norm" if not declared_final else "with the norm applied first"
        return Finding(
            check=check,
            status="mismatch",
            found=f"pre-norm and post-norm mixed up: last_hidden gives target_top1 and target_lse {applied} (argmax in "
            f"{other.top1:.1%}, logsumexp in {other.lse:.1%} of {other.num_rows} rows), and not as declared ({text})",
            expected="last_hidden as declared: " + ("final, after the norm" if declared_final else "before the norm"),
            consequence="a trainer would apply the target's norm twice, or not at all",
            mend="declare in dataset.json what last_hidden is, or " + RECAPTURE,
        )
    if again.top1 >= 0.7 and again.lse >= 0.7:
        return Finding(check=check, status="unknown", found=text)
    return Finding(
        check=check,
        status="mismatch",
        found=f"the target's norm and lm_head do not give target_top1 and target_lse of the stored last_hidden: {text}",
        expected=f"agreement in {enough_top1:.0%} of the rows at least (the replay's own final tap: {own.top1:.1%})",
        consequence="a trainer that recomputes the target's probabilities from last_hidden trains on other ones",
        mend="see what last_hidden is above; " + RECAPTURE,
    )
