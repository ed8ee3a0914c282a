from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from images.photographs import as_jpeg, photographs
from stoker.errors import ConfigError, SampleCorrupt
from stoker.images import Canvas, Eval, Train, decode, decode_image, resize
from stoker.images.resize import Box
from stoker.images.transforms import ImageTransform


@pytest.fixture(params=["native", "libraries", "pillow"])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With code of our own, with the fast libraries, if they are installed, and with neither."""
    if request.param == "native" and resize.native() is None:
        pytest.skip("built without libjpeg-turbo")
    if request.param != "native":
        monkeypatch.setattr(resize, "native", lambda: None)
    if request.param == "pillow":
        monkeypatch.setattr(decode, "simplejpeg", lambda: None)
        monkeypatch.setattr(resize, "cykooz_resizer", lambda: None)
    return str(request.param)


def trained(raw: bytes, transform: Train, seed: int) -> np.ndarray:
    """Return what Pillow makes of the whole image and the part that ``transform`` draws."""
    image = Image.open(io.BytesIO(raw)).convert("RGB")
    cut = transform.cut(*image.size, np.random.default_rng(seed))
    left, top, width, height = cut.box
    part = image.crop((left, top, left + width, top + height))
    square = np.asarray(part.resize((transform.size,) * 2, Image.Resampling.BILINEAR))
    return square[:, ::-1] if cut.is_flipped else square


def evaluated(raw: bytes, short_side: int, size: int) -> np.ndarray:
    """Return what torchvision's Resize and CenterCrop do."""
    image = Image.open(io.BytesIO(raw)).convert("RGB")
    width, height = image.size
    factor = short_side / min(width, height)
    new = (short_side, int(short_side * height / width))
    if width > height:
        new = (int(short_side * width / height), short_side)
    assert abs(max(new) - factor * max(width, height)) <= 1
    image = image.resize(new, Image.Resampling.BILINEAR)
    left, top = round((new[0] - size) / 2), round((new[1] - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(int) - other).mean())


@pytest.mark.parametrize(("size", "most"), [(224, 0.5), (96, 2), (48, 2), (24, 2)])
def test_train_agrees_with_pillow(libraries: str, size: int, most: float) -> None:
    transform = Train(size, layout="hwc")
    for raw in photographs():
        for seed in range(4):
            made = transform(raw, np.random.default_rng(seed))
            assert difference(made, trained(raw, transform, seed)) < most


@pytest.mark.parametrize(("sides", "most"), [((256, 224), 0.5), ((72, 64), 2), ((40, 32), 2)])
def test_eval_agrees_with_torchvision(libraries: str, sides: tuple[int, int], most: float) -> None:
    transform = Eval(*sides, layout="hwc")
    assert not transform.is_random
    for raw in photographs():
        assert difference(transform(raw), evaluated(raw, *sides)) < most


