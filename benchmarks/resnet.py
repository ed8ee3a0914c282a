"""ResNet-18 and ResNet-50, as torchvision has them: He and others, CVPR 2016."""

from __future__ import annotations

import torch
from torch import nn

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def resnet(depth: int, width: int = 64, classes: int = 1000) -> nn.Module:
    """Return the network of that depth, 18 or 50, whose first stage has ``width`` channels."""
    layers: list[nn.Module] = [*_convolved(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, count in enumerate(STAGES[depth]):
        for index in range(count):
            stride = 2 if stage and not index else 1
            block = Block(before, width << stage, stride, is_deep=depth >= 50)
            layers.append(block)
            before = block.channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A residual block; a deep one is narrow in its middle."""

    def __init__(self, before: int, width: int, stride: int, *, is_deep: bool) -> None:
        super().__init__()
        self.channels = 4 * width if is_deep else width
        if is_deep:
            sizes = ((before, width, 1, 1), (width, width, 3, stride), (width, self.channels, 1, 1))
        else:
            sizes = ((before, width, 3, stride), (width, width, 3, 1))
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [*_convolved(*size), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        is_same = before == self.channels and stride == 1
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(*_convolved(before, self.channels, 1, stride))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of ``[n, before, h, w]``."""
        return torch.relu(self.residual(images) + self.shortcut(images))


def _convolved(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after)]
