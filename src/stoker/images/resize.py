"""Antialiased resizing: of a part of an image for training, of whole photographs for a cache.

Pillow's bilinear filter, by code of our own where Stoker was built with it. Else, and for the
bicubic one, by cykooz-resizer, which does what Pillow's do, to the last bit or two, in a fourth of
the time; by Pillow where that is not installed.
"""

from __future__ import annotations

import io
import math
import re
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt
from stoker.images.decode import (
    JPEG_START,
    EncodedImage,
    offset_of_scan,
    pillow,
    shrink_for,
    simplejpeg,
    to_pil,
)
from stoker.source.packed import Buffer, join_parts, split_parts

Job = tuple[Any, ...]
"""What :func:`jpeg_job` returns."""


_FORM = re.compile(r"resized:(\d{1,5})(?::(\d{1,3}))?")
_LARGEST = 16_384
_HEAD_BYTES = 1 << 17  # where metadata lies; a segment has 64 KiB at most
_ORIENTATION = 0x0112
_COLOURS = {"YCbCr": "RGB", "Gray": "GRAY"}
_here = threading.local()  # a Resizer keeps buffers, and serves one thread at a time


class Box(NamedTuple):
    """A part of an image, in pixels from its upper left corner."""

    left: float
    top: float
    width: float
    height: float

    def over(self, divisor: int) -> Box:
        """Return the same part of the image at a ``divisor``-th of its size."""
        left, top, width, height = self
        return Box(left / divisor, top / divisor, width / divisor, height / divisor)


class Window(NamedTuple):
    """The whole pixels of an image that a resized box is made of."""

    left: int
    top: int
    right: int
    bottom: int


class Part(NamedTuple):
    """A box of an image, and what the filter looks at."""

    box: Box
    seen: Window

    def within(self) -> Box:
        """Return the box in pixels of what is seen."""
        left, top, width, height = self.box
        return Box(left - self.seen.left, top - self.seen.top, width, height)


def sides_of(image: Any) -> tuple[int, int]:
    """Return width and height of ``u8[height, width, 3]`` or a ``PIL.Image``."""
    width, height = image.shape[1::-1] if isinstance(image, np.ndarray) else image.size
    return width, height


def part_of(sides: tuple[int, int], box: Box, size: int, *, context: bool = False) -> Part:
    """Return what makes ``size`` x ``size`` pixels of an image of ``sides``, (width, height).

    With ``context`` the filter sees what lies around the box, as if all of the image were resized
    and then cut; without, as if it were cut first.
    """
    # The triangle filter reaches one target pixel beyond the box.
    reach_x, reach_y = (
        (math.ceil(max(1, side / size)) + 1 for side in box[2:]) if context else (0, 0)
    )
    seen = Window(
        max(0, math.floor(box.left) - reach_x),
        max(0, math.floor(box.top) - reach_y),
        min(sides[0], math.ceil(box.left + box.width) + reach_x),
        min(sides[1], math.ceil(box.top + box.height) + reach_y),
    )
    # Rounding may have put some of the box beyond the edges.
    width, height = min(box.width, seen.right - box.left), min(box.height, seen.bottom - box.top)
    return Part(Box(box.left, box.top, width, height), seen)


def jpeg_job(
    image: EncodedImage, shrink: int, part: Part, is_flipped: bool, out: NDArray[np.uint8]
) -> Job | None:
    """Return what :func:`cut_jpegs` takes to write a part of a JPEG into ``out``, as resize_part.

    ``part`` is that of the image at a ``shrink``-th of its size. None where Stoker was built
    without what does this, or the image is none for it.
    """
    library = native()
    if library is None or image.jpeg is None or not _fits(library, part, len(out)):
        return None
    return image.jpeg, (image.width, image.height), shrink, part.seen, part.box, is_flipped, out


def cut_jpegs(jobs: list[Job]) -> list[bool]:
    """Decode only those parts, resize and write them, in one call without the GIL.

    Returns which ones are written: others, such as progressive and damaged files, must be decoded
    first.
    """
    done: list[bool] = native().cut_jpegs(jobs) if jobs else []
    return done


def resize_part(image: Any, part: Part, is_flipped: bool, out: NDArray[np.uint8]) -> None:
    """Write a part of ``image`` into ``out``, ``u8[size, size, 3]`` with any strides.

    ``image`` is ``u8[height, width, 3]`` or an RGB ``PIL.Image``. Safe in any thread; the GIL is
    released.
    """
    left, top, right, bottom = part.seen
    is_array = isinstance(image, np.ndarray)
    pixels = image[top:bottom, left:right] if is_array else image.crop(part.seen)
    size, box = len(out), part.within()
    library = native()
    if library is not None and _fits(library, part, size):
        library.resize(np.asarray(pixels), box, is_flipped, out)
    else:
        square = _resize(pixels, box, (size, size), "bilinear")
        if is_flipped:  # whole pixels at once take half the time
            square = np.ascontiguousarray(square.view("V3")[:, ::-1]).view(np.uint8)
        out[...] = square


def resize_to(image: Any, width: int, height: int) -> NDArray[np.uint8]:
    """Return an image as ``u8[height, width, 3]``, by Pillow's bicubic filter.

    ``image`` is ``u8[h, w, 3]`` or an RGB ``PIL.Image``. Images that are resized again keep more
    detail so than by the bilinear filter, or by the mean of an area. Safe in any thread; the GIL is
    released.
    """
    return _resize(image, Box(0, 0, *sides_of(image)), (width, height), "bicubic")


