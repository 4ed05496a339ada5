"""Write docs/cli.md from the help of every command: `make docs`, or `python docs/generate_cli.py --check` to compare.

tests/cli/test_help.py fails where docs/cli.md is not what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from eyas.cli.main import main

PAGE = Path(__file__).parent / "cli.md"
WIDTH = 100  # of help text, whatever the terminal's

HEAD = """# Command line

Written by docs/generate_cli.py from `eyas COMMAND --help`; `make docs` writes it anew.
"""


def render() -> str:
    """docs/cli.md as it should be."""
    # No arguments are parsed, so a recipe in the working directory changes nothing.
    settings = {**main.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    group = click.Context(main, info_name="eyas", **settings)
    parts = [HEAD, _section("eyas", main.get_help(group))]
    for name in main.list_commands(group):
        command = main.get_command(group, name)
        assert command is not None
        parts += _sections(command, group, f"eyas {name}")
    return "\n".join(parts)


def _sections(command: click.Command, parent: click.Context, title: str) -> list[str]:
    """Of a command, and of those inside it."""
    name = title.rpartition(" ")[2]
    context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)
    inner = command.commands if isinstance(command, click.Group) else {}
    parts = [_section(title, command.get_help(context))]
    for name, part in inner.items():
        parts += _sections(part, context, f"{title} {name}")
    return parts


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != page:
            raise SystemExit("docs/cli.md is not current: run `make docs`")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        PAGE.write_text(page)
