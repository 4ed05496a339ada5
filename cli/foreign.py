"""What joins the rooms where a foreign folder comes in: whose states they are, which taps, where the masks are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import FINAL, Tap, after, format_taps

if TYPE_CHECKING:
    from eyas.align.stored import Slot, StoredSample
    from eyas.capture.engines.base import TargetOutline
    from eyas.shards.identity import TargetIdentity, TokenizerIdentity
    from eyas.standardize.foreign import MaskOf
    from eyas.standardize.formats.base import Layout, Reader
    from eyas.taps.target import TargetFacts

IDENTIFY = "identify"

_NORMS = {"rms": "RMSNorm", "rms_offset": "RMSNorm (1 + weight)", "layer": "LayerNorm"}
_TRIED_ITEMS = 16  # after one that is unreadable or too short to tell anything


def target_identity(target: str, *, trust_remote_code: bool) -> tuple[TargetIdentity, TargetOutline]:
    """The target as dataset.json records it, from its configuration and the headers of its weights.

    Nobody knows which weights made the files, so there is no hash of them. Raises TargetError, TargetPartsError.
    """
    from eyas.capture.engines.transformers.load import commit_hash, quantization_method, read_outline
    from eyas.shards.identity import TargetIdentity
    from eyas.train.target_parts import read_target_constants

    outline = read_outline(target, trust_remote_code=trust_remote_code)
    constants = read_target_constants(target)
    identity = TargetIdentity(
        name=target,
        revision=commit_hash(target, None),
        config_hash=outline.config_hash,
        weights_hash=None,
        model_class=outline.model_class,
        num_layers=outline.num_layers,
        hidden_size=outline.hidden_size,
        vocab_size=outline.vocab_size,
        weight_dtype=outline.dtype,
        quantization=quantization_method(outline),
        final_norm=_NORMS[constants.norm_kind],
        final_norm_eps=constants.norm_eps,
        logit_scale=constants.logit_scale,
        logit_softcap=constants.softcap,
        lm_head_bias=constants.head_bias,
        lm_head_rows=constants.head_rows,
    )
    return identity, outline


def tokenizer_of(target: str, *, trust_remote_code: bool) -> TokenizerIdentity:
    """Raises TargetError."""
    from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity

    return tokenizer_identity(target, load_tokenizer(target, None, trust_remote_code))


def masks_of(prepared: Path, tokenizer: TokenizerIdentity, target: str) -> MaskOf:
    """Loss masks by tokens. Raises PreparedError for samples of another tokenizer than the target's."""
    from eyas.capture.errors import PreparedError
    from eyas.capture.prepared import PreparedMasks, PreparedSamples

    samples = PreparedSamples.open(prepared)
    differing = [name for name, value in asdict(samples.tokenizer).items() if value != asdict(tokenizer)[name]]
    if differing:
        raise PreparedError(
            f"--prepared {prepared} was prepared with another tokenizer than that of {target} ({', '.join(differing)} "
            f"differ): prepare it again with --target {target}"
        )
    return PreparedMasks(samples)


def facts_of(outline: TargetOutline) -> TargetFacts:
    """What the reading of layer numbers depends on."""
    from eyas.taps.target import TargetFacts

    return TargetFacts.from_config(outline.config.to_dict())


def declared_taps(options: dict[str, Any], source: Path, layout: Layout, facts: TargetFacts) -> tuple[Tap, ...]:
    """The tap of each slot: as the options say, else as the folder does.

    Raises UsageError where neither says it, showing what was found.
    """
    from eyas.taps.conventions import resolve
    from eyas.taps.selection import select_taps

    chosen = {name: options[name] for name in ("taps", "layers", "from_config", "convention")}
    said = stated_taps(source, layout)
    if any(chosen.values()):
        taps = select_taps(facts, **chosen)
        refuse_contradiction(source, said, taps)
        return taps
    if said is not None:
        return said
    if layout.layer_ids is not None and layout.convention is not None:
        return resolve(layout.convention, layout.layer_ids, facts)
    raise UsageError(_which_taps(source, layout, facts))


