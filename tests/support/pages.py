"""Code blocks of the repository's pages, and programs made of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, heading: str, language: str = "") -> list[str]:
    """The code blocks of a section; of what comes before the first one for an empty heading."""
    text = (ROOT / page).read_text()
    begin = rf"^## {heading}\n" if heading else r"\A"
    (section,) = re.findall(rf"{begin}(.*?)(?:^## |\Z)", text, re.DOTALL | re.M)
    found = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.M)
    return [code for kind, code in found if kind == language]


def run_script(text: str, folder: Path) -> list[int]:
    """Run it as a file; return the numbers that it prints."""
    script = folder / "script.py"
    # Torch warns of more workers than there are processors.
    script.write_text(text.replace("num_workers=4", "num_workers=1"))
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]
