"""The native part of Stoker; the C++ headers in native/include say what each thing promises."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

BUILD: dict[str, str]

class Downloads:
    """Whole objects over HTTP by the libcurl that a loaded library has, many in one thread."""

    def __init__(
        self,
        library: str,
        headers: Sequence[str],
        authorities: str,
        connect_ms: int,
        total_ms: int,
        stalled_ms: int,
    ) -> None: ...
    def start(
        self,
        addresses: Sequence[str],
        sizes: Sequence[int],
        tickets: list[Any],
        rooms: list[tuple[Rooms, int] | None],
    ) -> None: ...
    def look(self, addresses: Sequence[str], tickets: list[Any]) -> None: ...
    def wait(self, seconds: float) -> list[tuple[Any, bytes | None, int, bytes, bool, int]]: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

def read_cached(
    fd: int,
    file: int,
    files: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    done: npt.NDArray[np.bool_],
) -> int: ...

class Reader:
    """Reads and stats many files at once through a bounded pool of threads."""

    SHRANK: ClassVar[int]
    GREW: ClassVar[int]
    NOT_A_FILE: ClassVar[int]

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def read(
        self,
        root: bytes,
        paths: npt.NDArray[np.uint8],
        path_offsets: npt.NDArray[np.int64],
        ids: npt.NDArray[np.uint32],
        data: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        status: npt.NDArray[np.int32],
        drop_page_cache: bool = False,
    ) -> None: ...
    def stat(
        self,
        root: bytes,
        paths: npt.NDArray[np.uint8],
        path_offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        mtimes_ns: npt.NDArray[np.int64],
        ctimes_ns: npt.NDArray[np.int64],
        status: npt.NDArray[np.int32],
    ) -> None: ...

ABI: int

_Ids = npt.NDArray[np.uint32]
_Keys = npt.NDArray[np.float64]

def crc32c(data: npt.NDArray[np.uint8], crc: int = 0) -> int: ...
def mark_once(marks: _Ids, ids: _Ids, stamp: int) -> npt.NDArray[np.bool_]: ...
def find_marked(
    marks: _Ids, wanted: npt.NDArray[np.bool_], ids: _Ids, stamp: int
) -> npt.NDArray[np.int64]: ...
def unmark(marks: _Ids, ids: _Ids, stamp: int) -> None: ...
def take_turns(
    marks: _Ids, displaced: npt.NDArray[np.uint64], ids: _Ids, stamp: int, longest: int
) -> tuple[_Ids, npt.NDArray[np.bool_]]: ...
def count(counts: npt.NDArray[np.int32], ids: _Ids) -> None: ...
def write_scores(
    values: _Keys,
    last: npt.NDArray[np.int32],
    seen: npt.NDArray[np.int32],
    ids: _Ids,
    given: _Keys,
    step: int,
) -> None: ...
def score_keys(values: _Keys, seen: npt.NDArray[np.int32], ids: _Ids) -> _Keys: ...
def count_below(values: _Keys) -> npt.NDArray[np.int64]: ...
def count_up_to(values: _Keys, order: _Ids, counts: _Ids) -> None: ...
def next_use(own: _Ids, later: _Ids, next: npt.NDArray[np.int64]) -> None: ...
def first_use(ids: _Ids, first: npt.NDArray[np.int64]) -> None: ...
def shuffle(items: npt.NDArray[Any], generator: Any, since: int) -> None: ...
def multinomial(size: int, p: _Keys, generator: Any, counts: _Ids) -> bool: ...
def draw_along(order: _Ids, parts: _Keys, start: float, drawn: _Ids) -> None: ...
def draw_among(order: _Ids, shares: _Keys, start: float, count: int) -> None: ...
def repeat(counts: _Ids, ids: _Ids) -> None: ...
def spread(counts: _Ids, phases: _Keys, visits: int) -> _Ids: ...
def release_fence() -> None: ...
def acquire_fence() -> None: ...
def segment_bytes(
    num_ids: int,
    capacity_bytes: int,
    mean_size: int,
    on_disk: bool,
    blank: bool = False,
    limit_bytes: int = ...,
) -> int: ...
def file_bytes(
    num_ids: int, capacity_bytes: int, mean_size: int, limit_bytes: int = ...
) -> int: ...

class View:
    """An arena mapped to be read only; it ends with the object."""

    def __init__(self, memory: int) -> None: ...
    @property
    def num_ids(self) -> int: ...
    def get(
        self, ids: _Ids
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.bool_]]: ...
    def contains(self, ids: _Ids) -> npt.NDArray[np.bool_]: ...

class Rooms:
    """Room in an arena for samples that are on their way; native/include/stoker/rooms.h."""

    def fill(self, index: int, bytes: npt.NDArray[np.uint8]) -> bool: ...
    def settle(self, whole: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]: ...
    def reserved(self) -> npt.NDArray[np.bool_]: ...

class Arena:
    """One cache segment, mapped; native/include/stoker/arena.h says what each method promises."""

    @staticmethod
    def create(
        num_ids: int,
        capacity_bytes: int,
        mean_size: int,
        path: str,
        exact: bool,
        seed: int,
        blank: bool = False,
        limit: int = ...,
    ) -> Arena: ...
    @staticmethod
    def attach(memory: int, file: int) -> Arena: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def descriptors(self) -> tuple[int, int]: ...
    @property
    def num_ids(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def mean_size(self) -> int: ...
    @property
    def io_errors(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    def limit(self, bytes: int, seconds: float) -> int: ...
    def put(
        self, ids: _Ids, samples: Sequence[Any], keys: _Keys | None, region: str, overflow: str
    ) -> npt.NDArray[np.bool_]: ...
    def reserve(
        self,
        ids: _Ids,
        sizes: npt.NDArray[np.int64],
        keys: _Keys | None,
        region: str,
        overflow: str,
    ) -> Rooms: ...
    def put_packed(
        self,
        ids: _Ids,
        data: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        keys: _Keys | None,
        region: str,
        overflow: str,
    ) -> npt.NDArray[np.bool_]: ...
    def put_lengths(
        self,
        ids: _Ids,
        lengths: npt.NDArray[np.int64],
        keys: _Keys | None,
        region: str,
        overflow: str,
    ) -> npt.NDArray[np.bool_]: ...
    def replay(
        self,
        ids: _Ids,
        lengths: npt.NDArray[np.int64],
        keys: _Keys | None,
        after: _Keys | None,
        regions: npt.NDArray[np.uint8] | None,
        entrance: str,
        overflow: str,
        at_once: int,
    ) -> npt.NDArray[np.bool_]: ...
    def replay_once_each(
        self,
        ids: _Ids,
        lengths: npt.NDArray[np.int64],
        entrance: str,
        overflow: str,
        at_once: int,
        served: _Ids,
        turns: _Ids,
        stamp: int,
        places: npt.NDArray[np.uint8] | None,
        place: int,
        scores: _Keys | None,
        seen: npt.NDArray[np.int32] | None,
        after: npt.NDArray[np.floating[Any]] | None,
        candidates: _Ids,
        search: Callable[[int], _Ids],
        packaged: npt.NDArray[np.uint8] | None,
        room: int,
        gone: _Ids,
        make_room: Callable[[_Ids], int] | None,
    ) -> tuple[_Ids, npt.NDArray[np.int8], int, _Ids, int]: ...
    def replay_batch(
        self,
        ids: _Ids,
        lengths: npt.NDArray[np.int64],
        keys: _Keys | None,
        regions: npt.NDArray[np.uint8] | None,
        entrance: str,
        overflow: str,
        stand_ins: npt.NDArray[np.uint64],
        key_region: str,
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]: ...
    def exchange(
        self,
        ids: _Ids,
        data: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        keys: _Keys | None,
        region: str,
        overflow: str,
    ) -> tuple[
        npt.NDArray[np.bool_], _Ids, npt.NDArray[np.uint8], npt.NDArray[np.int64], _Keys
    ]: ...
    def get(
        self, ids: _Ids, into: npt.NDArray[np.uint8] | None
    ) -> tuple[npt.NDArray[np.uint8] | None, npt.NDArray[np.int64], npt.NDArray[np.bool_]]: ...
    def contains(self, ids: _Ids) -> npt.NDArray[np.bool_]: ...
    def claim(self, ids: _Ids) -> npt.NDArray[np.bool_]: ...
    def are_coming(self, ids: _Ids) -> bool: ...
    def wait(self, ids: _Ids, timeout: float) -> npt.NDArray[np.bool_]: ...
    def keys(self, ids: _Ids) -> _Keys: ...
    def set_keys(self, ids: _Ids, keys: _Keys) -> None: ...
    def abandon(self, ids: _Ids) -> None: ...
    def discard(self, ids: _Ids) -> None: ...
    def discard_from(self, region: str, ids: _Ids) -> None: ...
    def move(self, ids: _Ids, region: str, keys: _Keys | None) -> npt.NDArray[np.bool_]: ...
    def where(self, ids: _Ids) -> npt.NDArray[np.uint8]: ...
    def copies(self, ids: _Ids, region: str) -> _Ids: ...
    def list(self, region: str) -> _Ids: ...
    def lease(self, ids: _Ids, position: int) -> bool: ...
    def release(self, position: int) -> None: ...
    def configure(self, regions: Sequence[dict[str, Any]]) -> None: ...
    def add_region(self, rules: dict[str, Any]) -> None: ...
    def resize_region(self, name: str, bytes: int) -> None: ...
    def divide(self, names: Sequence[str], shares: Sequence[float]) -> None: ...
    def reclaim(self) -> None: ...
    def verify(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
