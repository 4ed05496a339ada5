"""Names as patches write them, and the patterns they are guessed to be of."""

from __future__ import annotations

from itertools import product

import pytest

from eyas.standardize.formats.dump.names import group_paths

UUIDS = ("1f3a9c4e-0b2d-4e55-9a61-aa03b1c2d3e4", "9b2e7d10-77aa-4c1f-8e02-5d6c7b8a9f00")
LAYERS = (2, 12, 29)


def paths(template: str, **values: tuple[object, ...]) -> list[str]:
    """A template's every path: ``{layer:03}`` of LAYERS, ranks 0 and 1, steps 9 and 10, and what is given."""
    every: dict[str, tuple[object, ...]] = {"rank": (0, 1), "layer": LAYERS, "step": (9, 10), **values}
    names = [name for name in every if f"{{{name}" in template]
    return [template.format(**dict(zip(names, row, strict=True))) for row in product(*(every[name] for name in names))]


@pytest.mark.parametrize(
    ("template", "samples"),
    [
        ("rank{rank}/layer_{layer}/req-{sample}_step{step}.pt", ("abc", "d-2")),
        ("rank{rank}/layer_{layer:03}/req-{sample}_step{step:05}.pt", ("abc", "d-2")),
        ("rank{rank}/layer_{layer}/req-{sample}_step{step}.pt", ("abc",)),
        ("{sample}/tp{rank}/l{layer:02}.npy", UUIDS),
        ("chatcmpl-{sample}/rank_{rank}/layer-{layer}-step-{step}.safetensors", UUIDS),
        ("tp4/rank{rank}/model.layers.{layer}/{sample}.pt.gz", ("a", "b", "c")),
        ("states/{sample}.layer{layer}.rank{rank}.pt", ("conv0_7", "conv1_3")),
        ("{sample}/{sample}_layer{layer}.pt", UUIDS),
        ("tp2/rank{rank}_step{step}_layer{layer}.pt", ()),
        ("step{step}.pt", ()),
        ("sample_{sample}.pt", (1, 2, 10)),
        ("{sample}_input_ids.pt", ("abc",)),
        ("data_{sample}.ckpt", (7,)),
    ],
)
def test_patterns_are_found(template: str, samples: tuple[object, ...]) -> None:
    found = list(group_paths(sorted(paths(template, sample=samples))))
    plain = template.replace(":03", "").replace(":05", "").replace(":02", "")
    assert [group.pattern for group in found] == [plain]
    assert found[0].layers == (tuple(map(str, LAYERS)) if "{layer" in template else ())


def test_what_files_are_for_keeps_them_apart() -> None:
    every = [
        *paths("rank{rank}/layer_{layer}/req-{sample}.pt", sample=UUIDS),
        *paths("rank{rank}/last_hidden/req-{sample}.pt", sample=UUIDS),
        *paths("req-{sample}.token_ids.pt", sample=UUIDS),
        *paths("req-{sample}.loss_mask.pt", sample=UUIDS),
    ]
    assert {group.pattern for group in group_paths(sorted(every))} == {
        "rank{rank}/layer_{layer}/req-{sample}.pt",
        "rank{rank}/last_hidden/req-{sample}.pt",
        "req-{sample}.token_ids.pt",
        "req-{sample}.loss_mask.pt",
    }
