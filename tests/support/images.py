"""Real image files. Needs neither Stoker nor torch, as tests/check_wheel.py has none of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

NUM_IMAGES = 60
NUM_CLASSES = 3


def write_images(root: Path) -> Path:
    """Write PNGs of 8 x 8 pixels; every pixel of image ``i`` is ``i``."""
    per_class = NUM_IMAGES // NUM_CLASSES
    for number in range(NUM_IMAGES):
        folder = root / f"class{number // per_class}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8, 3), number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root
