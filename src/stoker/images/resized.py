"""Photographs made as small as training needs them: the form that a cache may keep."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt
from stoker.images.decode import JPEG_START, EncodedImage, pillow, shrink_for, simplejpeg
from stoker.images.resize import resize_to
from stoker.source.packed import Buffer, join_parts, split_parts

_FORM = re.compile(r"resized:(\d{1,5})(?::(\d{1,3}))?")
_LARGEST = 16_384
_HEAD_BYTES = 1 << 17  # where metadata lies; a segment has 64 KiB at most
_ORIENTATION = 0x0112
_COLOURS = {"YCbCr": "RGB", "Gray": "GRAY"}


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
        whole, _ = image.decoded(shrink_for(short, self.short_side))
        width, height = (side * self.short_side // short for side in (image.width, image.height))
        return resize_to(whole, width, height)


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
    head = bytes(data[:_HEAD_BYTES])
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
