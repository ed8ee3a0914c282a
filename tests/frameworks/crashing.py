"""Runs a program in folders, one after the other: LINES PROGRAM ARGUMENT WORKERS:FOLDER ...

When it has printed so many lines, the process is ended hard.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from typing import Any

from support.vision import spare_torchvision_its_operators

own_print = builtins.print
left = int(sys.argv[1])


def print_or_die(*values: Any, **options: Any) -> None:
    global left
    own_print(*values, **{**options, "flush": True})
    left -= 1
    if left == 0:
        os._exit(9)


TORCHVISION = (  # these examples load it, where it is installed
    *("composer_trainer", "fastai_learner", "hf_trainer", "lightning_fit", "timm_loader"),
    "ultralytics_classify",
)
if sys.argv[2].endswith(tuple(f"{name}.py" for name in TORCHVISION)):
    spare_torchvision_its_operators()
builtins.print = print_or_die
_, _, program, argument, *runs = sys.argv
if __name__ == "__main__":  # a worker that is spawned imports this file
    for run in runs:
        workers, _, folder = run.partition(":")
        os.chdir(folder)
        sys.argv = [program, argument, workers]
        runpy.run_path(program, run_name="__main__")
