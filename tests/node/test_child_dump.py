"""What a process of its own is told, and what cannot be told to it."""

import errno
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.node.child import dumped, load
from stoker.shared import SharedArray
from stoker.source import MemorySource


class Own(MemorySource):
    """A source as a user writes one."""


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_a_class_of_the_users_script_is_refused(monkeypatch, module):
    """The second is its name where multiprocessing spawned the script again, as for ranks."""
    monkeypatch.setattr(Own, "__module__", module)
    shared = SharedArray.copy_of(np.arange(3))
    gc.collect()  # what earlier tests left is not freed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (
        pytest.raises(pickle.PicklingError, match="Own is defined in __main__"),
        dumped({"deep": [shared, Own([b"a", b"bc"])]}),
    ):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_lies_in_a_module_is_passed_on():
    with dumped({"source": MemorySource([b"a", b"bc"]), "ids": np.arange(3)}) as given:
        job = load([os.dup(fd) for fd in given])
    assert job["source"].read_one(1) == b"bc"
    assert job["ids"].tolist() == [0, 1, 2]


WRITES_PART = """
import os, resource
from stoker.node.child import memory_file

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
before = os.listdir("/proc/self/fd")
for size in (1_000_000, 1_000_001):
    try:
        with memory_file(bytes(size)) as file:
            print(os.fstat(file).st_size)
    except OSError as error:
        print(error.errno)
assert os.listdir("/proc/self/fd") == before
"""


def test_a_job_was_cut_short_where_one_call_did_not_write_all_of_it():
    """As of more than 2 GiB, of which the kernel writes no more at once; here a limit is lower."""
    done = subprocess.run([sys.executable, "-c", WRITES_PART], capture_output=True, text=True)
    assert done.stdout.split() == ["1000000", str(errno.EFBIG)], done.stderr
