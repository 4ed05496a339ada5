"""What a described dump gives, and what of it is refused, by name: files as patches write them, a sample or two."""

from __future__ import annotations

import gzip
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eyas.standardize.formats.base import ForeignFileError, ForeignSample, FormatError
from eyas.standardize.formats.dump.description import DESCRIPTION_FILE, DescriptionError
from eyas.standardize.formats.dump.detect import detect
from eyas.standardize.formats.dump.guess import describe
from eyas.standardize.formats.dump.read import DumpReader, open_reader
from eyas.standardize.formats.registry import detect as detect_any
from eyas.taps.notation import FINAL, after

H, LAYERS = 8, (2, 12, 29)
HEAD = f"""
version = 1
hidden_size = {H}
dtype = "float32"
"""
TAIL = f"""
[layers]
ids = {list(LAYERS)}
convention = "vllm@0.32"
"""
IDS = """
[input_ids]
files = "ids/{sample}.pt"
"""
# What a patch wrote as /dump/rank0/layer_12/req-abc_step3.pt.
STATES = """
[states]
files = "rank{rank}/layer_{layer}/req-{sample}_step{step}.pt"
"""
REPLICATED = f"{HEAD}tp = 2\nfirst_step = 0\n{TAIL}{STATES}{IDS}"


def save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(value, path)
    elif path.suffix == ".npy":
        np.save(path, value)
    else:
        torch.save(value, path)


