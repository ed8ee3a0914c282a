"""The digits as files: real, complete, stable, and more of them on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stoker import cli
from stoker.cli.demo import COUNT, write_digits


@pytest.fixture(scope="module")
def digits() -> Any:
    """The digits as scikit-learn has them; it takes long to import."""
    from sklearn.datasets import load_digits

    return load_digits()


def test_every_digit_is_written_to_the_folder_of_its_class(tmp_path: Path, digits: Any) -> None:
    write_digits(tmp_path)
    for label in range(10):
        assert len(list((tmp_path / str(label)).iterdir())) == (digits.target == label).sum()
    assert sum(1 for _ in tmp_path.glob("*/*.jpg")) == COUNT


def test_the_images_are_the_digits(tmp_path: Path, digits: Any) -> None:
    write_digits(tmp_path)
    for number in (0, 5, COUNT - 1):
        with Image.open(tmp_path / str(digits.target[number]) / f"{number:06d}.jpg") as image:
            pixels = np.asarray(image, np.float64)
        assert pixels.shape == (32, 32)
        small = pixels.reshape(8, 4, 8, 4).mean((1, 3)) * (16 / 255)
        assert np.abs(small - digits.images[number]).max() < 1


def test_what_is_shipped_is_the_set_of_scikit_learn(digits: Any) -> None:
    with np.load(Path(cli.__file__).with_name("_digits.npz")) as shipped:
        assert np.array_equal(shipped["images"], digits.images)
        assert np.array_equal(shipped["labels"], digits.target)


def test_copies_are_shifted_and_files_that_exist_are_kept(tmp_path: Path) -> None:
    write_digits(tmp_path, copies=2)
    paths = sorted(tmp_path.glob("*/*.jpg"))
    assert len(paths) == 2 * COUNT
    paths[0].write_bytes(b"mine")
    write_digits(tmp_path, copies=2)
    assert paths[0].read_bytes() == b"mine"
    first, second = sorted(tmp_path.glob("0/*.jpg"), key=lambda path: int(path.stem) % COUNT)[1:3]
    assert first.read_bytes() != second.read_bytes()
