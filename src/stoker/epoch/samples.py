"""What the samples of a data set are made of: bytes of a Source, decoded, then finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.errors import SampleCorrupt
from stoker.source.base import Source

Decode = Callable[[bytes], Any]
"""What turns the bytes of one sample into what transforms work on."""


class Samples:
    """The samples of a Source: :meth:`decode` of their bytes, then :meth:`finish`.

    The cache stands before or after :meth:`decode`. Safe in any thread as far as what
    subclasses do there is.
    """

    is_bytes_of_source = True
    """Whether the source has the bytes that :meth:`decode` takes, so that others can read them."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def is_random(self) -> bool:
        """Whether :meth:`finish` may draw random numbers."""
        return False

    @property
    def decode_name(self) -> str | None:
        """What identifies :meth:`decode` to other jobs; None where it is code of the user's."""
        return None

    def decode(self, data: memoryview) -> Any:
        """Return what the transforms work on, from its bytes; the same every time.

        Raises :class:`~stoker.errors.SampleCorrupt`.
        """
        raise NotImplementedError

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the sample: transforms applied, target attached; drawn again for each use."""
        raise NotImplementedError

    def decode_named(self, index: int, data: memoryview) -> Any:
        """Return :meth:`decode` of sample ``index``; the error of a corrupt one names it."""
        try:
            return self.decode(data)
        except SampleCorrupt as error:
            what = f"sample {index} ({self.source.name(index)}): {error}"
            raise SampleCorrupt(what, [index]) from error

    def __len__(self) -> int:
        return len(self.source)


def call_decode(decode: Decode, raw: bytes) -> Any:
    """Return ``decode(raw)``; whatever it raises becomes SampleCorrupt."""
    try:
        return decode(raw)
    except SampleCorrupt:
        raise
    except Exception as error:
        raise SampleCorrupt(
            f"decode raised {type(error).__name__} for {len(raw)} bytes: {error}"
        ) from error
