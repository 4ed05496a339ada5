"""The cat: what a standard dataset holds, seen from its files and through an independent reader."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eyas.shards.errors import ShardWriteError
from eyas.shards.identity import read_identity
from eyas.shards.ledger import read_ledgers
from eyas.shards.rejects import append_reject, read_rejects
from eyas.shards.sample import Sample
from eyas.shards.token_counts import TokenCountsError, read_token_counts
from eyas.standardize.cat import Request, Summary, plan, request, standardize
from eyas.standardize.convert import NotCapturedError, OverflowRefusedError
from eyas.taps.errors import EyasError
from eyas.taps.notation import FINAL, TapError, parse_taps
from tests.captured import HIDDEN_SIZE, VOCAB_SIZE, captured_identity, hashes, make_samples, write_captured
from tests.standardize.child import standardize_and_die

NUM_SAMPLES = 24


@pytest.fixture
def identity():
    return captured_identity(num_samples=NUM_SAMPLES)


@pytest.fixture
def samples(identity) -> list[Sample]:
    return make_samples(identity, NUM_SAMPLES)


@pytest.fixture
def captured(tmp_path: Path, identity, samples) -> Path:
    return write_captured(tmp_path / "captured", identity, samples)


def run(
    asked: Request, *, workers: int = 2, should_stop: Callable[[], bool] = lambda: False, **options: Any
) -> Summary:
    *_, summary = standardize(
        asked, workers=workers, shard_bytes=options.get("shard_bytes", 8_000), should_stop=should_stop
    )
    assert isinstance(summary, Summary)
    return summary


def read_with_safetensors(dataset: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every sample of a dataset with codec raw, by a reader that knows nothing of eyas but offsets and ids."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted((dataset / "shards").glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            ids = json.loads(shard.metadata()["sample_ids"])
            names = list(shard.keys())
            offsets = shard.get_tensor("offsets").tolist()
            for n, sample_id in enumerate(ids):
                assert sample_id not in found, f"{sample_id} is there twice"
                found[sample_id] = {
                    name: shard.get_tensor(name)[offsets[n] : offsets[n + 1]] for name in names if name != "offsets"
                }
    return found


def check(dataset: Path, samples: list[Sample], slots: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Exactly ``samples``, with the taps at ``slots`` of the captured features."""
    found = read_with_safetensors(dataset)
    assert found.keys() == {sample.sample_id for sample in samples}
    for sample in samples:
        tensors = found[sample.sample_id]
        expected = torch.cat([sample.features[:, s * HIDDEN_SIZE : (s + 1) * HIDDEN_SIZE] for s in slots], dim=1)
        assert torch.equal(tensors["features"], expected.to(dtype))
        assert tensors["features"].dtype == dtype
        assert torch.equal(tensors["input_ids"], sample.input_ids)
        assert torch.equal(tensors["loss_mask"], sample.loss_mask)
        assert torch.equal(tensors["target_top1"], sample.target_top1)
        assert torch.equal(tensors["target_lse"], sample.target_lse)
        assert torch.equal(tensors["last_hidden"], sample.last_hidden.to(dtype))
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for sample in samples:
        for token, trained in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            counts[token] += trained
    assert read_token_counts(dataset).tolist() == counts.tolist()
    assert read_ledgers(dataset).problems == []


def test_what_already_is_the_answer_is_hard_linked(tmp_path, captured, samples) -> None:
    before = hashes(captured)
    summary = run(request(captured, tmp_path / "standard"))
    shards = sorted(os.listdir(captured / "shards"))
    assert len(shards) > 4
    assert sorted(os.listdir(tmp_path / "standard/shards")) == shards
    for name in shards:
        assert os.path.samefile(captured / "shards" / name, tmp_path / "standard/shards" / name)
    assert (summary.num_linked, summary.num_copied, summary.num_written) == (len(shards), 0, 0)
    assert (summary.num_samples, summary.num_missing, summary.failures) == (NUM_SAMPLES, 0, {})
    assert read_identity(tmp_path / "standard").stage == "standard"
    check(tmp_path / "standard", samples, [0, 1, 2, 3])
    assert hashes(captured) == before


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_no_hard_link_can_be_made_it_copies(tmp_path, captured, samples, monkeypatch, code) -> None:
    def refuse(source: Any, out: Any, **_: Any) -> None:
        if str(source).endswith(".safetensors"):
            raise OSError(code, os.strerror(code), source, None, out)
        real_link(source, out)

    real_link = os.link
    monkeypatch.setattr(os, "link", refuse)
    before = hashes(captured)
    summary = run(request(captured, tmp_path / "standard"))
    assert (summary.num_linked, summary.num_copied) == (0, summary.num_shards)
    for name in os.listdir(captured / "shards"):
        copy = tmp_path / "standard/shards" / name
        assert copy.read_bytes() == (captured / "shards" / name).read_bytes()
        assert copy.stat().st_nlink == 1
    check(tmp_path / "standard", samples, [0, 1, 2, 3])
    assert hashes(captured) == before


