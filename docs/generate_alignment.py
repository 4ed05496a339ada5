"""Write the generated parts of docs/alignment.md: `make docs`; `docs/generate_alignment.py --check` compares.

A part stands between `<!-- NAME -->` and `<!-- /NAME -->`. Tables come from eyas.taps.conventions and
eyas.align.loaders, verdicts from `eyas check` run on datasets and drafts that are made on the spot.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from click.testing import CliRunner

from eyas.align.loaders import TABLES, speculators
from eyas.align.loaders.base import FLAGS, Loader
from eyas.cli.main import main
from eyas.taps.conventions import SYSTEMS
from eyas.taps.conventions.entry import Versions
from eyas.taps.notation import TapError, format_taps
from tests.align.made import draft_config, draft_tensors, make_dataset, make_draft, make_identity

PAGE = Path(__file__).parent / "alignment.md"
_L = 61  # for the defaults in the table
_IDS = "eagle_aux_hidden_state_layer_ids"


def render(page: str) -> str:
    """``page`` with its generated parts as they should be."""
    for name, part in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert pattern.search(page), f"{PAGE.name} has no part {name}"
        page = pattern.sub(lambda match, part=part: match[1] + part() + match[2], page)  # type: ignore[misc]
    return page


def conventions() -> str:
    """How each system reads an id."""
    rows = []
    for system in SYSTEMS.values():
        for entry in sorted(system.entries, key=lambda entry: min(entry.models or {""})):
            try:
                default = format_taps(entry.default(_L)) if entry.default_taps else "none"
            except TapError:
                default = "none"
            classes = sorted(name for name in entry.models or () if name[:1].isupper())
            models = f"{', '.join(classes[:3])}{' ...' if len(classes) > 3 else ''}" or "all"
            rows.append((_label(system.name, entry.versions), models, entry.rule.says, default, f"`{entry.source}`"))
    return _table(("system", "target", "integer k means", f"default, L = {_L}", "read in"), rows)


def places() -> str:
    """Where each system looks for ids."""
    rows = [
        (
            _label(system.name, reader.versions) + (f", {reader.variant}" if reader.variant else ""),
            ", then ".join(f"`{place}`" for place in reader.places),
            f"`{reader.source}`",
        )
        for system in SYSTEMS.values()
        for reader in system.readers
    ]
    return _table(("system", "key", "read in"), rows)


def loaders() -> str:
    """How each system builds and fills a draft."""
    tables = [loader for loaders in [*TABLES.values(), speculators.LOADERS] for loader in loaders]
    rows = [
        (
            _label(loader.system, loader.versions),
            loader.family,
            *(_flag(loader, name) for name in FLAGS),
            {"dropped": "dropped in silence", "refused": "refused"}[loader.unknown_tensors],
            "the target's" if loader.embeddings == "target" else "own, else the target's",
            {"target": "the target's", "random": "random"}[loader.missing_head],
            {True: "both", False: "`rope_theta`, `rope_scaling`", None: "unknown"}[loader.reads_rope_parameters],
            f"`{loader.source}`",
        )
        for loader in tables
    ]
    names = ("system", "draft", *FLAGS, "unknown tensors", "embeddings", "missing lm_head", "RoPE keys", "read in")
    return _table(names, rows)


def _flag(loader: Loader, name: str) -> str:
    flag = loader.flags[name]
    return "never" if not flag.places else ", then ".join(f"`{place}`" for place in flag.places)


def story(ids: list[int], engine: str) -> Callable[[], str]:
    """The verdict on section 1's data, served with ``ids`` inside eagle_config."""

    def run() -> str:
        with tempfile.TemporaryDirectory() as scratch:
            identity = make_identity(
                "after:2,after:30,after:58", model_class="KimiK25ForConditionalGeneration", num_layers=_L
            )
            dataset = make_dataset(Path(scratch) / "kimi-k25", identity)
            draft = make_draft(Path(scratch) / "draft", draft_config(eagle_config={_IDS: ids}), draft_tensors())
            arguments = ["check", str(dataset), "--draft", str(draft), "--engine", engine]
            result = CliRunner().invoke(main, arguments)
        text = result.output.splitlines()
        begin = next(n for n, line in enumerate(text) if line.split()[1] == "taps")
        end = next(n for n, line in enumerate(text) if n > begin and not line.startswith(" "))
        shown = "\n".join(text[begin:end])
        return (
            f"```console\n$ jq -c .eagle_config draft/config.json\n{json.dumps({_IDS: ids}, separators=(',', ':'))}\n"
            f"$ eyas check kimi-k25 --draft draft --engine {engine}\n{shown}\n...\n$ echo $?\n{result.exit_code}\n```\n"
        )

    return run


PARTS: dict[str, Callable[[], str]] = {
    "conventions": conventions,
    "places": places,
    "loaders": loaders,
    "story-right": story([2, 30, 58], "sglang@0.5.12"),
    "story-embedding": story([-1, 2, 30, 58], "sglang@0.5.12"),
    "story-upgrade": story([2, 30, 58], "sglang@0.5.23"),
    "story-vllm": story([2, 30, 58], "vllm@0.32.0"),
}


def _label(system: str, versions: Versions) -> str:
    if versions is None:
        return f"{system}, release unknown"
    return f"{system} {versions[0]}" + ("" if versions[0] == versions[1] else f" to {versions[1]}")


def _table(names: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    names = list(names)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    page = PAGE.read_text()
    current = render(page)
    if sys.argv[1:] == ["--check"]:
        if page != current:
            raise SystemExit("docs/alignment.md is not current: run `make docs`")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        PAGE.write_text(current)
