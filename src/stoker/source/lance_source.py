"""The rows of a Lance data set, which its own library reads."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.arrow import column_of, field_of
from stoker.source.base import Errors, PackedRead, check_ids, without
from stoker.source.held import OwnHandle
from stoker.source.packed import Offsets, Packed, offsets_of, pick
from stoker.source.sample_format import (
    NO_VALUE,
    Column,
    Field,
    FormattedSource,
    SampleFormat,
    chosen,
)

_SAMPLED = 64  # rows that are read to estimate sizes
_MOST_ROWS = 1 << 32


class LanceSource(FormattedSource):
    """The rows of one version of a Lance data set, in the order of Lance; deleted ones are none.

    :class:`~stoker.source.sample_format.SampleFormat` says what the bytes of a sample are. A read
    takes its rows by their index, and fetches of the columns asked for what Lance needs for those.
    Rows that others add or delete later are in later versions, so they change nothing here; if this
    version is removed from the storage, reads fail.

    Lance fetches by itself, also from object stores, with retries of its own. Thread-safe; works in
    children of every start method, also after the parent has read, each of which opens the data set
    again; Lance warns of every fork nevertheless.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        version: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the data set, and read some rows to estimate the sizes of the others.

        ``where`` is a path or an address. ``columns`` is a name, or several, by default all.
        ``version`` is a number or a tag, by default the latest there is now. ``storage_options``
        are Lance's: ``region``, ``endpoint`` and so on.

        Raises :class:`ConfigError` without pylance, for a place that is none of a data set that can
        be read, a version or column that is not there, columns of blobs, and no rows; and what a
        read does.
        """
        place = str(where) if "://" in str(where) else str(Path(where).absolute())
        options = {name: _as_option(value) for name, value in (storage_options or {}).items()}
        opened = _opened(place, version, options)
        self._place, self._version = place, int(opened.version)
        # The very version from now on, in all processes.
        make = functools.partial(_opened, place, self._version, options)
        self._handle = OwnHandle(make, _let_go)
        names, is_single = chosen(columns, opened.schema.names)
        fields = tuple(_field(opened.schema.field(name)) for name in names)
        self.format = SampleFormat(fields, is_single)
        fragments = opened.get_fragments()
        self._first = offsets_of(np.array([each.count_rows() for each in fragments], np.int64))
        if not 0 < self._first[-1] < _MOST_ROWS:
            raise ConfigError(f"{place} has {self._first[-1]} rows: a source has 1 to 2^32 - 1")
        of_files = repr([_about(each.metadata) for each in fragments])
        digest = hashlib.blake2b(of_files.encode(), digest_size=16).hexdigest()
        self._fingerprint = f"lance-{digest}-{names}{is_single}"
        self._sizes = SharedArray.create(int(self._first[-1]), np.int64, "sizes")
        self._sizes.array[:] = self._mean()

    def _mean(self) -> int:
        """Return the mean bytes of some rows, which are spread over all."""
        some = np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(np.uint32))
        _, offsets, errors = self.read_packed(some)
        if errors:
            raise errors[min(errors)]
        return int(np.ceil(offsets[-1] / len(some)))

    @property
    def breaks(self) -> Offsets:
        """``i64[K]``: the first row of each fragment but the first."""
        return np.unique(self._first)[1:-1]

    def name(self, sample_id: int) -> str:
        """Return the address and the row, like ``/data/x.lance#17``."""
        return f"{self._place}#{sample_id}"

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        wanted = check_ids(ids, len(self))
        with self._handle.use() as dataset:
            pass  # outside of it: threads may read at once
        rows, at = np.unique(wanted, return_inverse=True)
        errors: Errors = {}
        try:
            columns = self._taken(dataset, rows)
        except SourceUnavailable as error:
            raise SourceUnavailable(str(error), rows.tolist()) from error
        except SourceError:  # of a row, or of some: the others may be sound
            columns, failed = self._one_by_one(dataset, rows)
            for position in np.flatnonzero(np.isin(at, list(failed))).tolist():
                errors[position] = failed[int(at[position])]
        picked = [Column(pick(column.packed, at), column.valid[at]) for column in columns]
        return without(errors, *self.format.joined(picked))

    def _taken(self, dataset: Any, rows: npt.NDArray[np.uint32]) -> list[Column]:
        """Return the columns of these rows, ascending; raises the SourceError of all of them."""
        fields = self.format.fields
        try:
            table = dataset.take(rows.tolist(), columns=[field.name for field in fields])
            if len(table) != len(rows):
                raise ValueError(f"{len(table)} rows came where {len(rows)} are expected")
            return [column_of(table.column(field.name), field) for field in fields]
        except BaseException as error:
            if not _is_of_lance(error):
                raise
            raise self._failure(error)(f"{self.name(int(rows[0]))}: {error}") from error

    def _one_by_one(
        self, dataset: Any, rows: npt.NDArray[np.uint32]
    ) -> tuple[list[Column], dict[int, SourceError]]:
        """Return the columns, in which rows that fail are null, and why those do, by position."""
        failed: dict[int, SourceError] = {}
        of_rows: list[list[Column]] = []
        for position, row in enumerate(rows.tolist()):
            try:
                of_rows.append(self._taken(dataset, rows[position : position + 1]))
            except SourceError as error:
                failed[position] = type(error)(str(error), [row])
                of_rows.append([NO_VALUE] * len(self.format.fields))
        return [_after_one_another(columns) for columns in zip(*of_rows, strict=True)], failed

    def _failure(self, error: BaseException) -> type[SourceError]:
        """Return what an error of Lance says about the rows, which its text alone tells."""
        if "Not found" in str(error):
            return SampleNotFound
        is_of_storage = isinstance(error, OSError) and "LanceError(IO)" in str(error)
        return SourceUnavailable if "://" in self._place and is_of_storage else SampleCorrupt

    def close(self) -> None:
        """Let go of the data set in this process and refuse further reads."""
        self._handle.close()


