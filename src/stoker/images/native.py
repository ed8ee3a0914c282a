"""The compiled module that decodes and resizes parts of images, where Stoker was built with it."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def native() -> Any:
    """Return ``stoker._images``; None if it was built without libjpeg-turbo, or that is gone."""
    try:
        import stoker._images as library
    except ImportError:
        return None
    return library
