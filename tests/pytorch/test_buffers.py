"""Memory of batches is used again, and never while anything refers to it."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stoker.pytorch.hand_over import Buffers

SIZE = 1 << 17


def filled(value: int, size: int = SIZE) -> Any:
    return np.full(size, value, np.uint8)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_copies_are_equal_and_may_be_written_to() -> None:
    buffers = Buffers()
    for size in (0, 1, 1 << 10, (1 << 16) - 1, 1 << 16, SIZE + 3):
        part = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        copy = buffers.copy_of(part)
        assert copy.tolist() == part.tolist()
        copy[:] = 0


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.copy_of(filled(1))
    at = address(first)
    assert address(buffers.copy_of(filled(2))) != at, "it is in use"
    del first
    assert at in {address(buffers.copy_of(filled(3))) for _ in range(2)}


DERIVED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda copy: copy,
    "a slice": lambda copy: copy[5:9],
    "a slice of a slice": lambda copy: copy[5:90][2:][:7],
    "another dtype": lambda copy: copy.view(np.int32).reshape(2, -1)[1],
    "transposed": lambda copy: copy.reshape(2, -1).T,
    "a memoryview": lambda copy: memoryview(copy)[3:],
    "frombuffer": lambda copy: np.frombuffer(copy, np.int64).reshape(-1, 2),
    "a tensor": lambda copy: torch.from_numpy(copy),
    "a view of a tensor": lambda copy: torch.from_numpy(copy).view(torch.float32)[7:9],
    "a storage": lambda copy: torch.from_numpy(copy).untyped_storage(),
    "a tensor's array": lambda copy: torch.from_numpy(copy[8:]).numpy()[::2],
    "through DLPack": lambda copy: torch.from_dlpack(copy),
    "detached": lambda copy: torch.from_numpy(copy).detach()[3],
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_memory_that_something_refers_to_is_left_alone(derive: Callable[[Any], Any]) -> None:
    buffers = Buffers()
    kept = derive(buffers.copy_of(filled(7)))
    before = bytes(kept) if isinstance(kept, memoryview) else np.array(kept.tolist()).tobytes()
    others = [buffers.copy_of(filled(value)) for value in range(9)]
    del others
    for value in range(9):
        buffers.copy_of(filled(value))
    after = bytes(kept) if isinstance(kept, memoryview) else np.array(kept.tolist()).tobytes()
    assert after == before


def test_a_small_part_does_not_take_a_large_buffer() -> None:
    buffers = Buffers()
    at = address(buffers.copy_of(filled(1, 4 * SIZE)))
    small = buffers.copy_of(filled(2))
    assert address(small) != at
    assert address(buffers.copy_of(filled(3, 3 * SIZE))) == at


def test_not_all_that_was_ever_used_is_kept() -> None:
    buffers = Buffers()
    copies = [buffers.copy_of(filled(value, 24 << 20)) for value in range(4)]
    del copies
    assert sum(map(len, buffers._free)) == 48 << 20


def test_large_and_small_parts_of_a_batch_are_used_again() -> None:
    buffers = Buffers()
    sizes = [8 * SIZE, SIZE, SIZE, SIZE, SIZE, SIZE]
    batch = [buffers.copy_of(filled(1, size)) for size in sizes]
    before = {address(part) for part in batch}
    del batch
    assert {
        address(part) for part in [buffers.copy_of(filled(2, size)) for size in sizes]
    } == before


def test_a_batch_that_is_kept_keeps_its_own_memory_only() -> None:
    buffers = Buffers()
    kept = buffers.copy_of(filled(1))
    buffers.copy_of(filled(2))
    gone = weakref.ref(buffers)
    del buffers
    assert gone() is None
    assert (kept == 1).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_what_it_has() -> None:
    buffers = Buffers()
    kept = buffers.copy_of(filled(5))
    told, tell = os.pipe()
    done, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)  # or it would wait for itself, should the parent fail
        os.read(told, 1)
        os.write(say, b"y" if (kept == 5).all() else b"n")
        os._exit(0)
    del kept
    for value in range(4):
        buffers.copy_of(filled(value))
    os.write(tell, b"x")
    assert os.read(done, 1) == b"y"
    os.waitpid(child, 0)
    for descriptor in (told, tell, done, say):
        os.close(descriptor)


def test_threads_never_get_the_same_memory() -> None:
    buffers = Buffers()
    wrong: list[int] = []

    def work(value: int) -> None:
        held: list[Any] = []
        chosen = random.Random(value)
        for _ in range(300):
            held.append(buffers.copy_of(filled(value)))
            if len(held) > 3:
                held.pop(chosen.randrange(4))
            wrong.extend(value for copy in held if not (copy == value).all())

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
