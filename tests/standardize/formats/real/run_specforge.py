"""SpecForge's own code on a CPU: its parser, collator and dump make files, its offline reader loads some.

    PYTHONPATH=SPECFORGE python run_specforge.py make TARGET CONVERSATIONS.jsonl OUT
    PYTHONPATH=SPECFORGE python run_specforge.py load FOLDER OUT.pt

Not theirs: the target's forward (SGLang's needs a GPU; transformers' stands in), the process groups, and that calls for
CUDA stay on the CPU.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS = (1, 3, 4)


def make(target: str, conversations: str, out: str) -> None:
    """Batches of two, so one of each is padded; OUT/plain, OUT/packed, and OUT/tokens.json with what was not padded."""
    from datasets import Dataset
    from specforge.data.preprocessing import build_eagle3_dataset
    from specforge.data.template import TEMPLATE_REGISTRY, ChatTemplate
    from specforge.data.utils import prepare_dp_dataloaders
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(Path(sys.modules["specforge"].__file__).parent.parent / "scripts"))
    import prepare_hidden_states as tool

    template = ChatTemplate(
        assistant_header="<|im_start|> assistant ",
        user_header="<|im_start|> user ",
        system_prompt=None,
        end_of_turn_token=" <|im_end|> ",
    )
    TEMPLATE_REGISTRY.register("tiny", template)
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = [json.loads(line) for line in Path(conversations).read_text().splitlines()]
    rows = Dataset.from_list([{"id": str(n), "conversations": line["messages"]} for n, line in enumerate(lines)])
    built = build_eagle3_dataset(dataset=rows, tokenizer=tokenizer, chat_template="tiny", max_length=64, num_proc=1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    make_tensor = torch.tensor
    torch.tensor = lambda *args, device=None, **kwargs: make_tensor(*args, **kwargs)
    torch.set_grad_enabled(False)
    for name, compress in (("plain", False), ("packed", True)):
        loader = prepare_dp_dataloaders(built, 2, num_workers=0, process_group=dist.group.WORLD)
        with tool.HiddenStatesGenerator(Capture(model), num_io_threads=1, compress=compress) as generator:
            generator.generate(loader, str(Path(out) / name), 0, len(built))
    tokens = [{key: row[key].flatten().tolist() for key in ("input_ids", "loss_mask")} for row in built]
    (Path(out) / "tokens.json").write_text(json.dumps(tokens))


class Capture:
    """Gives what SGLang's capture gives: rows of the batch as they are, padding and all."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def capture(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor) -> Any:
        from specforge.offline_capture.sglang import OfflineCaptureBatch

        states = self.model(input_ids=input_ids, output_hidden_states=True).hidden_states
        return OfflineCaptureBatch(
            hidden_states=torch.cat([states[layer + 1] for layer in LAYERS], dim=-1),
            last_hidden_states=states[-1],
            input_ids=input_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
        )


def load(folder: str, out: str) -> None:
    """What the trainer gets, a sample a batch, and what its target head then makes of tokens, states and mask."""
    from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    reader = build_offline_reader(folder, run_id="test", ttt_length=7, max_len=8192)
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=reader.read(),
        collate_fn=build_offline_collator(),
        per_sample_transform=build_offline_normalizer(8192),
    )
    batches = []
    for batch in loader:
        tensors = getattr(batch, "tensors", batch)
        batches.append({key: value.clone() for key, value in tensors.items() if isinstance(value, torch.Tensor)})
        seen = TargetHead.preprocess(None, *(batches[-1][key] for key in ("input_ids", "target", "loss_mask")))
        batches[-1] |= dict(zip(("trained_input_ids", "trained_target", "trained_loss_mask"), seen, strict=True))
    torch.save(batches, out)


if __name__ == "__main__":
    import specforge.distributed as groups

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for name in ("_TP_GROUP", "_DP_GROUP", "_DRAFT_DP_GROUP", "_DRAFT_SP_GROUP", "_SP_ULYSSES_GROUP"):
            setattr(groups, name, dist.group.WORLD)
        groups._TP_DEVICE_MESH = functools.partial(dist.get_rank)
        {"make": make, "load": load}[sys.argv[1]](*sys.argv[2:])
        dist.destroy_process_group()