def stated_taps(source: Path, layout: Layout) -> tuple[Tap, ...] | None:
    """The taps that the folder names outright: an export of eyas's own, or a dump's description."""
    from eyas.standardize.formats.write_rows import read_done
    from eyas.taps.notation import parse_tap

    done = read_done(source)
    if done is None or done.get("format") != layout.format:
        return layout.taps
    taps = [parse_tap(str(tap)) for tap in done.get("taps", ())]
    if layout.last_hidden is None and done.get("last_hidden"):
        taps.append(parse_tap(str(done["last_hidden"])))
    return tuple(taps) if len(taps) == layout.num_taps else None


def refuse_contradiction(source: Path, said: tuple[Tap, ...] | None, taps: Sequence[Tap]) -> None:
    """Raises EyasError where the folder itself names other taps than ``taps``."""
    if said is not None and said != tuple(taps):
        raise EyasError(
            f"{source} says itself that it holds {format_taps(said)}, and {format_taps(taps)} is asked for: leave "
            f"--taps and --layers out, or, if the folder is wrong, mend its description (eyas-dump.toml, eyas.json)"
        )


def _which_taps(source: Path, layout: Layout, facts: TargetFacts) -> str:
    from eyas.taps.conventions import describe, readings
    from eyas.taps.notation import default_taps

    beside = f", and a {layout.last_hidden} last hidden state" if layout.last_hidden else ""
    found = f"{source} ({layout.format} {layout.version}) holds {layout.num_taps} slots of features{beside}"
    if layout.layer_ids is not None:
        ids = ",".join(map(str, layout.layer_ids))
        return (
            f"{found}, with layer numbers {ids}, which mean other tensors in every system. For {facts}:\n"
            f"{describe(readings(layout.layer_ids, facts), format_taps)}\n"
            f"Say which is meant (--layers {ids} --convention SYSTEM[@VERSION]), name the taps (--taps), or have the "
            f"target replayed (--taps identify)."
        )
    try:
        example = format_taps(default_taps(facts.num_layers))
    except EyasError:
        example = "after:1,..."
    return (
        f"{found}, and nothing there says which layers they are. Give the tap of each slot (--taps {example}), the "
        f"layer numbers that the capturing system was given with its name (--layers 2,16,29 --convention vllm), or "
        f"have the target replayed on a few samples (--taps identify)."
    )


def layout_json(layout: Layout) -> dict[str, Any]:
    """As --json prints it."""
    from eyas.standardize.formats.base import Layout

    taps = None if layout.taps is None else [str(tap) for tap in layout.taps]
    return {**{field.name: getattr(layout, field.name) for field in fields(Layout)}, "taps": taps}


def guessed_taps(layout: Layout, facts: TargetFacts | None) -> list[str]:
    """Lines on what the slots may be, each saying what it rests on."""
    from eyas.taps.conventions import resolve
    from eyas.taps.notation import default_taps

    if layout.taps is not None:
        return [f"{format_taps(layout.taps)}, as the folder says"]
    if layout.layer_ids is not None:
        ids = ",".join(map(str, layout.layer_ids))
        if layout.convention is None or facts is None:
            whose = f" ({layout.convention}'s)" if layout.convention else ", of a system that the folder does not name"
            return [f"layer numbers {ids}{whose}: give --target to have them read"]
        return [f"{format_taps(resolve(layout.convention, layout.layer_ids, facts))}, which {layout.convention} reads "
                f"{ids} as"]  # fmt: skip
    features = layout.num_taps - 1 if layout.last_hidden is None and layout.num_taps == 4 else layout.num_taps
    if features != 3:
        return ["unknown: replay the target (eyas standardize FOREIGN OUT --target TARGET --taps identify)"]
    default = "after:1,after:L//2-1,after:L-4"
    if facts is not None:
        try:
            default = format_taps(default_taps(facts.num_layers))
        except EyasError:
            return ["unknown: the target is too shallow for the default taps"]
    fourth = "" if features == layout.num_taps else ", and after the last layer"
    return [f"{default}{fourth}: a guess by their number, which is that of every system's default"]


