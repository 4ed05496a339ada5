"""What the probe logs, on modules built as vLLM's EAGLE-3 drafts are."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: the probe watches every module that is built after its import.
DRAFT = """
import sys
from types import SimpleNamespace
import torch
from torch import nn
import eyas.serve.probe

def build(flag, module):
    class Draft(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(hidden_size=2)
            self.input_norm = nn.RMSNorm(6) if flag == "input_norm" else None
            self.fc = nn.Linear(6, 2, bias=False)
            # vLLM's DeepSeek drafts get it after fc
            self.fc_norm = nn.ModuleList([nn.RMSNorm(2) for _ in range(3)]) if flag == "fc_norm" else None

        def forward(self, x):
            if self.input_norm is not None:
                x = self.input_norm(x)
            if self.fc_norm is not None:
                x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, x.chunk(3, -1))], -1)
            return self.fc(x)

    Draft.__module__ = module
    return Draft()

draft = build(*sys.argv[1:])
for _ in range(5):
    draft(torch.tensor([[3.0, 4, 0, 0, 1, 0]]))
"""


def probe(flag: str, module: str = "vllm.model_executor.models.llama_eagle3") -> list[str]:
    done = subprocess.run([sys.executable, "-c", DRAFT, flag, module], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_without_norms_fc_receives_the_taps() -> None:
    lines = probe("")
    assert lines == [
        f"eyas probe: fc receives, call {call}: [1, 6] float32; slot 0: norm 5, 3 to 4; slot 1: norm 0, 0 to 0; "
        f"slot 2: norm 1, 0 to 1"
        for call in (1, 2, 4)
    ]


def test_norms_are_seen_from_both_sides() -> None:
    before, after = probe("input_norm")[:2]
    assert before.startswith("eyas probe: the concatenation before its norm, call 1: [1, 6] float32; slot 0: norm 5,")
    assert after.startswith("eyas probe: fc receives, call 1: [1, 6] float32; slot 0: norm 2.4")
    lines = probe("fc_norm")[:4]
    assert lines[0] == "eyas probe: slot 0 before its norm, call 1: [1, 2] float32; norm 5, 3 to 4"
    assert lines[2].startswith("eyas probe: slot 2 before its norm, call 1: [1, 2] float32; norm 1,")
    assert lines[3].startswith("eyas probe: fc receives, call 1: [1, 6] float32; slot 0: norm 1.4142,")


@pytest.mark.parametrize("module", ["vllm.model_executor.models.llama", "transformers.models.gpt"])
def test_other_modules_with_an_fc_are_left_alone(module: str) -> None:
    assert probe("", module) == []
