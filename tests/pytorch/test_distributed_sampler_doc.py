"""The example of docs/distributed-sampler.md runs as it stands, with the command beside it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "distributed-sampler.md"


def test_the_example_runs(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```\n(torchrun .*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (accuracy, steps) = re.findall(r"accuracy (\S+) after (\d+) steps", run.stdout)[0]
    assert float(accuracy) > 0.9 and int(steps) == 100
