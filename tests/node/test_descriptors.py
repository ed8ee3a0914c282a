import os
import threading

import pytest

from stoker.node import descriptors
from stoker.node.descriptors import Descriptor


def in_child(check):
    """Return what check() returns in a forked child."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_kept_descriptors_are_closed_in_children_only():
    with descriptors.no_fork:
        kept = descriptors.keep(Descriptor(os.open("/dev/null", os.O_RDONLY)))
    number, generation = kept.fileno(), descriptors.generation()
    assert in_child(lambda: kept.fileno() == -1 and not is_open(number))
    assert in_child(lambda: descriptors.generation() == generation + 1)
    assert descriptors.generation() == generation
    assert is_open(number)
    descriptors.drop(kept)
    descriptors.drop(kept)
    assert not is_open(number)


def test_a_child_can_keep_descriptors_of_its_own_and_fork_again():
    def check():
        with descriptors.no_fork:
            kept = descriptors.keep(Descriptor(os.open("/dev/null", os.O_RDONLY)))
        return in_child(lambda: kept.fileno() == -1) and is_open(kept.fileno())

    assert in_child(check)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_no_fork_happens_within_the_section():
    forked = threading.Event()

    def fork():
        in_child(lambda: True)
        forked.set()

    with descriptors.no_fork:
        thread = threading.Thread(target=fork)
        thread.start()
        assert not forked.wait(0.1)
    thread.join()
    assert forked.is_set()