def _after_one_another(columns: Sequence[Column]) -> Column:
    data = [column.packed.data for column in columns]
    sizes = np.array([len(each) for each in data], np.int64)
    valid = np.concatenate([column.valid for column in columns])
    return Column(Packed(np.concatenate(data), offsets_of(sizes)), valid)


def _opened(place: str, version: int | str | None, options: Mapping[str, str]) -> Any:
    """Return the open data set; raises :class:`ConfigError`."""
    try:
        import lance
    except ImportError as error:
        raise ConfigError("pylance is not installed: run pip install 'stoker[lance]'") from error
    try:
        return lance.dataset(place, version=version, storage_options=dict(options) or None)
    except BaseException as error:
        if not _is_of_lance(error):
            raise
        about = "" if version is None else f", version {version!r}"
        raise ConfigError(f"{place}{about} is no Lance data set to be read: {error}") from error


def _let_go(dataset: Any) -> None:
    """Do nothing: what Lance has open goes with the last read."""


def _is_of_lance(error: BaseException) -> bool:
    """Whether an error is one of data: Lance's own code in Rust panics at some."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _field(field: Any) -> Field:
    """Return what samples have of a column; raises ConfigError for blobs, which lie elsewhere."""
    if getattr(field.type, "extension_name", "").startswith("lance.blob"):
        raise ConfigError(f"column {field.name!r} is of blobs, which are not read: leave it out")
    return field_of(field)


def _about(fragment: Any) -> tuple[Any, ...]:
    """Return what tells a fragment from all others: files are never written again."""
    deleted = fragment.deletion_file
    files = [(file.path, file.fields, file.column_indices) for file in fragment.files]
    gone = None if deleted is None else (deleted.read_version, deleted.id)
    return files, fragment.physical_rows, gone


def _as_option(value: object) -> str:
    """Return a storage option as Lance takes it, a text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
