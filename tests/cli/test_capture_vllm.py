"""`eyas capture --engine vllm` where no vLLM is needed to say no."""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
    arguments = ["capture", inputs / "prepared", out, "--target", inputs / "target", "--taps", "default", *options]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_without_vllm_the_extra_is_named(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("eyas.capture.engines.vllm.load.version", missing)
    result = capture(inputs, tmp_path / "out", "--engine", "vllm")
    assert result.exit_code == 1
    assert "pip install 'eyas[vllm]'" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "vllm", "--dp", 2, "--", "--nnodes", 2), "--dp 2 with --nnodes 2 after --"),
        (("--engine", "vllm", "--", "--pipeline-parallel-size", 2), "--pipeline-parallel-size after --: not with"),
        (("--engine", "vllm", "--", "-pp", 2), "--pipeline-parallel-size after --: not with"),
        (("--engine", "vllm", "--", "--data-parallel-size=2"), "give eyas capture --dp instead"),
        (("--engine", "vllm", "--", "--enable-prefix-caching"), "a cached prefix is not computed"),
        (("--engine", "vllm", "--", "--speculative_config", "{}"), "captured without a draft"),
        (("--engine", "vllm", "--", "--no-enforce-eager"), "a compiled model would not call the hooks"),
        (("--engine", "vllm", "--", "--tensor-parallel-size", 2), "give eyas capture --tp instead"),
        (("--engine", "vllm", "--", "--max-num-batched-tokens", 64), "give eyas capture --batch-tokens instead"),
        (("--", "--seed", 1), "options after -- are those of --engine vllm"),
        (("extra",), "extra: unexpected after PREPARED and OUT"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    inputs: Path, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    result = capture(inputs, tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