def test_across_two_real_filesystems(tmp_path, captured, samples) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem")
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        assert run(request(captured, elsewhere / "standard")).num_copied > 0
        check(elsewhere / "standard", samples, [0, 1, 2, 3])
    finally:
        shutil.rmtree(elsewhere)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_subset_of_taps_equals_the_slices(tmp_path, captured, samples, workers) -> None:
    before = hashes(captured)
    summary = run(request(captured, tmp_path / "standard", taps=parse_taps("embed,after:5")), workers=workers)
    assert (summary.num_linked, summary.num_copied) == (0, 0)
    assert summary.num_written == summary.num_shards > 1
    check(tmp_path / "standard", samples, [0, 3])
    assert hashes(captured) == before


def test_a_tap_that_is_there_only_as_last_hidden_and_the_other_way_round(tmp_path) -> None:
    identity = captured_identity(num_samples=3, taps="after:1,after:3,final")
    samples = make_samples(identity, 3)
    captured = write_captured(tmp_path / "captured", identity, samples)
    asked = request(captured, tmp_path / "standard", taps=parse_taps("after:1,after:7"), last_hidden=FINAL)
    run(asked)
    found = read_with_safetensors(tmp_path / "standard")
    for sample in samples:
        tensors = found[sample.sample_id]
        assert torch.equal(
            tensors["features"], torch.cat([sample.features[:, :HIDDEN_SIZE], sample.last_hidden], dim=1)
        )
        assert torch.equal(tensors["last_hidden"], sample.features[:, 2 * HIDDEN_SIZE :])


