"""torchvision for CUDA beside torch for CPU: there is no wheel of it for CPU where tests run."""

from __future__ import annotations

import sys
from typing import Any

_libraries: list[Any] = []  # what is defined in one lasts as long as that


def spare_torchvision_its_operators() -> None:
    """Have torchvision load, if it is installed; what uses its operators still fails."""
    import torch

    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:
        _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            _libraries[0].define(schema)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
