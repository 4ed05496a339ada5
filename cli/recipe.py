"""The recipe file eyas.toml, and --dry-run, which shows what it and the flags resolve to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE_FILE = "eyas.toml"
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_SOURCES = {
    ParameterSource.COMMANDLINE: "given",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "recipe",
    ParameterSource.DEFAULT: "default",
}


def load_recipe(path: Path, commands: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read a recipe: one table per command. Raises click.UsageError (exit 2) for anything that is not."""
    try:
        recipe: dict[str, dict[str, Any]] = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: no TOML ({error})") from error
    for name, table in recipe.items():
        if name not in commands:
            raise click.UsageError(f"{path}: [{name}] is no command: expected tables named {', '.join(commands)}")
        if not isinstance(table, dict):
            raise click.UsageError(f"{path}: {name} = {table!r} stands outside a table: expected [COMMAND] first")
    return recipe


def apply_recipe(ctx: click.Context, command: click.Command, recipe: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the recipe's table for ``command`` its defaults. Keys are long options or arguments as --help shows them.

    A group's table holds those of all its commands.
    """
    parts = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    names = {key: parameter for part in parts for parameter in part.params for key in _recipe_keys(parameter)}
    defaults: dict[str, Any] = {}
    for key, value in recipe.get(command.name or "", {}).items():
        parameter = names.get(key.replace("_", "-"))
        if parameter is None:
            raise click.UsageError(
                f"{RECIPE_FILE}: [{command.name}] has no option {key!r}: expected one of {', '.join(sorted(names))}"
            )
        if (isinstance(parameter, click.Option) and parameter.is_flag) != isinstance(value, bool) or isinstance(
            value, dict
        ):
            raise click.UsageError(f"{RECIPE_FILE}: [{command.name}] {key} = {value!r} is of the wrong type")
        # A command takes lists as comma-separated text, and a recipe may write them as lists.
        plain = not (parameter.multiple if isinstance(parameter, click.Option) else False) and parameter.nargs == 1
        defaults[parameter.name or key] = ",".join(map(str, value)) if plain and isinstance(value, list) else value
    if isinstance(command, click.Group):  # each takes what it knows
        defaults = dict.fromkeys(command.commands, defaults)
    ctx.default_map = {**(ctx.default_map or {}), command.name or "": defaults}


def _recipe_keys(parameter: click.Parameter) -> list[str]:
    if isinstance(parameter, click.Argument):
        return [(parameter.name or "").replace("_", "-")]
    return [option[2:] for option in [*parameter.opts, *parameter.secondary_opts] if option.startswith("--")]


def dry_run_option(function: Decorated) -> Decorated:
    """Adds --dry-run."""
    return click.option("--dry-run", is_flag=True, help="Print what would happen, with every value resolved.")(function)


def print_dry_run(plan: Mapping[str, object]) -> None:
    """Print every parameter with where its value came from, then what the command would do; as JSON with --json."""
    ctx = click.get_current_context()
    options: dict[str, dict[str, object]] = {}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in ("dry_run", "help") or not parameter.expose_value:
            continue
        label = name if isinstance(parameter, click.Argument) else parameter.opts[-1]
        source = ctx.get_parameter_source(name)
        options[label] = {
            "value": ctx.params.get(name),
            "source": _SOURCES.get(source, "default") if source else "default",
        }
    if ctx.params.get("as_json"):
        click.echo(json.dumps({"options": options, "plan": plan}, default=str))
        return
    for label, option in options.items():
        shown = "-" if option["value"] is None else option["value"]
        click.echo(f"{label:<26} {shown}  ({option['source']})")
    for label, fact in plan.items():
        click.echo(f"{label + ':':<26} {fact}")
