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


def train(target: str, folder: str, out: str) -> None:
    """By the file's name, what the loss of the trainer's first step is given: teacher [T-1, V], mask [T-1]."""
    import modelopt.torch.speculative as speculative
    import modelopt.torch.speculative.plugins.modeling_eagle as drafts
    import torch
    from modelopt.torch.speculative.eagle.default_config import default_eagle_config
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
    from transformers import AutoModelForCausalLM

    rope = drafts.LlamaRotaryEmbedding
    drafts.LlamaRotaryEmbedding = lambda config, device=None: rope(config=config)
    model = AutoModelForCausalLM.from_pretrained(target)
    draft = {
        **default_eagle_config,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "_attn_implementation": "sdpa",
    }
    settings = {"eagle_architecture_config": draft, "eagle_ttt_steps": 1, "eagle_use_torch_compile": False}
    speculative.convert(model, mode=[("eagle", settings)])
    model.eagle_offline = True
    model.train()
    given = []
    loss = model._eagle_loss
    model._eagle_loss = lambda teacher, *rest: given.append((teacher.detach()[0], rest[-1][0])) or loss(teacher, *rest)
    files = sorted(Path(folder).rglob("*.pt"))
    for sample in OfflineSupervisedDataset(list(map(str, files)), answer_only_loss=True):
        done = model(**EagleOfflineDataCollator(train_len=len(sample["input_ids"]))([sample]))
        assert torch.isfinite(done.loss)
    torch.save({file.stem: seen for file, seen in zip(files, given, strict=True)}, out)


if __name__ == "__main__":
    {"make": make, "load": load, "train": train}[sys.argv[1]](*sys.argv[2:])
