"""`eyas train --trainer`: what another trainer is given and told; a stand-in for it is on the PATH."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from eyas.cli.main import main
from tests.train.tiny_run import make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, 12)
    return folder


def _train(inputs: Path, run: Path, *arguments: str) -> tuple[int, str]:
    command = ["train", str(inputs / "standard"), str(run), "--target", str(inputs / "target"), *arguments]
    done = CliRunner().invoke(main, command)
    return done.exit_code, done.output


def test_dry_run_prints_the_command_and_writes_nothing(inputs: Path, tmp_path: Path) -> None:
    code, output = _train(inputs, tmp_path / "run", "--trainer", "speculators", "--dry-run", "--draft-vocab-size", "64",
                          "--", "--num-workers", "0")  # fmt: skip
    assert code == 0
    assert "-m speculators.train" in output
    assert "--target-layer-ids 2 4 6" in output  # after:1, after:3, after:5
    assert output.rstrip().endswith("--num-workers 0")
    assert not (tmp_path / "run").exists()


def test_an_option_that_is_not_translated_is_refused(inputs: Path, tmp_path: Path) -> None:
    code, output = _train(inputs, tmp_path / "run", "--trainer", "specforge", "--noise", "0.2")
    assert code == 2
    assert "--noise: not translated for specforge" in output


def test_specforge_is_started_on_data_it_reads(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "specforge"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\nexit $(cat {tmp_path}/status)\n')
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "status").write_text("0")
    run = tmp_path / "run"
    arguments = ("--trainer", "specforge", "--draft-vocab-size", "64", "--", "training.log_interval=1")
    code, output = _train(inputs, run, *arguments)
    assert code == 0, output
    assert (tmp_path / "told").read_text().split() == ["train", "--config", f"{run}/specforge.yaml",
                                                       "training.log_interval=1"]  # fmt: skip
    config = json.loads((run / "specforge.yaml").read_text())
    assert config["model"]["aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert Path(config["model"]["vocab_mapping_path"]).is_file()
    assert len(list(Path(config["data"]["hidden_states_path"]).rglob("*.ckpt"))) > 0
    (tmp_path / "status").write_text("9")
    code, output = _train(inputs, run, *arguments)
    assert code == 1
    assert "specforge ended with status 9" in output


def test_a_trainer_that_is_not_installed_is_named(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = _train(inputs, tmp_path / "run", "--trainer", "specforge")
    assert code == 1
    assert "pip install specforge" in output
