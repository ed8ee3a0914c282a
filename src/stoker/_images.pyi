"""Parts of JPEG files and of pixels, resized; native/include/stoker says what each promises."""

import numpy as np
import numpy.typing as npt

JPEG_VERSION: str
MOST_SHRINK: float

Job = tuple[
    bytes | memoryview,
    tuple[int, int],
    int,
    tuple[int, int, int, int],
    tuple[float, float, float, float],
    bool,
    npt.NDArray[np.uint8],
]

def cut_jpegs(jobs: list[Job]) -> list[bool]: ...
def resize(
    pixels: npt.NDArray[np.uint8],
    box: tuple[float, float, float, float],
    mirrored: bool,
    out: npt.NDArray[np.uint8],
) -> None: ...
