"""SpecForge (sgl-project/SpecForge), a trainer that captures through SGLang: its ids are read by SGLang's rule.

Read in 0.2.0 (commit a6b6b023, 2026-08-08), which pins sglang 0.5.14:

    specforge/algorithms/model_providers.py   ``resolve_eagle_capture_layers`` takes
                                        ``eagle_config.eagle_aux_hidden_state_layer_ids`` of the draft's config, else
                                        1, L//2-1, L-4, and insists on exactly three
    specforge/offline_capture/sglang_backend/capture.py   gives them, as they are, to the target's
                                        ``set_eagle3_layers_to_capture``
    patches/sglang/v0.5.14/spec-capture.patch   the online server: the same setter

So ids mean outputs of layers on most models, and on DeepSeek and Kimi only if the first is 1: data for [2, 30, 58] are
of after:1, after:29, after:57 there (taps/conventions/sglang.py has the readings). Its DFlash drafts name outputs of
layers on every model (``dflash_config.target_layer_ids``, ``set_dflash_layers_to_capture``), and are not read here.
"""

from dataclasses import replace

from packaging.version import Version

from eyas.taps.conventions import sglang
from eyas.taps.conventions.entry import Entry, Reader, System, of_version
from eyas.taps.notation import default_taps

_SGLANG = Version("0.5.14")


def _through_sglang(entry: Entry) -> Entry:
    return Entry(
        versions=("0.2.0", "0.2.0"),
        models=entry.models,
        rule=replace(entry.rule, num_ids=3),
        default_taps=default_taps,  # 1, L//2-1, L-4, which every rule of 0.5.14 reads as outputs
        source=f"specforge/offline_capture/sglang_backend/capture.py, sglang {_SGLANG}",
    )


CONVENTION = System(
    name="specforge",
    entries=tuple(
        _through_sglang(entry) for entry in sglang.CONVENTION.entries if entry in of_version([entry], _SGLANG)
    ),
    readers=(
        Reader(
            versions=("0.2.0", "0.2.0"),
            places=("eagle_config.eagle_aux_hidden_state_layer_ids",),
            source="specforge/algorithms/model_providers.py",
        ),
    ),
)
