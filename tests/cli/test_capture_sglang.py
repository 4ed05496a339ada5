"""`eyas capture --engine sglang` where no SGLang is needed to say no."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from tests.tiny import make_target, prepare_rows, tokenized_rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_target(folder / "target")
    prepare_rows(folder / "prepared", folder / "target", tokenized_rows(4))
    return folder


def capture(inputs: Path, out: Path, *options: object) -> Result:
    arguments = ["capture", inputs / "prepared", out, "--target", inputs / "target", "--engine", "sglang", *options]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def installed(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """As if that release of SGLang were there."""
    monkeypatch.setattr("eyas.capture.engines.sglang.load.version", lambda _: release)
    monkeypatch.setattr("eyas.capture.engines.sglang.load.find_spec", lambda _: True)


def test_without_sglang_the_extra_is_named(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("eyas.capture.engines.sglang.load.version", missing)
    result = capture(inputs, tmp_path / "out", "--taps", "default")
    assert result.exit_code == 1
    assert "pip install 'eyas[sglang]'" in result.output
    assert not (tmp_path / "out").exists()


def test_a_release_that_is_too_old_is_refused(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.5.14")
    result = capture(inputs, tmp_path / "out", "--taps", "default")
    assert result.exit_code == 1
    assert "SGLang 0.5.14" in result.output
    assert "sglang>=" in result.output


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23", "0.5.99"])
def test_a_dry_run_needs_no_sglang(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    installed(monkeypatch, release)
    result = capture(inputs, tmp_path / "out", "--taps", "embed,after:0,after:3,final", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "embed,after:0,after:3,final" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pp-size", 2), "--pp-size after --: not with eyas capture, a stage would hold only its own taps"),
        (("--pipeline-parallel-size=2",), "a stage would hold only its own taps"),
        (("--dp-size", 2), "give eyas capture --dp instead"),
        (("--enable-dp-attention",), "a rank would hold only its own rows"),
        (("--nnodes", 2), "workers on other nodes cannot reach this process"),
        (("--speculative-algorithm", "EAGLE3"), "the target is captured without a draft"),
        (("--enable-torch-compile",), "a compiled one would not call the hooks"),
        (("--tp-size", 2), "give eyas capture --tp instead"),
        (("--tp", 2), "give eyas capture --tp instead"),
        (("--chunked-prefill-size", 64), "give eyas capture --batch-tokens instead"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    inputs: Path, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    result = capture(inputs, tmp_path / "out", "--taps", "default", "--", *options)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
