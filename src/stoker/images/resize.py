"""Antialiased resizing of a part of an image.

cykooz-resizer does what Pillow's bilinear filter does, to the last bit or two, in a fourth of the
time; Pillow does it where that is not installed.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.images.boxes import Box
from stoker.images.decode import to_pil

_here = threading.local()  # a Resizer keeps buffers, and serves one thread at a time


def resize_box(
    pixels: NDArray[np.uint8], box: Box, size: int, *, context: bool = False
) -> NDArray[np.uint8]:
    """Return ``box`` of ``pixels``, ``u8[height, width, 3]``, as ``u8[size, size, 3]``.

    With ``context`` the filter sees what lies around the box, as if all of the image were resized
    and then cut; without, as if it were cut first. Safe in any thread; the GIL is released.
    """
    # The triangle filter reaches one target pixel beyond the box.
    reach_x, reach_y = (
        (math.ceil(max(1, side / size)) + 1 for side in box[2:]) if context else (0, 0)
    )
    left, top = max(0, math.floor(box.left) - reach_x), max(0, math.floor(box.top) - reach_y)
    right, bottom = math.ceil(box.left + box.width), math.ceil(box.top + box.height)
    part = pixels[top : bottom + reach_y, left : right + reach_x]
    inside = _within(part, Box(box.left - left, box.top - top, box.width, box.height))
    library = cykooz_resizer()
    if library is None:
        return _resize_with_pillow(part, inside, size)
    return _resize_with_cykooz(library, part, inside, size)


@cache
def cykooz_resizer() -> Any:
    """Return the module, None if it is not installed; it loads Pillow, which takes a while."""
    try:
        import cykooz_resizer as library
    except ImportError:
        return None
    return library


def _within(part: NDArray[np.uint8], box: Box) -> Box:
    """Return ``box`` without what rounding put beyond the edges of ``part``."""
    height, width = part.shape[:2]
    return box._replace(
        width=min(box.width, width - box.left), height=min(box.height, height - box.top)
    )


def _resize_with_cykooz(
    library: Any, part: NDArray[np.uint8], box: Box, size: int
) -> NDArray[np.uint8]:
    kind = library.PixelType.U8x3
    height, width = part.shape[:2]
    source = library.ImageData(width, height, kind, part.tobytes())
    target = library.ImageData(size, size, kind)
    triangle = library.ResizeAlg.convolution(library.FilterType.bilinear)
    options = library.ResizeOptions(triangle, crop_box=library.CropBox(*box))
    if "resizer" not in _here.__dict__:
        _here.resizer = library.Resizer()
    _here.resizer.resize(source, target, options)
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(size, size, 3)


def _resize_with_pillow(part: NDArray[np.uint8], box: Box, size: int) -> NDArray[np.uint8]:
    from PIL.Image import Resampling

    left, top, width, height = box
    image = to_pil(part)
    edges = (left, top, left + width, top + height)
    return np.asarray(image.resize((size, size), Resampling.BILINEAR, edges))
