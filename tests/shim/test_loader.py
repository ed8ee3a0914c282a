"""A PyTorch program, unchanged, with each way of starting workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shim.hand import HandDaemon

COUNT, EPOCHS = 60, 2


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for index in range(COUNT):
        (folder / f"{index}.bin").write_bytes(bytes([index % 251]) * (2000 + index))
    size = sum(path.stat().st_size for path in folder.iterdir())
    with HandDaemon(folder, places=True) as daemon:
        program = Path(__file__).with_name("loading.py")
        daemon.run([sys.executable, program, folder, method, EPOCHS], timeout=240)
        counts = daemon.counted()
        assert (counts["source_bytes"], counts["tier_bytes"]) == (0, EPOCHS * size)
        assert (counts["tier_opens"], counts["source_opens"]) == (EPOCHS * COUNT, 0)
        assert len(daemon.requests) == COUNT
