"""TorchSpec's own offline dataset.

PYTHONPATH=TORCHSPEC python run_torchspec.py load FOLDER OUT.pt
"""

from __future__ import annotations

import sys
from pathlib import Path


def load(folder: str, out: str) -> None:
    """What the trainer gets, by the file's path below FOLDER."""
    import torch
    from torchspec.data.preprocessing import build_offline_eagle3_dataset

    data = build_offline_eagle3_dataset(folder, max_len=8192)
    torch.save({str(Path(path).relative_to(folder)): data[n] for n, path in enumerate(data.datapaths)}, out)


if __name__ == "__main__":
    {"load": load}[sys.argv[1]](*sys.argv[2:])
