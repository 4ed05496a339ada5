"""Replay: runs a few stored samples through the target again and says which tap every slot really is.

An independent path (align/forward.py) gives all L + 2 taps of each sample; every slot is compared with every tap, and
what is not the declared tap is named by align/defects/. All limits come from a noise measured on the same target
(align/noise.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.align.verdict import Finding

if TYPE_CHECKING:
    from eyas.align.defects.kinds import Examination
    from eyas.align.forward import Replayed
    from eyas.align.stored import Source, StoredSample
    from eyas.taps.notation import Tap

NUM_SAMPLES = 8
MAX_TOKENS = 384  # of each sample: a causal target's states do not depend on later tokens
_NEIGHBOURS = 8


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found."""

    findings: list[Finding]
    taps: tuple[Tap | None, ...]  # of each slot: None unless every sample is that tap, within rounding


def replay_report(
    source: Source,
    target: str | Replayed,
    *,
    num_samples: int = NUM_SAMPLES,
    max_tokens: int = MAX_TOKENS,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
) -> list[Finding]:
    """The findings of replay()."""
    return replay(
        source,
        target,
        num_samples=num_samples,
        max_tokens=max_tokens,
        revision=revision,
        trust_remote_code=trust_remote_code,
        device=device,
    ).findings


def replay(
    source: Source,
    target: str | Replayed,
    *,
    num_samples: int = NUM_SAMPLES,
    max_tokens: int = MAX_TOKENS,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
) -> Replay:
    """Replay ``num_samples`` samples of ``source``, the first ``max_tokens`` tokens of each, through ``target`` (a
    folder, a name on the hub, or one that is loaded), and say what every slot is.

    Raises TargetError where the target does not load, and what reading the source raises. Memory: the target's weights
    (in float32 where that fits), one sample's taps, and up to a gigabyte of others'.
    """
    from eyas.align.defects.evidence import Evidence
    from eyas.align.defects.examiner import examine
    from eyas.align.findings import examination_findings
    from eyas.align.forward import ReplayTarget
    from eyas.align.logits import statistics_findings
    from eyas.align.noise import NOISE_SAMPLES, assumed_noise, measure_noise
    from eyas.capture.engines.transformers.load import hash_weights

    samples = source.pick(num_samples)
    unknown = (None,) * len(source.slots)
    if not samples:
        finding = Finding(check="replay", status="unknown", found="no sample of at least 4 tokens to replay")
        return Replay(findings=[finding], taps=unknown)
    replayed = (
        ReplayTarget(target, revision=revision, trust_remote_code=trust_remote_code, device=device)
        if isinstance(target, str)
        else target
    )
    if refused := _wrong_shape(replayed, source, samples):
        return Replay(findings=refused, taps=unknown)
    # Engines pick such factors once, by the longest sequence they take.
    whole = isinstance(replayed, ReplayTarget) and replayed.length_changes_states
    window = None if whole else max_tokens
    longest = sorted(range(len(samples)), key=lambda n: -min(samples[n].num_tokens, max_tokens))
    # Where a router's flips make some samples much noisier than others, the noise of a few says little.
    num_probes = None if replayed.has_routers else NOISE_SAMPLES
    probes = [samples[n].input_ids[:window] for n in longest[:num_probes]]
    if isinstance(replayed, ReplayTarget):
        noise = measure_noise(replayed, probes, source.compute_dtype)
    else:
        noise = assumed_noise(replayed, probes, source.compute_dtype)
    evidence = Evidence(
        replayed,
        source.slots,
        samples,
        noise,
        compute_dtype=source.compute_dtype,
        max_tokens=window,
        proven=source.weights_hash is not None and source.weights_hash == hash_weights(replayed.name, revision),
        neighbours=lambda sample: source.neighbours(sample, _NEIGHBOURS),
    )
    examination = examine(evidence)
    return Replay(
        findings=[
            *examination_findings(replayed, source.slots, samples, examination, noise),
            *(
                statistics_findings(replayed, source.slots, samples, window, noise)
                if isinstance(replayed, ReplayTarget)
                else ()
            ),
        ],
        taps=tuple(_certain_tap(replayed, examination, slot, len(samples)) for slot in range(len(source.slots))),
    )


def _certain_tap(target: Replayed, examination: Examination, slot: int, num_samples: int) -> Tap | None:
    taps = [d.tap if d.explained else None for d in examination.of_slot(slot)]
    tap = taps[0] if len(taps) == num_samples and len(set(taps)) == 1 else None
    return None if tap is None else target.all_taps[tap]


def replay_dataset(
    dataset: Path, target: str | Replayed, *, num_samples: int = NUM_SAMPLES, trust_remote_code: bool = False
) -> list[Finding]:
    """replay_report of an eyas dataset. Raises EyasError for what is no dataset, and for a target that does not load;
    samples that cannot be read are a finding."""
    from eyas.align.stored import DatasetSource
    from eyas.shards.canaries import open_canaries
    from eyas.shards.dataset import Dataset
    from eyas.shards.errors import ShardError

    try:
        source = DatasetSource(Dataset.open(dataset), open_canaries(dataset))
        return replay_report(source, target, num_samples=num_samples, trust_remote_code=trust_remote_code)
    except ShardError as error:
        return [Finding(check="replay", status="unknown", found=f"samples cannot be read: {error}")]


def _wrong_shape(target: Replayed, source: Source, samples: Sequence[StoredSample]) -> list[Finding]:
    """What cannot be compared at all."""
    widths = sorted({slot.shape[1] for sample in samples for slot in sample.slots})
    findings = []
    if widths != [target.hidden_size]:
        findings.append(
            Finding(
                check="replay",
                status="mismatch",
                found=f"states of width {', '.join(map(str, widths))}",
                expected=f"{target.hidden_size}, the hidden size of {target.name}",
                consequence="these are not this target's states",
                mend="give the target that was captured: --target",
            )
        )
    largest = max(int(sample.input_ids.max()) for sample in samples)
    if largest >= target.outline.vocab_size:
        findings.append(
            Finding(
                check="replay",
                status="mismatch",
                found=f"token id {largest}",
                expected=f"ids below {target.outline.vocab_size}, the vocabulary of {target.name}",
                consequence="the samples were tokenized for another model",
                mend="give the target that was captured: --target",
            )
        )
    return findings
