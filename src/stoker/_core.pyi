"""The native part of Stoker; the C++ headers in native/include say what each thing promises."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

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
        status: npt.NDArray[np.int32],
    ) -> None: ...
