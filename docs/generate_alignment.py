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
from eyas.taps.notation import TapError, after, format_taps, parse_taps
from tests.align.made import draft_config, draft_tensors, make_dataset, make_draft, make_identity
from tests.align.states import build_target, make_world, store

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
    """How each system reads an id: a row for each reading, with the models and files that share it."""
    rows: dict[tuple[str, str, str], tuple[list[str], dict[str, None]]] = {}
    for system in SYSTEMS.values():
        rest = "others" if any(entry.models for entry in system.entries) else "all"
        for entry in sorted(system.entries, key=lambda entry: min(entry.models or {""})):
            try:
                default = format_taps(entry.default(_L)) if entry.default_taps else "none"
            except TapError:
                default = "none"
            says = f"{entry.rule.says} ({entry.note})" if entry.note else entry.rule.says
            label = _label(system.name, entry.versions) + (f", {entry.variant}" if entry.variant else "")
            classes, sources = rows.setdefault((label, says, default), ([], {}))
            classes += sorted(name for name in entry.models or (rest,) if name[:1].isupper() or name == rest)
            sources[f"`{entry.source}`"] = None
    shown = [
        (
            label,
            f"{', '.join(classes[:3])}{' ...' if len(classes) > 3 else ''}" or "others",
            says,
            default,
            ", ".join(sources),
        )
        for (label, says, default), (classes, sources) in rows.items()
    ]
    return _table(("system", "target", "integer k means", f"default, L = {_L}", "read in"), shown)


def unread() -> str:
    """Models that a system reads in ways of their own, which were not read."""
    return "".join(
        f"- {system.name}: {', '.join(sorted(system.unread))}\n" for system in SYSTEMS.values() if system.unread
    )


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


def story_replay() -> str:
    """The verdict of a replay on a tiny DeepSeek-V3 of 61 layers whose states are one layer later than declared."""
    small = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4}
    stored = parse_taps("after:2,after:30,after:58")
    with tempfile.TemporaryDirectory() as scratch:
        target = build_target(Path(scratch) / "target", "DeepseekV3ForCausalLM", num_hidden_layers=_L, **small)
        world = make_world(target, "float32", (20, 24, 18, 22))
        dataset = store(
            Path(scratch) / "captured",
            world,
            parse_taps("after:1,after:29,after:57"),
            last_hidden=after(_L - 1),
            edit=lambda world, n, kept: kept.update({f"slot {k}": world.states(n)[t] for k, t in enumerate(stored)}),
            statistics=False,
        )
        result = CliRunner().invoke(main, ["check", str(dataset), "--target", str(target)])
    text = result.stdout.splitlines()
    begin = next(n for n, line in enumerate(text) if line.split()[1] == "replay")
    shown = "\n".join(text[begin:-1])
    taps = "jq -c .taps captured/dataset.json"
    return (
        f'```console\n$ {taps}\n["after:1","after:29","after:57"]\n'
        f"$ eyas check captured --target target\n...\n{shown}\n$ echo $?\n{result.exit_code}\n```\n"
    )


def without_figures(page: str) -> str:
    """``page`` with its percentages masked: they are measured, and the last digit is the machine's."""
    return re.sub(r"[0-9]+(\.[0-9]+)?%", "N%", page)


PARTS: dict[str, Callable[[], str]] = {
    "conventions": conventions,
    "unread": unread,
    "places": places,
    "loaders": loaders,
    "story-right": story([2, 30, 58], "sglang@0.5.12"),
    "story-embedding": story([-1, 2, 30, 58], "sglang@0.5.12"),
    "story-upgrade": story([2, 30, 58], "sglang@0.5.23"),
    "story-vllm": story([2, 30, 58], "vllm@0.32.0"),
    "story-replay": story_replay,
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
        if without_figures(page) != without_figures(current):
            raise SystemExit("docs/alignment.md is not current: run `make docs`")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        PAGE.write_text(current)
