"""Rows of columns that come in units: pages, record batches, chunks, which are decoded whole."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SourceError
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, check_ids, without
from stoker.source.file_set import FileSet, FileSetSource
from stoker.source.packed import Offsets, by_part, gather, offsets_of
from stoker.source.sample_format import NO_VALUE, Column, Field, FormattedSource, SampleFormat

_RUN = 1 << 20  # bytes worth a request: smaller neighbouring units are read together
_MOST_ROWS = 1 << 32
KEPT_BYTES = 64 << 20
"""Memory for decoded units, in each process that reads."""


@dataclass(frozen=True, eq=False)
class Units:
    """``U`` units of ``C`` columns; those of a column lie together, in the order of their rows."""

    first_rows: Offsets
    """The first row of each unit, i64[U]; it ends where the next of its column begins."""
    of_column: Offsets
    """Where the units of each column begin, i64[C + 1]."""
    ranges: Offsets
    """Where the ranges of each unit begin in the next three, i64[U + 1]."""
    files: npt.NDArray[np.uint32]
    """The file of each range, u32[R]."""
    starts: Offsets
    """Where it begins, i64[R]."""
    lengths: Offsets
    """Its bytes, i64[R]."""
    notes: Offsets
    """What else a format must know of each range, i64[R]."""
    value_bytes: npt.NDArray[np.float64]
    """Mean bytes of a value, as far as the file says, f64[U]."""

    def find(self, column: int, rows: npt.NDArray[np.uint32]) -> Offsets:
        """Return the unit of each of these rows of a column, i64[n]."""
        begin, end = self.of_column[column : column + 2]
        found = np.searchsorted(self.first_rows[begin:end], rows, "right")
        of_all: Offsets = found.astype(np.int64) + (begin - 1)
        return of_all

    def column_of(self, unit: int) -> int:
        """Return the column of a unit."""
        return int(np.searchsorted(self.of_column, unit, "right")) - 1

    def breaks(self) -> Offsets:
        """Return the first rows of runs of units that are best read at once, but for row 0.

        A run has a mebibyte or one unit, in the column that has most bytes, and lies in one file.
        """
        first = self.ranges[:-1]
        files, starts = self.files[first].astype(np.int64), self.starts[first]
        num_bytes = np.add.reduceat(self.lengths, first)
        # Units after one another that share their first range, a dictionary, read it once.
        is_shared = (np.diff(files) == 0) & (np.diff(starts) == 0)
        num_bytes[1:] -= np.where(is_shared, self.lengths[first][1:], 0)
        heavy = int(np.argmax(np.add.reduceat(num_bytes, self.of_column[:-1])))
        mine = slice(*self.of_column[heavy : heavy + 2])
        before = np.cumsum(num_bytes[mine]) - num_bytes[mine]
        changes = (np.diff(before // _RUN) != 0) | (np.diff(files[mine]) != 0)
        begins: Offsets = self.first_rows[mine][1:][changes]
        return begins

    def sizes(self, num_rows: int) -> npt.NDArray[np.float64]:
        """Return the estimated bytes of the values of each row, f64[N]."""
        total = np.zeros(num_rows)
        for begin, end in zip(self.of_column[:-1], self.of_column[1:], strict=True):
            bounds = np.append(self.first_rows[begin:end], num_rows)
            total += np.repeat(self.value_bytes[begin:end], np.diff(bounds))
        return total


class KeptUnits:
    """The units that were decoded last, up to so many bytes.

    No lock: each step is one call into the interpreter's dictionary, so a fork at any time leaves
    nothing locked, and threads that meet only decode twice. Pickles empty.

    Raises :class:`ConfigError` for fewer than 0 bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        if most_bytes < 0:
            raise ConfigError(f"kept_bytes={most_bytes}: give bytes, 0 or more")
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[int, Column] = OrderedDict()

    def __reduce__(self) -> tuple[type[KeptUnits], tuple[int]]:
        return KeptUnits, (self._most,)

    def get(self, unit: int) -> Column | None:
        """Return the unit if it is kept."""
        found = self._kept.get(unit)
        if found is not None:
            with suppress(KeyError):  # another thread may just have dropped it
                self._kept.move_to_end(unit)
        return found

    def put(self, unit: int, column: Column) -> None:
        """Keep the unit, and drop those unused for longest."""
        if column.num_bytes > self._most:
            return
        if self._kept.setdefault(unit, column) is column:
            self._bytes += column.num_bytes
        while self._bytes > self._most:
            try:
                _, dropped = self._kept.popitem(last=False)
            except KeyError:
                break
            self._bytes -= dropped.num_bytes


