"""The networks: small ones where time is limited, ResNets where accuracy is reported.

All return the logits and the embedding before the classifier, which graph scores need.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from resnet import STAGES, Block
from torch import Tensor, nn

MODELS = ("tiny", "small", "resnet20", "resnet18")


class Network(nn.Module):
    """Features, then one linear layer."""

    def __init__(self, features: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.features = features
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits f32[B, classes] and embeddings f32[B, width] of u8[B, 3, 32, 32]."""
        inputs = images.to(memory_format=torch.channels_last).float().div_(127.5).sub_(1)
        embeddings = self.features(inputs)
        return self.classifier(embeddings), embeddings


class Residual(nn.Module):
    """Two 3x3 convolutions around an identity that is strided and padded where shapes change."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.stride, self.added = outside // inside, outside - inside
        self.path = nn.Sequential(
            *_conv(inside, outside, self.stride), nn.ReLU(), *_conv(outside, outside)
        )

    def forward(self, x: Tensor) -> Tensor:
        """f32[B, inside, H, W] -> f32[B, outside, H / stride, W / stride]."""
        short = x[:, :, :: self.stride, :: self.stride]
        short = nn.functional.pad(short, (0, 0, 0, 0, 0, self.added))
        return torch.relu(self.path(x) + short)


def build(name: str, num_classes: int) -> Network:
    """Return a new network; seed torch first."""
    if name == "tiny":
        layers: list[nn.Module] = [
            *_halving(3, 16, 2),
            *_halving(16, 32),
            *_halving(32, 64),
            nn.Flatten(),
        ]
        return Network(nn.Sequential(*layers), 256, num_classes)
    if name == "small":
        layers = []
        for inside, outside in itertools.pairwise((3, 16, 32, 64)):
            layers += [*_conv(inside, outside), nn.ReLU(), nn.MaxPool2d(2)]
        pooled = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        return Network(pooled, 256, num_classes)
    if name == "resnet18":  # ImageNet's, begun as for images of 32 pixels: no stride, no pooling
        layers = [*_conv(3, 64), nn.ReLU()]
        before = 64
        for stage, count in enumerate(STAGES[18]):
            for index in range(count):
                stride = 2 if stage and not index else 1
                layers.append(Block(before, 64 << stage, stride, is_deep=False))
                before = 64 << stage
        pooled = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Network(pooled, before, num_classes)
    widths = [16] * 4 + [32] * 3 + [64] * 3  # He et al. 2016, section 4.2, n = 3
    blocks = [Residual(a, b) for a, b in itertools.pairwise(widths)]
    features = nn.Sequential(
        *_conv(3, 16), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Network(features, 64, num_classes)


def _halving(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    """Pooling comes before what follows it, which then takes a quarter of the time."""
    convolution, norm = _conv(inside, outside, stride)
    return [convolution, nn.MaxPool2d(2), norm, nn.ReLU()]


def _conv(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outside),
    ]


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return u8[B, 3, 32, 32], each image shifted by up to 4 pixels and mirrored by chance.

    Chances are drawn by the processor, also for images on a device.
    """
    device = images.device
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, len(images), 1), generator=generator).to(device)
    mirrored = (torch.rand(len(images), 1, generator=generator) < 0.5).to(device)
    side = torch.arange(32, device=device)
    rows = (top + side)[:, None, :, None]
    columns = torch.where(mirrored, left + side.flip(0), left + side)
    which = torch.arange(len(images), device=device)[:, None, None, None]
    colours = torch.arange(3, device=device)[None, :, None, None]
    return padded[which, colours, rows, columns[:, None, None, :]]


class Trainer:
    """A network with its optimiser; the learning rate follows the share of training that is done.

    So samplers whose epochs differ in length anneal alike. One cosine after a short rise.
    """

    def __init__(
        self, model: str, num_classes: int, seed: int, rate: float = 0.05, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        network = build(model, num_classes)
        self.network = network.to(device, memory_format=torch.channels_last)
        self._device = device
        self._rate = rate
        self._optimiser = torch.optim.SGD(
            self.network.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses f32[B] of augmented images, logits and embeddings."""
        logits, embeddings = self._outputs(augmented(images, self._generator))
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        return losses, logits, embeddings

    def _outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and embeddings in f32; between them bfloat16, which is .6 of the time."""
        with torch.autocast(self._device, torch.bfloat16):
            logits, embeddings = self.network(images)
        return logits.float(), embeddings.float()

    def step(self, loss: Tensor, done: float) -> None:
        """Take one step at the share ``done`` of the training, 0 to 1."""
        rise = (
            min(1.0, done / 0.1) if done < 0.1 else 0.5 * (1 + np.cos(np.pi * (done - 0.1) / 0.9))
        )
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * max(0.01, rise)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()

    @torch.no_grad()
    def rescore(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the losses f32[B] of a batch as it is, without learning from it."""
        images, labels = batch
        self.network.eval()
        losses = nn.functional.cross_entropy(self._outputs(images)[0], labels, reduction="none")
        self.network.train()
        return losses

    @torch.no_grad()
    def accuracies(self, images: Tensor, targets: Tensor, num_classes: int) -> NDArray[np.float64]:
        """Return f64[classes], the share of each class that is named rightly."""
        self.network.eval()
        named = torch.cat([self._outputs(part)[0].argmax(1) for part in images.split(1000)])
        self.network.train()
        right = np.bincount(targets[named == targets].cpu(), minlength=num_classes)
        return right / np.maximum(1, np.bincount(targets.cpu(), minlength=num_classes))
