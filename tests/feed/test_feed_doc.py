"""The example of docs/feed.md runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.images import NUM_IMAGES, write_images

DOCUMENT = Path(__file__).parents[2] / "docs" / "feed.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.M)
    images = write_images(tmp_path / "images")
    script += "\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script.replace("/mnt/nfs/train", str(images))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(3 * NUM_IMAGES)
