"""Parts of JPEG files and of pixels, resized; native/include/stoker says what each promises."""

import numpy as np
import numpy.typing as npt

JPEG_VERSION: str
MOST_SHRINK: float

def cut_jpeg(
    data: bytes | memoryview,
    sides: tuple[int, int],
    shrink: int,
    seen: tuple[int, int, int, int],
    box: tuple[float, float, float, float],
    mirrored: bool,
    out: npt.NDArray[np.uint8],
) -> bool: ...
def resize(
    pixels: npt.NDArray[np.uint8],
    box: tuple[float, float, float, float],
    mirrored: bool,
    out: npt.NDArray[np.uint8],
) -> None: ...