def test_large_images_are_shrunk_as_they_are_decoded(
    libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []

    def noted(image: Any, part: resize.Part, *rest: Any) -> None:
        parts.append(part)
        resize.resize_part(image, part, *rest)

    def noted_file(image: Any, shrink: int, part: resize.Part, *rest: Any) -> Any:
        job = resize.jpeg_job(image, shrink, part, *rest)
        if job is not None:
            parts.append(part)
        return job

    monkeypatch.setattr("stoker.images.transforms.resize_part", noted)
    monkeypatch.setattr("stoker.images.transforms.jpeg_job", noted_file)
    raw = photographs()[0]
    height, width = decode_image(raw).shape[:2]
    for size in (224, 112, 56, 28):
        Train(size, scale=(1, 1), ratio=(1.5, 1.5))(raw)
    assert [part.box.width for part in parts] == pytest.approx(
        [min(width, 1.5 * height) / by for by in (1, 2, 4, 8)], abs=0.5
    )


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_any_size_agrees_with_pillow(width: int, height: int, size: int, seed: int) -> None:
    ramp = np.add.outer(np.arange(height), 2 * np.arange(width)) % 256
    pixels = np.stack([ramp, 255 - ramp, ramp // 2], -1).astype(np.uint8)
    raw = as_png(Image.fromarray(pixels))
    transform = Train(size, layout="hwc")
    assert (
        difference(transform(raw, np.random.default_rng(seed)), trained(raw, transform, seed)) <= 1
    )
    centre = Eval(size + seed % 5, size, layout="hwc")(raw)
    assert difference(centre, evaluated(raw, size + seed % 5, size)) < 2


def as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_the_same_of_bytes_pixels_and_pil_images() -> None:
    raw = photographs()[2]
    pixels = decode_image(raw)
    for transform in (Train(224), Eval(256, 224)):
        made = [
            transform(image, np.random.default_rng(5))
            for image in (raw, memoryview(raw), bytearray(raw), pixels, Image.fromarray(pixels))
        ]
        for other in made[1:]:
            np.testing.assert_array_equal(made[0], other)


def test_layouts_and_out() -> None:
    raw = photographs()[1]
    flips = set()
    for seed in range(8):
        tall = Train(32, layout="hwc")(raw, np.random.default_rng(seed))
        out = np.full((2, 3, 32, 32), 77, np.uint8)
        made = Train(32)(raw, np.random.default_rng(seed), out[1])
        assert made.base is out and (out[0] == 77).all()
        np.testing.assert_array_equal(made.transpose(1, 2, 0), tall)
        flips.add(Train(32).cut(9, 9, np.random.default_rng(seed)).is_flipped)
    assert flips == {False, True}
    assert (Train(32).shape, Train(32, layout="hwc").shape) == ((3, 32, 32), (32, 32, 3))


def test_the_probability_of_a_mirror_image() -> None:
    for flip in (0.0, 0.3, 1.0):
        transform, rng = Train(8, flip=flip), np.random.default_rng(3)
        mean = np.mean([transform.cut(50, 40, rng).is_flipped for _ in range(4000)])
        assert abs(mean - flip) < 0.03


def test_a_mirror_image_is_one() -> None:
    raw = photographs()[3]
    plain = Train(64, (1, 1), (1.5, 1.5), flip=0)(raw)
    np.testing.assert_array_equal(Train(64, (1, 1), (1.5, 1.5), flip=1)(raw), plain[..., ::-1])


def test_without_a_generator_pythons_decides() -> None:
    raw = photographs()[0]
    random.seed(4)
    one, two = Train(16)(raw), Train(16)(raw)
    random.seed(4)
    np.testing.assert_array_equal(Train(16)(raw), one)
    assert (one != two).any()


def test_threads_and_pickles_do_not_matter() -> None:
    transform: Train = pickle.loads(pickle.dumps(Train(48)))
    assert transform == Train(48)
    images = [image for image in photographs() for _ in range(8)]
    seeds = list(range(len(images)))
    alone, together = Canvas(transform, seeds), Canvas(transform, seeds)
    for place, image in enumerate(images):
        alone.fill(place, image)
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(together.fill, seeds, images))
    np.testing.assert_array_equal(alone.pixels, together.pixels)
    assert all(view.base is together.pixels for view in views)
    expected = transform(images[9], np.random.default_rng(9))
    np.testing.assert_array_equal(alone.pixels[9], expected)


def test_many_are_filled_as_one_by_one(libraries: str) -> None:
    images = [photographs()[0], MODES["PNG"](), b"no image", MODES["progressive JPEG"]()]
    images += [photographs()[1][:-900] + b"\xff\xd9", photographs()[2]]
    alone, together = (Canvas(Train(24), range(6)) for _ in range(2))
    drawings, bad = {}, set()
    for row, image in enumerate(images):
        try:
            drawings[row] = together.begin(row, image)
        except SampleCorrupt:
            bad.add(row)
    bad |= together.finish(drawings).keys()
    for row, image in enumerate(images):
        if row in bad:
            with pytest.raises(SampleCorrupt):
                alone.fill(row, image)
        else:
            np.testing.assert_array_equal(alone.fill(row, image), together.pixels[row])
    assert 2 in bad and len(bad) <= 2
    assert together.finish({}) == {}


@cache
def photo() -> Image.Image:
    return Image.open(io.BytesIO(photographs()[0])).convert("RGB").resize((90, 60))


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    return as_jpeg(photo(), exif=exif)


def grey16() -> Image.Image:
    return Image.fromarray(np.asarray(photo().convert("L")).astype(np.uint16) << 8)


MODES: dict[str, Callable[[], bytes]] = {  # images of every kind that is not a plain JPEG
    "grey JPEG": lambda: as_jpeg(photo().convert("L")),
    "CMYK JPEG": lambda: as_jpeg(photo().convert("CMYK")),
    "progressive JPEG": lambda: as_jpeg(photo(), progressive=True),
    "JPEG with EXIF rotation": turned,
    "4:4:4 JPEG": lambda: as_jpeg(photo(), subsampling=0),
    "PNG": lambda: as_png(photo()),
    "PNG of 16 bits": lambda: as_png(grey16()),
    "PNG with alpha": lambda: as_png(photo().convert("RGBA")),
    "grey PNG with alpha": lambda: as_png(photo().convert("LA")),
    "PNG with a palette": lambda: as_png(photo().convert("P")),
    "PNG of one bit": lambda: as_png(photo().convert("1")),
    "JPEG 1 pixel wide": lambda: as_jpeg(photo().crop((4, 0, 5, 60))),
    "JPEG 1 pixel high": lambda: as_jpeg(photo().crop((0, 4, 90, 5))),
    "PNG of 1 pixel": lambda: as_png(photo().crop((4, 4, 5, 5))),
}


@pytest.mark.parametrize("kind", sorted(MODES))
@pytest.mark.parametrize("size", [20, 8])
def test_every_kind_of_image_is_what_the_decoder_makes_of_it(
    libraries: str, kind: str, size: int
) -> None:
    raw = MODES[kind]()
    whole = decode_image(raw)
    for transform in (Train(size), Eval(size + 4, size)):
        made = transform(raw, np.random.default_rng(1))
        expected = transform(whole, np.random.default_rng(1))
        assert (made.shape, made.dtype) == ((3, size, size), np.uint8)
        assert difference(made, expected) < 3  # shrunk while it is decoded, of few pixels


@pytest.mark.parametrize("transform", [Train(24), Eval(28, 24)])
def test_what_does_not_decode_is_corrupt(libraries: str, transform: ImageTransform) -> None:
    raw = photographs()[4]
    jpeg_of_16_bits = raw.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x10")
    assert jpeg_of_16_bits != raw
    bad = [b"", b"no image at all", raw[:10], raw[: len(raw) // 2], raw[:-2], jpeg_of_16_bits]
    for data in [*bad, b"\xff\xd8\xff" + bytes(500), MODES["PNG"]()[:900]]:
        with pytest.raises(SampleCorrupt, match="do not decode to an image"):
            transform(data, np.random.default_rng(0))
    with pytest.raises(SampleCorrupt, match="0 x 5 has no pixels"):
        transform(np.empty((5, 0, 3), np.uint8))


def test_the_limit_of_pixels(libraries: str) -> None:
    raw = photographs()[0]
    width, height = Image.open(io.BytesIO(raw)).size
    Train(24, max_pixels=width * height)(raw)
    for transform in (Train(24, max_pixels=999), Eval(24, 24, max_pixels=999)):
        with pytest.raises(SampleCorrupt, match="more than 999 pixels"):
            transform(raw)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Train(0), "size=0"),
        (lambda: Train(8, scale=(0, 1)), "scale="),
        (lambda: Train(8, scale=(0.5, 0.2)), "scale="),
        (lambda: Train(8, scale=(0.5, 1.2)), "no part is larger"),
        (lambda: Train(8, ratio=(-1, 2)), "ratio="),
        (lambda: Train(8, flip=1.5), "flip=1.5"),
        (lambda: Train(8, layout="nchw"), "layout='nchw'"),  # type: ignore[arg-type]
        (lambda: Eval(224, 256), r"Eval\(224, 256\)"),
        (lambda: Eval(8, 8, max_pixels=0), "max_pixels=0"),
        (lambda: Eval(8, 8)(np.zeros((4, 4), np.uint8)), "shape"),
        (lambda: Eval(8, 8)(np.zeros((4, 4, 3))), "float64"),
    ],
)
def test_what_makes_no_sense(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_context_is_what_lies_around_the_box(libraries: str) -> None:
    pixels = decode_image(photographs()[5])
    whole = np.asarray(Image.fromarray(pixels).resize((100, 100), Image.Resampling.BILINEAR))
    height, width = pixels.shape[:2]
    box = Box(0.2 * width, 0.3 * height, 0.5 * width, 0.5 * height)
    part = resize.part_of((width, height), box, 50, context=True)
    seen = np.empty((50, 50, 3), np.uint8)
    resize.resize_part(pixels, part, False, seen)
    assert np.abs(seen.astype(int) - whole[30:80, 20:70]).max() <= 2