def states(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """[T, A, H]"""
    return torch.randn(num_tokens, len(LAYERS), H, generator=torch.Generator().manual_seed(seed))


def write_replicated(folder: Path, *, ranks: int = 2, samples: tuple[str, ...] = ("abc", "def")) -> dict[str, Any]:
    """Samples of 7 tokens in steps of 4 and 3."""
    written = {}
    for n, name in enumerate(samples):
        written[name] = states(7, seed=n)
        for rank in range(ranks):
            for a, layer in enumerate(LAYERS):
                for step, rows in enumerate(written[name].split(4)):
                    save(folder / f"rank{rank}/layer_{layer}/req-{name}_step{step}.pt", rows[:, a].clone())
        save(folder / f"ids/{name}.pt", torch.arange(7) + n)
    return written


def opened(folder: Path, text: str) -> DumpReader:
    (folder / DESCRIPTION_FILE).write_text(text)
    layout = detect(folder)
    assert layout is not None
    return open_reader(folder, layout)


def read_all(reader: DumpReader, item: str) -> ForeignSample:
    sample = reader.read(item)
    assert sample.features is not None
    assert sample.last_hidden is None or sample.last_hidden.ndim == 2
    return sample


def refusal(reader: DumpReader, item: str) -> str:
    with pytest.raises(ForeignFileError) as caught:
        read_all(reader, item)
    assert caught.value.where == item
    return caught.value.what


def test_steps_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    whole = states(24)
    for rank in range(2):
        for a, layer in enumerate(LAYERS):
            for step, rows in enumerate(whole.split(2)):
                save(tmp_path / f"rank{rank}/layer_{layer:03}/req-a_step{step}.pt", rows[None, :, a].clone())
    save(tmp_path / "ids/a.pt", torch.arange(24))
    sample = opened(tmp_path, REPLICATED).read("a")  # step 10 comes behind 9
    assert torch.equal(sample.features, whole)
    assert sample.loss_mask is None
    assert sample.last_hidden is None
    assert detect_any(tmp_path, "dump").format == "dump"


def test_a_folder_without_a_description_is_no_dump(tmp_path: Path) -> None:
    assert detect(tmp_path) is None


def test_a_look_at_ids_reads_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_replicated(tmp_path)
    reader = opened(tmp_path, REPLICATED)
    (tmp_path / "rank0/layer_2").rename(tmp_path / "moved")
    assert reader.items() == ["abc", "def"]
    (tmp_path / "moved").rename(tmp_path / "rank0/layer_2")
    merges: list[object] = []
    monkeypatch.setattr("eyas.standardize.formats.dump.read.merge_into", lambda *args, **_: merges.append(args))
    assert reader.read("def").input_ids.tolist() == list(range(1, 8))
    assert not merges


def test_replicas_that_disagree_are_refused_by_rank_and_amount_unless_it_is_tolerated(tmp_path: Path) -> None:
    whole = write_replicated(tmp_path)
    path = tmp_path / "rank1/layer_12/req-abc_step1.pt"
    rows = torch.load(path)
    rows[1] *= 1 + 1e-3
    torch.save(rows, path)
    reader = opened(tmp_path, REPLICATED)
    message = refusal(reader, "abc")
    assert message.startswith("layer 12, step 1: rank 1 is no replica of rank 0: 1 of 3 rows, by up to 0.001 relative")
    assert torch.equal(reader.read("def").features, whole["def"])
    tolerant = opened(tmp_path, REPLICATED.replace("[input_ids]", "tolerance = 2e-3\n[input_ids]"))
    assert torch.equal(tolerant.read("abc").features, whole["abc"])
    strict = opened(tmp_path, REPLICATED.replace("[input_ids]", "tolerance = 5e-4\n[input_ids]"))
    assert "where 0.0005 is tolerated" in refusal(strict, "abc")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_a_bit_that_numbers_hide_is_a_difference(tmp_path: Path, value: float) -> None:
    write_replicated(tmp_path)
    for rank in range(2):
        path = tmp_path / f"rank{rank}/layer_2/req-abc_step0.pt"
        rows = torch.load(path)
        rows[0, 0] = value if rank else 0.0
        torch.save(rows, path)
    assert "rank 1 is no replica of rank 0" in refusal(opened(tmp_path, REPLICATED), "abc")
    torch.save(torch.load(tmp_path / "rank1/layer_2/req-abc_step0.pt"), tmp_path / "rank0/layer_2/req-abc_step0.pt")
    assert read_all(opened(tmp_path, REPLICATED), "abc").features.shape == (7, 3, H)


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ("rank1/layer_12/req-abc_step1.pt", "layer 12, step 1: no file of rank 1, expected ranks 0 to 1"),
        ("*/layer_29/req-abc_step0.pt", "layer 29, step 0: no file of the pattern"),
        ("*/*/req-abc_step0.pt", "no files of step 0: found 1, first_step 0"),
        ("*/*/req-abc_step1.pt", "layer 2, step 0: 4 rows for 7 token ids (is a step missing"),
        ("ids/abc.pt", "token ids: no file of the pattern ids/{sample}.pt"),
    ],
)
def test_what_is_missing_rejects_its_sample_alone(tmp_path: Path, missing: str, what: str) -> None:
    whole = write_replicated(tmp_path)
    for path in tmp_path.glob(missing):
        path.unlink()
    reader = opened(tmp_path, REPLICATED)
    assert reader.items() == ["abc", "def"]
    assert what in refusal(reader, "abc")
    assert torch.equal(reader.read("def").features, whole["def"])


