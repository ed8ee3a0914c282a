"""Data sets of Hugging Face's ``datasets``: their Arrow rows are cached, and formatted after it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import SampleCorrupt, SampleNotFound, SourceError
from stoker.pytorch.wrapped import WrappedDataset, WrappedSource
from stoker.source.base import check_ids

_CHUNK = 128 << 10  # bytes that Linux reads at once of a mapped file, by default


def is_of_hub(dataset: Any) -> bool:
    """Whether rows of ``dataset`` can be taken from its table: a ``datasets.Dataset``, as it is."""
    library = sys.modules.get("datasets")
    if library is None or type(dataset) is not library.Dataset:
        return False
    kinds = [field.type for field in dataset.data.schema]
    return not any(_has_dictionary(kind) for kind in kinds)


def _has_dictionary(kind: Any) -> bool:
    """Whether a type of Arrow keeps values beside the row."""
    below = [kind.field(number).type for number in range(kind.num_fields)]
    return type(kind).__name__ == "DictionaryType" or any(map(_has_dictionary, below))


class HubSource(WrappedSource):
    """The rows of a data set's table, each as a record batch of Arrow without its schema.

    Rows are taken from the mapped batches where they lie, past formats, transforms, and the order
    that ``shuffle`` or ``select`` gave the data set, which costs it a look-up for each row. Images
    and recordings of which the table has the path only, as those of ``imagefolder``, are read into
    their row, so that they are cached too. Safe in any thread.
    """

    def __init__(self, dataset: Any, name: str | None, sample_bytes: int | None = None) -> None:
        table = dataset.data
        mean = sample_bytes or _mean_bytes(table.to_batches()) + _framing(table.schema)
        super().__init__(dataset, mean, name)
        self.audits = 0  # tables do not change
        self._of_files = {
            name: feature
            for name, feature in dataset.features.items()
            if hasattr(feature, "embed_storage")
        }
        middle = table.num_rows // 2
        if sample_bytes is None and any(
            _lacks_bytes(table[name].slice(middle, 1)) for name in self._of_files
        ):
            self.measure()

    @functools.cached_property
    def _batches(self) -> tuple[list[Any], NDArray[np.int64]]:
        """The batches of the table, and the first row of each with the number of all at the end."""
        batches = [batch for batch in self.dataset.data.table.to_batches() if batch.num_rows]
        return batches, np.cumsum([0, *(batch.num_rows for batch in batches)])

    @functools.cached_property
    def _mapped(self) -> list[list[tuple[int, int]]]:
        """Address and bytes of the buffers of each batch; of none where all lies in memory.

        Without those of long rows, which begin too far from where they would if all were as long.
        """
        if not self.dataset.cache_files:
            return []
        return [
            [
                (each.address, each.size)
                for each in _buffers(batch)
                if each is not None and each.size <= 2 * _CHUNK * batch.num_rows**0.5
            ]
            for batch in self._batches[0]
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_batches", "_mapped")}

    def read_each(self, ids: ArrayLike) -> tuple[list[bytes | None], dict[int, SourceError]]:
        """Return the rows as bytes, None for those that failed, and why by row in ``ids``."""
        rows = check_ids(ids, len(self)).astype(np.int64)
        indices = self.dataset._indices
        if indices is not None and len(rows):
            rows = indices.column(0).take(rows).to_numpy().astype(np.int64)
        batches, begins = self._batches
        which = np.searchsorted(begins, rows, "right") - 1
        self._will_need(which, rows - begins[which])
        samples: list[bytes | None] = []
        errors: dict[int, SourceError] = {}
        pairs = zip(which.tolist(), (rows - begins[which]).tolist(), strict=True)
        for position, (batch, row) in enumerate(pairs):
            try:
                whole = self._with_files(batches[batch].slice(row, 1))
                samples.append(whole.serialize().to_pybytes())
            except Exception as error:  # Arrow raises what it likes
                samples.append(None)
                index = int(np.asarray(ids)[position])
                kind = SampleNotFound if isinstance(error, FileNotFoundError) else SampleCorrupt
                errors[position] = kind(f"{self.name(index)}: {error}", [index])
        return samples, errors

    def _will_need(self, which: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Have the kernel read what these rows lie in at once, not one after another as touched.

        By where a row would begin if all were equally long: what is beside that is read as it is
        touched, with what lies around.
        """
        if not self._mapped:
            return
        for number in np.unique(which).tolist():
            share = rows[which == number] / self._batches[0][number].num_rows
            for address, size in self._mapped[number]:
                begin = address // mmap.PAGESIZE * mmap.PAGESIZE
                for chunk in np.unique((share * size).astype(np.int64) // _CHUNK).tolist():
                    first = begin + chunk * _CHUNK
                    length = min(_CHUNK, address + size - first)
                    _madvise(first, length, mmap.MADV_WILLNEED)  # a failure changes nothing

    def _with_files(self, row: Any) -> Any:
        """Return a record batch of one row with the bytes of files that it has the path of."""
        from datasets.table import embed_array_storage

        for name, feature in self._of_files.items():
            column = row.column(name)
            if _lacks_bytes(column):
                place = row.schema.get_field_index(name)
                row = row.set_column(
                    place, row.schema.field(place), embed_array_storage(column, feature)
                )
        return row

    def _size_of(self, index: int) -> int:
        return len(self.read([index])[0])

    def read(self, ids: ArrayLike) -> list[bytes]:
        """Return the rows as bytes; raises the SourceError of the first that fails."""
        samples, errors = self.read_each(ids)
        if errors:
            raise errors[min(errors)]
        return [sample for sample in samples if sample is not None]


class HubDataset(WrappedDataset):
    """What ``stoker.wrap`` makes of a ``datasets.Dataset``: a sample is what ``dataset[i]`` is.

    The format and the transform that the data set had when it was wrapped, and the decoding of its
    features, come after the cache; ``transform`` may be set beside them, and takes whole samples.
    """

    def __init__(self, dataset: Any, name: str | None, sample_bytes: int | None = None) -> None:
        super().__init__(HubSource(dataset, name, sample_bytes))

    @property
    def is_random(self) -> bool:
        """Whether there is a transform, which may draw random numbers."""
        return super().is_random or self.source.dataset.format["type"] == "custom"

    def decode(self, data: memoryview) -> Any:
        """Return the row as a ``pyarrow.Table``; SampleCorrupt for bytes that are none."""
        import pyarrow as pa

        schema = self.source.dataset.data.schema
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(bytes(data)), schema)
            batch.validate(full=True)
        except Exception as error:  # Arrow raises what it likes
            raise SampleCorrupt(f"{len(data)} bytes are no row of the data set: {error}") from error
        return pa.Table.from_batches([batch])

    def finish(self, index: int, decoded: Any) -> Any:
        """Return the row as the data set formats it, its transform included."""
        return super().finish(index, self._format(decoded, 0))

    @functools.cached_property
    def _format(self) -> Callable[[Any, int], Any]:
        """What makes of a table with one row what the data set would."""
        from datasets.formatting import format_table, get_formatter

        dataset = self.source.dataset
        how = dataset.format
        return functools.partial(
            format_table,
            formatter=get_formatter(how["type"], features=dataset.features, **how["format_kwargs"]),
            format_columns=how["columns"],
            output_all_columns=how["output_all_columns"],
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_format"}


def _lacks_bytes(column: Any) -> bool:
    """Whether a column of one image or recording has the path of it only."""
    (value,) = column.to_pylist()
    return value is not None and value["bytes"] is None


def _mean_bytes(batches: list[Any]) -> float:
    """Return the bytes of a row, by at most 32 batches, as each is a read; these lie apart."""
    some = batches[:: -(-len(batches) // 32) or 1]
    num_bytes: int = sum(batch.nbytes for batch in some)
    num_rows: int = sum(batch.num_rows for batch in some)
    return num_bytes / max(1, num_rows)


def _buffers(batch: Any) -> list[Any]:
    return [buffer for column in batch.columns for buffer in column.buffers()]


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _framing(schema: Any) -> int:
    """Return about how many bytes a record batch of one row has beside its values."""
    return 128 + 64 * len(schema)