def test_last_hidden_left_out(tmp_path, captured) -> None:
    run(request(captured, tmp_path / "standard", last_hidden="none"))
    assert all("last_hidden" not in tensors for tensors in read_with_safetensors(tmp_path / "standard").values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype(tmp_path, captured, samples, dtype) -> None:
    run(request(captured, tmp_path / "standard", dtype=dtype))
    check(tmp_path / "standard", samples, [0, 1, 2, 3], getattr(torch, dtype))


def test_codec_there_and_back_is_lossless(tmp_path, captured, samples) -> None:
    run(request(captured, tmp_path / "zstd", codec="zstd"))
    assert read_identity(tmp_path / "zstd").codec == "zstd"
    before = hashes(tmp_path / "zstd")
    summary = run(request(tmp_path / "zstd", tmp_path / "raw", codec="raw"))
    assert summary.num_written > 0
    check(tmp_path / "raw", samples, [0, 1, 2, 3])
    assert hashes(tmp_path / "zstd") == before


def test_overflow_is_refused_by_name_before_anything_is_read(tmp_path, identity, samples) -> None:
    samples[5].features[1, 2 * HIDDEN_SIZE] = 1e6
    captured = write_captured(tmp_path / "captured", identity, samples)
    with pytest.raises(
        OverflowRefusedError, match=r"host-1-\d+.safetensors: tap after:3 reaches .* infinite in float16"
    ):
        run(request(captured, tmp_path / "standard", dtype="float16"))
    run(request(captured, tmp_path / "subset", taps=parse_taps("after:1,after:5"), dtype="float16"))


def test_overflow_to_bfloat16_names_the_sample(tmp_path) -> None:
    identity = captured_identity(num_samples=2, dtype="float32")
    samples = make_samples(identity, 2)
    samples[1].last_hidden[0, 0] = torch.finfo(torch.float32).max
    captured = write_captured(tmp_path / "captured", identity, samples)
    with pytest.raises(
        OverflowRefusedError, match=f"sample {samples[1].sample_id}, last_hidden after:7 .* in bfloat16"
    ):
        run(request(captured, tmp_path / "standard", dtype="bfloat16"))


def test_a_tap_that_was_not_captured(tmp_path, captured) -> None:
    with pytest.raises(NotCapturedError) as caught:
        request(captured, tmp_path / "standard", taps=parse_taps("after:1,after:2,after:5"))
    message = str(caught.value)
    assert "after:2 was not captured" in message
    assert "captured were embed,after:1,after:3,after:5, and after:7 as last_hidden" in message
    assert "--target some/target --taps embed,after:1,after:2,after:3,after:5" in message
    assert not (tmp_path / "standard").exists()


@pytest.mark.parametrize("taps", ["after:5,after:1", "after:1,after:1", "after:99"])
def test_taps_that_an_engine_would_reorder(tmp_path, captured, taps) -> None:
    with pytest.raises(TapError):
        request(captured, tmp_path / "standard", taps=parse_taps(taps))


def test_where_out_cannot_be(tmp_path, captured) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    for out in (captured, captured / "inside", tmp_path / "full"):
        with pytest.raises(EyasError):
            request(captured, out)
    run(request(captured, tmp_path / "standard"))
    with pytest.raises(EyasError, match="taps"):
        run(request(captured, tmp_path / "standard", taps=parse_taps("after:1")))


@pytest.mark.parametrize("taps", [None, "after:1,after:3"])
def test_a_corrupt_shard_is_named_and_the_rest_is_done(tmp_path, captured, samples, taps) -> None:
    bad = sorted((captured / "shards").iterdir())[2]
    content = bytearray(bad.read_bytes())
    content[-5] ^= 1
    bad.write_bytes(content)
    asked = request(captured, tmp_path / "standard", taps=parse_taps(taps) if taps else None)
    summary = run(asked)
    assert list(summary.failures) == [bad.name]
    assert str(bad) in summary.failures[bad.name]
    lost = next(entry.sample_ids for entry in read_ledgers(captured).entries if entry.shard == bad.name)
    kept = [sample for sample in samples if sample.sample_id not in lost]
    assert summary.num_missing == len(lost) > 0
    slots = [1, 2] if taps else [0, 1, 2, 3]
    check(tmp_path / "standard", kept, slots)
    # Once the samples are captured anew, the same call takes them in.
    bad.rename(bad.with_suffix(".corrupt"))
    again = [sample for sample in samples if sample.sample_id in lost]
    write_captured(captured, read_identity(captured), again, workers=1)
    assert run(asked).failures == {}
    check(tmp_path / "standard", samples, slots)


def test_a_corrupt_shard_whose_samples_another_shard_holds(tmp_path, captured, samples) -> None:
    write_captured(captured, read_identity(captured), samples[:3], workers=1)
    bad = captured / "shards/host-0-000000.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])  # size differs: the ledger alone shows it
    found = next(captured.glob("shards/host-1-000000*"))
    found.write_bytes(found.read_bytes()[:-1] + b"\0")
    summary = run(request(captured, tmp_path / "standard"))
    held = {s.sample_id for s in samples[:3]}
    kept = {sample_id for entry in read_ledgers(captured).entries for sample_id in entry.sample_ids} - {
        sample_id
        for entry in read_ledgers(captured).entries
        if entry.shard == found.name
        for sample_id in entry.sample_ids
    }
    assert set(summary.failures) == {bad.name, found.name}
    check(tmp_path / "standard", [s for s in samples if s.sample_id in kept | held], [0, 1, 2, 3])


def test_samples_that_are_captured_twice_are_there_once(tmp_path, captured, samples) -> None:
    write_captured(captured, read_identity(captured), samples[3:9], workers=1)
    assert any(problem.kind == "duplicate sample" for problem in read_ledgers(captured).problems)
    run(request(captured, tmp_path / "standard"))
    check(tmp_path / "standard", samples, [0, 1, 2, 3])


def test_more_is_captured_later(tmp_path, identity, samples) -> None:
    captured = write_captured(tmp_path / "captured", identity, samples[:10])
    asked = request(captured, tmp_path / "standard")
    assert run(asked).num_missing == NUM_SAMPLES - 10
    check(tmp_path / "standard", samples[:10], [0, 1, 2, 3])
    write_captured(captured, identity, samples[10:])
    first = hashes(tmp_path / "standard/shards")
    assert plan(asked).num_samples == NUM_SAMPLES - 10
    run(asked)
    check(tmp_path / "standard", samples, [0, 1, 2, 3])
    assert first.items() <= hashes(tmp_path / "standard/shards").items()


def test_token_counts_older_than_the_shards_are_stale(tmp_path, captured, samples) -> None:
    asked = request(captured, tmp_path / "standard")
    run(asked)
    counts = tmp_path / "standard/token_counts.safetensors"
    whole = counts.read_bytes()
    write_captured(captured, read_identity(captured), make_samples(read_identity(captured), 2, seed=9), workers=1)
    run(asked)
    counts.write_bytes(whole)
    with pytest.raises(TokenCountsError, match="other shards"):
        read_token_counts(tmp_path / "standard")
    for damage in (whole, whole[:-3], None):
        counts.write_bytes(damage) if damage else counts.unlink()
        run(asked)
        assert read_token_counts(tmp_path / "standard").sum() == read_ledgers(tmp_path / "standard").num_trained_tokens


def test_rejects_are_carried_over(tmp_path, identity, samples) -> None:
    captured = write_captured(tmp_path / "captured", identity, samples[2:])
    append_reject(captured, "host-0", samples[0].sample_id, "NaN in after:1")
    append_reject(captured, "host-0", samples[2].sample_id, "tried again since, and sealed")
    for _ in range(2):
        summary = run(request(captured, tmp_path / "standard"))
        assert (summary.num_rejected, summary.num_missing) == (1, 1)
        assert read_rejects(tmp_path / "standard") == {samples[0].sample_id: "NaN in after:1"}
    assert len(list((tmp_path / "standard/rejects").iterdir())) == 1


def test_which_engine_captured_a_shard_stays_in_its_metadata(tmp_path, identity, samples) -> None:
    captured = write_captured(tmp_path / "captured", identity, samples[:12], metadata={"engine": "a", "tp": "1"})
    write_captured(captured, identity, samples[12:], metadata={"engine": "b", "tp": "2"})
    run(request(captured, tmp_path / "standard", taps=parse_taps("after:1")), workers=1, shard_bytes=1 << 20)
    for path in (tmp_path / "standard/shards").iterdir():
        with safe_open(path, framework="pt") as shard:
            engine = json.loads(shard.metadata()["engine"])["engine"]
            ids = set(json.loads(shard.metadata()["sample_ids"]))
        assert ids <= {s.sample_id for s in (samples[:12] if engine == "a" else samples[12:])}
    assert len(list((tmp_path / "standard/shards").iterdir())) >= 2


@pytest.mark.parametrize("taps", [None, "after:1,after:3"])
def test_a_stop_seals_and_the_same_call_goes_on(tmp_path, captured, samples, taps) -> None:
    asked = request(captured, tmp_path / "standard", taps=parse_taps(taps) if taps else None)
    events: list[object] = []
    for event in standardize(asked, workers=1, shard_bytes=2_000, should_stop=lambda: len(events) > 4):
        events.append(event)
    summary = events[-1]
    assert isinstance(summary, Summary)
    assert summary.stopped_early
    assert 0 < summary.num_samples < NUM_SAMPLES
    assert summary.num_samples == read_ledgers(tmp_path / "standard").num_samples
    assert not (tmp_path / "standard/token_counts.safetensors").exists()
    assert not run(asked).stopped_early
    check(tmp_path / "standard", samples, [1, 2] if taps else [0, 1, 2, 3])


def test_a_name_that_a_captured_shard_has_is_not_written_over(tmp_path, captured, samples) -> None:
    asked = request(captured, tmp_path / "once", taps=parse_taps("after:1,after:3,after:5"))
    run(asked)
    # `once` holds shards named after this host's standardize workers; out writes some anew, for what was there twice.
    write_captured(tmp_path / "once", read_identity(tmp_path / "once"), [], workers=1)
    run(request(tmp_path / "once", tmp_path / "twice"))
    run(request(tmp_path / "twice", tmp_path / "thrice", codec="zstd"))
    run(request(tmp_path / "thrice", tmp_path / "out", codec="raw"))
    check(tmp_path / "out", samples, [1, 2, 3])


@pytest.mark.parametrize("taps", [None, "after:1,after:3"])
def test_a_full_disk_is_said_and_survived(tmp_path, captured, samples, monkeypatch, taps) -> None:
    asked = request(captured, tmp_path / "standard", taps=parse_taps(taps) if taps else None)
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(stat.S_ISREG(os.fstat(fd).st_mode))
        if synced[-1] and sum(synced) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ShardWriteError, match=r"(?i)no space left.* run the same command again"):
        run(asked, shard_bytes=2_000)
    monkeypatch.undo()
    assert not [name for name in os.listdir(tmp_path / "standard/shards") if name.startswith(".")]
    run(asked)
    check(tmp_path / "standard", samples, [1, 2] if taps else [0, 1, 2, 3])


@pytest.mark.parametrize(("taps", "step"), [(None, 2), ("after:1,after:3", 5)])
def test_killed_at_every_kind_of_moment_nothing_is_lost_or_doubled(tmp_path, captured, samples, taps, step) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "eyas.standardize.cat"])
    before = hashes(captured)
    out = tmp_path / "standard"
    exits = []
    for calls in range(1, 400, step):
        child = context.Process(target=standardize_and_die, args=(captured, out, taps, calls))
        child.start()
        child.join()
        exits.append(child.exitcode)
        if child.exitcode == 0:
            break
    assert exits[-1] == 0
    assert set(exits[:-1]) == {-signal.SIGKILL}
    assert len(exits) > 8
    check(out, samples, [1, 2] if taps else [0, 1, 2, 3])
    assert not [path for path in out.rglob("*") if path.name.startswith(".tmp-")]
    assert hashes(captured) == before
