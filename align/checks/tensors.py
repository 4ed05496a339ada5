"""The draft's tensors as the engine takes them: dropped, refused, left random, overwritten, of another shape."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.align.checks.releases import over_releases
from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft
from eyas.align.loaders.base import Loader, Loading
from eyas.align.verdict import Finding


def check_tensors(subject: Subject) -> list[Finding]:
    """Names, shapes, embeddings and head. Nothing for a folder that holds a config alone."""
    if subject.draft is None or not subject.draft.tensors:
        return []
    if subject.engine is not None and subject.draft.config.raw.get("quantization_config"):
        found = "the draft is quantized, and how engines name its tensors then was not read"
        return [Finding(check="draft tensors", status="unknown", found=found)]
    return over_releases(subject, _check)


def _check(loading: Loading, draft: Draft) -> list[Finding]:
    return [
        *_layers(loading, draft),
        *_names(loading),
        *_missing(loading),
        *_shapes(loading, draft),
        *_embeddings(loading, draft),
        *_head(loading, draft),
    ]


def _layers(loading: Loading, draft: Draft) -> list[Finding]:
    loader, number = loading.loader, draft.config.num_layers
    if loader.max_layers is None or number <= loader.max_layers:
        return []
    return [
        Finding(
            check="draft layers",
            status="mismatch",
            found=f"{number} decoder layers",
            expected=f"{loader.max_layers}, all that {loader.label} builds",
            consequence="the engine refuses the draft",
            mend="serve with a later release, or train a draft of one layer",
            source=loader.cite,
        )
    ]


def _names(loading: Loading) -> list[Finding]:
    loader, found = loading.loader, []
    if loading.dropped:
        found.append(
            Finding(
                check="draft tensors dropped",
                status="mismatch",
                found=f"{loader.label} drops {_listed(loading.dropped)} without a word",
                expected="every trained tensor is used",
                consequence="the engine runs another draft than the one that was trained",
                mend=_unused_mend(loader, loading.dropped),
                source=loader.cite,
            )
        )
    if loading.unknown:
        found.append(
            Finding(
                check="draft tensors refused",
                status="mismatch",
                found=f"{loader.label} has no parameter for {_listed(loading.unknown)}",
                expected="names that it knows: " + _listed([*loading.expected]),
                consequence="the engine refuses the draft",
                mend=_unused_mend(loader, loading.unknown),
                source=loader.cite,
            )
        )
    return found


def _unused_mend(loader: Loader, names: Sequence[str]) -> str:
    """What to do about tensors that the engine has no use for."""
    if "model." not in loader.prefixes and any(name.startswith("model.") for name in names):
        return "remove the prefix model. from the names (this engine adds it)"
    if any(name.startswith(("layers.", "model.layers.")) for name in names) and "layers.{i}." not in loader.layer_names:
        return "rename layers.0.* to midlayer.*, or serve with a release that knows both"
    if any("_norm." in name and "self_attn" in name for name in names):
        return "serve with an engine that has query and key norms in its draft (vllm's Eagle3Qwen3ForCausalLM)"
    if any(name.endswith(".bias") for name in names):
        return "train with attention_bias false, or serve with an engine that reads it (vllm)"
    if any("input_norm." in name for name in names):
        return '"norm_before_fc": true where the engine reads it; else a release that does'
    if any("fc_norm." in name for name in names):
        return '"fc_norm": true where the engine reads it; else a release that does'
    return "rename the tensors as the engine knows them, or remove them if they are not part of the draft"


def _missing(loading: Loading) -> list[Finding]:
    if not loading.missing:
        return []
    return [
        Finding(
            check="draft tensors missing",
            status="mismatch",
            found=f"the checkpoint has no {_listed(loading.missing)}",
            expected=f"all that {loading.loader.label} builds",
            consequence="the engine does not notice: norms are ones, matrices what was in memory, and no token is "
            "accepted",
            mend="save these tensors with the checkpoint, or turn the switch off that asks for them",
            source=loading.loader.cite,
        )
    ]


def _shapes(loading: Loading, draft: Draft) -> list[Finding]:
    wrong = []
    for parameter, name in loading.taken.items():
        if parameter == "lm_head.weight":
            continue  # check_vocabulary's
        has, wanted = draft.tensors[name].shape, loading.expected[parameter]
        if has != wanted:
            wrong.append(f"{name} {list(has)} for {list(wanted)}")
    if not wrong:
        return [
            Finding(check="draft tensors", status="ok", found=f"{len(loading.taken)} fit", source=loading.loader.cite)
        ]
    return [
        Finding(
            check="draft tensors",
            status="mismatch",
            found=_listed(wrong),
            expected="the shapes that follow from the draft's config",
            consequence="the engine refuses the draft, or reads it as another model",
            mend="correct the sizes in config.json (hidden_size, head_dim, num_attention_heads, num_key_value_heads, "
            "intermediate_size, vocab_size): the tensors are what was trained",
            source=loading.loader.cite,
        )
    ]


def _embeddings(loading: Loading, draft: Draft) -> list[Finding]:
    loader, config = loading.loader, draft.config
    own, shared = "embed_tokens.weight" in loading.taken, config.target_hidden_size == config.hidden_size
    trained = bool(config.raw.get("embed_requires_grad"))
    if own and shared and loader.embeddings == "target" and trained:
        return [
            Finding(
                check="draft embeddings",
                status="mismatch",
                found=f"{loader.label} replaces embed_tokens.weight by the target's",
                expected="the draft's own, which were trained (embed_requires_grad is true)",
                consequence="the draft reads other embeddings than it was trained with",
                mend="train with frozen embeddings (the target's), or serve with vllm, which keeps the draft's own",
                source=loader.cite,
            )
        ]
    if not own and not shared:
        return [
            Finding(
                check="draft embeddings",
                status="mismatch",
                found="the checkpoint has no embed_tokens.weight",
                expected=f"its own of width {config.hidden_size}: the target's have {config.target_hidden_size}",
                consequence="the target's embeddings do not fit, so the draft's stay random",
                mend="save embed_tokens.weight with the checkpoint",
                source=loader.cite,
            )
        ]
    whose = "the draft's own" if own and (loader.embeddings == "own" or not shared) else "the target's"
    return [Finding(check="draft embeddings", status="ok", found=whose, source=loader.cite)]


def _head(loading: Loading, draft: Draft) -> list[Finding]:
    """Whose lm_head the engine uses, and whether the draft's vocabulary allows it."""
    loader, config = loading.loader, draft.config
    has = "lm_head.weight" in loading.taken
    declared, tied = config.draft_vocab_size, bool(config.layer.get("tie_word_embeddings"))
    full = declared in (None, config.vocab_size)
    if loader.needs_draft_vocab_key and "draft_vocab_size" not in config.raw:
        return [
            Finding(
                check="draft lm_head",
                status="mismatch",
                found="config.json has no draft_vocab_size",
                expected="the key: null for the target's vocabulary",
                consequence=f"{loader.label} reads it as an attribute and fails",
                mend=f'"draft_vocab_size": {"null" if full else declared}',
                source=loader.cite,
            )
        ]
    if tied and loader.system == "sglang" and (has or not full):
        return [
            Finding(
                check="draft lm_head",
                status="mismatch",
                found='"tie_word_embeddings": true',
                expected="false: the draft has a head of its own",
                consequence=f"{loader.label} takes the embeddings as head, and those are the target's",
                mend='"tie_word_embeddings": false',
                source=loader.cite,
            )
        ]
    if not has and not full:
        random = loader.missing_head == "random"
        return [
            Finding(
                check="draft lm_head",
                status="mismatch",
                found=f"no lm_head.weight, and draft_vocab_size {declared}",
                expected=f"lm_head.weight of {declared} rows",
                consequence=f"{loader.label} leaves the head random: no token is accepted"
                if random
                else f"{loader.label} takes the target's head, whose first {declared} rows are no draft vocabulary: "
                "proposals are other tokens",
                mend="save lm_head.weight with the checkpoint (the target's rows t2d, if it was frozen)",
                source=loader.cite,
            )
        ]
    if not has and declared is not None and loader.missing_head == "random" and not tied:
        return [
            Finding(
                check="draft lm_head",
                status="mismatch",
                found=f"no lm_head.weight, and draft_vocab_size {declared} (the whole vocabulary)",
                expected="null, which makes it take the target's head, or lm_head.weight itself",
                consequence=f"{loader.label} builds a head of its own and leaves it random: no token is accepted",
                mend='"draft_vocab_size": null',
                source=loader.cite,
            )
        ]
    if has and declared is None and loader.head_without_draft_vocab == "target":
        return [
            Finding(
                check="draft lm_head",
                status="mismatch",
                found="lm_head.weight, and no draft_vocab_size",
                expected="the draft's own head to be used",
                consequence=f"{loader.label} overwrites the draft's head with the target's where it is null",
                mend=f'"draft_vocab_size": {config.vocab_size}',
                source=loader.cite,
            )
        ]
    return [
        Finding(
            check="draft lm_head", status="ok", found="the draft's own" if has else "the target's", source=loader.cite
        )
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
