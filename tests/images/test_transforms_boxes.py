from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.images.resize import Box
from stoker.images.transforms import centre_box, random_box

SIDES = st.integers(1, 3000)
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@st.composite
def ranges(draw: st.DrawFn, least: float, most: float) -> tuple[float, float]:
    low = draw(st.floats(least, most))
    return low, draw(st.floats(low, most))


class Numbers:
    """Plays a generator, and writes down what it drew."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.drawn: list[float] = []

    def uniform(self, low: float, high: float) -> float:
        self.drawn.append(float(self._rng.uniform(low, high)))
        return self.drawn[-1]

    def integers(self, below: int) -> int:
        self.drawn.append(int(self._rng.integers(below)))
        return int(self.drawn[-1])


def torchvision_box(width: int, height: int, ratio: tuple[float, float], drawn: list[float]) -> Box:
    """Return what torchvision's RandomResizedCrop.get_params makes of the same numbers.

    A side of its fallback is at least 1 here.
    """
    numbers = iter(drawn)
    for _ in range(10):
        target_area = height * width * next(numbers)
        aspect_ratio = math.exp(next(numbers))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = next(numbers), next(numbers)
            return Box(left, top, w, h)
    in_ratio = width / height
    if in_ratio < min(ratio):
        w = width
        h = max(1, round(w / min(ratio)))
    elif in_ratio > max(ratio):
        h = height
        w = max(1, round(h * max(ratio)))
    else:
        w, h = width, height
    return Box((width - w) // 2, (height - h) // 2, w, h)


@given(SIDES, SIDES, ranges(0.001, 1), ranges(0.1, 10), st.integers(0, 2**64 - 1))
def test_a_random_box_is_torchvisions(
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    seed: int,
) -> None:
    numbers = Numbers(seed)
    box = random_box(width, height, scale, ratio, numbers)  # type: ignore[arg-type]
    assert box.left >= 0 and box.left + box.width <= width and box.width >= 1
    assert box.top >= 0 and box.top + box.height <= height and box.height >= 1
    assert box == torchvision_box(width, height, ratio, numbers.drawn)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), (0, 0, 1, 1)),
        ((1, 3000), (0, 1499, 1, 1)),
        ((3000, 1), (1499, 0, 1, 1)),
        ((2, 90), (0, 43, 2, 3)),
        ((90, 30), (25, 0, 40, 30)),
    ],
)
def test_the_fallback_is_the_largest_centred_box(
    size: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert random_box(*size, (1, 1), RATIO, np.random.default_rng(0)) == expected


def test_statistics_of_the_boxes() -> None:
    """Of a square, whose boxes nearly always fit: area and ratio are those that were asked for."""
    rng = np.random.default_rng(7)
    boxes = np.array([random_box(4000, 4000, (0.08, 0.5), RATIO, rng) for _ in range(20_000)])
    left, top, width, height = boxes.T
    share = width * height / 4000**2
    aspect = np.log(width / height) / np.log(4 / 3)
    for values, low, high in ((share, 0.08, 0.5), (aspect, -1, 1)):
        quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
        np.testing.assert_allclose(quantiles, np.linspace(low, high, 5), atol=0.02 * (high - low))
    for start, side in ((left, width), (top, height)):
        assert abs(np.mean(start / (4000 - side)) - 0.5) < 0.01
    assert abs(np.corrcoef(share, aspect)[0, 1]) < 0.03


def test_statistics_of_the_boxes_are_torchvisions() -> None:
    """Of a photograph's size, where one box in ten does not fit: against numbers of NumPy's own."""
    rng = np.random.default_rng(11)
    ours = np.array([random_box(500, 375, SCALE, RATIO, rng) for _ in range(10_000)])
    theirs = np.array([drawn_at_once(500, 375, rng) for _ in range(10_000)])
    for column in range(4):
        np.testing.assert_allclose(
            np.quantile(ours[:, column], np.linspace(0.05, 0.95, 10)),
            np.quantile(theirs[:, column], np.linspace(0.05, 0.95, 10)),
            atol=8,
        )


def drawn_at_once(width: int, height: int, rng: np.random.Generator) -> tuple[float, ...]:
    area = rng.uniform(0.08, 1.0, 10) * width * height
    aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), 10))
    w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = np.flatnonzero((w <= width) & (h <= height))
    if not len(fits):
        return 0, 0, width, height
    w, h = w[fits[0]], h[fits[0]]
    return rng.integers(0, width - w + 1), rng.integers(0, height - h + 1), w, h


@given(SIDES, SIDES, st.integers(1, 500), st.integers(1, 500))
def test_the_centre_lies_within_the_image(width: int, height: int, one: int, other: int) -> None:
    short_side, size = max(one, other), min(one, other)
    box = centre_box(width, height, short_side, size)
    assert box.left >= 0 and box.left + box.width <= width + 1e-6
    assert box.top >= 0 and box.top + box.height <= height + 1e-6
    across, down = width - 2 * box.left - box.width, height - 2 * box.top - box.height
    # Centred to a pixel of the resized image.
    assert abs(across) <= width / short_side + 1e-6 and abs(down) <= height / short_side + 1e-6
