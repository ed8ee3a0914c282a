"""What the C library does with memory that this process frees."""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT = 128 << 20  # bytes of freed memory that a process keeps at most
_LARGEST = 32 << 20  # bytes that one piece of it has at most; glibc takes no more
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Have the C library keep what is freed in this process for what is needed next.

    For processes that take and free large pieces all the time, batches or objects: memory fresh
    from the kernel, which has to be cleared, took more of their time than all the rest. At most
    128 MiB are kept, and what the user has set stays. It holds until the process ends.
    """
    if not any(name in os.environ for name in _USERS_OWN):
        with contextlib.suppress(AttributeError):  # a C library that has no such thing
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, _LARGEST)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)
