"""From the options that say which taps are meant to a validated tuple of taps.

Three ways to say it, of which one may be used:

    --taps LIST|default                       taps by name
    --layers LIST --convention SYSTEM[@V]     a system's layer ids
    --from-config FILE --convention SYSTEM[@V]   what that system would feed a draft with this config.json
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from eyas.taps.conventions import SYSTEMS, describe, read_draft_config, readings, resolve
from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import Tap, default_taps, format_taps, parse_taps, validate_taps
from eyas.taps.target import TargetFacts

DEFAULT = "default"


class TapOptionsError(UsageError):
    """Options that contradict each other, or layer numbers without the convention that says what they mean."""


def select_taps(
    target: TargetFacts,
    *,
    taps: str | None = None,
    layers: str | None = None,
    from_config: Path | None = None,
    convention: str | None = None,
) -> tuple[Tap, ...]:
    """The taps that the options mean for ``target``; the default taps where none is given.

    Raises TapOptionsError for options that do not go together, ConventionError for ids that a convention does not read
    in one way, and TapError for taps that the target does not have, that repeat or are not in ascending depth.
    """
    given = [
        option
        for option, value in (("--taps", taps), ("--layers", layers), ("--from-config", from_config))
        if value is not None
    ]
    if len(given) > 1:
        raise TapOptionsError(f"{' and '.join(given)} each say which taps are meant: give one of them")
    if convention is not None and given not in (["--layers"], ["--from-config"]):
        raise TapOptionsError(
            f"--convention {convention} says how layer numbers are read, and there are none: give --layers or "
            "--from-config with it"
        )
    if layers is not None:
        selected = _from_layers(layers, convention, target)
    elif from_config is not None:
        selected = _from_config(from_config, convention, target)
    elif taps is None or taps.strip() == DEFAULT:
        selected = default_taps(target.num_layers)
    elif ids := _integers(taps):
        raise TapOptionsError(_bare("--taps", ids, target))
    else:
        selected = parse_taps(taps)
    validate_taps(selected, target.num_layers)
    return selected


def _from_layers(layers: str, convention: str | None, target: TargetFacts) -> tuple[Tap, ...]:
    ids = _integers(layers)
    if ids is None:
        raise TapOptionsError(
            f"--layers {layers}: expected layer numbers such as 3,31,59 (taps such as after:2 go to --taps)"
        )
    if convention is None:
        raise TapOptionsError(_bare("--layers", ids, target))
    return resolve(convention, ids, target)


def _from_config(path: Path, convention: str | None, target: TargetFacts) -> tuple[Tap, ...]:
    if path.is_dir():
        path = path / "config.json"
    if convention is None:
        raise TapOptionsError(
            f"--from-config {path}: every system reads its ids in its own way and place: say which one with "
            f"--convention SYSTEM[@VERSION] ({', '.join(s.name for s in SYSTEMS.values() if s.readers)})"
        )
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TapOptionsError(
            f"--from-config {path}: no such file; expected a draft's config.json or its folder"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EyasError(f"--from-config {path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise EyasError(f"--from-config {path}: expected a JSON object, found {type(config).__name__}")
    return read_draft_config(config, convention, target, where=str(path))


def _integers(text: str) -> tuple[int, ...] | None:
    """``3,31,59`` or ``[3, 31, 59]`` as integers; None for anything else."""
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    return tuple(map(int, parts)) if all(re.fullmatch(r"-?[0-9]+", part) for part in parts) else None


def _bare(option: str, ids: tuple[int, ...], target: TargetFacts) -> str:
    text = ",".join(map(str, ids))
    return (
        f"{option} {text}: a bare layer number means another tensor in every system. For {target}:\n"
        f"{describe(readings(ids, target), format_taps)}\n"
        f"Say which is meant (--layers {text} --convention SYSTEM[@VERSION]), or name the taps (--taps)."
    )
