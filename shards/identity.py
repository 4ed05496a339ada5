"""dataset.json: what every worker that writes into one dataset must agree on.

Written first and never changed. What may differ between workers (engine build, tensor-parallel size, host, batch
limits) stands in each shard's metadata instead. The file is specified in docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.shards.atomic import publish_new
from eyas.taps.errors import EyasError
from eyas.taps.notation import Tap, TapError, parse_tap, validate_taps

FORMAT_VERSION = 1
IDENTITY_FILE = "dataset.json"
DTYPES = ("bfloat16", "float16", "float32")
CODECS = ("raw", "zstd")


class IdentityError(EyasError):
    """dataset.json is missing, unreadable, of another format version, or of another identity than expected."""


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """The model whose hidden states these are."""

    name: str  # as the user gave it; not compared, since a path may differ between machines
    revision: str | None  # hub revision, None for a plain folder
    config_hash: str  # blake2b-128 of config.json's bytes, hex
    weights_hash: (
        str | None
    )  # blake2b-128 of the weight files' names, sizes and (over 2 GiB: every so many) blocks, hex
    model_class: str  # e.g. LlamaForCausalLM
    num_layers: int
    hidden_size: int
    vocab_size: int  # config's: the ids a row of logits may name
    weight_dtype: str
    quantization: str | None  # quant method, None for plain weights
    final_norm: str  # class name of the norm module, e.g. LlamaRMSNorm
    final_norm_eps: float | None
    logit_scale: float  # logits = softcap(scale * (lm_head(final) + bias))
    logit_softcap: float | None  # softcap(x) = cap * tanh(x / cap)
    lm_head_bias: bool
    lm_head_rows: int  # at least vocab_size: some checkpoints pad


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """Hashes are blake2b-128, hex."""

    files_hash: str  # over all tokenizer files (tiktoken models too), by name
    chat_template_hash: str | None
    probe_hash: str  # of the ids of a fixed probe text


@dataclass(frozen=True, kw_only=True)
class PreparedIdentity:
    """The prepared input: the set of samples a capture works through."""

    fingerprint: str  # blake2b-128 over the sorted sample ids, hex
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class DatasetIdentity:
    """Everything in dataset.json."""

    stage: Literal["captured", "standard"]
    taps: tuple[Tap, ...]  # the features' taps, ascending depth
    last_hidden: Tap | None  # after:{L-1} or final
    dtype: str  # bfloat16, float16 or float32: of features and last_hidden
    codec: str  # raw or zstd
    target_statistics: bool  # whether shards hold target_top1 and target_lse
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    prepared: PreparedIdentity

    def __post_init__(self) -> None:
        validate_taps(self.taps, self.target.num_layers)
        if self.dtype not in DTYPES:
            raise IdentityError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.codec not in CODECS:
            raise IdentityError(f"codec {self.codec!r}: expected one of {', '.join(CODECS)}")
        if self.codec == "zstd" and self.dtype != "bfloat16":
            raise IdentityError(f"codec zstd stores bfloat16 only, and this dataset is {self.dtype}: use codec raw")
        if self.stage not in ("captured", "standard"):
            raise IdentityError(f"stage {self.stage!r}: expected captured or standard")
        allowed = (f"after:{self.target.num_layers - 1}", "final")
        if self.last_hidden is not None and str(self.last_hidden) not in allowed:
            raise IdentityError(f"last_hidden {self.last_hidden}: expected {' or '.join(allowed)}")

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def features_width(self) -> int:
        """A * H: the width of a row of features."""
        return len(self.taps) * self.target.hidden_size

    @property
    def wide_tensors(self) -> dict[str, int]:
        """The tensors that a codec stores, and their widths in elements."""
        wide = {"features": self.features_width}
        return wide if self.last_hidden is None else wide | {"last_hidden": self.hidden_size}

    @property
    def itemsize_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def to_json(self) -> dict[str, Any]:
        """As dataset.json holds it."""
        body = asdict(self)
        body["taps"] = [str(tap) for tap in self.taps]
        body["last_hidden"] = None if self.last_hidden is None else str(self.last_hidden)
        return {"format": "eyas", "format_version": FORMAT_VERSION, **body}

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str = IDENTITY_FILE) -> DatasetIdentity:
        """The inverse of to_json. Raises IdentityError, naming ``where``."""
        if body.get("format") != "eyas":
            raise IdentityError(f"{where}: no eyas dataset (format is {body.get('format')!r})")
        if body.get("format_version") != FORMAT_VERSION:
            raise IdentityError(
                f"{where}: format version {body.get('format_version')!r}, and this eyas reads version "
                f"{FORMAT_VERSION}: use the eyas that wrote it"
            )
        try:
            last_hidden = body["last_hidden"]
            return cls(
                stage=body["stage"],
                taps=tuple(parse_tap(tap) for tap in body["taps"]),
                last_hidden=None if last_hidden is None else parse_tap(last_hidden),
                dtype=body["dtype"],
                codec=body["codec"],
                target_statistics=body["target_statistics"],
                target=TargetIdentity(**body["target"]),
                tokenizer=TokenizerIdentity(**body["tokenizer"]),
                prepared=PreparedIdentity(**body["prepared"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise IdentityError(f"{where}: a field is missing or of the wrong kind ({error})") from error
        except TapError as error:
            raise IdentityError(f"{where}: {error}") from error


def read_identity(dataset: Path) -> DatasetIdentity:
    """Read ``dataset``/dataset.json. Raises IdentityError."""
    path = dataset / IDENTITY_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise IdentityError(f"{dataset}: no {IDENTITY_FILE} there, so this is no eyas dataset") from error
    except NotADirectoryError as error:
        raise IdentityError(f"{path}: unreadable ({error})") from error
    return parse_identity(content, where=str(path))


def parse_identity(content: bytes, *, where: str) -> DatasetIdentity:
    """The identity that dataset.json holds as ``content``. Raises IdentityError, naming ``where``."""
    try:
        body = json.loads(content)
    except ValueError as error:
        raise IdentityError(f"{where}: unreadable ({error})") from error
    if not isinstance(body, dict):
        raise IdentityError(f"{where}: expected a JSON object")
    return DatasetIdentity.from_json(body, where=where)


def create_or_match(dataset: Path, identity: DatasetIdentity) -> None:
    """Write dataset.json, or prove that the one there is the same.

    Several workers may call this at once: exactly one writes. Raises IdentityError listing every difference.
    """
    dataset.mkdir(parents=True, exist_ok=True)
    path = dataset / IDENTITY_FILE
    text = json.dumps(identity.to_json(), indent=2) + "\n"
    if not path.exists() and publish_new(path, text.encode()):
        return
    found = read_identity(dataset)
    differences = identity_differences(found, identity)
    if differences:
        raise IdentityError(
            f"{dataset} holds another dataset: "
            + "; ".join(f"{name} is {theirs!r} there and {ours!r} here" for name, theirs, ours in differences)
            + f". Give another output folder, or the options that {path} was made with."
        )


def content_hash(identity: DatasetIdentity) -> str:
    """blake2b-128, hex, of what the meaning of a shard's bytes depends on; each shard carries it.

    Stage, prepared input and ``target.name`` are left out: a captured shard may stand in a standard dataset as it is.
    """
    body = identity.to_json()
    del body["stage"], body["prepared"], body["target"]["name"]
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def identity_differences(a: DatasetIdentity, b: DatasetIdentity) -> list[tuple[str, Any, Any]]:
    """(field, a's value, b's value) for each field that differs; ``target.name`` is a label and not compared."""
    return [
        (name, value, flat_b.get(name))
        for flat_b in [dict(_flatten(b))]
        for name, value in _flatten(a)
        if name != "target.name" and value != flat_b.get(name)
    ]


def _flatten(identity: DatasetIdentity) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for field, value in identity.to_json().items():
        if isinstance(value, dict):
            pairs += [(f"{field}.{key}", inner) for key, inner in value.items()]
        else:
            pairs.append((field, value))
    return pairs
