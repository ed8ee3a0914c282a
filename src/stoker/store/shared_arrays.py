"""Arrays that processes which are not related share under a name."""

from __future__ import annotations

import math
import os
import secrets
import sys
import warnings
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from stoker.errors import SegmentError, UntrustedPlace
from stoker.shared import SharedArray
from stoker.store.arena import Handle
from stoker.store.handshake import Announcement
from stoker.store.keeper import Keeper
from stoker.store.meeting import meet

Layout = Mapping[str, tuple[int, DTypeLike]]
"""Name of an array -> its length and the type of its elements."""


class SharedArrays:
    """Arrays by name, and this process's part in keeping them findable. Also a context manager.

    What uses the arrays may go on with them after :meth:`close`: that ends only the part of this
    process. Closed at the end of the process at the latest.
    """

    def __init__(self, arrays: Mapping[str, SharedArray], keeper: Keeper | None) -> None:
        self.arrays = dict(arrays)
        self.shared = keeper is not None
        """False if other processes cannot find them."""
        self._finish = weakref.finalize(self, _finish, keeper)

    def __getitem__(self, name: str) -> SharedArray:
        return self.arrays[name]

    def close(self) -> None:
        """Keep them findable no longer; may be called again."""
        self._finish()

    def __enter__(self) -> SharedArrays:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _finish(keeper: Keeper | None) -> None:
    if keeper is not None:
        keeper.close()


def open_arrays(key: str, layout: Layout, *, share: bool = True) -> SharedArrays:
    """Return the arrays that this user's processes share under ``key``, zeros if they are new.

    For what the ranks of one job on one node write together, like who was served: ``key`` must be
    the job's own. Other layouts under one key never meet. They vanish with the last process that
    has them. When sharing fails there is a warning and arrays of this process's own, as with
    ``share=False``.

    Safe in any thread and process. Raises :class:`~stoker.errors.CapacityError` when the memory
    is not there.
    """
    plain = {name: [int(size), np.dtype(dtype).str] for name, (size, dtype) in layout.items()}
    num_bytes = sum(int(size) * np.dtype(dtype).itemsize for size, dtype in layout.values())
    wanted = Announcement(
        key=key,
        token=secrets.token_hex(16),
        description=f"arrays {', '.join(layout)}",
        capacity_bytes=num_bytes,
        regions=[],
        meta={},
        stats={},
        kind="arrays",
    )
    if share and sys.platform == "linux":
        try:
            met = meet(wanted, f"{key} {sorted(plain.items())}", lambda: _make(plain), _attach)
            return SharedArrays(met.held.arrays, met.keeper)
        except UntrustedPlace:
            raise  # processes that each have their own would not know of each other's
        except OSError as error:
            message = f"other processes cannot share {', '.join(layout)}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return SharedArrays(_make(plain).arrays, None)


class _Arrays:
    """Arrays in a form that can be passed on."""

    def __init__(self, arrays: dict[str, SharedArray], meta: dict[str, Any]) -> None:
        self.arrays = arrays
        self.handle = Handle(tuple(array.fileno() for array in arrays.values()), meta)

    def stats(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        """Do nothing: memory goes with its last user."""


def _make(plain: dict[str, list[Any]]) -> _Arrays:
    made = {
        name: SharedArray.create(size, dtype, name=f"stoker-{name}")
        for name, (size, dtype) in plain.items()
    }
    return _Arrays(made, {"arrays": plain})


def _attach(handle: Handle) -> _Arrays:
    """Map what another process passed; SegmentError if it is not what it says."""
    plain = handle.meta.get("arrays", {})
    if len(plain) != len(handle.fds):
        raise SegmentError(f"{len(handle.fds)} descriptors for the arrays {[*plain]}")
    arrays = {}
    for fd, (name, (size, dtype)) in zip(handle.fds, plain.items(), strict=True):
        if os.fstat(fd).st_size < math.prod((int(size), np.dtype(dtype).itemsize)):
            raise SegmentError(f"the memory of {name!r} is smaller than said")
        arrays[name] = SharedArray.attach(fd, int(size), dtype, name=f"stoker-{name}")
    return _Arrays(arrays, dict(handle.meta))
