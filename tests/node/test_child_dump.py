"""What a process of its own is told, and what cannot be told to it."""

import pickle

import numpy as np
import pytest

from stoker.node.child import dump
from stoker.source import MemorySource


class Own(MemorySource):
    """A source as a user writes one."""


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_a_class_of_the_users_script_is_refused(monkeypatch, module):
    """The second is its name where multiprocessing spawned the script again, as for ranks."""
    monkeypatch.setattr(Own, "__module__", module)
    with pytest.raises(pickle.PicklingError, match="Own is defined in __main__"):
        dump({"deep": [Own([b"a", b"bc"])]})


def test_what_lies_in_a_module_is_passed_on():
    pickled, fds = dump({"source": MemorySource([b"a", b"bc"]), "ids": np.arange(3)})
    assert b"MemorySource" in pickled
    assert isinstance(fds, list)