class RowSource(FormattedSource, FileSetSource):
    """Rows of files as samples; a subclass says where units lie and what their bytes mean.

    Reads fetch the units that they touch, neighbours together, and decode each once for all of
    their rows; those decoded last are kept. Sizes are estimates, since a row's own is not known
    before it is decoded.

    Thread-safe; works in children of every start method, also after the parent has read.
    """

    def _hold(
        self,
        files: FileSet,
        sample_format: SampleFormat,
        num_rows: int,
        units: Units,
        kept_bytes: int,
        about: str,
    ) -> None:
        """Keep the index in shared memory; ``about`` says what of the files is read."""
        if not 0 < num_rows < _MOST_ROWS:
            raise ConfigError(f"there are {num_rows} rows: a source has from 1 to {_MOST_ROWS - 1}")
        self._files, self.format = files, sample_format
        self._arrays = {
            name: SharedArray.copy_of(array, name) for name, array in vars(units).items()
        }
        sizes = np.ceil(units.sizes(num_rows)).astype(np.int64) + sample_format.overhead
        self._sizes = SharedArray.copy_of(sizes, "sizes")
        self._fingerprint = f"{files.keys.fingerprint}-{about}"
        self._kept = KeptUnits(kept_bytes)

    @abstractmethod
    def _decoded(self, unit: int, num_rows: int, pieces: list[memoryview]) -> Column:
        """Return the values of a unit of so many rows, from the bytes of its ranges.

        Whatever it raises is the error of the unit's rows.
        """

    @property
    def _units(self) -> Units:
        return Units(**{name: shared.array for name, shared in self._arrays.items()})

    @property
    def breaks(self) -> Offsets:
        """``i64[K]``: where pages, batches or other units begin that are best read by themselves.

        Small ones are counted together, up to a mebibyte. Blocks that end here, as those of
        ``foresight:block=`` do, have each of them read and decoded once.
        """
        return self._units.breaks()

    def name(self, sample_id: int) -> str:
        """Return the file's address and the row in it, like ``s3://b/000.parquet#17``."""
        units = self._units
        unit = units.find(0, np.array([sample_id], np.uint32))[0]
        files = units.files[units.ranges[: units.of_column[1]]]
        file = int(units.files[units.ranges[unit]])
        first = int(units.first_rows[np.flatnonzero(files == file)[0]])
        return f"{self._files.name(file)}#{sample_id - first}"

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`.

        Raises :class:`ConfigError` also for refused credentials, as :class:`KeySource` does.
        """
        self._check_open()
        rows = check_ids(ids, len(self))
        units = self._units
        of_column = [units.find(column, rows) for column in range(len(self.format.fields))]
        decoded, failed = self._load(units, np.unique(np.concatenate(of_column)))
        errors: Errors = {}
        columns = []
        for field, touched in zip(self.format.fields, of_column, strict=True):
            columns.append(_picked(field, units, decoded, rows, touched))
            if failed:
                for row in np.flatnonzero(np.isin(touched, list(failed))).tolist():
                    errors.setdefault(row, _of_row(failed[int(touched[row])], int(rows[row]), self))
        return without(errors, *self.format.joined(columns))

    def _load(
        self, units: Units, wanted: Offsets
    ) -> tuple[dict[int, Column], dict[int, SourceError]]:
        """Return the decoded units, and why others are not."""
        decoded: dict[int, Column] = {}
        for unit in wanted.tolist():
            kept = self._kept.get(unit)
            if kept is not None:
                decoded[unit] = kept
        missing = [unit for unit in wanted.tolist() if unit not in decoded]
        failed: dict[int, SourceError] = {}
        if not missing:
            return decoded, failed
        bounds = [(int(units.ranges[unit]), int(units.ranges[unit + 1])) for unit in missing]
        ranges = np.concatenate([np.arange(begin, end) for begin, end in bounds])
        pieces, errors = self._fetch(units, ranges)
        at = 0
        for unit, (begin, end) in zip(missing, bounds, strict=True):
            mine = range(at, at + end - begin)
            at = mine.stop
            try:
                wrong = [errors[number] for number in mine if number in errors]
                if wrong:
                    raise wrong[0]
                decoded[unit] = self._checked(units, unit, [pieces[number] for number in mine])
                self._kept.put(unit, decoded[unit])
            except SourceError as error:
                failed[unit] = error
            except Exception as error:  # the libraries that decode raise what they like
                column = self.format.fields[units.column_of(unit)].name
                failed[unit] = SampleCorrupt(f"column {column!r} cannot be decoded: {error}")
        return decoded, failed

    def _checked(self, units: Units, unit: int, pieces: list[memoryview]) -> Column:
        is_last = unit + 1 == units.of_column[units.column_of(unit) + 1]
        end = len(self) if is_last else int(units.first_rows[unit + 1])
        num_rows = end - int(units.first_rows[unit])
        found = self._decoded(unit, num_rows, pieces)
        if len(found.valid) != num_rows:
            raise ValueError(f"it has {len(found.valid)} rows where {num_rows} are expected")
        return found

    def _fetch(
        self, units: Units, ranges: Offsets
    ) -> tuple[list[memoryview], dict[int, SourceError]]:
        """Return the bytes of these ranges, those close together read at once."""
        # Columns of a batch are one range, and pages of a column share their dictionary.
        each = np.stack([units.files[ranges], units.starts[ranges], units.lengths[ranges]], axis=1)
        own, of = np.unique(each, axis=0, return_inverse=True)
        files, starts, lengths = own.T.copy()
        data, failures = self._files.fetch_near(files, starts, lengths)
        views = [data.data[begin:end] for begin, end in pairwise(offsets_of(lengths).tolist())]
        numbers = of.ravel().tolist()
        errors = {
            number: self._files.error(int(files[which]), failures[which])
            for number, which in enumerate(numbers)
            if which in failures
        }
        pieces = [views[which] for which in numbers]
        return pieces, errors

    def close(self) -> None:
        """Let go of the storage and refuse further reads."""
        super().close()
        self._kept = KeptUnits(0)


def _picked(
    field: Field,
    units: Units,
    decoded: dict[int, Column],
    rows: npt.NDArray[np.uint32],
    touched: Offsets,
) -> Column:
    """Return the values of these rows; those of units that failed are null."""
    own = np.unique(touched).tolist()
    parts = [decoded.get(unit, NO_VALUE) for unit in own]
    part = np.searchsorted(own, touched)
    is_there = np.array([unit in decoded for unit in own], np.bool_)[part]
    index = np.where(is_there, rows - units.first_rows[touched], 0)
    packed = gather([each.packed for each in parts], part, index)
    valid = np.zeros(len(rows), np.bool_)
    for each, mine in zip(parts, by_part(part, len(parts)), strict=True):
        valid[mine] = each.valid[index[mine]]
    return Column(packed, valid)


def _of_row(error: SourceError, row: int, source: RowSource) -> SourceError:
    return type(error)(f"{source.name(row)}: {error}", [row])
