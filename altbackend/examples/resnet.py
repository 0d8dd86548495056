"""ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015), with the stride in the 3x3 convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, each normalised, added to the (projected) input.

    Input [N, inputs, H, W], output [N, 4 * width, H / stride, W / stride].
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        # Small residual branches: at 1, rounding differences of a random network grow from block to block.
        nn.init.constant_(self.norm3.weight, 0.2)
        self.project: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.project = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.project(x))


class ResNet(nn.Module):
    """Images [N, 3, H, W] to logits [N, classes]; `blocks` per resolution."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        layers: list[nn.Module] = []
        channels = width
        for level, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if level > 0 and index == 0 else 1
                layers.append(Bottleneck(channels, width << level, stride))
                channels = 4 * (width << level)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.layers(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits
