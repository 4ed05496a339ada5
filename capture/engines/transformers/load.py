"""Reading a target's configuration, loading its weights, and hashing what was read."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.errors import TargetError
from eyas.shards.identity import DTYPES, TargetIdentity

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

HASHED_BLOCK_BYTES = 64 * 1024
HASHED_BYTES = 2 << 30


def read_outline(target: str, *, revision: str | None = None, trust_remote_code: bool = False) -> TargetOutline:
    """What the configuration of ``target`` (a folder, or a name on the hub) says. No weight is read or fetched.

    Raises TargetError where there is no configuration, transformers does not know it, or it is of no causal language
    model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TargetError(f"--target {target}: its configuration cannot be read: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"--target {target} is an encoder-decoder ({config.model_type}): expected a causal language model"
        )
    architectures = getattr(config, "architectures", None) or []
    if not architectures:
        raise TargetError(
            f'--target {target}: config.json names no architecture; expected e.g. "architectures": ["LlamaForCausalLM"]'
        )
    text = text_config(config)
    sizes = {}
    for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = getattr(text, field, None)
        if not isinstance(value, int) or value < 1:
            raise TargetError(
                f"--target {target}: {type(text).__name__} has no {field}: is it a causal language model?"
            )
        sizes[field] = value
    # Tables of learned positions and rotary embeddings alike; ALiBi models and others have no such bound.
    max_positions = getattr(text, "max_position_embeddings", None)
    return TargetOutline(
        config=config,
        config_hash=hashlib.blake2b(_config_file(target, revision).read_bytes(), digest_size=16).hexdigest(),
        model_class=architectures[0],
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        dtype=_checkpoint_dtype(config, text),
        max_positions=max_positions if isinstance(max_positions, int) and max_positions > 0 else None,
    )


def text_config(config: Any) -> Any:
    """The language model's part of a multimodal configuration; ``config`` itself elsewhere."""
    return config.get_text_config(decoder=True)


def load_model(
    settings: EngineSettings, outline: TargetOutline, *, device: torch.device, quiet: bool = False
) -> PreTrainedModel:
    """The target in ``settings.dtype``, in evaluation mode, on ``device`` or spread over ``settings.tp`` ranks.

    Raises TargetError where it does not load, is no causal language model, or where the checkpoint leaves weights
    unset (transformers would fill them with random numbers).
    """
    import torch
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    if quiet:  # one rank of a launch shows its progress bar
        logging.disable_progress_bar()
    placement: dict[str, Any] = (
        {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=settings.tp)}
        if settings.tp > 1
        else {"device_map": {"": device}}
    )
    model_class = _model_class(settings, outline)
    try:
        model, report = model_class.from_pretrained(
            settings.target,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=getattr(torch, settings.dtype),
            output_loading_info=True,
            **placement,
        )
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"--target {settings.target} does not fit the memory of {device} with --tp {settings.tp}: "
            f"spread it over more of them (--tp {2 * settings.tp})"
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise TargetError(f"--target {settings.target} cannot be loaded: {error}") from error
    _refuse_unset_weights(settings.target, report)
    if model.get_output_embeddings() is None:
        raise TargetError(
            f"--target {settings.target}: {type(model).__name__} has no language model head; expected a causal "
            f"language model"
        )
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What transformers' own model has between the last layer and the logits (see TargetIdentity)."""

    final_norm: str
    final_norm_eps: float | None
    lm_head_bias: bool
    lm_head_rows: int

    @classmethod
    def of(cls, norm: Any, lm_head: Any) -> HeadFacts:
        """Of the final norm and lm_head, loaded or not; its rows all, where it is quantized or split too."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        return cls(
            final_norm=type(norm).__name__,
            final_norm_eps=float(epsilon) if isinstance(epsilon, (int, float)) else None,
            lm_head_bias=getattr(lm_head, "bias", None) is not None,
            lm_head_rows=int(getattr(lm_head, "out_features", None) or lm_head.weight.shape[0]),
        )


def target_identity(
    settings: EngineSettings,
    outline: TargetOutline,
    head: HeadFacts,
    *,
    logit_scale: float,
    logit_softcap: float | None,
    quantization: str | None = None,
) -> TargetIdentity:
    """What is run, as dataset.json records it: the same whichever engine runs it. quantization: the engine's word for
    what the target's own config does not name."""
    return TargetIdentity(
        name=settings.target,
        revision=commit_hash(settings.target, settings.revision),
        config_hash=outline.config_hash,
        weights_hash=hash_weights(settings.target, settings.revision),
        model_class=outline.model_class,
        num_layers=outline.num_layers,
        hidden_size=outline.hidden_size,
        vocab_size=outline.vocab_size,
        weight_dtype=outline.dtype,
        quantization=quantization_method(outline) or quantization,
        final_norm=head.final_norm,
        final_norm_eps=head.final_norm_eps,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        lm_head_bias=head.lm_head_bias,
        lm_head_rows=head.lm_head_rows,
    )


