"""A U-Net: halves of convolutions around a bottleneck, joined by concatenations (Ronneberger et al. 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.cases.case import Built, Preset

# batch, pixels, channels of the first level
SIZES: dict[Preset, tuple[int, int, int]] = {
    "tiny": (2, 32, 4),
    "cpu": (1, 128, 32),
    "gpu": (16, 256, 64),
    "serve": (1, 256, 64),
}
LEVELS, CLASSES = 4, 2


def _two_convolutions(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """[batch, 3, pixels, pixels] -> [batch, pixels, pixels, classes]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(LEVELS + 1)]
        self.first = _two_convolutions(3, width)
        self.down = nn.ModuleList(_two_convolutions(a, 2 * a) for a in widths[:-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1]))
        self.joined = nn.ModuleList(_two_convolutions(2 * a, a) for a in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(torch.max_pool2d(levels[-1], 2)))
        y = levels.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            y = joined(torch.cat([levels.pop(), up(y)], 1))
        return self.last(y).permute(0, 2, 3, 1)


def unet(preset: Preset) -> Built:
    """Return the model of a preset with its images."""
    batch, pixels, width = SIZES[preset]
    return UNet(width), (torch.randn(batch, 3, pixels, pixels),), {}
