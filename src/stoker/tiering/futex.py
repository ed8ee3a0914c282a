"""Wakes who waits for a word of shared memory to change."""

from __future__ import annotations

import ctypes
import mmap
import platform

_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAKE, _ALL = 1, 0x7FFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)


def wake(memory: mmap.mmap, offset: int) -> None:
    """Wake every process that waits for the 32-bit word at ``offset`` of a shared mapping.

    On other processors than x86-64 and ARM it does nothing: waiters look by themselves too.
    """
    if _NUMBER is not None:
        word = ctypes.c_uint32.from_buffer(memory, offset)
        _libc.syscall(
            ctypes.c_long(_NUMBER),
            ctypes.byref(word),
            ctypes.c_long(_WAKE),
            ctypes.c_long(_ALL),
            None,
            None,
            ctypes.c_long(0),
        )