def read_head_facts(settings: EngineSettings, outline: TargetOutline) -> HeadFacts:
    """The end of the target's stack, from its structure alone: built without memory for its weights.

    For engines that run the target by their own code; locate() finds the same parts in a model that is loaded. Raises
    TargetError where transformers cannot build it.
    """
    import torch

    model_class = _model_class(settings, outline)
    build = getattr(model_class, "_from_config", None) or model_class.from_config
    remote = (
        {"trust_remote_code": True} if settings.trust_remote_code and not hasattr(model_class, "_from_config") else {}
    )
    try:
        with torch.device("meta"):
            model = build(outline.config, **remote)
    except (ValueError, ImportError, RuntimeError, AttributeError, KeyError) as error:
        raise TargetError(f"--target {settings.target}: transformers cannot build it: {error}") from error
    lm_head = model.get_output_embeddings()
    decoders = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == outline.num_layers
    ]
    owner = model.get_submodule(min(decoders, key=len).rpartition(".")[0]) if decoders else model
    norms = [child for child in owner.children() if "norm" in type(child).__name__.lower()]
    if lm_head is None or not norms:
        raise TargetError(f"--target {settings.target}: {type(model).__name__} has no final norm or no lm_head")
    return HeadFacts.of(norms[-1], lm_head)


def hash_weights(target: str, revision: str | None) -> str | None:
    """blake2b-128, hex, over the weight files' names, sizes and bytes; None where there are no such files.

    Up to 2 GiB of weights are read whole. Of more, blocks of 64 KiB evenly spread over all of them are, 2 GiB in all,
    the first and the last of each file among them: of 16 GB every eighth block, of 1 TB one in 32 MB, which a changed
    tensor of a target that large does not fit between.
    """
    folder = _config_file(target, revision).parent
    files = _weight_files(folder)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=16)
    step = max(1, -(-sum(path.stat().st_size for path in files) // HASHED_BYTES))  # of so many blocks, one is read
    for path in files:
        num_bytes = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{num_bytes}\0".encode())
        last = max(0, num_bytes - HASHED_BLOCK_BYTES)
        with open(path, "rb") as file:
            for offset in [*range(0, num_bytes, step * HASHED_BLOCK_BYTES), *([last] if step > 1 else [])]:
                file.seek(offset)
                digest.update(file.read(HASHED_BLOCK_BYTES))
    return digest.hexdigest()


def quantization_method(outline: TargetOutline) -> str | None:
    """quant_method of the configuration; None for plain weights."""
    quantization = getattr(outline.config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return None if quantization is None else str(quantization.get("quant_method"))


def num_weight_bytes(target: str, revision: str | None) -> int:
    """Of the target's weight files."""
    return sum(path.stat().st_size for path in _weight_files(_config_file(target, revision).parent))


def commit_hash(target: str, revision: str | None) -> str | None:
    """The hub commit that ``target`` was read from, None for a plain folder."""
    snapshot = _config_file(target, revision).parent
    return snapshot.name if snapshot.parent.name == "snapshots" else None


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers loads from ``folder``: those of the index if there is one, safetensors before others."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).exists():
            return [folder / single]
        if (folder / index).exists():
            names = set(json.loads((folder / index).read_bytes())["weight_map"].values())
            root = os.path.abspath(folder)
            paths = [folder / name for name in sorted(names)]
            return [path for path in paths if os.path.abspath(path).startswith(root + os.sep) and path.exists()]
    return sorted(path for path in folder.glob("*.safetensors"))


def _config_file(target: str, revision: str | None) -> Path:
    from transformers.utils import cached_file

    try:
        return Path(cached_file(target, "config.json", revision=revision))
    except OSError as error:
        raise TargetError(f"--target {target}: no config.json there: {error}") from error


def _checkpoint_dtype(config: Any, text: Any) -> str:
    """The dtype config.json declares. Without one transformers' own default, float32."""
    declared = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    if declared is None:
        return "float32"
    name = str(declared).removeprefix("torch.")
    # A quantized checkpoint may declare its storage dtype; its activations are 16-bit then.
    return name if name in DTYPES else "bfloat16"


def _model_class(settings: EngineSettings, outline: TargetOutline) -> Any:
    import transformers

    auto_map = getattr(outline.config, "auto_map", None) or {}
    if settings.trust_remote_code:
        for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
            if name in auto_map:
                return getattr(transformers, name)
    # The class that config.json names, since one configuration may belong to several (with and without a head,
    # text-only and multimodal); what transformers does not know by name it may know by configuration.
    named = getattr(transformers, outline.model_class, None)
    return named if named is not None else transformers.AutoModelForCausalLM


def _refuse_unset_weights(target: str, report: dict[str, Any]) -> None:
    for kind, what in (("missing_keys", "are missing from"), ("mismatched_keys", "have another shape in")):
        keys = sorted(str(key) for key in report.get(kind) or ())
        if keys:
            shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise TargetError(
                f"--target {target}: weights {what} the checkpoint and would be random: {shown}. "
                f"Is it a whole checkpoint of the architecture that config.json names?"
            )
