"""Damages good inputs at random, and checks what a parser makes of them.

A parser must return, or raise an error of its own kind, within bounds of time and memory in
proportion to the input.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
"""Inputs by target that a fuzzer has found; all are tried in each run of the tests."""

SECONDS = 10
LEAST_BYTES, TIMES = 64 << 20, 400


@dataclass(frozen=True)
class Target:
    """A parser of bytes from outside."""

    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    """What it may raise."""
    seeds: Sequence[bytes]
    """Good inputs."""
    mend: Callable[[bytes], bytes] = field(default=bytes)
    """Puts right the sums by which the parser would know that an input is damaged."""
    made: Callable[[Random], bytes] | None = None
    """Makes other inputs, of the format's own parts."""
    is_json: bool = False
    close: Callable[[], None] = lambda: None


class TooSlow(BaseException):
    """No parser catches it."""


class TooLarge(Exception):
    """A parser took more memory than its input justifies."""


def check(target: Target, data: bytes) -> None:
    """Raise what the parser must not."""
    with _bounded(data), contextlib.suppress(*target.allowed):
        target.parse(data)


@contextlib.contextmanager
def _bounded(data: bytes) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"{len(data)} bytes took more than {SECONDS} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    if peak > LEAST_BYTES + TIMES * len(data):
        raise TooLarge(f"{len(data)} bytes took {peak} bytes of memory")


def corpus(name: str) -> list[Path]:
    """Return the files that a fuzzer has found for a target."""
    return sorted((CORPUS / name).glob("*"))


def damaged(name: str, target: Target) -> Callable[[Random], bytes]:
    """Return what makes inputs for a target."""
    seeds = [*target.seeds, *(path.read_bytes() for path in corpus(name))]
    makers = [lambda random: _damaged(random, seeds, target.mend)]
    if target.made is not None:
        makers.append(target.made)
    if target.is_json:
        documents = [json.loads(seed) for seed in target.seeds]
        makers.append(lambda random: _other_values(random, documents))
    return lambda random: random.choice(makers)(random)


_INTERESTING = [0, 1, 0x7F, 0x80, 0xFF, 1 << 15, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62]
_INTERESTING += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 512]


def _damaged(random: Random, seeds: Sequence[bytes], mend: Callable[[bytes], bytes]) -> bytes:
    data = random.choice(seeds)
    for _ in range(random.randint(1, 6)):
        at = random.randint(0, len(data))
        data = data[:at] + _edited(random, data[at:])
    return mend(data) if random.randint(0, 1) else data


def _edited(random: Random, rest: bytes) -> bytes:
    """Return the rest of an input with its beginning written over, cut out, or repeated."""
    kind = random.randint(0, 11)
    if kind == 0:
        return b""
    if kind == 1:
        return rest[random.randint(1, 2000) :]
    if kind == 2:
        return rest[: random.randint(1, 2000)] + rest
    if kind == 3:
        return bytes(random.randint(0, 255) for _ in range(random.randint(1, 600))) + rest
    new = _written(random, kind)
    return new + rest[len(new) :]


def _written(random: Random, kind: int) -> bytes:
    if kind < 6:
        return bytes(random.randint(0, 255) for _ in range(random.randint(1, 4)))
    if kind < 8:
        return "".join(random.choices("0123456789-", k=random.randint(1, 12))).encode()
    width = random.choice([1, 2, 4, 8])
    value = random.choice(_INTERESTING) % (1 << 8 * width)
    return value.to_bytes(width, random.choice(["little", "big"]))


_ODD = [None, True, "", "\0", "\ud800", "/", "../..", "9" * 5000, "arena", [], {}, [[]], {"": 0}]
_ODD += [-1, 0.5, -512, 10**400, 1e308, float("inf"), float("nan"), *_INTERESTING]


def _other_values(random: Random, documents: Sequence[Any]) -> bytes:
    """Return a document with other values in some places, or one that is deep."""
    document = random.choice(documents)
    for _ in range(random.randint(1, 3)):
        value = random.choice(_ODD)
        for _ in range(random.randint(0, 2)):
            value = random.choice([[value], [value, 1], {"name": value}])
        document = _with(document, random.choice(list(_places(document))), value)
    text = json.dumps(document)
    if random.randint(0, 19) == 0:
        deep = random.choice([500, 5000, 30_000])
        text = f'{{"deep": {"[" * deep}{"]" * deep}, {text[1:]}'
    return text.encode() + b"\n"


def _places(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    is_list = isinstance(document, list)
    names = range(len(document)) if is_list else document if isinstance(document, dict) else ()
    for name in names:
        yield from _places(document[name], (*before, name))


def _with(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = _with(copy[place[0]], place[1:], value)
    return copy
