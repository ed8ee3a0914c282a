"""Encoded image bytes to RGB pixels.

JPEG goes through simplejpeg (7 µs on a CIFAR-10 image, Pillow 47 µs). Pillow decodes every other
format, JPEG where simplejpeg is not installed, and the JPEGs that simplejpeg in its strict mode
refuses: some are merely odd (stray bytes between markers) and torchvision reads them, so only what
Pillow refuses too is corrupt.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt

JPEG_START = b"\xff\xd8\xff"
_SHRINKS = (8, 4, 2)
_ROOM = 1.5  # of a result's size: what is left once an image was shrunk, else it looks too sharp
_MAX_IMAGE_PIXELS = 89_478_485  # Pillow's, which refuses images of more than twice as many
_BASELINE = (0xC0, 0xC1)  # frames whose rows follow each other; progressive ones come in layers
_PROGRESSIVE, _SCAN = 0xC2, 0xDA
_END = b"\xff\xd9"
_ROWS_BELOW = 16  # that interpolating the colours of the last one looks at, at most
_WAY_OUT = "if the data set may be trusted, give max_pixels= to ImageFolder or decode_image"
_limit_mutex = threading.Lock()


def decode_image(data: bytes | memoryview, max_pixels: int | None = None) -> NDArray[np.uint8]:
    """Return the pixels of one encoded image, RGB, ``u8[height, width, 3]``, writable.

    An image of more than ``max_pixels`` counts as corrupt, before its pixels take memory: 3 bytes
    each, and up to 4 more while it is decoded. None is what Pillow refuses: twice
    ``PIL.Image.MAX_IMAGE_PIXELS``, 179 million unless that was changed.

    Raises :class:`~stoker.errors.SampleCorrupt` for such an image, for bytes that are none, and for
    a damaged or truncated one. EXIF orientation is not applied, as in torchvision. Safe in any
    thread.
    """
    decoded, _ = EncodedImage(data, max_pixels).decoded()
    return decoded if isinstance(decoded, np.ndarray) else np.array(decoded)


class EncodedImage:
    """An encoded image of which only the header was read; see :func:`decode_image`."""

    def __init__(self, data: bytes | memoryview, max_pixels: int | None = None) -> None:
        self._data = data
        self._max_pixels = max_pixels
        self._opened: Any = None
        self.width: int
        self.height: int
        library = simplejpeg()
        if library is not None and bytes(data[:3]) == JPEG_START:
            try:
                self.height, self.width, *_ = library.decode_jpeg_header(data)
                most = _pillow_limit() if max_pixels is None else max_pixels
                _check_pixels(self.width, self.height, most)
                return
            except ValueError:
                pass
        self._open_with_pillow()

    def sides(self, shrink: int) -> tuple[int, int]:
        """Return width and height of the image at a ``shrink``-th of its size, rounded up."""
        return -(-self.width // shrink), -(-self.height // shrink)

    @property
    def jpeg(self) -> bytes | memoryview | None:
        """The file if it is a JPEG with a sound header, as simplejpeg read it."""
        return self._data if self._opened is None else None

    def decoded(self, shrink: int = 1, rows: int | None = None) -> tuple[Any, int]:
        """Return the image and by how much each side was shrunk: ``shrink``, 1, 2, 4 or 8, or 1.

        The image is ``u8[height, width, 3]``, or an RGB ``PIL.Image`` if Pillow decoded it. JPEG is
        shrunk in its inverse transform, which takes less time than decoding all pixels; sides are
        rounded up. Other formats are not shrunk. Below the first ``rows``, counted before
        shrinking, rows may be missing.
        """
        if self._opened is None:
            try:
                return self._decoded_by_simplejpeg(shrink, rows), shrink
            except ValueError:
                self._open_with_pillow()
        with _other_errors_as_corrupt(self._data), self._opened as image:
            if shrink > 1:
                image.draft(None, (max(1, self.width // shrink), max(1, self.height // shrink)))
            is_shrunk = image.size != (self.width, self.height)
            image.load()
            # Pillow copies an image that it converts to what it is.
            converted = image if image.mode == "RGB" else image.convert("RGB")
            return converted, shrink if is_shrunk else 1

    def _decoded_by_simplejpeg(self, shrink: int, rows: int | None) -> NDArray[np.uint8]:
        """Return the pixels; ValueError if the library finds anything wrong."""
        upper = None if rows is None else upper_rows(self._data, self.height, rows)
        data, height = (self._data, self.height) if upper is None else upper
        decoded: NDArray[np.uint8] = simplejpeg().decode_jpeg(
            data,
            "RGB",
            min_width=-(-self.width // shrink),
            min_height=-(-height // shrink),
            strict=upper is None,
        )
        return decoded

    def _open_with_pillow(self) -> None:
        with _other_errors_as_corrupt(self._data):
            self._opened = _opened(pillow(), bytes(self._data), self._max_pixels)
        self.width, self.height = self._opened.size


def shrink_for(side: float, size: int) -> int:
    """Return by how much an image may be shrunk before ``side`` pixels become too few for ``size``.

    1, 2, 4 or 8, as :meth:`EncodedImage.decoded` takes it.
    """
    return next((by for by in _SHRINKS if side >= _ROOM * by * size), 1)


@cache
def simplejpeg() -> Any:
    """Return the module, None if it is not installed."""
    try:
        import simplejpeg as library
    except ImportError:
        return None
    return library


def to_pil(pixels: NDArray[np.uint8]) -> Any:
    """Return ``u8[height, width, 3]`` as a ``PIL.Image`` that shares its memory."""
    return pillow().fromarray(pixels)


def upper_rows(data: bytes | memoryview, height: int, rows: int) -> tuple[bytearray, int] | None:
    """Return a JPEG file with the first ``rows`` of ``height`` pixels, and its own height.

    A decoder reads a file's rows in order: where the header names fewer it stops there, warns of
    what follows, and only searches that for its end. The file has some more rows, so that those
    asked for come out as from the whole one. None if nothing is saved, the file is progressive, or
    it does not end as it should: then it must be read to its end. ``data`` must have a valid
    header.
    """
    kept = rows + _ROWS_BELOW
    if kept >= height or data[-2:] != _END:
        return None
    offset = _offset_of_height(data)
    if offset is None:
        return None
    shortened = bytearray(data)
    shortened[offset : offset + 2] = kept.to_bytes(2)
    return shortened, kept


@contextmanager
def _other_errors_as_corrupt(data: bytes | memoryview) -> Iterator[None]:
    """Turn what Pillow raises into SampleCorrupt."""
    image_module = pillow()
    try:
        yield
    except SampleCorrupt:
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise SampleCorrupt(f"{error} {_WAY_OUT}") from error
    # Pillow lets decoders raise what they like: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise SampleCorrupt(f"{len(data)} bytes do not decode to an image: {reason}") from error


def _opened(image_module: Any, raw: bytes, max_pixels: int | None) -> Any:
    """Return the image, of which only the header was read."""
    if max_pixels is None:
        return image_module.open(io.BytesIO(raw))
    with _limit_mutex:  # Pillow's own limit is one for the whole process
        own, image_module.MAX_IMAGE_PIXELS = image_module.MAX_IMAGE_PIXELS, None
        try:
            image = image_module.open(io.BytesIO(raw))
        finally:
            image_module.MAX_IMAGE_PIXELS = own
    width, height = image.size
    _check_pixels(width, height, max_pixels)
    return image


def _check_pixels(width: int, height: int, most: int | None) -> None:
    if most is not None and width * height > most:
        raise SampleCorrupt(
            f"an image of {width} x {height} has more than {most:,} pixels: {_WAY_OUT}"
        )


def _pillow_limit() -> int | None:
    # Not loaded, or being loaded by another thread: its limit is the default.
    limit = getattr(sys.modules.get("PIL.Image"), "MAX_IMAGE_PIXELS", _MAX_IMAGE_PIXELS)
    return None if limit is None else 2 * limit


def pillow() -> Any:
    """Return ``PIL.Image``; ConfigError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "images need Pillow, which is not installed: pip install 'stoker[images]', or pass "
            "your own decode="
        ) from error
    return Image


def offset_of_scan(data: bytes | memoryview) -> int | None:
    """Return where the pixels of a JPEG begin, None where the segments before them are odd."""
    for kind, offset in _segments(data):
        if kind == _SCAN:
            return offset
    return None


def _offset_of_height(data: bytes | memoryview) -> int | None:
    """Return where the header names the height, None if the file is not of the baseline kind."""
    for kind, offset in _segments(data):
        if kind in _BASELINE:
            return offset + 5
        if kind in (_PROGRESSIVE, _SCAN):
            return None
    return None


def _segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield kind and place of each segment as long as they follow each other as they should."""
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF and 0xC0 <= data[offset + 1] < 0xFF:
        yield data[offset + 1], offset
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4])
