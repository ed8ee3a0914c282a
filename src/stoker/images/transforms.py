"""From encoded images to the squares of pixels that a network takes, a batch of them at a time."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt
from stoker.images.decode import EncodedImage, shrink_for
from stoker.images.resize import Box, Job, Part, cut_jpegs, jpeg_job, part_of, resize_part, sides_of

_TRIES = 10


class Cut(NamedTuple):
    """What of an image is kept, and how."""

    box: Box
    is_flipped: bool = False
    has_context: bool = False
    """Whether the image is resized before it is cut."""


class ImageTransform(ABC):
    """Makes ``u8[3, size, size]`` or ``u8[size, size, 3]``, RGB, of an image.

    A data set or a Feed takes one as the first of its transforms, and hands it the encoded bytes,
    so that a JPEG is decoded at half, a quarter or an eighth of its size where the part that is
    kept stays half as large again as the result. Alone, call it with bytes, an array
    ``u8[height, width, 3]`` or a ``PIL.Image``. Immutable; safe in any thread and process.
    """

    size: int
    layout: Literal["chw", "hwc"]
    max_pixels: int | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the result."""
        size = self.size
        return (3, size, size) if self.layout == "chw" else (size, size, 3)

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether random numbers are drawn."""

    @abstractmethod
    def cut(self, width: int, height: int, rng: np.random.Generator | None) -> Cut:
        """Return what is kept of an image of that size; ``rng`` may be None if nothing is drawn."""

    def __call__(
        self,
        image: Any,
        rng: np.random.Generator | None = None,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Return the pixels, in ``out`` if given, an array of :attr:`shape`.

        Without ``rng`` random numbers come from a generator seeded by Python's ``random``, which
        every Loader seeds for each sample. Raises :class:`~stoker.errors.SampleCorrupt` for bytes
        that do not decode, and for an image without pixels.
        """
        if out is None:
            out = np.empty(self.shape, np.uint8)
        return self.begin(image, rng).into(out)

    def begin(self, image: Any, rng: np.random.Generator | None = None) -> Drawing:
        """Do what a call does before pixels are decoded, and raise what that does."""
        if rng is None and self.is_random:
            rng = np.random.default_rng(random.getrandbits(64))
        if isinstance(image, bytes | bytearray | memoryview):
            image = EncodedImage(memoryview(image), self.max_pixels)
        if isinstance(image, EncodedImage):
            cut = self.cut(image.width, image.height, rng)
            shrink = shrink_for(min(cut.box[2:]), self.size)
            return Drawing(self, image, cut, shrink, self.part(cut, image.sides(shrink), shrink))
        pixels = _rgb(image)
        cut = self.cut(*sides_of(pixels), rng)
        return Drawing(self, pixels, cut, 1, self.part(cut, sides_of(pixels)))

    def part(self, cut: Cut, sides: tuple[int, int], shrink: int = 1) -> Part:
        """Return ``cut`` in an image of ``sides``, at a ``shrink``-th of its size."""
        return part_of(sides, cut.box.over(shrink), self.size, context=cut.has_context)

    def _check(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size={self.size!r}: give 1 or more pixels")
        if self.layout not in ("chw", "hwc"):
            raise ConfigError(f"layout={self.layout!r} is not known: use 'chw' or 'hwc'")
        if self.max_pixels is not None and not self.max_pixels >= 1:
            raise ConfigError(f"max_pixels={self.max_pixels!r}: give 1 or more")


class Drawing(NamedTuple):
    """An image of which it is known what is kept of it."""

    transform: ImageTransform
    image: EncodedImage | NDArray[np.uint8]
    cut: Cut
    shrink: int
    part: Part

    def into(self, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Write the pixels into ``out``, an array of the transform's shape, and return it.

        Raises :class:`~stoker.errors.SampleCorrupt` for what does not decode.
        """
        job = self.job(out)
        if job is None or not all(cut_jpegs([job])):
            self.decode_into(out)
        return out

    def job(self, out: NDArray[np.uint8]) -> Job | None:
        """Return what :func:`cut_jpegs` can do instead of :meth:`into`; None: nothing."""
        if isinstance(self.image, np.ndarray):
            return None
        return jpeg_job(self.image, self.shrink, self.part, self.cut.is_flipped, self._rows(out))

    def decode_into(self, out: NDArray[np.uint8]) -> None:
        """Do :meth:`into` by decoding the image first, as :func:`cut_jpegs` cannot do it."""
        whole, part = self.image, self.part
        if not isinstance(whole, np.ndarray):
            whole, shrunk = whole.decoded(self.shrink, self.shrink * part.seen.bottom)
            part = self.transform.part(self.cut, sides_of(whole), shrunk)
        resize_part(whole, part, self.cut.is_flipped, self._rows(out))

    def _rows(self, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return out.transpose(1, 2, 0) if self.transform.layout == "chw" else out


@dataclass(frozen=True)
class Train(ImageTransform):
    """A part of the image of random size and shape, resized to ``size`` x ``size``, or its mirror.

    The part is that of torchvision's RandomResizedCrop: ``scale`` is the range of its share of the
    area, ``ratio`` that of width / height. ``flip`` is the probability of the mirror image.
    Resized with Pillow's antialiased bilinear filter. ``max_pixels`` is that of
    :func:`~stoker.images.decode_image`. ConfigError for ranges that make no sense.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    layout: Literal["chw", "hwc"] = field(default="chw", kw_only=True)
    max_pixels: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ConfigError(f"{name}={(low, high)}: give (low, high), 0 < low <= high")
        if not self.scale[1] <= 1:
            raise ConfigError(f"scale={self.scale}: no part is larger than the image, 1")
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"flip={self.flip!r}: give a probability, 0 to 1")

    @property
    def is_random(self) -> bool:
        """True."""
        return True

    def cut(self, width: int, height: int, rng: np.random.Generator | None) -> Cut:
        """Draw a part; see :class:`ImageTransform`."""
        assert rng is not None
        is_flipped = bool(rng.random() < self.flip)
        return Cut(random_box(width, height, self.scale, self.ratio, rng), is_flipped)


@dataclass(frozen=True)
class Eval(ImageTransform):
    """The centre, ``size`` x ``size``, of the image whose short side was resized to ``short_side``.

    As torchvision's Resize and CenterCrop. ConfigError for a ``size`` above ``short_side``.
    """

    short_side: int
    size: int
    layout: Literal["chw", "hwc"] = field(default="chw", kw_only=True)
    max_pixels: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        if self.size > self.short_side:
            raise ConfigError(
                f"Eval({self.short_side}, {self.size}): the centre cannot be larger than the "
                "resized image, whose short side comes first"
            )

    @property
    def is_random(self) -> bool:
        """False."""
        return False

    def cut(self, width: int, height: int, rng: np.random.Generator | None) -> Cut:
        """Return the centre; see :class:`ImageTransform`."""
        return Cut(centre_box(width, height, self.short_side, self.size), has_context=True)


class Canvas:
    """``n`` rows for what ``transform`` makes of images; each has random numbers of its own.

    ``seeds`` are the ``n`` seeds of the rows, from 0 to 2**64 - 1. Several threads may fill
    different rows.
    """

    def __init__(
        self,
        transform: ImageTransform,
        seeds: Sequence[int],
        pixels: NDArray[np.uint8] | None = None,
    ) -> None:
        self._transform, self._seeds = transform, seeds
        if pixels is None:
            pixels = np.empty((len(seeds), *transform.shape), np.uint8)
        self.pixels = pixels
        """``u8[n, ...]``, with the transform's shape."""

    def fill(self, row: int, image: Any) -> NDArray[np.uint8]:
        """Return the row in :attr:`pixels`, filled with what becomes of ``image``.

        Raises what the transform does.
        """
        return self.begin(row, image).into(self.pixels[row])

    def begin(self, row: int, image: Any) -> Drawing:
        """Return what becomes of ``image`` in the row, before it is decoded; raises as fill."""
        rng = None
        if self._transform.is_random:
            rng = np.random.default_rng(self._seeds[row])
        return self._transform.begin(image, rng)

    def finish(self, drawings: Mapping[int, Drawing]) -> dict[int, SampleCorrupt]:
        """Fill the rows of what began; return why some cannot be filled.

        JPEGs are cut in one call without the GIL: between two of them, Python's code would come
        from memory each time, and a thread would wait for the GIL.
        """
        jobs = {row: each.job(self.pixels[row]) for row, each in drawings.items()}
        possible = {row: job for row, job in jobs.items() if job is not None}
        done = set(compress(possible, cut_jpegs(list(possible.values()))))
        errors = {}
        for row in drawings.keys() - done:
            try:
                drawings[row].decode_into(self.pixels[row])
            except SampleCorrupt as error:
                errors[row] = error
        return errors

    def at(self, rows: Sequence[int]) -> Canvas:
        """Return the canvas of some consecutive rows, over the same memory."""
        span = slice(rows[0], rows[-1] + 1)
        return Canvas(self._transform, self._seeds[span], self.pixels[span])


@dataclass(frozen=True)
class Chain:
    """Applies functions one after the other; what comes beside the sample goes to each."""

    functions: tuple[Callable[..., Any], ...]

    def __call__(self, sample: Any, *beside: Any) -> Any:
        """Return the last function's result."""
        for function in self.functions:
            sample = function(sample, *beside)
        return sample


def split(transform: Any) -> tuple[ImageTransform | None, Callable[..., Any] | None]:
    """Return the image transform that ``transform`` begins with, and the function of the rest.

    ``transform`` is a function, a sequence of functions, or None; both parts may be None. Raises
    :class:`~stoker.errors.ConfigError` for anything else, and an image transform further back.
    """
    functions = tuple(transform) if isinstance(transform, Sequence) else (transform,)
    if functions == (None,):
        return None, None
    first = functions[0] if functions and isinstance(functions[0], ImageTransform) else None
    rest = functions if first is None else functions[1:]
    for function in rest:
        if isinstance(function, ImageTransform) or not callable(function):
            raise ConfigError(
                f"transform={transform!r}: give a function or a list of functions, of which only "
                "the first may be of stoker.images"
            )
    return first, rest[0] if len(rest) == 1 else Chain(rest) if rest else None


def random_box(
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box:
    """Return a box of whole pixels as torchvision's RandomResizedCrop draws it.

    Its share of the area is uniform in ``scale`` and the logarithm of width / height uniform in
    that of ``ratio``. If ten boxes in a row do not fit, it is the largest centred one whose ratio
    is in range. Source: Szegedy and others, Going deeper with convolutions, CVPR 2015.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1)), w, h)
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return Box((width - w) // 2, (height - h) // 2, w, h)


def centre_box(width: int, height: int, short_side: int, size: int) -> Box:
    """Return what the central ``size`` x ``size`` pixels show once the short side was resized.

    Rounds as torchvision's Resize and CenterCrop do.
    """
    resized_width, resized_height = short_side, short_side
    if width < height:
        resized_height = short_side * height // width
    else:
        resized_width = short_side * width // height
    across, down = width / resized_width, height / resized_height
    left, top = round((resized_width - size) / 2), round((resized_height - size) / 2)
    return Box(left * across, top * down, size * across, size * down)


def _rgb(image: Any) -> NDArray[np.uint8]:
    """Return a decoded image as ``u8[height, width, 3]``."""
    convert = getattr(image, "convert", None)
    pixels = np.asarray(image if convert is None else convert("RGB"))
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ConfigError(
            f"an image of shape {list(pixels.shape)} and type {pixels.dtype}: give encoded bytes, "
            "u8[height, width, 3] or a PIL.Image"
        )
    if not pixels.size:
        raise SampleCorrupt(f"an image of {pixels.shape[1]} x {pixels.shape[0]} has no pixels")
    return pixels
