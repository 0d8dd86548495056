"""Small networks, written from their papers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.programs.program import Made, Program, case


def conv(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Return convolution, batch norm and, with `act`, ReLU."""
    layer = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(o), *([nn.ReLU()] if act else []))


def classifier(c: int, classes: int = 1000) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes)]


def images(module: nn.Module, n: int, side: int, channels: int = 3) -> Made:
    return module, (torch.randn(n, channels, side, side),)


def mlp(n: int, width: int, depth: int) -> Made:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(n, width),)


def lenet(n: int) -> Made:
    first = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 20)]
    return images(nn.Sequential(*first, *last), n, 32, 1)


def alexnet(n: int, side: int) -> Made:
    first = [nn.Conv2d(3, 96, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(96, 256, 5, 1, 2), nn.ReLU()]
    middle = [nn.MaxPool2d(3, 2), nn.Conv2d(256, 384, 3, 1, 1), nn.ReLU(), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()]
    last = [
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Linear(9216, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 1000),
    ]
    return images(nn.Sequential(*first, *middle, *last), n, side)


def vgg(n: int, side: int) -> Made:
    layers: list[nn.Module] = []
    i = 3
    for o, count in ((64, 2), (128, 2), (256, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU()]
            i = o
        layers.append(nn.MaxPool2d(2))
    return images(nn.Sequential(*layers, *classifier(512)), n, side)


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(i, o, 3, stride), conv(o, o, 3, act=False))
        self.shortcut = conv(i, o, 1, stride, act=False) if stride > 1 or i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18(n: int, side: int) -> Made:
    widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    blocks = [Residual(*w) for w in widths]
    return images(nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *blocks, *classifier(512)), n, side)


class Dense(nn.Module):
    """Layers that each read all results before them (Huang et al., 2017)."""

    def __init__(self, i: int, growth: int, layers: int) -> None:
        super().__init__()
        made = [(i + k * growth, growth) for k in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, 3, padding=1, bias=False)) for a, b in made
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat((x, layer(x)), 1)
        return x


class Branches(nn.Module):
    """Four branches side by side (Szegedy et al., 2015)."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(i, o, 1)
        self.three = nn.Sequential(nn.Conv2d(i, o // 2, 1), nn.Conv2d(o // 2, o, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(i, o // 4, 1), nn.Conv2d(o // 4, o // 2, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(i, o // 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pool(x)), 1)


def inception(n: int, side: int) -> Made:
    blocks = [Branches(192, 128), nn.MaxPool2d(3, 2, 1), Branches(384, 160), Branches(480, 192)]
    return images(nn.Sequential(conv(3, 192, 7, 4), *blocks, *classifier(576)), n, side)


def mobilenet(n: int, side: int) -> Made:
    layers: list[nn.Module] = [conv(3, 32, 3, 2)]
    for i, o, stride in (
        (32, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ):
        layers += [conv(i, i, 3, stride, groups=i), conv(i, o, 1)]
    return images(nn.Sequential(*layers, *classifier(512)), n, side)


class Inverted(nn.Module):
    """Expansion, depthwise convolution, gate of channels, projection (Tan and Le, 2019)."""

    def __init__(self, c: int, factor: int, kernel: int) -> None:
        super().__init__()
        wide = c * factor
        self.first = nn.Sequential(
            conv(c, wide, 1, act=False), nn.SiLU(), conv(wide, wide, kernel, groups=wide, act=False), nn.SiLU()
        )
        self.gate = nn.Sequential(nn.Conv2d(wide, c // 4, 1), nn.SiLU(), nn.Conv2d(c // 4, wide, 1), nn.Sigmoid())
        self.last = conv(wide, c, 1, act=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return x + self.last(y * self.gate(y.mean((2, 3), keepdim=True)))


class Shuffled(nn.Module):
    """Grouped 1x1 convolutions with a shuffle of channels between (Zhang et al., 2018)."""

    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.first, self.last = conv(c, c, 1, groups=groups), conv(c, c, 1, groups=groups, act=False)
        self.middle = conv(c, c, 3, groups=c, act=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        n, c, h, w = y.shape
        y = y.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)
        return F.relu(x + self.last(self.middle(y)))


class Fire(nn.Module):
    """A narrow layer and two wide ones (Iandola et al., 2016)."""

    def __init__(self, i: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(i, narrow, 1)
        self.one, self.three = nn.Conv2d(narrow, wide, 1), nn.Conv2d(narrow, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.squeeze(x))
        return torch.cat((F.relu(self.one(y)), F.relu(self.three(y))), 1)


class Encoder(nn.Module):
    """Convolutions with a softmax over the width, down and up again (after Ronneberger et al., 2015)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.down, self.deep, self.up = self._twice(8, c), self._twice(c, 2 * c), self._twice(2 * c, c)
        self.wide = nn.ConvTranspose2d(2 * c, c, 2, 2)

    @staticmethod
    def _twice(i: int, o: int) -> nn.Sequential:
        def once(a: int) -> list[nn.Module]:
            return [nn.Conv2d(a, o, 3, padding=1), nn.BatchNorm2d(o), nn.Softmax(-1)]

        return nn.Sequential(*once(i), *once(o))

    def forward(self, x: Tensor) -> Tensor:
        side = self.down(x)
        return self.up(torch.cat((self.wide(self.deep(F.max_pool2d(side, 2))), side), 1))