@cache
def native() -> Any:
    """Return ``stoker._images``; None if it was built without libjpeg-turbo, or that is gone."""
    try:
        import stoker._images as library
    except ImportError:
        return None
    return library


@cache
def cykooz_resizer() -> Any:
    """Return the module, None if it is not installed; it loads Pillow, which takes a while."""
    try:
        import cykooz_resizer as library
    except ImportError:
        return None
    return library


def _fits(library: Any, part: Part, size: int) -> bool:
    """Return whether our own code resizes the part: not where it has thousands of pixels to add."""
    return bool(max(part.box.width, part.box.height) <= library.MOST_SHRINK * size)


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
    source = library.ImageData(*sides_of(image), kind, image.tobytes())
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


@dataclass(frozen=True)
class Resized:
    """Makes JPEG files whose short side is ``short_side`` pixels, of a ``quality`` from 1 to 100.

    Resized with Pillow's antialiased bicubic filter, after a JPEG that is much larger was decoded
    at half, a quarter or an eighth of its size. The subsampling of colours stays, and so does the
    EXIF orientation; no other metadata does. The same bytes for the same file, as long as the
    libraries stay the same. Immutable; safe in any thread and process.

    Raises :class:`~stoker.errors.ConfigError` for a size or a quality out of range, and, when it
    is called, without simplejpeg.
    """

    short_side: int
    quality: int = 90

    def __post_init__(self) -> None:
        if not 1 <= self.short_side <= _LARGEST:
            raise ConfigError(f"short_side={self.short_side!r}: give 1 to {_LARGEST:,} pixels")
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"quality={self.quality!r}: give 1 to 100")

    @classmethod
    def parse(cls, text: str) -> Resized | None:
        """Return the form named ``"resized:SIDE"`` or ``"resized:SIDE:QUALITY"``; None for others.

        Raises :class:`~stoker.errors.ConfigError` for numbers out of range.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        return cls(*(int(number) for number in found.groups() if number is not None))

    def __str__(self) -> str:
        """Return the name, with the quality."""
        return f"resized:{self.short_side}:{self.quality}"

    def __call__(self, data: Buffer) -> Buffer:
        """Return the small file, or ``data`` itself where that is not smaller.

        Of a sample of several parts, as :func:`stoker.source.join_parts` makes it, each part that
        is such a file becomes small. What is no photograph in JPEG stays as it is too: other
        formats, CMYK, 12 bits a value, images of more pixels than Pillow opens, and files that do
        not decode.
        """
        view = memoryview(data)
        small = self._small(view) if _is_jpeg(view) else self._small_parts(view)
        return data if small is None or len(small) >= len(data) else small

    def _small_parts(self, data: memoryview) -> bytes | None:
        try:
            parts = split_parts(data)
        except SampleCorrupt:
            return None
        small = {name: self(part) for name, part in parts.items() if _is_jpeg(part)}
        return join_parts(parts | small) if small else None

    def _small(self, data: memoryview) -> bytes | None:
        library = _library()
        try:
            height, width, colours, subsampling = library.decode_jpeg_header(data)
            if min(height, width) <= self.short_side or colours not in _COLOURS:
                return None
            pixels = self._pixels(EncodedImage(data))
        except (ValueError, SampleCorrupt):
            return None
        if colours == "Gray":
            pixels = np.ascontiguousarray(pixels[..., :1])
        encoded: bytes = library.encode_jpeg(pixels, self.quality, _COLOURS[colours], subsampling)
        return _with_orientation(encoded, _orientation(data))

    def _pixels(self, image: EncodedImage) -> NDArray[np.uint8]:
        short = min(image.width, image.height)
        shrink = shrink_for(short, self.short_side)
        whole = _decoded_by_own(image, shrink)
        if whole is None:
            whole, _ = image.decoded(shrink)
        width, height = (side * self.short_side // short for side in (image.width, image.height))
        return resize_to(whole, width, height)


def _decoded_by_own(image: EncodedImage, shrink: int) -> NDArray[np.uint8] | None:
    """Return what :meth:`EncodedImage.decoded` does, sooner; None where that must do it."""
    library = native()
    if library is None or image.jpeg is None:
        return None
    width, height = image.sides(shrink)
    pixels = np.empty((height, width, 3), np.uint8)
    sides = image.width, image.height
    return pixels if library.decode_jpeg(image.jpeg, sides, shrink, pixels) else None


def _is_jpeg(data: memoryview) -> bool:
    return bytes(data[:3]) == JPEG_START


def _library() -> Any:
    library = simplejpeg()
    if library is None:
        raise ConfigError(
            "stage='resized:...' needs simplejpeg, which is not installed: "
            "pip install 'stoker[images]'"
        )
    return library


def _orientation(data: memoryview) -> int:
    """Return how EXIF or XMP says that the image is to be turned; 1: not at all."""
    scan = offset_of_scan(data)
    head = bytes(data[: _HEAD_BYTES if scan is None else scan])
    if b"Exif\0" not in head and b"rientation" not in head:
        return 1
    try:
        with pillow().open(io.BytesIO(data)) as image:
            return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata says nothing, whatever Pillow raises for it
        return 1


def _with_orientation(encoded: bytes, orientation: int) -> bytes:
    """Return a JPEG file that begins with a JFIF segment with an EXIF segment behind that."""
    if orientation == 1:
        return encoded
    exif = pillow().Exif()
    exif[_ORIENTATION] = orientation
    segment: bytes = exif.tobytes()
    behind = 4 + int.from_bytes(encoded[4:6], "big")
    size = (len(segment) + 2).to_bytes(2, "big")
    return b"".join([encoded[:behind], b"\xff\xe1", size, segment, encoded[behind:]])
