"""Code blocks of the repository's pages, and programs made of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from support.processes import run_python

ROOT = Path(__file__).parents[2]


def blocks(page: str, heading: str, language: str = "") -> list[str]:
    """The code blocks of a section; of what comes before the first one for an empty heading."""
    text = (ROOT / page).read_text()
    begin = rf"^## {heading}\n" if heading else r"\A"
    (section,) = re.findall(rf"{begin}(.*?)(?:^## |\Z)", text, re.DOTALL | re.M)
    found = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.M)
    return [code for kind, code in found if kind == language]


def readmes_program(folder: Path) -> str:
    """The program of the README for three epochs of images in ``folder``, which it writes.

    It prints the number of accesses, 180, and 1 if there were hits.
    """
    from support.images import write_images

    write_images(folder / "train")
    (program,) = blocks("README.md", "Use", "python")
    before = """
import multiprocessing, torch, stoker.pytorch
multiprocessing.set_start_method("fork", force=True)  # see docs/troubleshooting.md: Python 3.14
torch.set_num_threads(1)
pooled = torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten()
model = torch.nn.Sequential(stoker.pytorch.Normalize(), *pooled, torch.nn.Linear(192, 10))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
"""
    here = program.replace("/mnt/nfs/imagenet", str(folder)).replace("range(90)", "range(3)")
    here = here.replace("num_workers=8", "num_workers=1").replace("print(loader.stats)", "pass")
    here = here.replace('"20%"', 'stoker.Cache("20%", stands_aside=False)')
    after = "\nprint(loader.stats.accesses, int(loader.stats.hits > 0))\nloader.close()\n"
    return before + here + after


def run_script(text: str, folder: Path, python: str | None = None) -> list[int]:
    """Run it as a file, by another Python if given; return the numbers that it prints."""
    script = folder / "script.py"
    # Torch warns of more workers than there are processors.
    script.write_text(text.replace("num_workers=4", "num_workers=1"))
    words = ["-W", "error", str(script)]
    if python is None:
        done = run_python(*words, folder=folder)
    else:
        command = [python, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]
