"""Memory of a process that forks often."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_HUGE = 2 << 20  # bytes; other sizes of huge pages are left alone
_MADV_COLLAPSE = 25  # of Linux 6.1; the mmap module does not name it


def settle() -> None:
    """Take what stays to the end out of the collector's sight, and move it to huge pages.

    A fork copies the page table: with torch and thousands of tests in small pages, parent and child
    pay 15 ms each, longer than most tests take. Kernels without such pages leave it at that.
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):
        _collapse()


def _collapse() -> None:
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = -(-begin // _HUGE) * _HUGE
            if end - begin >= _HUGE:
                size = (end - begin) // _HUGE * _HUGE
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_COLLAPSE)
