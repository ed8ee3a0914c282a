"""Antialiased resizing of a part of an image.

cykooz-resizer does what Pillow's bilinear and bicubic filters do, to the last bit or two, in a
fourth of the time; Pillow does it where that is not installed.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.images.boxes import Box
from stoker.images.decode import to_pil

_here = threading.local()  # a Resizer keeps buffers, and serves one thread at a time


class Window(NamedTuple):
    """The whole pixels of an image that a resized box is made of."""

    left: int
    top: int
    right: int
    bottom: int


def window(box: Box, size: int, *, context: bool = False) -> Window:
    """Return what :func:`resize_box` reads; it may reach beyond the right and lower edges."""
    # The triangle filter reaches one target pixel beyond the box.
    reach_x, reach_y = (
        (math.ceil(max(1, side / size)) + 1 for side in box[2:]) if context else (0, 0)
    )
    return Window(
        max(0, math.floor(box.left) - reach_x),
        max(0, math.floor(box.top) - reach_y),
        math.ceil(box.left + box.width) + reach_x,
        math.ceil(box.top + box.height) + reach_y,
    )


def resize_box(image: Any, box: Box, size: int, *, context: bool = False) -> NDArray[np.uint8]:
    """Return ``box`` of ``image`` as ``u8[size, size, 3]``.

    ``image`` is ``u8[height, width, 3]`` or an RGB ``PIL.Image``. With ``context`` the filter sees
    what lies around the box, as if all of the image were resized and then cut; without, as if it
    were cut first. Safe in any thread; the GIL is released.
    """
    left, top, right, bottom = window(box, size, context=context)
    if isinstance(image, np.ndarray):
        part = image[top:bottom, left:right]
        height, width = part.shape[:2]
    else:
        part = image.crop((left, top, min(right, image.width), min(bottom, image.height)))
        width, height = part.size
    # Rounding may have put some of the box beyond the edges.
    inside = Box(
        box.left - left,
        box.top - top,
        min(box.width, width - (box.left - left)),
        min(box.height, height - (box.top - top)),
    )
    return _resize(part, inside, (size, size), "bilinear")


def resize_to(image: Any, width: int, height: int) -> NDArray[np.uint8]:
    """Return an image as ``u8[height, width, 3]``, by Pillow's bicubic filter.

    ``image`` is ``u8[h, w, 3]`` or an RGB ``PIL.Image``. Images that are resized again keep more
    detail so than by the bilinear filter, or by the mean of an area. Safe in any thread; the GIL is
    released.
    """
    sides = image.shape[1::-1] if isinstance(image, np.ndarray) else image.size
    return _resize(image, Box(0, 0, *sides), (width, height), "bicubic")


@cache
def cykooz_resizer() -> Any:
    """Return the module, None if it is not installed; it loads Pillow, which takes a while."""
    try:
        import cykooz_resizer as library
    except ImportError:
        return None
    return library


def _resize(image: Any, box: Box, size: tuple[int, int], how: str) -> NDArray[np.uint8]:
    """Return ``box`` of ``image`` as ``u8[size[1], size[0], 3]``."""
    library = cykooz_resizer()
    if library is None:
        return _resize_with_pillow(image, box, size, how)
    return _resize_with_cykooz(library, image, box, size, how)


def _resize_with_cykooz(
    library: Any, image: Any, box: Box, size: tuple[int, int], how: str
) -> NDArray[np.uint8]:
    kind, filters = library.PixelType.U8x3, library.FilterType
    sides = image.shape[1::-1] if isinstance(image, np.ndarray) else image.size
    source = library.ImageData(*sides, kind, image.tobytes())
    target = library.ImageData(*size, kind)
    chosen = filters.catmull_rom if how == "bicubic" else filters.bilinear
    algorithm = library.ResizeAlg.convolution(chosen)
    options = library.ResizeOptions(algorithm, crop_box=library.CropBox(*box))
    if "resizer" not in _here.__dict__:
        _here.resizer = library.Resizer()
    _here.resizer.resize(source, target, options)
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(size[1], size[0], 3)


def _resize_with_pillow(image: Any, box: Box, size: tuple[int, int], how: str) -> NDArray[np.uint8]:
    from PIL.Image import Resampling

    whole = to_pil(image) if isinstance(image, np.ndarray) else image
    left, top, width, height = box
    edges = (left, top, left + width, top + height)
    return np.asarray(whole.resize(size, Resampling[how.upper()], edges))