def test_damage_is_named(tmp_path: Path) -> None:
    write_replicated(tmp_path, samples=("cut", "object", "wide", "half", "twice", "float"))
    path = tmp_path / "rank1/layer_2"
    content = (path / "req-cut_step0.pt").read_bytes()
    (path / "req-cut_step0.pt").write_bytes(content[: len(content) // 2])
    torch.save({"states": Path("/tmp")}, path / "req-object_step0.pt")
    torch.save(torch.zeros(4, H + 1), path / "req-wide_step0.pt")
    torch.save(torch.zeros(4, H, dtype=torch.bfloat16).int(), path / "req-half_step0.pt")
    torch.save(torch.zeros(4, H), path / "req-twice_step00.pt")
    torch.save(torch.zeros(7), tmp_path / "ids/float.pt")
    reader = opened(tmp_path, REPLICATED)
    where = "rank1/layer_2/req-"
    assert f"{where}cut_step0.pt cannot be read, truncated or damaged" in refusal(reader, "cut")
    assert f"{where}object_step0.pt is no torch file, or holds Python objects" in refusal(reader, "object")
    assert f"layer 2, step 0: widths {H}, {H + 1} on the ranks, expected {H} on each" in refusal(reader, "wide")
    assert f"{where}half_step0.pt is int32, expected float32" in refusal(reader, "half")
    assert f"{where}twice_step00.pt is there twice" in refusal(reader, "twice")
    assert "ids/float.pt: token ids are float32 [7], expected whole numbers [T]" in refusal(reader, "float")


def test_a_tap_before_the_all_reduce_is_summed_in_float32_and_cast_once(tmp_path: Path) -> None:
    parts = states(5).bfloat16().split(1, dim=1)
    for rank, part in enumerate(parts):  # three ranks
        save(tmp_path / f"tp{rank}/a.safetensors", {"layer.12": part[:, 0].contiguous()})
    save(tmp_path / "ids/a.pt", [3, 1, 4, 1, 5])
    text = HEAD.replace("float32", "bfloat16") + (
        'tp = 3\n[layers]\nids = [12]\ntaps = ["final"]\n[states]\nfiles = "tp{rank}/{sample}.safetensors"\n'
        f'key = "layer.{{layer}}"\nplacement = "partial-sums"\n{IDS}'
    )
    reader = opened(tmp_path, text)
    assert reader.layout.taps == (FINAL,)
    expected = sum(part[:, 0].float() for part in parts)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(reader.read("a").features[:, 0], expected.bfloat16())


@pytest.mark.parametrize("shape", ["T,A,H", "A,T,H", "T,A*H"])
def test_one_tensor_may_hold_all_layers(tmp_path: Path, shape: str) -> None:
    whole = states(5)
    laid = {"T,A,H": whole, "A,T,H": whole.transpose(0, 1).contiguous(), "T,A*H": whole.flatten(1)}[shape]
    for rank in range(2):
        part = laid.chunk(2, dim=-1)[rank] if shape != "T,A*H" else whole.chunk(2, dim=-1)[rank].flatten(1)
        save(tmp_path / f"rank{rank}/a.pt", {"out": {"hidden": part[None].clone()}})
    save(tmp_path / "ids/a.pt", torch.arange(5))
    text = f'{HEAD}tp = 2\n{TAIL}[states]\nfiles = "rank{{rank}}/{{sample}}.pt"\nkey = ["out", "hidden"]\n'
    reader = opened(tmp_path, f'{text}shape = "{shape}"\nplacement = "hidden-sharded"\n{IDS}')
    assert torch.equal(reader.read("a").features, whole)


@pytest.mark.parametrize("stored", ["int16", "uint16", "float32", "void"])
def test_numpy_has_no_bfloat16_and_patches_find_ways(tmp_path: Path, stored: str) -> None:
    whole = states(5).bfloat16()
    for a, layer in enumerate(LAYERS):
        rows = whole[:, a].contiguous()
        array = rows.float().numpy() if stored == "float32" else rows.view(torch.int16).numpy()
        save(
            tmp_path / f"{layer}/a.npy",
            array if stored == "float32" else array.view("V2" if stored == "void" else stored),
        )
    save(tmp_path / "ids/a.pt", torch.arange(5))
    text = HEAD.replace("float32", "bfloat16") + f'{TAIL}[states]\nfiles = "{{layer}}/{{sample}}.npy"\n{IDS}'
    assert torch.equal(opened(tmp_path, text).read("a").features, whole)


def test_ranks_may_be_counted_over_pipeline_stages_and_replicas(tmp_path: Path) -> None:
    """Ranks 0 and 1 hold the first stage's layer, 2 and 3 the second's; another replica's 4 to 7 hold other samples."""
    whole = states(5)
    for name, base in (("a", 0), ("b", 4)):
        for a, layer in enumerate(LAYERS):
            for rank in range(2):
                group = base + (0 if layer == 2 else 2)
                save(tmp_path / f"rank{group + rank}/layer_{layer}/req-{name}_step0.pt", whole[:, a].clone())
        save(tmp_path / f"ids/{name}.pt", torch.arange(5))
    reader = opened(tmp_path, REPLICATED)
    assert torch.equal(reader.read("a").features, whole)
    assert torch.equal(reader.read("b").features, whole)
    assert "is tp another?" in refusal(opened(tmp_path, REPLICATED.replace("tp = 2", "tp = 1")), "a")


def test_a_step_a_token_is_read_with_few_files_open(tmp_path: Path) -> None:
    whole = states(100)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for step, rows in enumerate(whole):
        for a, layer in enumerate(LAYERS):
            for rank in range(2):
                save(tmp_path / f"rank{rank}/layer_{layer}/a-step{step}.npy", rows[None, a].numpy())
    save(tmp_path / "ids/a.pt", torch.arange(100))
    text = REPLICATED.replace("req-{sample}_step{step}.pt", "{sample}-step{step}.npy")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        assert torch.equal(opened(tmp_path, text).read("a").features, whole)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_residual_that_a_layer_returns_apart_is_added(tmp_path: Path) -> None:
    """vLLM's decoder layers return (hidden states, residual)."""
    whole, residual = states(5).bfloat16(), states(5, seed=1).bfloat16()
    for a, layer in enumerate(LAYERS):
        save(tmp_path / f"layers.{layer}/a.pt", (whole[:, a].clone(), residual[:, a].clone()))
    save(tmp_path / "ids/a.pt", torch.arange(5))
    guessed = describe(tmp_path)
    assert 'key = "0"' in guessed
    assert 'residual = "1"' in guessed
    reader = opened(tmp_path, guessed.replace('"?"', '"vllm@0.32"'))
    assert torch.equal(reader.read("a").features, whole + residual)


def test_a_guess_finds_layers_within_files(tmp_path: Path) -> None:
    whole = states(5)
    for name in ("a1", "b2"):
        content = {f"layer_{layer}": whole[None, :, a].clone() for a, layer in enumerate(LAYERS)}
        save(tmp_path / f"{name}.pt", {"aux": content, "tokens": torch.arange(5), "loss_mask": torch.ones(5)})
    guessed = describe(tmp_path)
    assert "ids = [2, 12, 29]" in guessed
    reader = opened(tmp_path, guessed.replace('"?"', '"vllm@0.32"'))
    assert reader.items() == ["a1", "b2"]
    assert torch.equal(reader.read("b2").features, whole)
    assert reader.read("b2").loss_mask is not None


@pytest.mark.parametrize("shape", ["T,A,H", "A,T,H", "T,A*H"])
def test_a_guess_finds_layers_within_a_tensor(tmp_path: Path, shape: str) -> None:
    whole = states(5)
    stacked = {"T,A,H": whole, "A,T,H": whole.transpose(0, 1).contiguous(), "T,A*H": whole.flatten(1)}[shape]
    for name in ("req-17", "req-18"):
        save(tmp_path / f"{name}.safetensors", {"hidden_states": stacked, "token_ids": torch.arange(5)})
    guessed = describe(tmp_path, hidden_size=H)
    assert f'shape = "{shape}"' in guessed
    reader = opened(tmp_path, guessed.replace('"?"', '"unknown"'))
    assert torch.equal(reader.read("18").features, whole)


def test_a_guess_of_one_sample_in_one_step(tmp_path: Path) -> None:
    for rank in range(2):
        for layer in LAYERS:
            save(tmp_path / f"tp2/rank{rank}/layer_{layer}/req-abc_step3.pt", torch.ones(4, H))
    save(tmp_path / "tp2/rank0/req-abc_step3.tokens.pt", torch.arange(4))
    guessed = describe(tmp_path)
    assert 'files = "tp2/rank{rank}/layer_{layer}/req-{sample}_step{step}.pt"' in guessed
    assert opened(tmp_path, guessed.replace('"?"', '"unknown"')).read("abc").input_ids.tolist() == [0, 1, 2, 3]


def test_a_guess_says_what_it_cannot_tell(tmp_path: Path) -> None:
    whole = write_replicated(tmp_path)
    for name in whole:
        for path in tmp_path.glob(f"rank1/*/req-{name}_*.pt"):
            torch.save(torch.load(path) + 1, path)
    guessed = describe(tmp_path)
    assert 'hidden_size = "?"' in guessed
    assert 'placement = "?"' in guessed
    assert f"hidden-sharded, H = {2 * H}; or partial-sums" in " ".join(guessed.replace("# ", "").split())
    assert 'placement = "partial-sums"' in describe(tmp_path, hidden_size=H)
    assert 'placement = "hidden-sharded"' in describe(tmp_path, hidden_size=2 * H)
    with pytest.raises(DescriptionError, match="is still"):
        opened(tmp_path, guessed)
    for path in tmp_path.glob("rank1/*/*.pt"):
        torch.save(torch.load(Path(str(path).replace("rank1", "rank0"))) * 1.001, path)
    guessed = describe(tmp_path, hidden_size=H)
    assert 'placement = "replicated"' in guessed
    assert "tolerance = 0.002" in guessed
    for path in tmp_path.glob("ids/*"):
        path.unlink()
    assert "nothing can be read without" in describe(tmp_path)


def test_nothing_to_describe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no file ends in one of"):
        describe(tmp_path)
    save(tmp_path / "a.pt", torch.arange(3))
    with pytest.raises(FormatError, match="no floating-point tensor"):
        describe(tmp_path)


def write_packed(folder: Path) -> dict[str, torch.Tensor]:
    """Three samples over three steps of a batch: b is prefilled in chunks, c comes later."""
    whole = {"a": states(4, 1), "b": states(9, 2), "c": states(3, 3)}
    batches = {7: {"a": (0, 4), "b": (0, 3)}, 8: {"b": (3, 8)}, 10: {"c": (0, 3), "b": (8, 9)}}
    for step, batch in batches.items():
        rows = torch.cat([whole[name][slice(*span)] for name, span in batch.items()])
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, len(rows) % 2))
        for rank, part in enumerate(padded.chunk(2)):
            for a, layer in enumerate(LAYERS):
                save(folder / f"rank{rank}/step{step}_layer{layer}.pt", part[:, a].clone())
        lengths = torch.tensor([stop - start for start, stop in batch.values()])
        ids = torch.cat([torch.arange(*span) + ord(name) for name, span in batch.items()])
        meta = {
            "req_ids": list(batch),
            "token_ids": ids,
            "cu_seqlens": torch.cat([torch.zeros(1, dtype=int), lengths.cumsum(0)]),
        }
        save(folder / f"meta/step{step}.pt", meta)
    return whole


