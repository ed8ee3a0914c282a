"""A NumPy array in memory that several processes share, without a name that could collide."""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import context, reduction
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stoker.errors import CapacityError, ConfigError

_LARGE_PAGE = 1 << 21  # bytes, on most machines
_PART = 1 << 14

_are_private = ContextVar("stoker.shared.are_private", default=False)


@contextmanager
def private_arrays() -> Iterator[None]:
    """Within it, give this thread arrays that no other process gets to see: for a replay.

    Private memory comes in large pages where the kernel has some, shared memory hardly ever does.
    Such a :class:`SharedArray` cannot be passed on.
    """
    before = _are_private.set(True)
    try:
        yield
    finally:
        _are_private.reset(before)


class SharedArray:
    """A NumPy array that forked, spawned and forkserver children see as the same memory.

    The memory is an anonymous file (``memfd_create``) that is passed on by descriptor. It has no
    name, is not limited by the size of ``/dev/shm``, and is freed with its last holder, even if
    that is killed, so nothing can leak. Pages that were never written cost nothing and read as
    zero.

    Passing one to a child by ``multiprocessing`` (an argument of ``Process``, or a data set given
    to a ``DataLoader``) passes the descriptor, not the bytes: the private memory of a worker does
    not grow with the array.

    Threads and processes: reading and writing need no lock and give none; an aligned element of up
    to 8 bytes is never seen half written on x86-64 and arm64. The owner must synchronise anything
    more.
    """

    __slots__ = ("__weakref__", "_array", "_fd", "_name")

    _array: npt.NDArray[Any]
    _fd: int | None
    _name: str

    def __init__(self) -> None:
        raise TypeError("use SharedArray.create(shape, dtype) or SharedArray.copy_of(array)")

    @classmethod
    def create(
        cls, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64, name: str = ""
    ) -> Self:
        """Return a new array of zeros with this ``shape`` and ``dtype``.

        ``name`` only shows up in ``/proc/PID/maps``. Raises :class:`ConfigError` for a negative
        shape or a dtype that holds Python objects, :class:`CapacityError` when the system does not
        provide it.
        """
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if dtype.hasobject:
            raise ConfigError(f"dtype={dtype} holds Python objects, which cannot be shared")
        if any(length < 0 for length in shape):
            raise ConfigError(f"shape={shape} is negative: give the length of each axis")
        count = math.prod(map(int, shape))
        if _are_private.get():
            return cls._alone(count, shape, dtype, name)
        fd = _anonymous_file(max(count * dtype.itemsize, 1), name)
        return cls._of(fd, shape, dtype, name)

    @classmethod
    def copy_of(cls, array: npt.ArrayLike, name: str = "") -> Self:
        """Return a new array with the shape, dtype and values of ``array``; raises as create()."""
        array = np.asarray(array)
        shared = cls.create(array.shape, array.dtype, name)
        shared.array[...] = array
        return shared

    @classmethod
    def attach(
        cls, fd: int, shape: int | Sequence[int], dtype: npt.DTypeLike, name: str = ""
    ) -> Self:
        """Return the array in the memory of descriptor ``fd``, which stays the caller's.

        The memory must have come from another SharedArray's :meth:`fileno`, and be as large as
        that. Raises OSError when the descriptor cannot be duplicated, :class:`CapacityError` when
        it cannot be mapped.
        """
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        return cls._of(os.dup(fd), shape, np.dtype(dtype), name)

    @classmethod
    def _of(cls, fd: int, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Self:
        """Map ``fd``, which from here on belongs to the new object."""
        self = object.__new__(cls)
        weakref.finalize(self, os.close, fd)
        self._fd, self._name = fd, name
        try:
            self._array = np.ndarray(shape, dtype, buffer=_map(fd))
        except OSError as error:
            raise CapacityError(f"cannot map {shape} of {dtype} for {name!r}: {error}") from error
        return self

    @classmethod
    def _alone(cls, count: int, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Self:
        """Return one in memory of this process alone."""
        self = object.__new__(cls)
        self._fd, self._name = None, name
        try:
            self._array = scratch(count, dtype).reshape(shape)
        except (OSError, OverflowError) as error:
            raise CapacityError(f"cannot have {shape} of {dtype} for {name!r}: {error}") from error
        return self

    @property
    def array(self) -> npt.NDArray[Any]:
        """The memory as a writable array; it stays valid as long as anything refers to it."""
        return self._array

    @property
    def read_only(self) -> npt.NDArray[Any]:
        """The same memory as a read-only view."""
        view = self._array.view()
        view.flags.writeable = False
        return view

    @property
    def is_private(self) -> bool:
        """Whether it was made in :func:`private_arrays`."""
        return self._fd is None

    def fileno(self) -> int:
        """Return the descriptor of the memory; it belongs to this object and is closed with it.

        Raises TypeError of one that is private.
        """
        if self._fd is None:
            raise TypeError("this array is private: make it outside of private_arrays()")
        return self._fd

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy, as ``copy.deepcopy`` promises."""
        return type(self).copy_of(self._array, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            raise TypeError(
                "a SharedArray can be pickled only while a child process is being started: "
                "pass it as an argument of multiprocessing.Process, or pickle a copy of .array"
            )
        dup = reduction.DupFd(self.fileno())
        return _rebuild, (type(self), dup, self._array.shape, self._array.dtype, self._name)

    def __repr__(self) -> str:
        label = f" {self._name!r}" if self._name else ""
        return f"<SharedArray{label} shape={self._array.shape} dtype={self._array.dtype}>"


def _rebuild(
    cls: type[SharedArray], dup: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str
) -> SharedArray:
    """Return the child's view of the array that its parent pickled."""
    fd = dup.detach()
    # Children started by exec receive it inheritable; it must not leak into what they start.
    os.set_inheritable(fd, False)
    return cls._of(fd, shape, dtype, name)


def in_parts(count: int) -> Iterator[slice]:
    """Yield slices of an array of ``count`` elements, one after the other.

    Each of so few, 2^14, that what is worked out of them takes little memory: there may be 100
    million, and a gigabyte is what NumPy takes for 8 bytes of each.
    """
    for begin in range(0, count, _PART):
        yield slice(begin, min(begin + _PART, count))


def scratch(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return [count] zeros for this process alone, which leave nothing behind.

    Of what NumPy takes from the heap, much stays in use. In large pages where the kernel has some,
    as many as it fills. Raises OSError without memory.
    """
    dtype = np.dtype(dtype)
    if not count:
        return np.zeros(0, dtype)
    private, num_bytes = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, count * dtype.itemsize
    filled = num_bytes // _LARGE_PAGE * _LARGE_PAGE
    memory = mmap.mmap(-1, num_bytes + (_LARGE_PAGE if filled else 0), flags=private)
    start = 0
    if filled:
        start = -np.frombuffer(memory, np.uint8).__array_interface__["data"][0] % _LARGE_PAGE
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, start, filled)
    return np.frombuffer(memory, dtype, count, start)


def _anonymous_file(num_bytes: int, name: str) -> int:
    """Return the descriptor of a new nameless file of ``num_bytes`` zero bytes."""
    try:
        if not hasattr(os, "memfd_create"):
            with tempfile.TemporaryFile(prefix="stoker-") as file:
                file.truncate(num_bytes)
                return os.dup(file.fileno())
        fd = os.memfd_create(f"stoker:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(fd, num_bytes)
            _seal_size(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"cannot have {num_bytes} bytes of shared memory for {name!r}: {error}"
        ) from error


def _seal_size(fd: int) -> None:
    """Fix the file's size, because reading a mapping beyond a shrunk file is a fatal SIGBUS."""
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _map(fd: int) -> mmap.mmap:
    """Return a shared mapping of the whole file."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, 0, trackfd=False)
    return mmap.mmap(fd, 0)
