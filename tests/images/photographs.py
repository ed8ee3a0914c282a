"""Photographs as JPEG files, of the size and the detail of ImageNet's."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from PIL import Image

SHORT_SIDE = 375


@cache
def photographs() -> tuple[bytes, ...]:
    """Return six photographs, of 375 pixels and more, as JPEG."""
    # Each worker collects all tests, and these take more than a second to load.
    from skimage import data
    from sklearn.datasets import load_sample_images

    arrays = [*load_sample_images().images, data.astronaut(), data.coffee(), data.cat()]
    return tuple(as_jpeg(resized(array)) for array in [*arrays, data.rocket()])


def resized(pixels: np.ndarray) -> Image.Image:
    """Return ``u8[height, width, 3]`` with the short side of ImageNet's images."""
    image = Image.fromarray(pixels)
    factor = SHORT_SIDE / min(image.size)
    width, height = (round(side * factor) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def as_jpeg(image: Image.Image, **options: object) -> bytes:
    """Return the file; ``options`` are Pillow's."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 95, **options})
    return buffer.getvalue()
