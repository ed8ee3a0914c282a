"""Runs a program, and ends the process hard when it has printed so many lines: LINES PROGRAM ..."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from typing import Any

own_print = builtins.print
left = int(sys.argv[1])


def print_or_die(*values: Any, **options: Any) -> None:
    global left
    own_print(*values, **{**options, "flush": True})
    left -= 1
    if left == 0:
        os._exit(9)


libraries: list[Any] = []  # what is defined in one lasts as long as that


def spare_torchvision_its_operators() -> None:
    """Have torchvision for CUDA load beside torch for CPU; the examples use no such operator."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            libraries[0].define(schema)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


if sys.argv[2].endswith(("timm_loader.py", "fastai_learner.py")):
    spare_torchvision_its_operators()
builtins.print = print_or_die
sys.argv = sys.argv[2:]
if __name__ == "__main__":  # a worker that is spawned imports this file
    runpy.run_path(sys.argv[0], run_name="__main__")
