"""The rows of arrays in a Zarr store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError
from stoker.source.array_rows import ArrayRowSource, numbers_or_text
from stoker.source.row_source import KEPT_BYTES
from stoker.source.sample_format import Field

ENDINGS = (".zarr",)
_ONLY = "array"  # what the only array of a store is called


class ZarrSource(ArrayRowSource):
    """Rows along the first axis of the arrays of a local Zarr store, of version 2 or 3.

    Columns are the paths of arrays; the array of a store that is one itself is ``"array"``. For the
    rest see :class:`ArrayRowSource`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Open the store.

        ``columns`` is a name, or several, by default all arrays. ``kept_bytes`` is in bytes.

        Raises :class:`ConfigError` without zarr, for a folder that is no store, a column that is
        not there, and columns of different lengths or without rows.
        """
        self._hold(Path(path).absolute(), _Opened, columns, kept_bytes)


class _Opened:
    """An open store."""

    def __init__(self, path: str) -> None:
        try:
            import zarr
        except ImportError as error:
            raise ConfigError("zarr is not installed: run pip install 'stoker[zarr]'") from error
        try:
            opened: Any = zarr.open(path, mode="r")
            if isinstance(opened, zarr.Array):
                self._arrays = {_ONLY: opened}
            else:
                members = opened.members(max_depth=None)
                self._arrays = {n: item for n, item in members if isinstance(item, zarr.Array)}
        except Exception as error:  # zarr raises what it likes
            raise ConfigError(f"{path} is no store of Zarr that can be read: {error}") from error

    def names(self) -> list[str]:
        """Return the paths of all arrays, sorted."""
        return sorted(self._arrays)

    def array(self, name: str) -> Any:
        """Return an array."""
        return self._arrays[name]

    def field(self, name: str) -> Field:
        """Return what samples have of it."""
        array = self._arrays[name]
        kind = {"T": "text", "O": "bytes"}.get(array.dtype.kind)
        return numbers_or_text(name, array, kind)

    def close(self) -> None:
        """Let go of the store, which holds nothing open."""
        self._arrays = {}