PACKED = f"""{HEAD}tp = 2{TAIL}
[states]
files = "rank{{rank}}/step{{step}}_layer{{layer}}.pt"
placement = "token-sharded"
padded = true
[input_ids]
files = "meta/step{{step}}.pt"
key = "token_ids"
[packing]
files = "meta/step{{step}}.pt"
samples = "req_ids"
cu_seqlens = "cu_seqlens"
"""


def test_samples_packed_in_steps_are_taken_apart(tmp_path: Path) -> None:
    whole = write_packed(tmp_path)
    reader = opened(tmp_path, PACKED)
    assert reader.items() == ["a", "b", "c"]
    for name in whole:
        sample = reader.read(name)
        assert torch.equal(sample.features, whole[name])
        assert sample.input_ids.tolist() == [ord(name) + n for n in range(len(whole[name]))]
    guessed = describe(tmp_path, hidden_size=H).replace('convention = "?"', 'convention = "unknown"')
    reader = opened(tmp_path, guessed)
    assert reader.layout.convention is None
    assert reader.layout.layer_ids == LAYERS
    assert torch.equal(reader.read("b").features, whole["b"])


def test_packed_states_may_have_ids_and_masks_by_sample(tmp_path: Path) -> None:
    whole = {"11": states(4, 1), "12": states(3, 2)}
    for n, name in enumerate(whole):
        save(tmp_path / f"{name}.ids.npy", np.arange(len(whole[name]), dtype=np.uint16))
        save(tmp_path / f"{name}.mask.npy", np.ones(len(whole[name]), dtype=bool) & bool(n))
    for step, rows in enumerate((slice(0, 2), slice(2, 4))):
        batch = [whole[name][rows] for name in whole]
        save(tmp_path / f"step{step}.pt", {"h": torch.cat(batch)})
        sizes = torch.tensor(list(map(len, batch)))
        save(tmp_path / f"step{step}.batch.safetensors", {"rows": torch.tensor([11, 12]), "lengths": sizes})
    text = f"""{HEAD}{TAIL}
    [states]
    files = "step{{step}}.pt"
    key = "h"
    shape = "T,A,H"
    [input_ids]
    files = "{{sample}}.ids.npy"
    [loss_mask]
    files = "{{sample}}.mask.npy"
    [packing]
    files = "step{{step}}.batch.safetensors"
    samples = "rows"
    lengths = "lengths"
    """
    reader = opened(tmp_path, text)
    assert reader.items() == ["11", "12"]
    for n, name in enumerate(whole):
        sample = reader.read(name)
        assert torch.equal(sample.features, whole[name])
        assert sample.input_ids.tolist() == list(range(len(whole[name])))
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == [n] * len(whole[name])
    save(tmp_path / "12.mask.npy", np.array([0, 2, 1]))
    assert "other values than 0 and 1" in refusal(reader, "12")
    save(tmp_path / "12.mask.npy", np.array([0, 1]))
    assert "a loss mask of 2 for 3 token ids" in refusal(reader, "12")


