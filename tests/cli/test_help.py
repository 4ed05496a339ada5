"""What --help shows: docs/cli.md is current, the set of options changes on purpose only, and help costs no import."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from eyas.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]

# A change here is a change for users: it belongs into CHANGELOG.md too.
OPTIONS = {
    "prepare": """--dry-run --json --last-turn-only --max-samples --max-tokens --min-trained-tokens --overlong
        --revision --show --split --strict --target --trust-remote-code --workers""",
    "regenerate": """--batch-size --device --dp --dry-run --dtype --endpoint --engine --json --max-new-tokens
        --max-runtime --max-samples --max-tokens --request-timeout --revision --seed --split --target --temperature
        --top-p --tp --trust-remote-code""",
    "capture": """--batch-tokens --codec --codec-threads --convention --device --dp --draft --dry-run --dtype --engine
        --json --last-hidden --layers --max-rejects --max-runtime --max-samples --no-target-statistics --retry-rejects
        --revision --serving-engine --shard-size --taps --target --target-statistics --tp --trust-remote-code
        --worker""",
    "status": "--json",
    "standardize": """--codec --convention --describe --draft-vocab-size --dry-run --dtype --format --from
        --from-config --json --last-hidden --layers --max-disk --max-rejects --prepared --shard-size --taps --target
        --trust-remote-code --workers""",
    "check": """--draft --engine --engine-live --identify --json --replay --replay-in --strict --target --tp
        --trust-remote-code""",
    "train": """--accumulate --batch-tokens --clip --compile --device --dp --draft-hidden-size --draft-layers
        --draft-vocab-size --dry-run --dtype --epochs --fc-norm --init-from --json --keep --learning-rate --loss
        --max-runtime --max-steps --no-compile --noise --norm-before-fc --norm-before-residual --norm-output
        --optimizer --overlong --plot --reader-threads --save-every --schedule --seed --serving-engine --shard
        --step-weights --target --tensorboard --trainer --trust-remote-code --ttt-steps --validate-every --validation
        --warmup --weight-decay""",
    "eval": """--baselines --dataset --decode --device --draft-ms --draft-tokens --dry-run --dtype --endpoint --engine
        --json --max-new-tokens --max-prompts --plot --seed --steps --target --temperature --trust-remote-code
        --validation --verify-ms""",
    "export": "--draft-vocab-size --dtype --engine --json --source-engine --target",
    "inspect": "--from --json --plot --sample --target --trust-remote-code --verify --workers",
    "upload": "--dry-run --json --verify --workers",
    "download": "--dry-run --json --workers",
    "serve start": """--dataset --draft --draft-tokens --dry-run --engine --host --json --no-probe --port --probe
        --python --target --tp --wait""",
    "serve restart": """--dataset --draft --draft-tokens --dry-run --engine --grace --host --json --no-probe --port
        --probe --python --target --tp --wait""",
    "serve stop": "--grace --json",
    "serve status": "--json",
}

HEAVY = ("torch", "transformers", "datasets", "accelerate", "matplotlib", "vllm", "sglang", "fsspec", "huggingface_hub")


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def _all_commands() -> dict[str, click.Command]:
    """By what is typed; of a group, the commands inside it."""
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = _command(name)
        inner = command.commands if isinstance(command, click.Group) else None
        found |= {name: command} if inner is None else {f"{name} {part}": inner[part] for part in inner}
    return found


NAMES = [*OPTIONS, "serve"]


def test_docs_are_what_help_says() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
    assert (ROOT / "docs" / "cli.md").read_text() == generator["render"](), "run `make docs`"


def test_help_says_the_same_on_every_machine() -> None:
    """With another number of cores, another host name, terminal width and working directory."""
    code = (
        "import os, runpy, socket, sys\n"
        "os.cpu_count = lambda: 97\n"
        "socket.gethostname = lambda: 'elsewhere'\n"
        "print(runpy.run_path(sys.argv[1])['render'](), end='')\n"
    )
    script = str(ROOT / "docs" / "generate_cli.py")
    environment = {**os.environ, "COLUMNS": "50", "PYTHONPATH": str(ROOT / "typings")}
    done = subprocess.run(
        [sys.executable, "-c", code, script], capture_output=True, text=True, check=True, env=environment, cwd="/"
    )
    assert done.stdout == (ROOT / "docs" / "cli.md").read_text()


def test_the_set_of_options() -> None:
    found = {
        name: {option for p in command.params for option in [*p.opts, *p.secondary_opts] if option[0] == "-"}
        for name, command in _all_commands().items()
    }
    assert found == {name: set(options.split()) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_a_full_word_and_says_what_it_does(name: str) -> None:
    for parameter in _all_commands()[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
            assert all(option.startswith("--") for option in parameter.opts), parameter.opts


@pytest.mark.parametrize("name", NAMES)
def test_help_names_its_command_and_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), "-h"], prog_name="eyas")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: eyas {name} ")
    assert f"\n  eyas {name} " in result.output


@pytest.mark.parametrize(
    "arguments", [(), *(tuple(name.split()) for name in NAMES)], ids=lambda a: " ".join(a) or "eyas"
)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from eyas.cli.main import main\n"
        f"try: main([*{arguments!r}, '--help'])\n"
        f"finally: print('heavy:', *sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")
    assert done.stderr.splitlines()[-1].strip() == "heavy:"


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["no-such-command"], ["status", "--no-such-option"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Try '" in result.output


@pytest.mark.parametrize("target", ["/no/such", "./nosuch", "../nosuch", "~/nosuch", "no/such/folder"])
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "--target " in options])
def test_a_target_that_is_no_folder_is_not_asked_of_the_hub(name: str, target: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), "--target", target])
    assert result.exit_code == 2
    assert f"{target}: no such folder" in result.stderr or f"'{target}' does not exist" in result.stderr
