"""Loads a folder by torch's DataLoader and compares every sample; run under the shim.

``loading.py FOLDER METHOD EPOCHS``: file ``i`` of the folder holds 2,000 + ``i`` times ``i % 251``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset[tuple[int, int]]):
    """A sample is its number and its length, or -1 in place of that when a byte is wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = len(list(folder.iterdir()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, int]:
        content = (self._folder / f"{index}.bin").read_bytes()
        right = content == bytes([index % 251]) * len(content)
        return index, len(content) if right else -1


def main() -> None:
    """Read all epochs; end with an error when a sample is missing or wrong."""
    folder, method, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    loader = DataLoader(
        Folder(folder),
        batch_size=7,
        num_workers=2,
        persistent_workers=True,
        shuffle=True,
        multiprocessing_context=method,
        generator=torch.Generator().manual_seed(3),
    )
    for _ in range(epochs):
        seen = sorted(
            (int(index), int(length))
            for indices, lengths in loader
            for index, length in zip(indices, lengths, strict=True)
        )
        assert seen == [(index, 2000 + index) for index in range(len(seen))], seen
        assert len(seen) == len(loader.dataset)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
