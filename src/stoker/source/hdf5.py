"""The rows of data sets in an HDF5 file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import ConfigError
from stoker.source.array_rows import ArrayRowSource, numbers_or_text
from stoker.source.row_source import KEPT_BYTES
from stoker.source.sample_format import Field

ENDINGS = (".h5", ".hdf5")
MAGIC = b"\x89HDF\r\n\x1a\n"


class HDF5Source(ArrayRowSource):
    """Rows along the first axis of the data sets of a local HDF5 file, read by h5py.

    Columns are the paths of data sets, like ``"images"`` or ``"train/labels"``. Texts and bytes of
    variable length are as they are, and so are lists of numbers of variable length, as bytes. For
    the rest see :class:`ArrayRowSource`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Open the file.

        ``columns`` is a name, or several, by default all data sets. ``kept_bytes`` is in bytes.

        Raises :class:`ConfigError` without h5py, for a file that is not there or none of HDF5, a
        column that is not there, and columns of different lengths or without rows.
        """
        self._hold(Path(path).absolute(), _Opened, columns, kept_bytes)


class _Opened:
    """An open file."""

    def __init__(self, path: str) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ConfigError("h5py is not installed: run pip install 'stoker[hdf5]'") from error
        self._h5py = h5py
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise ConfigError(f"{path} is no file of HDF5 that can be read: {error}") from error

    def names(self) -> list[str]:
        """Return the paths of all data sets, in the order of their names."""
        found: list[str] = []

        def note(name: str, item: Any) -> None:
            if isinstance(item, self._h5py.Dataset):
                found.append(name)

        self._file.visititems(note)
        return found

    def array(self, name: str) -> Any:
        """Return a data set."""
        return self._file[name]

    def field(self, name: str) -> Field:
        """Return what samples have of it."""
        array = self._file[name]
        text = self._h5py.check_string_dtype(array.dtype)
        of_lists = self._h5py.check_vlen_dtype(array.dtype)
        kind = None
        if text is not None:
            kind = "text" if text.encoding == "utf-8" else "bytes"
        elif of_lists is not None and np.dtype(of_lists).kind in "biuf":
            kind = "bytes"
        return numbers_or_text(name, array, kind)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