class Attention(nn.Module):
    """Causal attention of several heads written out; `kind` is softmax or ReLU."""

    def __init__(self, width: int, heads: int, length: int, kind: str = "softmax") -> None:
        super().__init__()
        self.heads, self.kind = heads, kind
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (y.view(n, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        scores = F.relu(scores) if self.kind == "relu" else F.softmax(scores, -1)
        return self.out((scores @ v).transpose(1, 2).reshape(n, t, c))


class Block(nn.Module):
    """A transformer's layer with GELU by its tanh form."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, length)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y = self.wide(self.second(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.narrow(y)


def tokens(module: nn.Module, n: int, length: int, width: int) -> Made:
    return module, (torch.randn(n, length, width),)


class OverPixels(nn.Module):
    """Attention over the pixels of an image, then a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, heads), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.view(n, c, h * w).permute(2, 0, 1)
        z, _ = self.attention(y, y, y, need_weights=False)
        return self.norm(z + y).permute(1, 2, 0).view(n, c, h, w)


class Clusters(nn.Module):
    """Residuals of features from soft clusters (Arandjelovic et al., 2016)."""

    def __init__(self, width: int, clusters: int) -> None:
        super().__init__()
        self.assign, self.norm = nn.Parameter(torch.randn(width, clusters) / width**0.5), nn.BatchNorm1d(clusters)
        self.centres = nn.Parameter(torch.randn(1, width, clusters) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        share = F.softmax(self.norm(x.reshape(-1, d) @ self.assign), 1).view(n, t, -1)
        total = share.sum(1, keepdim=True) * self.centres
        found = (share.transpose(1, 2) @ x).transpose(1, 2) - total
        return F.normalize(F.normalize(found).reshape(n, -1))


def state_space(n: int, length: int, heads: int, width: int) -> Made:
    """Return chunks of a state space model as products (Dao and Gu, 2024)."""

    def run(_: Any, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        block = 64
        x, a, b, c = (y.unflatten(1, (-1, block)) for y in (x, a, b, c))
        sums = a.sigmoid().neg().permute(0, 3, 1, 2).cumsum(-1)
        mask = torch.ones(block, block, dtype=torch.bool, device=x.device).tril()
        decay = torch.exp((sums[..., :, None] - sums[..., None, :]).masked_fill(~mask, -torch.inf))
        inner = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, decay, x)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(sums[..., -1:] - sums), x)
        outer = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(sums))
        return (inner + outer).flatten(1, 2)

    shapes = ((n, length, heads, width), (n, length, heads), (n, length, heads, 16), (n, length, heads, 16))
    return Program(run), tuple(torch.randn(*s) for s in shapes)


class Recurrent(nn.Module):
    """Layers of an LSTM or GRU with a linear layer over the last step."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        return self.out(y[:, -1])


class Elman(nn.Module):
    """A recurrent network by hand over a few steps."""

    def __init__(self, i: int, width: int) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(i + width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.step.out_features)
        for t in range(x.shape[1]):
            state = torch.tanh(self.step(torch.cat((x[:, t], state), 1)))
        return self.out(state)


def lstm(n: int, length: int, width: int) -> Made:
    return tokens(Recurrent(nn.LSTM(64, width, 2, batch_first=True), width), n, length, 64)


def gru(n: int, length: int, width: int) -> Made:
    return tokens(Recurrent(nn.GRU(64, width, 2, batch_first=True, bidirectional=True), 2 * width), n, length, 64)


CASES: tuple[Case, ...] = (
    case("mlp deep", (256, 1024, 16), (32, 128, 6), mlp),
    case("mlp wide", (128, 8192, 2), (32, 512, 2), mlp),
    case("lenet", (4096,), (16,), lenet),
    case("alexnet", (256, 224), (1, 96), alexnet),
    case("vgg", (32, 224), (1, 48), vgg),
    case("residual network", (64, 224), (1, 64), resnet18),
    case("dense block", (16, 32, 64), (1, 16, 16), lambda n, c, s: images(Dense(c, 32, 6), n, s, c)),
    case("inception", (64, 224), (1, 64), inception),
    case("mobilenet", (64, 224), (1, 64), mobilenet),
    case("inverted residual", (64, 64, 56), (1, 16, 14), lambda n, c, s: images(Inverted(c, 6, 5), n, s, c)),
    case(
        "shuffled",
        (64, 240, 28),
        (1, 24, 14),
        lambda n, c, s: images(nn.Sequential(*[Shuffled(c, 3) for _ in range(3)]), n, s, c),
    ),
    case(
        "fire",
        (64, 128, 56),
        (1, 16, 14),
        lambda n, c, s: images(nn.Sequential(Fire(c, 32, c), Fire(2 * c, 32, c)), n, s, c),
    ),
    case("encoder with softmax", (8, 64, 128), (1, 8, 16), lambda n, c, s: images(Encoder(c), n, s, 8)),
    case("causal attention", (16, 512, 768), (1, 64, 96), lambda n, t, c: tokens(Attention(c, 12, t), n, t, c)),
    case("relu attention", (16, 512, 768), (1, 64, 96), lambda n, t, c: tokens(Attention(c, 12, t, "relu"), n, t, c)),
    case("transformer block", (32, 512, 768), (1, 64, 96), lambda n, t, c: tokens(Block(c, 8, t), n, t, c)),
    case("attention over pixels", (4, 128, 48), (1, 32, 12), lambda n, c, s: images(OverPixels(c, 4), n, s, c)),
    case("clusters", (512, 100, 512), (8, 20, 64), lambda n, t, c: tokens(Clusters(c, 32), n, t, c)),
    case("state space", (16, 512, 8, 64), (1, 128, 2, 16), state_space),
    case("lstm", (64, 256, 256), (2, 16, 32), lstm),
    case("gru", (64, 256, 256), (2, 16, 32), gru),
    case("elman", (128, 32, 256), (4, 8, 32), lambda n, t, c: tokens(Elman(128, c), n, t, 128)),
)
