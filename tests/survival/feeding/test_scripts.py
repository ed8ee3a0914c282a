"""Training as people write it: a script without a main guard, and a notebook's cells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .samples import sample

NUM = 120

IMPORTS = """
import sys
from pathlib import Path
from stoker.pytorch import Loader, SampleDataset, wrap
from stoker.source import FileSource
paths = sorted(Path(sys.argv[1]).iterdir())
"""

LIBRARY = """
dataset = SampleDataset(FileSource(paths))
"""

OWN_DATASET = """
class Own(SampleDataset):
    def decode(self, data):
        return bytes(data)
dataset = Own(FileSource(paths), None, lambda raw: raw)
"""

OWN_SOURCE = """
import numpy as np
class Own:
    sizes = np.array([path.stat().st_size for path in paths])
    fingerprint = "own"
    def __len__(self):
        return len(paths)
    def read(self, ids):
        return [paths[i].read_bytes() for i in ids]
dataset = SampleDataset(Own())
"""

FULL_SOURCE = """
class Own(FileSource):
    pass
from stoker.testing.sources import SlowSource
dataset = SampleDataset(SlowSource(Own(paths), latency=0.001))
"""

WRAPPED = """
class Own:
    def __len__(self):
        return len(paths)
    def __getitem__(self, index):
        return paths[index].read_bytes()
dataset = wrap(Own())
"""

TRAINING = """
loader = Loader(
    dataset, 8, cache="30%", num_workers=2, multiprocessing_context="fork", collate_fn=list
)
expected = sorted(path.read_bytes() for path in paths)
for epoch in range(2):
    served = [raw for batch in loader for raw in batch]
    assert sorted(served) == expected
print("ok", loader.stats.accesses)
"""

DATASETS = {
    "library": LIBRARY,
    "own dataset": OWN_DATASET,
    "own source": OWN_SOURCE,
    "own source below another": FULL_SOURCE,
    "wrapped": WRAPPED,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(NUM):
        (folder / f"{number:04d}").write_bytes(sample(number))
    return folder


def run(arguments: list[object], said: str = "", loaders: int = 1) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This DataLoader:UserWarning", *map(str, arguments)],
        input=said,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == f"ok {2 * NUM}\n" * loaders
    assert done.returncode == 0


@pytest.mark.parametrize("dataset", ["library", "wrapped"])
def test_a_script_without_a_main_guard(tmp_path: Path, folder: Path, dataset: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(IMPORTS + DATASETS[dataset] + TRAINING)
    run([script, folder])


CELLS = """
import __main__, sys
for cell in {cells!r}:
    exec(compile(cell, "<ipython-input>", "exec"), __main__.__dict__)
"""


def test_cells_of_a_notebook(folder: Path) -> None:
    """Where ``__main__`` has no file, and classes live in it; no loader is ever closed."""
    cells = [IMPORTS]
    for dataset in DATASETS.values():
        cells += [dataset, TRAINING, "raw = next(iter(loader))"]
    run(["-", folder], CELLS.format(cells=cells), loaders=len(DATASETS))
