"""`eyas`: the group of all subcommands.

A subcommand is the object ``command`` of ``cli/<name>.py``, imported when it is asked for.
"""

from __future__ import annotations

import errno
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from eyas.cli.recipe import RECIPE_FILE, apply_recipe, load_recipe
from eyas.taps.errors import EyasError, UsageError

# In the order of the data flow, which is how --help lists them.
COMMANDS = ("prepare", "regenerate", "capture", "status", "standardize", "check", "train", "eval", "export", "inspect",
            "serve", "upload", "download")  # fmt: skip

ARGUMENTS = "eyas.arguments"  # key of ctx.meta: the arguments as given, for commands that start themselves again


class Commands(click.Group):
    """Loads each subcommand from its own file, with its defaults from the recipe."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"eyas.cli.{cmd_name}").command
        if isinstance(ctx.obj, dict):
            apply_recipe(ctx, command, ctx.obj)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise click.UsageError(str(error)) from error
        except EyasError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            named = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{named}{error.strerror or error}") from error


def _read_recipe(ctx: click.Context, _: click.Parameter, value: Path | None) -> None:
    if value is None and not Path(RECIPE_FILE).is_file():
        return
    path = value or Path(RECIPE_FILE)
    ctx.obj = load_recipe(path, COMMANDS)
    if not ctx.resilient_parsing:
        click.echo(f"eyas: defaults from {path}", err=True)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
@click.version_option(package_name="eyas", prog_name="eyas")
@click.option(
    "--recipe",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_read_recipe,
    expose_value=False,
    help=f"TOML file with a table per command ([capture], ...) whose keys are the command's long options and "
    f"arguments. Flags override it. Without this option ./{RECIPE_FILE} is read where it exists.",
)
def main() -> None:
    """Capture hidden states of a large language model, standardize and check them, train draft heads on them.

    \b
    eyas regenerate conversations.jsonl answers.jsonl --target TARGET
    eyas prepare answers.jsonl prepared --target TARGET
    eyas capture prepared captured --target TARGET --taps default
    eyas status captured
    eyas standardize captured standard --taps default
    eyas check standard --draft DRAFT --engine sglang@0.5.23
    eyas train standard run --target TARGET
    eyas eval run --decode prompts.jsonl
    eyas inspect standard --verify
    eyas upload standard hf://datasets/USER/NAME

    Every command can be killed at any time and run again. Exit status: 0 done, 1 failed, 2 wrong usage, 3 check found
    a mismatch, 75 stopped early with work left (run it again).
    """


if __name__ == "__main__":
    main()
