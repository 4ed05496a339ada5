"""Dataset and draft: hidden sizes, the width of fc, the vocabulary, dtypes, positions of the draft's attention."""

from __future__ import annotations

from eyas.align.checks.releases import over_releases
from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft
from eyas.align.loaders.base import Loading
from eyas.align.verdict import Finding

_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def check_shapes(subject: Subject) -> list[Finding]:
    """Hidden size, fc width, vocabulary size and dtype."""
    if subject.draft is None:
        return []
    return [
        compare_hidden_size(subject.draft, subject.identity.hidden_size, "the captured target's hidden size"),
        *_fc(subject, subject.draft),
        *_vocabulary_size(subject, subject.draft),
        *_heads(subject.draft),
        *_dtype(subject, subject.draft),
        *over_releases(subject, lambda loading, draft: _num_taps(subject, loading)),
    ]


def compare_hidden_size(draft: Draft, width: int, whose: str) -> Finding:
    """The width of a tap that ``draft`` expects, in channels, against ``width``; ``whose`` says what that is."""
    wanted = draft.config.target_hidden_size
    if width == wanted:
        return Finding(check="hidden size", status="ok", found=f"{width}")
    return Finding(
        check="hidden size",
        status="mismatch",
        found=f"the draft expects taps of width {wanted}",
        expected=f"{width}, {whose}",
        consequence="the draft belongs to another target: its first matrix product fails",
        mend=f'"target_hidden_size": {width} if only the config is wrong, else another draft',
    )


def _fc(subject: Subject, draft: Draft) -> list[Finding]:
    fc = draft.find("fc.weight")
    if fc is None:
        return []
    num_taps, hidden_size = len(subject.identity.taps), draft.config.target_hidden_size
    width = fc.shape[-1]
    if width == num_taps * hidden_size:
        return [Finding(check="fc width", status="ok", found=f"{width} = {num_taps} taps x {hidden_size}")]
    has = f"{width // hidden_size} taps" if width % hidden_size == 0 else f"no whole number of taps of {hidden_size}"
    return [
        Finding(
            check="fc width",
            status="mismatch",
            found=f"fc.weight takes {width} = {has}",
            expected=f"{num_taps * hidden_size} = {num_taps} taps x {hidden_size}, as captured",
            consequence="the draft was made for another number of taps than this dataset holds",
            mend=f"train the draft on this dataset, or capture {width // hidden_size} taps (eyas capture --taps)",
        )
    ]


def _num_taps(subject: Subject, loading: Loading) -> list[Finding]:
    captured, loader = len(subject.identity.taps), loading.loader
    if loading.num_taps == captured:
        return _skipped_fc(subject, loading)
    if loader.system == "trtllm":
        return []  # its number stands in the serving config, as its ids do
    places = loader.num_taps_places
    key = next((place for place in places if "." not in place and place.startswith("num_")), None)
    mend = (
        f'"{key}": {captured}'
        if key
        else f"{loader.label} takes three taps: capture three, or serve with a later release"
    )
    if key is None and places:
        mend = "\n".join(f"write {captured} ids in {place}" for place in places[:1])
    return [
        Finding(
            check="fc taps",
            status="mismatch",
            found=f"{loader.label} builds fc for {loading.num_taps} taps",
            expected=f"{captured}, as captured",
            consequence="fc.weight of the checkpoint does not fit the model that the engine builds: it does not load",
            mend=mend,
            source=loader.cite,
        )
    ]


def _skipped_fc(subject: Subject, loading: Loading) -> list[Finding]:
    """SGLang applies fc only to inputs that are not as wide as the draft, which a single tap may be."""
    draft, loader = subject.draft, loading.loader
    assert draft is not None
    width = loading.num_taps * draft.config.target_hidden_size
    if loader.system != "sglang" or width != draft.config.hidden_size:
        return []
    return [
        Finding(
            check="fc taps",
            status="mismatch",
            found=f"{loading.num_taps} tap as wide as the draft: {loader.label} skips fc then",
            expected="fc applied to it, as in training",
            consequence="the draft gets the bare tap",
            mend="capture two taps or more, or serve with vllm, which always applies fc",
            source=loader.cite,
        )
    ]


def _vocabulary_size(subject: Subject, draft: Draft) -> list[Finding]:
    target = subject.identity.target
    has = draft.config.vocab_size
    if has in (target.vocab_size, target.lm_head_rows):
        return [Finding(check="vocabulary", status="ok", found=f"{has} ids")]
    return [
        Finding(
            check="vocabulary",
            status="mismatch",
            found=f"the draft's vocab_size is {has}",
            expected=f"{target.vocab_size}, the captured target's",
            consequence="embeddings and the map of draft ids belong to another vocabulary: proposals are other tokens",
            mend=f'"vocab_size": {target.vocab_size} if only the config is wrong, else another draft',
        )
    ]


def _heads(draft: Draft) -> list[Finding]:
    config = draft.config
    if config.num_heads % config.num_kv_heads == 0:
        return []
    return [
        Finding(
            check="heads",
            status="mismatch",
            found=f"{config.num_heads} attention heads, {config.num_kv_heads} key/value heads",
            expected="a multiple",
            consequence="no engine can share key/value heads among query heads this way: the draft does not load",
            mend=f'"num_key_value_heads": a divisor of {config.num_heads}',
        )
    ]


def _dtype(subject: Subject, draft: Draft) -> list[Finding]:
    fc = draft.find("fc.weight")
    captured = subject.identity.dtype
    drafts = {draft.config.dtype} if fc is None else {name for name, short in _SAFETENSORS.items() if short == fc.dtype}
    if None in drafts or not drafts:
        return []
    (name,) = drafts
    if name == captured or name == "float32":
        return [Finding(check="dtype", status="ok", found=f"{captured} captured, draft {name}")]
    return [
        Finding(
            check="dtype",
            status="warning",
            found=f"the draft's weights are {name}",
            expected=f"{captured}, as captured",
            consequence="hidden states are cast on their way into the draft"
            + (": large values of bfloat16 become infinite in float16" if name == "float16" else ""),
            mend=f"save the draft in {captured}",
        )
    ]
