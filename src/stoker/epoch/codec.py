"""Samples as plain bytes: all that a cache on disk or a pool of servers may hold.

A process that can write there must not be able to run code here, so nothing is pickled. A message
is, all little-endian::

    u8   version (2)
    u32  bytes of the head
    head: one tree in MessagePack
    the values of each array, one after the other, in the order in which the tree names them

In the tree None, bool, int of 64 bits, float, str and bytes stand for themselves. All else is an
array whose first element is one of the kinds below.

What stays in memory of this job's own processes may be pickled: :func:`dumps` does so with tensors.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt

if TYPE_CHECKING:
    import torch

_VERSION, _PICKLED = 2, 0
_HEAD = struct.Struct("<BI")
_LIST, _TUPLE, _DICT, _LARGE_INT, _COMPLEX, _SCALAR, _ARRAY, _TENSOR, _IMAGE = range(9)
_DEEPEST = 32  # containers within one another
_MOST_AXES = 32
_LEAVES = (type(None), bool, int, float, str, bytes)
_DTYPE_KINDS = "biufcmMSU"
_IMAGE_MODES = {
    *("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA"),
    *("RGBX", "RGBa", "La", "I;16", "I;16L", "I;16B"),
}


@functools.cache
def _msgpack() -> tuple[Callable[[Any], bytes], Callable[[Any], Any]]:
    """Return what writes a tree and what reads it."""
    try:
        from msgspec import msgpack
    except ImportError as error:
        raise ConfigError(
            "samples are kept decoded by msgspec, which is not installed: pip install msgspec, or "
            "leave stage='decoded' out"
        ) from error
    return msgpack.Encoder().encode, msgpack.Decoder().decode


def encode(sample: Any, *, private: bool = False) -> bytes:
    """Return ``sample`` as bytes.

    Plain is: None, bool, int, float, complex, str, bytes; NumPy's numbers and arrays of numbers,
    times and text; torch's tensors on the CPU; ``PIL.Image``; tuples, lists and dicts of these, up
    to 32 deep, with keys that are None, bool, int, float, str or bytes. The order of axes in memory
    is kept where the values lie dense, and of an image's ``info`` what is plain. ``private``: the
    bytes stay in memory of this job's own processes, so that all else may be pickled.

    Raises :class:`~stoker.errors.ConfigError`, which names the type, for what is not plain, and
    with ``private`` what pickling raises. Safe in any thread.
    """
    values: list[Any] = []
    to_msgpack, _ = _msgpack()
    try:
        head = to_msgpack(_tree(sample, values, _DEEPEST))
    except (ConfigError, UnicodeEncodeError) as error:
        if private:
            return bytes([_PICKLED]) + dumps(sample)
        if isinstance(error, ConfigError):
            raise
        raise _refused(f"text that is not Unicode ({error})") from error
    return b"".join([_HEAD.pack(_VERSION, len(head)), head, *values])


def decode(data: memoryview, *, private: bool = False) -> Any:
    """Return what :func:`encode` was given, with the same ``private``.

    All arrays may be written to. One of single bytes is a view of ``data`` where that is writable,
    others are copies. Raises :class:`~stoker.errors.SampleCorrupt` for bytes that are no message;
    it takes time and memory in proportion to them. Safe in any thread.
    """
    _, from_msgpack = _msgpack()
    try:
        if private and data[0] == _PICKLED:
            return pickle.loads(data[1:])
        version, head_bytes = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"version {version}, where {_VERSION} is known")
        head = data[_HEAD.size : _HEAD.size + head_bytes]
        values = _Values(data, _HEAD.size + head_bytes)
        sample = _value(from_msgpack(head), values, _DEEPEST)
        values.end()
    except Exception as error:  # NumPy, torch and Pillow raise what they like
        raise SampleCorrupt(
            f"{len(data)} bytes are no sample as Stoker writes it: {error or type(error).__name__}"
        ) from error
    return sample


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"a sample holds {what}, which is not kept where others could write: on disk, in a "
        "pool, or under wrap(name=...). Let the data set return arrays, tensors, images, numbers, "
        "text, bytes, and tuples, lists and dicts of these, and make the rest of them in a "
        "transform; or leave name= out, and the cache stays in this job's own memory"
    )


# ---- to the tree ----


def _tree(value: Any, values: list[Any], depth: int) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        if kind is int and not -(1 << 63) <= value < 1 << 64:
            return [_LARGE_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
        return value
    if kind in (list, tuple, dict):
        return _branch(value, values, depth - 1)
    if kind in (np.ndarray, np.memmap):
        return [_ARRAY, _dtype(value.dtype), *_laid(value, values)]
    if _is_tensor(value):
        return [_TENSOR, *_laid_tensor(value, values)]
    if isinstance(value, np.generic):
        values.append(value.tobytes())
        return [_SCALAR, _dtype(value.dtype)]
    if kind is complex:
        return [_COMPLEX, value.real, value.imag]
    images = sys.modules.get("PIL.Image")
    if images is not None and isinstance(value, images.Image) and value.mode in _IMAGE_MODES:
        return [_IMAGE, *_laid_image(value, values)]
    raise _refused(f"a {kind.__module__}.{kind.__qualname__}")


def _branch(value: Any, values: list[Any], depth: int) -> list[Any]:
    if depth < 0:
        raise _refused(f"containers more than {_DEEPEST} deep")
    if type(value) is not dict:
        kind = _LIST if type(value) is list else _TUPLE
        return [kind, *[_tree(item, values, depth) for item in value]]
    tree: list[Any] = [_DICT]
    for key, item in value.items():
        if type(key) not in _LEAVES:
            raise _refused(f"a dict with a key of type {type(key).__qualname__}")
        tree += (_tree(key, values, depth), _tree(item, values, depth))
    return tree


def _dtype(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _DTYPE_KINDS or not dtype.itemsize:
        raise _refused(f"an array of dtype {dtype}")
    return dtype.str


def _laid(array: NDArray[Any], values: list[Any]) -> tuple[list[int], list[int] | None]:
    """Append the values as they lie in memory; return the shape and the order of axes there."""
    dense, order = array, None
    if not array.flags.c_contiguous:
        order = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
        dense = array.transpose(order)
        if not dense.flags.c_contiguous:
            dense, order = np.ascontiguousarray(array), None
    values.append(np.asarray(dense).reshape(-1).view(np.uint8))
    return list(dense.shape), order


def _laid_tensor(
    tensor: torch.Tensor, values: list[Any]
) -> tuple[str, list[int], list[int] | None]:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or name not in _torch_dtypes() or tensor.device.type != "cpu":
        raise _refused(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} (.to_dense(), "
            ".dequantize() or .cpu() make it plain)"
        )
    if tensor.requires_grad:
        raise _refused("a tensor that requires a gradient (.detach() takes that away)")
    dense, order = tensor.resolve_conj().resolve_neg(), None
    if not dense.is_contiguous():
        order = sorted(range(dense.ndim), key=dense.stride, reverse=True)
        if not dense.permute(order).is_contiguous():
            order = None
        dense = dense.contiguous() if order is None else dense.permute(order)
    values.append(dense.reshape(-1).view(torch.uint8).numpy())
    return name, list(dense.shape), order


def _laid_image(image: Any, values: list[Any]) -> tuple[Any, ...]:
    palette = None
    if image.mode in ("P", "PA") and (colours := image.getpalette("RGBA")) is not None:
        palette = bytes(colours)
    info: list[Any] = []
    for name, item in image.info.items():
        if type(name) is str and type(item) in (*_LEAVES, tuple):
            try:
                info += (name, _tree(item, [], 2))
            except ConfigError:
                continue
    values.append(image.tobytes())
    return image.mode, *image.size, len(values[-1]), palette, info


# ---- and back ----


class _Values:
    """The values of arrays behind the head, which are taken one after the other."""

    def __init__(self, data: memoryview, begin: int) -> None:
        self._data, self._at = data, begin

    def take(self, num_bytes: int, itemsize: int = 2) -> NDArray[np.uint8]:
        """Return so many bytes, ``u8[n]``, aligned for items of that size and writable."""
        begin, self._at = self._at, self._at + num_bytes
        if not 0 <= num_bytes <= len(self._data) - begin:
            raise ValueError(f"{num_bytes} bytes at {begin} are not there")
        taken = np.frombuffer(self._data[begin : self._at], np.uint8)
        return taken.copy() if itemsize > 1 or not taken.flags.writeable else taken

    def end(self) -> None:
        """Raise ValueError unless everything was taken."""
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


def _value(tree: Any, values: _Values, depth: int) -> Any:
    if type(tree) in _LEAVES:
        return tree
    if type(tree) is not list:
        raise ValueError(f"{type(tree).__name__} in the tree")
    kind, *rest = tree
    if kind in (_LIST, _TUPLE, _DICT):
        if depth == 0:
            raise ValueError(f"more than {_DEEPEST} deep")
        items = [_value(item, values, depth - 1) for item in rest]
        return items if kind == _LIST else tuple(items) if kind == _TUPLE else _dict(items)
    return _LEAVES_OF_KIND[kind](values, *rest)


def _dict(items: list[Any]) -> dict[Any, Any]:
    found = dict(zip(items[::2], items[1::2], strict=True))
    if 2 * len(found) != len(items) or any(type(key) not in _LEAVES for key in found):
        raise ValueError("a key twice, or one that is no plain value")
    return found


def _large_int(_: _Values, digits: bytes) -> int:
    return int.from_bytes(digits, "little", signed=True)


def _complex(_: _Values, real: float, imag: float) -> complex:
    return complex(real, imag)


def _scalar(values: _Values, dtype: str) -> Any:
    return _array(values, dtype, [], None)[()]


def _array(values: _Values, dtype: str, shape: list[int], order: list[int] | None) -> NDArray[Any]:
    of = _dtype_of(dtype)
    flat = values.take(_num_items(shape) * of.itemsize, of.itemsize).view(of)
    if of.kind == "b":
        flat.view(np.uint8)[:] = flat.view(np.uint8) != 0  # NumPy counts on 0 and 1
    elif of.kind == "U" and np.any(flat.view(f"{of.byteorder}u4") > sys.maxunicode):
        raise ValueError("text that is not Unicode")
    array = flat.reshape(shape)
    return array if order is None else array.transpose(np.argsort(_axes(order, shape)))


def _tensor(values: _Values, name: str, shape: list[int], order: list[int] | None) -> torch.Tensor:
    import torch

    dtype = _torch_dtypes()[name]
    raw = values.take(_num_items(shape) * dtype.itemsize, dtype.itemsize)
    if dtype is torch.bool:
        raw[:] = raw != 0
    flat = torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return tensor if order is None else tensor.permute(np.argsort(_axes(order, shape)).tolist())


def _image(
    values: _Values,
    mode: str,
    width: int,
    height: int,
    num_bytes: int,
    palette: bytes | None,
    info: list[Any],
) -> Any:
    from PIL import Image

    raw = values.take(num_bytes)
    # A pixel takes an eighth of a byte or more, so a small message asks for little memory.
    if mode not in _IMAGE_MODES or not _num_items([width, height]) <= 8 * num_bytes:
        raise ValueError(f"an image {width} x {height} of mode {mode!r} in {num_bytes} bytes")
    image = Image.frombytes(mode, (width, height), raw.data)
    if palette is not None:
        image.putpalette(bytes(memoryview(palette)), "RGBA")  # which would take a number too
    image.info = _dict([_value(item, values, 2) for item in info])
    return image


_LEAVES_OF_KIND: dict[int, Callable[..., Any]] = {
    _LARGE_INT: _large_int,
    _COMPLEX: _complex,
    _SCALAR: _scalar,
    _ARRAY: _array,
    _TENSOR: _tensor,
    _IMAGE: _image,
}


@functools.cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    """Return the plain types of tensors by name; a sample that has one needs torch."""
    import torch

    return {
        str(dtype).removeprefix("torch."): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and "q" not in str(dtype)  # not quint8 and its like
    }


@functools.lru_cache(256)
def _dtype_of(name: str) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in _DTYPE_KINDS or not dtype.itemsize:
        raise ValueError(f"an array of {dtype}")
    return dtype


def _num_items(shape: list[int]) -> int:
    items = 1
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError(f"an array with {length} items along an axis")
        items *= length
    if len(shape) > _MOST_AXES:
        raise ValueError(f"an array of {len(shape)} axes")
    return items


def _axes(order: list[int], shape: list[int]) -> list[int]:
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"axes in the order {order[: _MOST_AXES + 1]}")
    return order


# ---- pickles, for private memory ----


def dumps(sample: Any, apart: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Return ``sample`` as bytes: pickle protocol 5, tensors as plain arrays.

    ``apart`` is given the memory of each array, which is not among the bytes then. Only for
    anonymous memory and pipes between this job's own processes. Raises what pickle raises for
    samples that cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5, buffer_callback=apart).dump(sample)
    return buffer.getvalue()


def _is_tensor(value: Any) -> bool:
    """Whether it is a plain torch tensor; torch is not loaded for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