def identified_taps(
    reader: Reader, target: str, facts: TargetFacts, *, trust_remote_code: bool, say: Callable[[str], None]
) -> tuple[tuple[Tap, ...], Literal["pre-norm", "post-norm"] | None]:
    """The taps of the slots, and what the last hidden state beside them is, as a replay of the target finds them.

    The findings are told line by line to ``say``. Raises EyasError where one is not certain.
    """
    from eyas.align.replay import replay
    from eyas.align.stored import LAST_HIDDEN
    from eyas.align.verdict import Report

    beside: dict[Tap | None, Literal["pre-norm", "post-norm"]]
    beside = {after(facts.num_layers - 1): "pre-norm", FINAL: "post-norm"}
    source = ForeignSource(reader)
    found = replay(source, target, trust_remote_code=trust_remote_code)
    for line in Report(tuple(found.findings)).text().splitlines():
        say(line)
    wrong = [
        slot.name
        for slot, tap in zip(source.slots, found.taps, strict=True)
        if tap is None or (slot.name == LAST_HIDDEN and tap not in beside)
    ]
    if wrong:
        raise EyasError(
            f"--taps identify: the replay of {target} is not certain what {', '.join(wrong)} "
            f"{'is' if len(wrong) == 1 else 'are'} (above): name the taps with --taps if you know them"
        )
    taps = tuple(tap for tap in found.taps[: reader.layout.num_taps] if tap is not None)
    last_hidden = found.taps[-1] if reader.layout.last_hidden is not None else None
    say(f"identified: {format_taps(taps)}{f', last_hidden {last_hidden}' if last_hidden else ''}")
    return taps, beside.get(last_hidden)


class ForeignSource:
    """A reader's samples as the replay takes them (align/stored.py, Source)."""

    def __init__(self, reader: Reader) -> None:
        from eyas.align.stored import LAST_HIDDEN, Slot

        layout = reader.layout
        self._reader, self._items = reader, reader.items()
        self._places = {item: n for n, item in enumerate(self._items)}
        self.name = layout.format
        self.compute_dtype = layout.dtype
        self.weights_hash = None
        slots = [Slot(name=f"slot {n}", tensor="features", declared=None) for n in range(layout.num_taps)]
        if layout.last_hidden is not None:
            slots.append(Slot(name=LAST_HIDDEN, tensor=LAST_HIDDEN, declared=None))
        self.slots: tuple[Slot, ...] = tuple(slots)

    def pick(self, num_samples: int) -> list[StoredSample]:
        """Evenly spread over the items."""
        places = np.unique(((np.arange(num_samples) + 0.5) * len(self._items) / num_samples).astype(int)).tolist()
        picked: dict[str, StoredSample] = {}
        for place in places:
            for item in self._items[place : place + _TRIED_ITEMS]:
                if item not in picked and (sample := self._sample(item)) is not None:
                    picked[item] = sample
                    break
        return list(picked.values())

    def neighbours(self, sample: StoredSample, num_samples: int) -> list[StoredSample]:
        """Of the items around it."""
        at = self._places[sample.name]
        around = sorted(range(len(self._items)), key=lambda n: abs(n - at))[1 : num_samples + 1]
        return [found for n in around if (found := self._sample(self._items[n])) is not None]

    def _sample(self, item: str) -> StoredSample | None:
        from eyas.align.stored import MIN_TOKENS, SCANNED_TOKENS, StoredSample
        from eyas.standardize.formats.base import ForeignFileError

        try:
            foreign = self._reader.read(item)
        except ForeignFileError:
            return None
        if len(foreign.input_ids) < MIN_TOKENS:
            return None
        slots = list(foreign.features[:SCANNED_TOKENS].unbind(1))
        if foreign.last_hidden is not None:
            slots.append(foreign.last_hidden[:SCANNED_TOKENS])
        return StoredSample(
            name=item, where=foreign.where, input_ids=foreign.input_ids[:SCANNED_TOKENS], slots=tuple(slots)
        )
