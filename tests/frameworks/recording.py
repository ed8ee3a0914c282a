"""Runs programs one after the other: OUT PROGRAM ... -- ARGUMENT ...

Writes, for each, the targets of the batch of each step of its optimizer to OUT, as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from support.vision import spare_torchvision_its_operators
from torch.optim.optimizer import register_optimizer_step_post_hook

own_loss = torch.nn.functional.cross_entropy
targets: list[int] = []
steps: list[list[int]] = []


def note(scores: torch.Tensor, labels: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    if torch.is_grad_enabled():
        targets[:] = labels.flatten().tolist()
    return own_loss(scores, labels, *given, **options)


if __name__ == "__main__":  # a worker that is spawned imports this file
    out, *words = sys.argv[1:]
    programs, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    torch.set_num_threads(1)
    spare_torchvision_its_operators()
    torch.nn.functional.cross_entropy = note
    register_optimizer_step_post_hook(lambda *_: steps.append([*targets]))
    recorded = []
    for program in programs:
        sys.argv = [program, *arguments]
        steps.clear()
        runpy.run_path(program, run_name="__main__")
        recorded.append([*steps])
    rank = os.environ.get("RANK", "")
    Path(out + rank).write_text(json.dumps(recorded))
