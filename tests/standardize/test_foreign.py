"""Foreign folders in and out: what comes back, what is rejected, and what a kill leaves."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity, IdentityError, read_identity
from eyas.shards.ledger import read_ledgers
from eyas.shards.rejects import read_rejects
from eyas.shards.sample import Sample, sample_id
from eyas.shards.token_counts import read_token_counts
from eyas.standardize.events import Summary
from eyas.standardize.foreign import MaskOf, foreign_request, import_folder
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.registry import create_writer, detect, open_reader
from eyas.standardize.formats.write_rows import write_rows
from eyas.taps.errors import EyasError
from eyas.taps.notation import FINAL, Tap, TapError, after, parse_taps
from tests.captured import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, captured_identity, make_samples, write_captured
from tests.standardize.child import export_and_die, import_and_die

LAST = after(NUM_LAYERS - 1)


def standard_identity(*, num_samples: int = 12, **changes: Any) -> DatasetIdentity:
    changes = {"stage": "standard", "target_statistics": False, "taps": "after:1,after:3,after:5", **changes}
    return captured_identity(num_samples=num_samples, **changes)


def written(folder: Path, identity: DatasetIdentity, samples: Sequence[Sample], **options: Any) -> Path:
    return write_captured(folder, identity, samples, **options)


def export(source: Path, out: Path, name: str, **options: Any) -> Path:
    summary = write_rows(Dataset.open(source), out, create_writer(name), format=name, threads=2, **options)
    assert summary.stopped is None
    return out


def imported(
    source: Path,
    out: Path,
    name: str,
    taps: Sequence[Tap],
    *,
    mask_of: MaskOf | None = None,
    last_hidden: Any = "captured",
    should_stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Summary:
    target = captured_identity(num_samples=1)
    layout = detect(source, name)
    request = foreign_request(
        source,
        out,
        open_reader(source, layout),
        beside=layout.last_hidden,
        target=target.target,
        tokenizer=target.tokenizer,
        taps=taps,
        last_hidden=last_hidden,
        mask_of=mask_of,
        **options,
    )
    *_, summary = import_folder(request, workers=2, shard_bytes=8_000, should_stop=should_stop)
    assert isinstance(summary, Summary)
    return summary


def masks_of(samples: Sequence[Sample]) -> MaskOf:
    known = {sample.input_ids.numpy().tobytes(): sample.loss_mask.numpy() for sample in samples}

    def mask_of(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        if ids.tobytes() not in known:
            raise EyasError("no such tokens")
        return known[ids.tobytes()]

    return mask_of


def bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous().view(torch.uint8)


def check(dataset: Path, samples: Sequence[Sample], *, last_hidden: bool = True) -> None:
    """Exactly ``samples``, to the bit."""
    found = {sample.sample_id: sample for sample in Dataset.open(dataset)}
    assert found.keys() == {sample.sample_id for sample in samples}
    for sample in samples:
        read = found[sample.sample_id]
        assert torch.equal(read.input_ids, sample.input_ids)
        assert torch.equal(read.loss_mask, sample.loss_mask)
        assert torch.equal(bits(read.features), bits(sample.features))
        assert read.features.dtype == sample.features.dtype
        if last_hidden:
            assert torch.equal(bits(read.last_hidden), bits(sample.last_hidden))
    state = read_ledgers(dataset)
    assert state.problems == []
    assert read_token_counts(dataset).sum() == sum(int(sample.loss_mask.sum()) for sample in samples)


@pytest.fixture
def identity() -> DatasetIdentity:
    return standard_identity()


@pytest.fixture
def samples(identity: DatasetIdentity) -> list[Sample]:
    return make_samples(identity, 12)


@pytest.fixture
def standard(tmp_path: Path, identity: DatasetIdentity, samples: list[Sample]) -> Path:
    return written(tmp_path / "standard", identity, samples)


@pytest.fixture
def theirs(tmp_path: Path, standard: Path) -> Path:
    return export(standard, tmp_path / "theirs", "speculators")


# --- round trips --------------------------------------------------------------------------------

LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([1, 2, 500, 5000]))


@st.composite
def datasets(draw: st.DrawFn, name: str) -> tuple[DatasetIdentity, list[Sample]]:
    """A dataset that the format can say, with every bit pattern in its states."""
    layers = draw(st.sets(st.integers(0, NUM_LAYERS - 2), min_size=1, max_size=5))
    dtypes = ["bfloat16", "float32"] if name == "speculators" else ["bfloat16", "float16", "float32"]
    identity = standard_identity(
        taps=",".join(f"after:{layer}" for layer in sorted(layers)), dtype=draw(st.sampled_from(dtypes))
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    integers = torch.int32 if identity.dtype == "float32" else torch.int16
    found: dict[str, Sample] = {}
    for length, trained in draw(st.lists(st.tuples(LENGTHS, st.sampled_from([0, 1, 2])), min_size=1, max_size=4)):
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=random, dtype=torch.int32)
        mask = torch.randint(0, 2, (length,), generator=random, dtype=torch.uint8)
        mask = mask if trained == 2 else torch.full_like(mask, trained)
        key = sample_id(ids.numpy(), mask.numpy())
        if any(torch.equal(ids, other.input_ids) for other in found.values()):
            continue  # one mask for the same tokens, or no join finds it
        info = torch.iinfo(integers)
        wide = [
            torch.randint(info.min, info.max + 1, (length, width), generator=random).to(integers)
            for width in (identity.features_width, HIDDEN_SIZE)
        ]
        features, last_hidden = (values.view(getattr(torch, identity.dtype)) for values in wide)
        found[key] = Sample(
            sample_id=key,
            input_ids=ids,
            loss_mask=mask,
            features=features,
            last_hidden=last_hidden,
            target_top1=None,
            target_lse=None,
        )
    return replace(identity, prepared=replace(identity.prepared, num_samples=len(found))), list(found.values())


@pytest.mark.parametrize("name", ["speculators", "vllm"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_comes_back_to_the_bit(name: str, data: st.DataObject) -> None:
    identity, samples = data.draw(datasets(name))
    with tempfile.TemporaryDirectory() as folder:
        source = written(Path(folder) / "standard", identity, samples, shard_bytes=100_000)
        out = export(source, Path(folder) / "out", name)
        taps = identity.taps if name == "speculators" else (*identity.taps, LAST)
        imported(out, Path(folder) / "again", name, taps, mask_of=masks_of(samples))
        found = read_identity(Path(folder) / "again")
        assert (found.taps, found.last_hidden, found.dtype) == (identity.taps, LAST, identity.dtype)
        assert (found.stage, found.target.weights_hash, found.target_statistics) == ("standard", None, False)
        check(Path(folder) / "again", samples)


def test_a_slot_stays_a_tap_where_no_last_hidden_is_wanted(tmp_path: Path, standard: Path, samples) -> None:
    out = export(standard, tmp_path / "out", "vllm")
    taps = parse_taps(f"after:1,after:3,after:5,{LAST}")
    imported(out, tmp_path / "again", "vllm", taps, mask_of=masks_of(samples), last_hidden="none")
    found = Dataset.open(tmp_path / "again")
    assert (found.identity.taps, found.identity.last_hidden) == (taps, None)
    for sample in samples:
        both = torch.cat([sample.features, sample.last_hidden], dim=1)
        assert torch.equal(found.sample(sample.sample_id).features, both)


def test_an_fp8_backend_is_read_as_its_trainer_reads_it(tmp_path: Path, theirs: Path, samples) -> None:
    expected = {}
    for path in theirs.rglob("hs_*.safetensors"):
        tensors = load_file(path)
        wide = tensors["hidden_states"].float()
        scales = (wide.abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)  # hs_connectors' fp8_utils.py
        stored = (wide / scales).to(torch.float8_e4m3fn)
        save_file({**tensors, "hidden_states": stored, "hidden_states_scales": scales}, path)
        expected[tuple(tensors["token_ids"].tolist())] = stored.to(torch.bfloat16) * scales.to(torch.bfloat16)
    assert detect(theirs, "speculators").version.startswith("0.9, fp8 backend")
    imported(theirs, tmp_path / "again", "speculators", parse_taps("after:1,after:3,after:5"))
    for sample in Dataset.open(tmp_path / "again"):
        states = expected[tuple(sample.input_ids.tolist())]
        assert torch.equal(sample.features, states[:, :-1].flatten(1))
        assert torch.equal(sample.last_hidden, states[:, -1])


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_older_speculators_files(tmp_path: Path, samples: list[Sample], version: str) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    torch.save({"a": 1}, folder / "token_freq.pt")
    for n, sample in enumerate(samples):
        body: dict[str, Any] = {"input_ids": sample.input_ids.long(), "loss_mask": sample.loss_mask.long()}
        if version == "v0":
            body |= {"hidden_state": sample.features, "target": sample.last_hidden}
        else:
            body["hidden_states"] = [*sample.features.split(HIDDEN_SIZE, dim=1), sample.last_hidden]
        torch.save(body, folder / f"data_{n}.pt")
    (folder / "data_config.json").write_text('{"hidden_states": {"layer_ids": [1, 3, 5, 7]}}')
    layout = detect(folder, "speculators")
    assert version in layout.version
    assert layout.num_files == len(samples)
    if version == "v1":
        assert (layout.layer_ids, layout.convention) == ((1, 3, 5), "speculators@0.4.0")
    imported(folder, tmp_path / "again", "speculators", parse_taps("after:1,after:3,after:5"))
    assert read_identity(tmp_path / "again").last_hidden == (FINAL if version == "v0" else LAST)
    check(tmp_path / "again", samples)


# --- what is wrong ------------------------------------------------------------------------------


def test_what_cannot_be_used_is_named_and_the_rest_goes_on(tmp_path: Path, theirs: Path, samples) -> None:
    states = theirs / "hidden_states"
    order = [sample.sample_id for sample in Dataset.open(tmp_path / "standard")]
    truncated, other, vocabulary, width = (states / f"hs_{n}.safetensors" for n in (0, 3, 5, 7))
    truncated.write_bytes(truncated.read_bytes()[:-7])
    shutil.copy(states / "hs_4.safetensors", other)
    tensors = load_file(vocabulary)
    save_file({**tensors, "token_ids": tensors["token_ids"] + VOCAB_SIZE}, vocabulary)
    tensors = load_file(width)
    save_file({**tensors, "hidden_states": tensors["hidden_states"][:-1].contiguous()}, width)
    (states / "hs_99.safetensors").write_bytes((states / "hs_1.safetensors").read_bytes())
    summary = imported(theirs, tmp_path / "again", "speculators", parse_taps("after:1,after:3,after:5"))
    rejects = read_rejects(tmp_path / "again")
    assert {Path(item).name for item in rejects} == {f"hs_{n}.safetensors" for n in (0, 3, 5, 7, 99)}
    assert "truncated" in rejects["hidden_states/hs_0.safetensors"]
    assert "are not the" in rejects["hidden_states/hs_3.safetensors"]
    assert "no row 99" in rejects["hidden_states/hs_99.safetensors"]
    assert summary.num_rejected == 5
    lost = {order[n] for n in (0, 3, 5, 7)}
    check(tmp_path / "again", [sample for sample in samples if sample.sample_id not in lost])


def test_what_is_mended_comes_in_later(tmp_path: Path, theirs: Path, samples) -> None:
    bad = theirs / "hidden_states" / "hs_2.safetensors"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:100])
    taps = parse_taps("after:1,after:3,after:5")
    assert imported(theirs, tmp_path / "again", "speculators", taps).num_rejected == 1
    bad.write_bytes(whole)
    (theirs / "hidden_states" / "hs_1.safetensors").unlink()  # taken in already, and given away
    summary = imported(theirs, tmp_path / "again", "speculators", taps)
    assert (summary.num_rejected, summary.num_written) == (0, 1)
    assert read_rejects(tmp_path / "again") == {}
    assert read_identity(tmp_path / "again").prepared.num_samples == len(samples)
    check(tmp_path / "again", samples)


def test_the_same_sample_twice_is_one(tmp_path: Path, standard: Path, samples) -> None:
    out = export(standard, tmp_path / "out", "vllm")
    shutil.copy(out / f"{samples[0].sample_id}.safetensors", out / "again.safetensors")
    taps = parse_taps(f"after:1,after:3,after:5,{LAST}")
    summary = imported(out, tmp_path / "again", "vllm", taps, mask_of=masks_of(samples))
    assert (summary.num_duplicates, summary.num_samples) == (1, len(samples))
    check(tmp_path / "again", samples)


def test_tokens_without_a_mask_are_rejected(tmp_path: Path, standard: Path, samples) -> None:
    out = export(standard, tmp_path / "out", "vllm")
    taps = parse_taps(f"after:1,after:3,after:5,{LAST}")
    imported(out, tmp_path / "again", "vllm", taps, mask_of=masks_of(samples[1:]))
    assert read_rejects(tmp_path / "again") == {f"{samples[0].sample_id}.safetensors": "no such tokens"}
    check(tmp_path / "again", samples[1:])


def test_refusals(tmp_path: Path, standard: Path, theirs: Path) -> None:
    vllm = export(standard, tmp_path / "vllm", "vllm")
    taps = parse_taps("after:1,after:3,after:5")
    with pytest.raises(FormatError, match=r"holds 3 slots of features .* and 2 taps were given"):
        imported(theirs, tmp_path / "no", "speculators", taps[:2])
    with pytest.raises(TapError, match="ascending"):
        imported(theirs, tmp_path / "no", "speculators", taps[::-1])
    with pytest.raises(FormatError, match=r"keeps no loss mask .*--prepared"):
        imported(vllm, tmp_path / "no", "vllm", (*taps, LAST))
    with pytest.raises(FormatError, match=r"--last-hidden final: .* holds after:7"):
        imported(theirs, tmp_path / "no", "speculators", taps, last_hidden=FINAL)
    with pytest.raises(FormatError, match=r"none of its 12 samples .*\n .*no such tokens"):
        imported(vllm, tmp_path / "no", "vllm", (*taps, LAST), mask_of=masks_of([]))
    assert not list((tmp_path / "no").glob("[!.]*"))
    with pytest.raises(EyasError, match="or inside it"):
        imported(theirs, theirs / "out", "speculators", taps)
    imported(theirs, tmp_path / "again", "speculators", taps)
    with pytest.raises(IdentityError, match="taps is"):
        imported(theirs, tmp_path / "again", "speculators", parse_taps("after:1,after:3,after:4"))


def test_what_looks_like_no_format(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no tensors")
    with pytest.raises(FormatError, match="in none of the formats known"):
        detect(tmp_path)


def test_a_folder_is_told_from_all_others(tmp_path: Path, standard: Path, theirs: Path) -> None:
    assert detect(theirs).format == "speculators"
    assert detect(export(standard, tmp_path / "vllm", "vllm")).format == "vllm"


# --- stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [5, 15])  # in the first pass, in the second
def test_stopped_it_seals_what_is_complete_and_goes_on(tmp_path: Path, standard: Path, samples, at: int) -> None:
    taps, out = parse_taps(f"after:1,after:3,after:5,{LAST}"), export(standard, tmp_path / "out", "vllm")
    asked, stop, known = iter(range(1_000)), threading.Event(), masks_of(samples)

    def stopping_mask_of(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        if next(asked) >= at:
            stop.set()
            time.sleep(0.3)  # longer than the run looks away
        return known(ids)

    early = imported(out, tmp_path / "again", "vllm", taps, mask_of=stopping_mask_of, should_stop=stop.is_set)
    assert early.stopped_early
    assert (read_ledgers(tmp_path / "again").num_samples > 0) == (at > len(samples))
    late = imported(out, tmp_path / "again", "vllm", taps, mask_of=known)
    assert not late.stopped_early
    check(tmp_path / "again", samples)


def test_a_disk_budget_piecewise(tmp_path: Path, standard: Path, theirs: Path) -> None:
    out, away = tmp_path / "out", tmp_path / "away"
    limit, runs = 12_000, 0
    while True:
        summary = write_rows(
            Dataset.open(standard), out, create_writer("speculators"), format="speculators", max_disk=limit
        )
        runs += 1
        assert sum(path.stat().st_size for path in out.rglob("hs_*")) <= limit
        for path in list(out.rglob("hs_*")):
            moved = away / path.relative_to(out)
            moved.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)
        if summary.stopped is None:
            break
        assert summary.stopped == "max disk"
        assert summary.num_new > 0
    assert runs > 2
    shutil.copytree(out, away, dirs_exist_ok=True)
    for path in theirs.rglob("*"):
        if path.is_file() and path.name != "eyas.json":  # which says what was there at the end
            assert (away / path.relative_to(theirs)).read_bytes() == path.read_bytes()
    with pytest.raises(FormatError, match=r"--max-disk 100: sample .* alone takes"):
        write_rows(Dataset.open(standard), tmp_path / "no", create_writer("vllm"), format="vllm", max_disk=100)


@pytest.mark.parametrize(("field", "message"), [("f_bavail", "bytes, and the disk has"), ("f_favail", "inodes free")])
def test_too_small_a_disk_is_refused_with_numbers(tmp_path, standard, monkeypatch, field, message) -> None:
    real = os.statvfs

    def small(path: Any) -> Any:
        found = real(path)
        names = [name for name in dir(found) if name.startswith("f_")]
        return SimpleNamespace(**{name: getattr(found, name) for name in names} | {field: 3, "f_files": 9})

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(FormatError, match=message):
        export(standard, tmp_path / "out", "vllm")
    assert not list(tmp_path.glob("out/*.safetensors"))
    write_rows(Dataset.open(standard), tmp_path / "out", create_writer("vllm"), format="vllm", max_disk=1 << 30)


def test_another_export_in_the_same_folder_is_refused(tmp_path: Path, standard: Path, theirs: Path) -> None:
    with pytest.raises(FormatError, match="format differ"):
        export(standard, theirs, "vllm")
    with pytest.raises(FormatError, match="options differ"):
        export(standard, theirs, "speculators", options={"draft vocabulary": "00"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(FormatError, match="is not empty"):
        export(standard, tmp_path / "full", "vllm")


# --- kills --------------------------------------------------------------------------------------


def _die_again_and_again(child: Callable[..., None], *arguments: Any, step: int) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "eyas.standardize.foreign", "eyas.standardize.formats.write_rows"])
    for calls in range(1, 600, step):
        process = context.Process(target=child, args=(*arguments, calls))
        process.start()
        process.join()
        if process.exitcode == 0:
            return calls
        assert process.exitcode == -signal.SIGKILL
    raise AssertionError("it never ended")


def test_killed_at_every_kind_of_moment_an_import_loses_and_doubles_nothing(tmp_path, theirs, samples) -> None:
    assert _die_again_and_again(import_and_die, theirs, tmp_path / "again", step=3) > 20
    check(tmp_path / "again", samples)
    assert not [path for path in (tmp_path / "again").rglob("*") if path.name.startswith(".tmp-")]


def test_killed_at_every_kind_of_moment_an_export_ends_the_same(tmp_path, standard, theirs) -> None:
    assert _die_again_and_again(export_and_die, standard, tmp_path / "out", step=3) > 20
    names = {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
    assert names == {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (theirs / name).read_bytes(), name
