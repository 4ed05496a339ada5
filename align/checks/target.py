"""Dataset and target: the same model, weights, tokenizer and template; and in which state last_hidden is."""

from __future__ import annotations

import hashlib

from eyas.align.checks.subject import Subject, TargetFolder
from eyas.align.verdict import Finding


def check_target(subject: Subject) -> list[Finding]:
    """Whether the target's folder holds what was captured from. Without one, only the state of last_hidden."""
    found = []
    if subject.target is not None:
        found = [
            *_model(subject, subject.target),
            *_weights(subject, subject.target),
            *_tokenizer(subject, subject.target),
        ]
    return [*found, _last_hidden(subject)]


def _model(subject: Subject, folder: TargetFolder) -> list[Finding]:
    identity, facts, text = subject.identity.target, folder.facts, folder.text
    pairs = [
        ("model class", identity.model_class, facts.model_class),
        ("layers", identity.num_layers, facts.num_layers),
        ("hidden size", identity.hidden_size, text.get("hidden_size")),
        ("vocabulary", identity.vocab_size, text.get("vocab_size")),
    ]
    wrong = [(name, ours, theirs) for name, ours, theirs in pairs if theirs is not None and ours != theirs]
    if wrong:
        return [
            Finding(
                check="target model",
                status="mismatch",
                found=", ".join(f"{name} {theirs}" for name, _, theirs in wrong),
                expected=", ".join(f"{name} {ours}" for name, ours, _ in wrong) + ", as captured",
                consequence="these hidden states are another model's: a draft trained on them drafts for that one",
                mend=f"give the target that was captured ({identity.name}), or capture this one",
            )
        ]
    same = hashlib.blake2b(folder.config_bytes, digest_size=16).hexdigest() == identity.config_hash
    if same:
        return [Finding(check="target model", status="ok", found=f"{identity.model_class}, the same config.json")]
    return [
        Finding(
            check="target model",
            status="warning",
            found="config.json differs from the one that was captured with, in keys other than its sizes",
            consequence="norm epsilon, rotary embedding or scales may differ, and the hidden states with them",
            mend=f"compare it with the config.json of {identity.name}; a replay on the target tells for certain",
        )
    ]


def _weights(subject: Subject, folder: TargetFolder) -> list[Finding]:
    from eyas.capture.engines.transformers.load import hash_weights

    identity = subject.identity.target
    quantization = _quantization(folder)
    if quantization != identity.quantization:
        return [
            Finding(
                check="target weights",
                status="mismatch",
                found=f"quantization: {quantization or 'none'}",
                expected=f"{identity.quantization or 'none'}, as captured",
                consequence="the target that serves rounds otherwise than the one that was captured",
                mend=f"capture with the weights that serve (--target {folder.path}), or serve those of {identity.name}",
            )
        ]
    if identity.weights_hash is None:
        return [
            Finding(
                check="target weights",
                status="unknown",
                found="the dataset does not say which weights it was captured with",
            )
        ]
    here = hash_weights(str(folder.path), None)
    if here is None:
        return [Finding(check="target weights", status="unknown", found=f"{folder.path} holds no weights")]
    if here == identity.weights_hash:
        return [
            Finding(
                check="target weights", status="ok", found=f"the same files (quantization: {quantization or 'none'})"
            )
        ]
    return [
        Finding(
            check="target weights",
            status="mismatch",
            found="the weight files are not those that were captured with",
            expected=f"the files of {identity.name}" + (f", revision {identity.revision}" if identity.revision else ""),
            consequence="another revision or fine-tune has other hidden states. The same weights saved in other files "
            "look the same from here",
            mend="capture again from these weights, or give those that were captured; a replay tells them apart",
        )
    ]


def _quantization(folder: TargetFolder) -> str | None:
    for config in (folder.config, folder.text):
        settings = config.get("quantization_config")
        if isinstance(settings, dict):
            return str(settings.get("quant_method"))
    return None


def _tokenizer(subject: Subject, folder: TargetFolder) -> list[Finding]:
    from eyas.capture.errors import TargetError
    from eyas.capture.tokenizer import tokenizer_identity

    captured = subject.identity.tokenizer
    try:
        here = tokenizer_identity(folder.path, folder.tokenizer)
    except TargetError as error:
        return [Finding(check="tokenizer", status="unknown", found=str(error))]
    found = []
    if here.probe_hash != captured.probe_hash:
        found.append(
            Finding(
                check="tokenizer",
                status="mismatch",
                found="the target's tokenizer gives other ids for the probe text",
                expected="the ids that the dataset's tokenizer gave",
                consequence="the same text is other tokens when served: the draft has learned other embeddings",
                mend="prepare and capture again with this tokenizer",
            )
        )
    elif here.files_hash != captured.files_hash:
        found.append(
            Finding(
                check="tokenizer",
                status="warning",
                found="the tokenizer's files differ, and the probe text has the same ids",
                consequence="rare tokens or special tokens may differ",
                mend="prepare and capture again if the vocabulary was changed",
            )
        )
    else:
        found.append(Finding(check="tokenizer", status="ok", found="the same files and ids"))
    if here.chat_template_hash == captured.chat_template_hash:
        found.append(Finding(check="chat template", status="ok", found="the same"))
    else:
        found.append(
            Finding(
                check="chat template",
                status="mismatch",
                found="the target's chat template is not the one the dataset was rendered with",
                expected=captured.chat_template_hash or "none",
                consequence="served prompts differ from the trained ones: headers, thinking blocks, tools",
                mend="eyas prepare with this target's template, and capture again",
            )
        )
    return found


def _last_hidden(subject: Subject) -> Finding:
    identity, target = subject.identity, subject.identity.target
    norm = f"{target.final_norm}" + ("" if target.final_norm_eps is None else f" (eps {target.final_norm_eps:g})")
    if identity.last_hidden is None:
        if identity.target_statistics:
            return Finding(check="last hidden", status="ok", found="not stored; top-1 and logsumexp of the target are")
        return Finding(
            check="last hidden",
            status="warning",
            found="neither last hidden states nor the target's top-1 and logsumexp are stored",
            consequence="a trainer has the tokens alone to learn from, not the target's distribution",
            mend="eyas capture --last-hidden after:last --target-statistics",
        )
    if identity.last_hidden.kind == "final":
        return Finding(
            check="last hidden",
            status="ok",
            found=f"final, after the target's {norm}: lm_head follows, and nothing may norm it again",
        )
    return Finding(
        check="last hidden",
        status="ok",
        found=f"{identity.last_hidden}, before the target's {norm}: the trainer applies it, then lm_head",
    )
