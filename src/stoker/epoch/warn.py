"""Warnings that point at the training loop, however deep inside they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = __name__.partition(".")[0] + "."


def warn_caller(message: str) -> None:
    """Warn (RuntimeWarning) at the line outside of this package that led here."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level + 1)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
