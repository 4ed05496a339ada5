"""eyas -> another trainer's layout -> eyas: the same ids, masks and states, to the bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample, sample_id
from eyas.taps.notation import FINAL, after

from ...captured import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, captured_identity
from .exchange import bits, export, open_reader, read_all, writer_of

LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([1, 2, 500, 5000]))


@st.composite
def exchanged(draw: st.DrawFn, name: str) -> tuple[DatasetIdentity, list[Sample]]:
    """A dataset that the format can say, and samples of it with every bit pattern in their states."""
    num_taps = 3 if name == "specforge" else draw(st.integers(1, 5))
    layers = draw(st.sets(st.integers(0, NUM_LAYERS - 1), min_size=num_taps, max_size=num_taps))
    taps = ",".join(f"after:{layer}" for layer in sorted(layers)) if name != "eagle" else "final"
    last_hidden = draw(st.sampled_from([FINAL, after(NUM_LAYERS - 1)])) if name == "modelopt" else FINAL
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    identity = captured_identity(
        num_samples=1, taps=taps, stage="standard", last_hidden=last_hidden, dtype=dtype, target_statistics=False
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    samples = {}
    masks = st.sampled_from(["none", "some", "all"])
    for length, trained in draw(st.lists(st.tuples(LENGTHS, masks), min_size=1, max_size=4)):
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=random, dtype=torch.int32)
        ids[length // 2 :] *= draw(st.integers(0, 1))  # ends as padding does, or not
        mask = torch.randint(0, 2, (length,), generator=random, dtype=torch.uint8)
        mask = {"none": mask * 0, "some": mask, "all": mask * 0 + 1}[trained]
        name_ = sample_id(ids.numpy(), mask.numpy())
        samples[name_] = Sample(
            sample_id=name_,
            input_ids=ids,
            loss_mask=mask,
            features=_states(length, identity.features_width, dtype, random),
            last_hidden=_states(length, HIDDEN_SIZE, dtype, random),
            target_top1=None,
            target_lse=None,
        )
    return identity, list(samples.values())


def _states(length: int, width: int, dtype: str, random: torch.Generator) -> torch.Tensor:
    integers = torch.int32 if dtype == "float32" else torch.int16
    info = torch.iinfo(integers)
    drawn = torch.randint(info.min, info.max + 1, (length, width), generator=random)
    return drawn.to(integers).view(getattr(torch, dtype))


@pytest.mark.parametrize("name", ["specforge", "modelopt", "eagle"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_comes_back_to_the_bit(name: str, data: st.DataObject) -> None:
    identity, samples = data.draw(exchanged(name))
    with tempfile.TemporaryDirectory() as folder:
        reader = open_reader(export(writer_of(name), identity, samples, Path(folder)), name)
        assert (reader.layout.num_taps, reader.layout.hidden_size) == (len(identity.taps), HIDDEN_SIZE)
        assert (reader.layout.dtype, reader.layout.num_files) == (identity.dtype, len(samples))
        found = read_all(reader)
    if name == "modelopt":  # its files are named by the samples
        samples.sort(key=lambda sample: Path(f"{sample.sample_id}.pt"))
        found.sort(key=lambda sample: Path(sample.where))
    for sample, read in zip(samples, found, strict=True):
        assert torch.equal(read.input_ids, sample.input_ids.long())
        assert read.loss_mask is not None
        assert torch.equal(read.loss_mask, sample.loss_mask)
        assert torch.equal(bits(read.features.flatten(1)), bits(sample.features))
        if name == "eagle":
            assert read.last_hidden is None
        else:
            assert read.last_hidden is not None
            assert sample.last_hidden is not None
            assert torch.equal(bits(read.last_hidden), bits(sample.last_hidden))
    if name == "modelopt":
        assert reader.layout.last_hidden == ("post-norm" if identity.last_hidden == FINAL else "pre-norm")
