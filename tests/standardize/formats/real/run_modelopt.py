"""ModelOpt's own code on a CPU: its script makes files, its dataset and collator load some.

PYTHONPATH=MODELOPT python run_modelopt.py make TARGET CONVERSATIONS.jsonl TEMPLATE.jinja OUT
PYTHONPATH=MODELOPT python run_modelopt.py load FOLDER OUT.pt
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

LAYERS = (1, 3, 4)


def make(target: str, conversations: str, template: str, out: str) -> None:
    """compute_hidden_states_hf.py as it is, all of it."""
    import modelopt

    root = Path(modelopt.__path__[0]).parent
    scripts = root / "examples" / "speculative_decoding" / "collect_hidden_states"
    sys.path.insert(0, str(scripts))
    options = f"--model {target} --input-data {conversations} --output-dir {out} --chat-template {template}"
    layers = ",".join(map(str, LAYERS))
    sys.argv = ["compute_hidden_states_hf.py", *options.split(), "--aux-layers", layers, "--answer-only-loss"]
    runpy.run_path(str(scripts / sys.argv[0]), run_name="__main__")


def load(folder: str, out: str) -> None:
    """What the trainer gets, by the file's name: all files that its data module would find, answers only."""
    import torch
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = [str(path) for path in Path(folder).rglob("*.pt")]
    data = OfflineSupervisedDataset(files, answer_only_loss=True)
    loaded = {}
    for number, file in enumerate(files):
        sample = data[number]
        loaded[Path(file).stem] = EagleOfflineDataCollator(train_len=len(sample["input_ids"]))([sample])
    torch.save(loaded, out)


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](*sys.argv[2:])
