"""Arrow's columns as the bytes of samples. Needs pyarrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.packed import Packed, offsets_of, pack
from stoker.source.sample_format import Column, Field


def pyarrow() -> Any:
    """Return the module; raises :class:`ConfigError` where it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("pyarrow is not installed: run pip install 'stoker[arrow]'") from error
    return pyarrow


def field_of(field: Any) -> Field:
    """Return what samples hold of a ``pyarrow.Field``.

    Raises :class:`ConfigError` for types that are not supported, :class:`SampleCorrupt` for names
    that are not UTF-8, which pyarrow decodes only when they are asked for.
    """
    try:
        return _field_of(field)
    except UnicodeDecodeError as error:
        raise SampleCorrupt(f"the name of a column is not UTF-8: {error}") from error


def _field_of(field: Any) -> Field:
    pa = pyarrow()
    types, kind, name = pa.types, _stored(field.type), field.name
    if is_media(kind) or types.is_fixed_size_binary(kind) or _is_binary(kind):
        return Field(name, "bytes")
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Field(name, "text")
    dtype = _dtype(kind)
    if dtype is not None:
        return Field(name, "number", dtype.str)
    if _is_list(kind) and (dtype := _dtype(kind.value_type)) is not None and dtype.kind in "biuf":
        shape = (kind.list_size,) if types.is_fixed_size_list(kind) else None
        return Field(name, "array", dtype.str, shape)
    if _has_dictionary(kind):
        raise ConfigError(f"column {name!r} is {kind}, with a dictionary inside: leave it out")
    schema = pa.schema([pa.field(name, kind)]).serialize().to_pybytes()
    return Field(name, "arrow", schema=schema)


def column_of(array: Any, field: Field) -> Column:
    """Return the values of a ``pyarrow.Array`` of ``n`` rows as bytes, without copies if possible.

    Raises :class:`SampleCorrupt` for a list of whole numbers with a null in it.
    """
    array = _plain(array)
    if is_media(array.type):
        array = pyarrow().compute.struct_field(array, "bytes")
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    make = {"bytes": _binary, "text": _binary, "number": _numbers, "array": _lists}
    packed = make[field.kind](array, field) if field.kind != "arrow" else _batches(array, field)
    if not valid.all() and field.kind in ("number", "arrow"):
        lengths = np.diff(packed.offsets)
        packed = Packed(
            packed.data[np.repeat(valid, lengths)], offsets_of(np.where(valid, lengths, 0))
        )
    return Column(packed, valid)


def _stored(kind: Any) -> Any:
    """Return the type that values are kept in: of an extension, of a dictionary."""
    types = pyarrow().types
    if isinstance(kind, pyarrow().BaseExtensionType):
        return _stored(kind.storage_type)
    return _stored(kind.value_type) if types.is_dictionary(kind) else kind


def _plain(array: Any) -> Any:
    pa = pyarrow()
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain(array.storage)
    return _plain(array.dictionary_decode()) if pa.types.is_dictionary(array.type) else array


def _is_binary(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def is_media(kind: Any) -> bool:
    """Whether it is an image or a recording as the Hugging Face Hub keeps them."""
    types = pyarrow().types
    if not types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return False
    names = {kind.field(number).name for number in range(kind.num_fields)}
    return names <= {"bytes", "path"} and _is_binary(kind.field("bytes").type)


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _has_dictionary(kind: Any) -> bool:
    below = [kind.field(number).type for number in range(kind.num_fields)]
    is_one = bool(pyarrow().types.is_dictionary(kind))
    return is_one or any(_has_dictionary(each) for each in below)


def _dtype(kind: Any) -> np.dtype[Any] | None:
    """Return NumPy's type of numbers and times, or None."""
    types = pyarrow().types
    if types.is_time(kind) or types.is_decimal(kind) or types.is_interval(kind):
        return None
    if not types.is_primitive(kind):
        return None
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype() if types.is_boolean(kind) else "V")
    if types.is_timestamp(kind) or types.is_duration(kind):
        dtype = np.dtype(f"{'M' if types.is_timestamp(kind) else 'm'}8[{kind.unit}]")
    elif types.is_date(kind):
        dtype = np.dtype("M8[D]" if types.is_date32(kind) else "M8[ms]")
    elif types.is_integer(kind) or types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
    return dtype.newbyteorder("<")


def _binary(array: Any, field: Field) -> Packed:
    pa = pyarrow()
    is_small = pa.types.is_binary(array.type) or pa.types.is_string(array.type)
    is_small = is_small or pa.types.is_fixed_size_binary(array.type)
    array = array.cast(pa.binary() if is_small else pa.large_binary())
    if array.null_count:
        array = array.fill_null(pa.scalar(b"", array.type))
    width = np.int32 if is_small else np.int64
    _, offsets, data = array.buffers()
    if not len(array) or offsets is None:
        return Packed(np.empty(0, np.uint8), np.zeros(len(array) + 1, np.int64))
    begin = array.offset
    bounds = np.frombuffer(offsets, width)[begin : begin + len(array) + 1].astype(np.int64)
    flat = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return Packed(flat[bounds[0] : bounds[-1]], bounds - bounds[0])


def _flat(array: Any, dtype: str) -> npt.NDArray[np.uint8]:
    """Return the numbers of an array without nulls, as their bytes."""
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, dtype).view(np.uint8)


def _numbers(array: Any, field: Field) -> Packed:
    pa = pyarrow()
    if array.null_count:
        array = array.fill_null(pa.scalar(0, pa.int64()).cast(array.type))
    width = np.dtype(field.dtype).itemsize
    return Packed(_flat(array, field.dtype), width * np.arange(len(array) + 1, dtype=np.int64))


def _lists(array: Any, field: Field) -> Packed:
    values = array.flatten()
    if values.null_count:
        if np.dtype(field.dtype).kind != "f":
            raise SampleCorrupt(f"column {field.name!r} has lists with nulls in them")
        values = values.fill_null(float("nan"))
    lengths = pyarrow().compute.list_value_length(array).fill_null(0)
    sizes = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    width = np.dtype(field.dtype).itemsize
    return Packed(_flat(values, field.dtype), offsets_of(width * sizes))


def _batches(array: Any, field: Field) -> Packed:
    pa = pyarrow()
    schema = pa.schema([pa.field(field.name, array.type)])
    rows = (pa.record_batch([array.slice(row, 1)], schema=schema) for row in range(len(array)))
    return Packed(*pack([row.serialize().to_pybytes() for row in rows]))
