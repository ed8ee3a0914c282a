"""Real image files, and a place of each test's own for caches and listings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.images import write_images


@pytest.fixture(autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short, because the path of a Unix socket has at most 107 bytes.
    base = tmp_path_factory.mktemp("s")
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        place = base / name[4:7]
        place.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(place))


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def own_images(tmp_path: Path) -> Path:
    """Images that a test may damage."""
    return write_images(tmp_path / "images")


@pytest.fixture(scope="session")
def jpeg() -> Callable[..., bytes]:
    """Makes a JPEG with some detail in it."""

    def make(height: int = 40, width: int = 56, seed: int = 0, **options: object) -> bytes:
        import io

        noise = np.random.default_rng(seed).integers(0, 255, (height // 8, width // 8, 3))
        pixels = np.kron(noise, np.ones((8, 8, 1))).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", **{"quality": 90, **options})
        return buffer.getvalue()

    return make
