"""The example of docs/sequences.md runs as it stands."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import numpy as np
from support.processes import run_python

DOCUMENT = Path(__file__).parents[2] / "docs" / "sequences.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.M)
    rng, texts = np.random.default_rng(0), tmp_path / "texts.tar"
    with tarfile.open(texts, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(500):
            tokens = rng.integers(1, 50_000, rng.integers(50, 900), np.uint16).tobytes()
            entry = tarfile.TarInfo(f"{number:03}.u16")
            entry.size = len(tokens)
            tar.addfile(entry, io.BytesIO(tokens))
    (tmp_path / "script.py").write_text(script.replace("/data/texts.tar", str(texts)))
    done = run_python("-W", "error", "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (share,) = re.findall(r"([0-9.]+)% padding", done.stdout)
    assert float(share) < 20  # of 15 batches the last is not full
