"""Data sets of Hugging Face's ``datasets``: their Arrow rows are cached, and formatted after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import SampleCorrupt, SampleNotFound, SourceError
from stoker.pytorch.wrapped import WrappedDataset, WrappedSource
from stoker.source.base import check_ids


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
        mean = table.nbytes / max(1, table.num_rows) + _framing(table.schema)
        super().__init__(dataset, sample_bytes or mean, name)
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

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_batches"}

    def read_each(self, ids: ArrayLike) -> tuple[list[bytes | None], dict[int, SourceError]]:
        """Return the rows as bytes, None for those that failed, and why by row in ``ids``."""
        rows = check_ids(ids, len(self)).astype(np.int64)
        indices = self.dataset._indices
        if indices is not None and len(rows):
            rows = indices.column(0).take(rows).to_numpy().astype(np.int64)
        batches, begins = self._batches
        which = np.searchsorted(begins, rows, "right") - 1
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


def _framing(schema: Any) -> int:
    """Return about how many bytes a record batch of one row has beside its values."""
    return 128 + 64 * len(schema)
