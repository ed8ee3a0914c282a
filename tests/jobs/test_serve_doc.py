"""The example of docs/serve.md, jobs that share a node, runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.images import write_images

DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"


def test_the_section_runs(tmp_path: Path) -> None:
    (section,) = re.findall(r"^## An example\n(.*?)^## ", DOCUMENT.read_text(), re.DOTALL | re.M)
    (script, commands) = [
        text for _, text in re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.M)
    ]
    images = write_images(tmp_path / "images")
    (tmp_path / "search.py").write_text(script.replace("/mnt/nfs/train", str(images)))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, what in (
        ("python", ""),
        ("stoker", '-c "from stoker.cli.root import root; root()" '),
    ):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what}"$@"\n')
        (tools / name).chmod(0o755)
    commands = commands.replace("64GiB", "64MiB")
    done = subprocess.run(
        ["bash", "-c", f'export PATH="{tools}:$PATH" COLUMNS=200\n{commands}'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for seed in range(4):
        assert re.search(rf"seed {seed}: \d+% hits", done.stdout), done.stdout + done.stderr
    assert "kept by the service" in done.stdout