def test_files_may_be_gzipped(tmp_path: Path) -> None:
    whole = write_replicated(tmp_path)
    for path in tmp_path.glob("rank*/*/*.pt"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    reader = opened(tmp_path, REPLICATED.replace("{step}.pt", "{step}.pt.gz"))
    assert torch.equal(reader.read("abc").features, whole["abc"])
    assert "{sample}_step{step}.pt.gz" in describe(tmp_path)


def test_a_broken_packing_file_rejects_itself_and_whoever_may_be_in_it(tmp_path: Path) -> None:
    whole = write_packed(tmp_path)
    save(tmp_path / "meta/step10.pt", {"req_ids": ["c", "b"], "token_ids": torch.arange(4), "cu_seqlens": [0, 3]})
    save(tmp_path / "meta/step9.pt", {"req_ids": []})
    reader = opened(tmp_path, PACKED)
    assert reader.items() == ["a", "b", "meta/step9.pt", "meta/step10.pt"]
    assert torch.equal(reader.read("a").features, whole["a"])
    assert "may have tokens in step 9 too" in refusal(reader, "b")
    assert "no key 'cu_seqlens', found a dict of 'req_ids'" in refusal(reader, "meta/step9.pt")
    assert "2 samples with cu_seqlens [0, 3]" in refusal(reader, "meta/step10.pt")
    assert len(reader.layout.problems) == 2
    for content, what in (
        ({"req_ids": ["c", "c"], "cu_seqlens": [0, 1, 2]}, "names a sample twice: c, c"),
        ({"req_ids": ["c"], "cu_seqlens": [0.0, 2.0]}, "expected whole numbers"),
        ({"req_ids": [1.5], "cu_seqlens": [0, 2]}, "expected strings or whole numbers"),
    ):
        save(tmp_path / "meta/step9.pt", content)
        assert what in refusal(opened(tmp_path, PACKED), "meta/step9.pt")
    save(tmp_path / "meta/step09.pt", content)
    assert "is there twice" in refusal(opened(tmp_path, PACKED), opened(tmp_path, PACKED).items()[-2])


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_replicated(tmp_path / "dump", samples=("abc",))
    secret = tmp_path / "secret.pt"
    torch.save(torch.zeros(7, dtype=torch.int64), secret)
    (tmp_path / "dump/ids/abc.pt").unlink()
    (tmp_path / "dump/ids/abc.pt").symlink_to(secret)
    (tmp_path / "dump/rank2").symlink_to(tmp_path)
    reader = opened(tmp_path / "dump", REPLICATED)
    assert "token ids: no file" in refusal(reader, "abc")
    assert "2 symbolic links are not followed" in reader.layout.problems[0]


@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        ("version = 1", "version = 2", "version is 2, and this eyas reads 1"),
        ("version = 1", "version = [", "no TOML"),
        (f"hidden_size = {H}", "", "hidden_size is missing"),
        (f"hidden_size = {H}", 'hidden_size = "8"', "hidden_size is '8', expected a whole number"),
        (f"hidden_size = {H}", "hidden_size = true", "hidden_size is True, expected a whole number"),
        (f"hidden_size = {H}", "hiden_size = 8", "hidden_size is missing"),
        ("tp = 2", "tp = 2\nranks = 2", "ranks is no key here: expected version, "),
        ('dtype = "float32"', 'dtype = "fp8"', "dtype is 'fp8', expected one of bfloat16, float16, float32"),
        ('"vllm@0.32"', '"?"', "[layers] convention is still '?'"),
        ('"vllm@0.32"', '"vlm"', "no system 'vlm' is known"),
        ('convention = "vllm@0.32"', "", "[layers] convention or taps: exactly one of them"),
        ('convention = "vllm@0.32"', 'taps = ["after:1"]', "[layers] taps lists 1, and ids 3"),
        ('convention = "vllm@0.32"', 'taps = ["after:1", "final", "after:3"]', "not in ascending depth"),
        ("[2, 12, 29]", "[2, 12, 12]", "which repeats a layer"),
        ('"rank{rank}/', '"/rank{rank}/', "must be a path below the folder"),
        ('"rank{rank}/', '"../rank{rank}/', "has an empty part, . or .."),
        ('"rank{rank}/', '"a/../../rank{rank}/', "has an empty part, . or .."),
        ('"rank{rank}/', '"~/rank{rank}/', "must be a path below the folder"),
        ("{step}.pt", "{step}.txt", "must end in one of .safetensors"),
        ("{step}.pt", "{steps}.pt", "has {steps}: the fields are {rank}, {layer}, {step}, {sample}"),
        ("_step{step}", "{step}", "stand side by side"),
        ("layer_{layer}", "layer_0{layer}", "a digit beside {layer} could belong to it"),
        ("layer_{layer}", "layer", "have no {layer}, and there are 3"),
        ("req-{sample}_", "req_", "has no {sample}"),
        ("[input_ids]", 'placement = "token_sharded"\n[input_ids]', "expected one of replicated, token-sharded"),
        ("[input_ids]", "padded = true\n[input_ids]", "only token-sharded parts are padded"),
        ("[input_ids]", 'padded = true\nplacement="token-sharded"\n[input_ids]', "[input_ids] files has no {step}"),
        ("[input_ids]", "tolerance = -1\n[input_ids]", "tolerance is -1.0, expected at least 0"),
        ("tp = 2", "tp = 0", "tp is 0, expected at least 1"),
    ],
)
def test_a_description_is_read_strictly(tmp_path: Path, found: str, put: str, message: str) -> None:
    assert found in REPLICATED
    with pytest.raises(DescriptionError) as caught:
        opened(tmp_path, REPLICATED.replace(found, put, 1))
    assert message in str(caught.value)
    assert str(tmp_path / DESCRIPTION_FILE) in str(caught.value)


def test_taps_may_be_named_and_layers_be_words(tmp_path: Path) -> None:
    whole = states(5)
    for a, layer in enumerate(("early", "7", "final_norm")):
        save(tmp_path / f"{layer}_a.pt", {"x": whole[:, a].clone(), "token_ids": torch.arange(5)})
    text = f"""{HEAD}
    [layers]
    ids = ["early", 7, "final_norm"]
    taps = ["after:1", "after:7", "final"]
    [states]
    files = "{{layer}}_{{sample}}.pt"
    key = "x"
    [input_ids]
    files = "{{layer}}_{{sample}}.pt"
    key = "token_ids"
    """
    reader = opened(tmp_path, text)
    assert reader.layout.taps == (after(1), after(7), FINAL)
    assert torch.equal(reader.read("a").features, whole)
    save(tmp_path / "7_a.pt", {"x": whole[:, 1].clone(), "token_ids": torch.arange(5) + 1})
    assert "token ids of 7_a.pt are not those of early_a.pt" in refusal(opened(tmp_path, text), "a")
