"""1,797 real handwritten digits as image files in class folders.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI
Machine Learning Repository, 1998; CC BY 4.0), 8 x 8 pixels of 17 grey levels, unchanged in
``_digits.npz``, so that a demo needs no download.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.errors import ConfigError

COUNT = 1797
"""Images in the set."""
_SCALE = 4  # 32 x 32 pixels, so that decoding costs what it costs on CIFAR-10


def write_digits(folder: Path, copies: int = 1) -> Path:
    """Write ``folder/<digit>/<number>.jpg`` and return ``folder``; files that exist are kept.

    Each image is 32 x 32 pixels, about 1 KB as JPEG. ``copies`` above 1 writes each image that
    many times, shifted by a few pixels, where a measurement needs more files than there are
    digits. Raises ConfigError when Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"the digits are written with Pillow ({error}): pip install pillow, "
            "or give a folder of class folders with --data"
        ) from error
    with np.load(Path(__file__).with_name("_digits.npz")) as digits:
        levels, labels = digits["images"], digits["labels"]  # u8[1797, 8, 8] to 16; u8[1797]
    grey = np.rint(levels * (255 / 16)).astype(np.uint8)
    images = np.kron(grey, np.ones((1, _SCALE, _SCALE), np.uint8))
    for label in range(10):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
    for copy in range(copies):
        shifted = np.roll(images, (copy % 3 - copy // 3 % 3, copy // 9), axis=(1, 2))
        for number, (image, label) in enumerate(zip(shifted, labels, strict=True)):
            path = folder / str(label) / f"{copy * COUNT + number:06d}.jpg"
            if not path.exists():
                Image.fromarray(image).save(path, quality=90)
    return folder