class _Pickler(pickle.Pickler):
    """Stores a tensor as its values; by itself torch stores all that a view's memory spans."""

    def reducer_override(self, value: Any) -> Any:
        if not _is_tensor(value) or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        try:
            return self._reduced(value)
        except (TypeError, RuntimeError):  # sparse, quantised, conjugate: no NumPy twin
            return value.clone().__reduce_ex__(5)

    def _reduced(self, value: torch.Tensor) -> Any:
        if value.dtype in (bits := _bits()):
            return _of_bits, (value.view(bits[value.dtype]), value.dtype)
        if not value.is_contiguous():
            # Channels that lie last stay last, as they do where torch sends a tensor.
            order = sorted(range(value.ndim), key=value.stride, reverse=True)
            if value.permute(order).is_contiguous():
                return _permuted, (value.permute(order), np.argsort(order).tolist())
        return _of_array, (np.ascontiguousarray(value.numpy()).reshape(value.shape),)


@functools.cache
def _bits() -> dict[torch.dtype, torch.dtype]:
    """Return the types that NumPy does not have, and those whose bits they are sent as."""
    import torch

    return {torch.bfloat16: torch.int16, torch.complex32: torch.int32} | {
        dtype: torch.uint8
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and dtype.is_floating_point
    }


def _of_array(values: NDArray[Any]) -> torch.Tensor:
    import torch

    owner: Any = values
    while isinstance(owner, np.ndarray):
        owner = owner.base
    tensor = torch.from_numpy(values)
    if not _is_tensor(owner) or owner.nbytes != values.nbytes:
        return tensor
    # Of the tensor that owns the memory, whose allocator follows copies to a device that read it.
    own: torch.Tensor = owner.view(tensor.dtype).view(values.shape)
    return own


def _of_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)


def _permuted(dense: torch.Tensor, order: list[int]) -> torch.Tensor:
    return dense.permute(order)
