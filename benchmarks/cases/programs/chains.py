"""A convolution, a product or a normalisation with the three to six operators that follow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.programs.program import Made, case, of, weight

IMAGE = (64, 32, 64, 128), (2, 8, 16, 24)  # images, channels, channels of the result, side
VOLUME = (8, 16, 32, 32), (1, 4, 8, 10)
ROWS = (1024, 4096, 4096), (32, 128, 160)  # rows, features, features of the result


def after_conv(function: Any, **parts: Any) -> Any:
    """Return a maker of a 3x3 convolution and `function(layers, result)`; a part may be a function of the channels."""
    return lambda n, i, o, s: _made(function, nn.Conv2d(i, o, 3), (n, i, s, s), o, parts)


def after_transposed(function: Any, stride: int = 2, **parts: Any) -> Any:
    """Return the same for a transposed convolution of images of half the side."""
    layer = {1: (3, 1, 1), 2: (4, 2, 1)}[stride]
    return lambda n, i, o, s: _made(function, nn.ConvTranspose2d(i, o, *layer), (n, i, s // 2, s // 2), o, parts)


def after_conv3d(function: Any, transposed: bool = False, **parts: Any) -> Any:
    """Return the same for volumes."""

    def make(n: int, i: int, o: int, s: int) -> Made:
        layer = nn.ConvTranspose3d(i, o, 3, 2, 1) if transposed else nn.Conv3d(i, o, 3)
        side = s // 2 if transposed else s
        return _made(function, layer, (n, i, side, side, side), o, parts)

    return make


def after_linear(function: Any, **parts: Any) -> Any:
    """Return the same for a linear layer over rows."""
    return lambda m, k, n: _made(function, nn.Linear(k, n), (m, k), n, parts)


def _made(function: Any, layer: nn.Module, shape: tuple[int, ...], width: int, parts: Any) -> Made:
    made = {name: part(width) if not isinstance(part, nn.Module) else part for name, part in parts.items()}
    return of(lambda m, x: function(m, m.layer(x)), shape, layer=layer, **made)


def channel_bias(dims: int) -> Any:
    return lambda c: weight(c, *[1] * dims)


CONVOLUTIONS: tuple[Case, ...] = (
    case("conv, relu, bias", *IMAGE, after_conv(lambda m, y: F.relu(y) + m.bias, bias=channel_bias(2))),
    case(
        "conv, min, bias, scale",
        *IMAGE,
        after_conv(lambda m, y: (torch.clamp(y, max=0.5) + m.bias) * 2.0, bias=channel_bias(2)),
    ),
    case("conv, mish, mish", *IMAGE, after_conv(lambda _, y: F.mish(F.mish(y)))),
    case(
        "conv, bias, scale, sigmoid, group norm",
        *IMAGE,
        after_conv(
            lambda m, y: m.norm(torch.sigmoid((y + m.bias) * m.scale)),
            bias=channel_bias(2),
            scale=channel_bias(2),
            norm=lambda c: nn.GroupNorm(8, c),
        ),
    ),
    case("conv, instance norm, divide", *IMAGE, after_conv(lambda m, y: m.norm(y) / 2.0, norm=nn.InstanceNorm2d)),
    case("conv, batch norm, scale", *IMAGE, after_conv(lambda m, y: m.norm(y) * 2.0, norm=nn.BatchNorm2d)),
    case(
        "conv, tanh, batch norm of the product",
        *IMAGE,
        after_conv(lambda m, y: m.norm(torch.tanh(F.softplus(y)) * y), norm=nn.BatchNorm2d),
    ),
    case(
        "conv, group norm, tanh, hardswish, logsumexp",
        *IMAGE,
        after_conv(
            lambda m, y: torch.logsumexp(y + F.hardswish(torch.tanh(m.norm(y))), 1, keepdim=True),
            norm=lambda c: nn.GroupNorm(16, c),
        ),
    ),
    case("conv, hardswish, pool, mish", *IMAGE, after_conv(lambda _, y: F.mish(F.max_pool2d(F.hardswish(y - 0.5), 2)))),
    case(
        "conv, minimum over channels, tanh, tanh",
        *IMAGE,
        after_conv(lambda _, y: torch.tanh(torch.tanh(torch.amin(y, 1, keepdim=True)))),
    ),
    case("conv, pool, sigmoid, sum", *IMAGE, after_conv(lambda _, y: torch.sigmoid(F.avg_pool2d(y, 4)).sum((1, 2, 3)))),
    case(
        "conv, gelu, mean", *IMAGE, after_conv(lambda _, y: F.adaptive_avg_pool2d(F.gelu(y), 1).squeeze(-1).squeeze(-1))
    ),
    case(
        "conv, subtract, tanh, subtract, pool",
        *IMAGE,
        after_conv(lambda _, y: F.avg_pool2d(torch.tanh(y - 0.5) - 0.2, 2)),
    ),
    case(
        "conv, group norm, scale, pool, clamp",
        *IMAGE,
        after_conv(
            lambda m, y: torch.clamp(F.max_pool2d(m.norm(y) * m.scale, 4), 0, 1),
            norm=lambda c: nn.GroupNorm(16, c),
            scale=channel_bias(2),
        ),
    ),
    case("conv, softmax over channels", *IMAGE, after_conv(lambda _, y: torch.softmax(y, 1))),
    case(
        "depthwise, hardswish, relu",
        (64, 128, 128),
        (2, 16, 24),
        lambda n, c, s: of(
            lambda m, x: F.relu(F.hardswish(m.conv(x))), (n, c, s, s), conv=nn.Conv2d(c, c, 3, groups=c)
        ),
    ),
    case(
        "depthwise, pointwise, batch norm",
        (64, 128, 64),
        (2, 16, 24),
        lambda n, c, s: of(
            lambda m, x: F.relu(m.norm(m.point(m.conv(x)))),
            (n, c, s, s),
            conv=nn.Conv2d(c, c, 5, padding=2, groups=c),
            point=nn.Conv2d(c, c, 1),
            norm=nn.BatchNorm2d(c),
        ),
    ),
    case(
        "dilated conv, leaky relu",
        *IMAGE,
        lambda n, i, o, s: of(
            lambda m, x: F.leaky_relu(m.conv(x)), (n, i, s, s), conv=nn.Conv2d(i, o, 3, dilation=3, padding=2)
        ),
    ),
    case(
        "conv 1-d, gelu, layer norm",
        (32, 128, 4096),
        (2, 16, 256),
        lambda n, c, s: of(
            lambda m, x: m.norm(F.gelu(m.conv(x)).transpose(1, 2)),
            (n, c, s),
            conv=nn.Conv1d(c, c, 7, padding=3),
            norm=nn.LayerNorm(c),
        ),
    ),
)

TRANSPOSED: tuple[Case, ...] = (
    case(
        "transposed conv, bias, tanh",
        *IMAGE,
        after_transposed(lambda m, y: torch.tanh(y - m.bias), bias=channel_bias(2)),
    ),
    case(
        "transposed conv, softmax, bias, scale, sigmoid",
        *IMAGE,
        after_transposed(lambda m, y: torch.sigmoid((torch.softmax(y, 1) + m.bias) * 2.0), bias=channel_bias(2)),
    ),
    case(
        "transposed conv, add, min, gelu, multiply",
        *IMAGE,
        after_transposed(lambda _, y: F.gelu(torch.clamp(y + 0.5, max=0.0)) * 2.0),
    ),
    case(
        "transposed conv, mean, bias, logsumexp, sum",
        *IMAGE,
        after_transposed(
            lambda m, y: torch.logsumexp(y.mean((2, 3), keepdim=True) + m.bias, 1, keepdim=True).sum((2, 3)) * 10.0,
            1,
            bias=channel_bias(2),
        ),
    ),
    case(
        "transposed conv, pool, hardtanh, mean, tanh",
        *IMAGE,
        after_transposed(lambda _, y: torch.tanh(F.hardtanh(F.max_pool2d(y, 2)).mean((2, 3), keepdim=True))),
    ),
    case(
        "transposed conv, group norm, silu",
        *IMAGE,
        after_transposed(lambda m, y: m.norm(F.silu(y)), norm=lambda c: nn.GroupNorm(4, c)),
    ),
    case(
        "transposed conv, minimum, sum, gelu, bias",
        *IMAGE,
        after_transposed(
            lambda m, y: F.gelu(torch.amin(y, 1, keepdim=True).sum(2, keepdim=True)) + m.bias,
            bias=lambda _: weight(1, 1, 1),
        ),
    ),
    case(
        "transposed conv 3-d, sum, residual",
        *VOLUME,
        after_conv3d(lambda m, y: ((y + m.bias) + y) * y + y, True, bias=channel_bias(3)),
    ),
    case(
        "transposed conv 3-d, layer norm, pool, gelu",
        *VOLUME,
        after_conv3d(
            lambda m, y: F.gelu(F.avg_pool3d(m.norm((y + m.bias).transpose(1, 4)).transpose(1, 4), 2)),
            True,
            bias=channel_bias(3),
            norm=nn.LayerNorm,
        ),
    ),
    case(
        "transposed conv 3-d, batch norm, mean",
        *VOLUME,
        after_conv3d(lambda m, y: (z := m.norm(y)) - z.mean((2, 3, 4), keepdim=True), True, norm=nn.BatchNorm3d),
    ),
    case(
        "transposed conv 3-d, pool, softmax, swish, max",
        *VOLUME,
        after_conv3d(
            lambda m, y: (z := torch.softmax(F.max_pool3d(y, 2), 1) - m.bias).mul(torch.sigmoid(z)).amax(1),
            True,
            bias=channel_bias(3),
        ),
    ),
)

VOLUMES: tuple[Case, ...] = (
    case(
        "conv 3-d, softmax, pool, pool",
        *VOLUME,
        after_conv3d(lambda _, y: F.max_pool3d(F.max_pool3d(torch.softmax(y, 1), 2), 2)),
    ),
    case(
        "conv 3-d, divide, pool, mean, bias, sum",
        *VOLUME,
        after_conv3d(
            lambda m, y: (F.adaptive_avg_pool3d(F.max_pool3d(y / 2.0, 2), 1) + m.bias).sum(1), bias=channel_bias(3)
        ),
    ),
    case(
        "conv 3-d, relu, leaky relu, gelu, sigmoid, bias",
        *VOLUME,
        after_conv3d(lambda m, y: torch.sigmoid(F.gelu(F.leaky_relu(F.relu(y)))) + m.bias, bias=channel_bias(3)),
    ),
    case(
        "conv 3-d, group norm, minimum, clamp, dropout",
        *VOLUME,
        after_conv3d(
            lambda m, y: torch.clamp(torch.minimum(m.norm(y), m.bias), 0.0, 1.0),
            norm=lambda c: nn.GroupNorm(8, c),
            bias=channel_bias(3),
        ),
    ),
    case(
        "conv 3-d, group norm, mean",
        *VOLUME,
        after_conv3d(lambda m, y: m.norm(y).mean((1, 2, 3, 4)), norm=lambda c: nn.GroupNorm(8, c)),
    ),
    case(
        "conv 3-d, pool, logsumexp, relu",
        *VOLUME,
        after_conv3d(lambda _, y: F.relu(torch.logsumexp(F.max_pool3d(y, 2), 1, keepdim=True))),
    ),
    case(
        "conv 3-d, scale, tanh, scale, sigmoid",
        *VOLUME,
        after_conv3d(
            lambda m, y: torch.sigmoid(torch.tanh(y * m.scale) * m.bias), scale=channel_bias(3), bias=channel_bias(3)
        ),
    ),
    case(
        "conv 3-d, minimum over depth, softmax", *VOLUME, after_conv3d(lambda _, y: torch.softmax(torch.amin(y, 2), 1))
    ),
    case(
        "conv 3-d, instance norm, multiply, clamp, max",
        *VOLUME,
        after_conv3d(
            lambda m, y: (torch.clamp(m.norm(y * m.scale), -1, 1) * m.scale).amax(1),
            norm=nn.InstanceNorm3d,
            scale=channel_bias(3),
        ),
    ),
)

PRODUCTS: tuple[Case, ...] = (
    case("linear, relu, divide", *ROWS, after_linear(lambda _, y: F.relu(y) / 2.0)),
    case("linear, subtract, multiply, relu", *ROWS, after_linear(lambda _, y: F.relu((y - 0.1) * 1.5))),
    case(
        "linear, swish, bias, group norm",
        *ROWS,
        after_linear(lambda m, y: m.norm(F.silu(y) + m.bias), bias=channel_bias(0), norm=lambda c: nn.GroupNorm(32, c)),
    ),
    case(
        "linear, group norm, hardtanh",
        *ROWS,
        after_linear(lambda m, y: F.hardtanh(m.norm(y), -2, 2), norm=lambda c: nn.GroupNorm(16, c)),
    ),
    case(
        "linear, group norm, minimum, bias",
        *ROWS,
        after_linear(
            lambda m, y: torch.amin(m.norm(y), 1, keepdim=True) + m.bias,
            bias=channel_bias(0),
            norm=lambda c: nn.GroupNorm(32, c),
        ),
    ),
    case(
        "linear, batch norm, gelu, relu",
        *ROWS,
        after_linear(lambda m, y: F.relu(F.gelu(m.norm(y))), norm=nn.BatchNorm1d),
    ),
    case(
        "linear, batch norm, scale, softmax",
        *ROWS,
        after_linear(
            lambda m, y: torch.softmax(m.scale * m.norm(y), 1), norm=nn.BatchNorm1d, scale=lambda _: weight(1)
        ),
    ),
    case(
        "linear, scale, residual, clamp, logsumexp, mish",
        *ROWS,
        after_linear(
            lambda _, y: (z := torch.logsumexp(torch.clamp(y * 2.0 + y * 2.0, -10, 10), 1, keepdim=True)) * F.mish(z)
        ),
    ),
    case("linear, sigmoid, sum", *ROWS, after_linear(lambda _, y: torch.sigmoid(y).sum(1, keepdim=True))),
    case(
        "linear, max pool, sum, scale",
        *ROWS,
        after_linear(lambda _, y: F.max_pool1d(y.unsqueeze(1), 2).squeeze(1).sum(1) * 0.5),
    ),
    case(
        "linear, average pool, gelu, scale, max",
        *ROWS,
        after_linear(lambda _, y: (F.gelu(F.avg_pool1d(y.unsqueeze(1), 16).squeeze(1)) * 2.0).amax(1)),
    ),
    case(
        "linear, instance norm, residual, multiply",
        *ROWS,
        after_linear(lambda _, y: (z := F.instance_norm(y[:, None, None]).squeeze(1).squeeze(1) + y) * z),
    ),
    case(
        "linear, swish, divide, clamp, tanh, clamp",
        *ROWS,
        after_linear(lambda _, y: torch.clamp(torch.tanh(torch.clamp(F.silu(y) / 2.0, -1.0, 1.0)), -1.0, 1.0)),
    ),
    case("linear, mish, mish", *ROWS, after_linear(lambda _, y: F.mish(F.mish(y)))),
    case(
        "linear, scale, batch norm",
        *ROWS,
        after_linear(lambda m, y: m.norm(y * m.scale), scale=channel_bias(0), norm=nn.BatchNorm1d),
    ),
    case("linear, gelu, softmax", *ROWS, after_linear(lambda _, y: torch.softmax(F.gelu(y), 1))),
    case(
        "linear, dropout, softmax", *ROWS, after_linear(lambda m, y: torch.softmax(m.drop(y), 1), drop=nn.Dropout(0.2))
    ),
    case("linear, sigmoid, scale, residual", *ROWS, after_linear(lambda _, y: torch.sigmoid(y) * 2.0 + y)),
    case(
        "linear, logsumexp, leaky relu, gelu",
        *ROWS,
        after_linear(lambda _, y: F.gelu(F.gelu(F.leaky_relu(F.leaky_relu(torch.logsumexp(y, 1, keepdim=True)))))),
    ),
    case(
        "linear, group norm, swish, multiply, swish",
        *ROWS,
        after_linear(
            lambda m, y: F.silu(F.silu(m.norm(y)) * m.scale), norm=lambda c: nn.GroupNorm(16, c), scale=channel_bias(0)
        ),
    ),
)

CASES = (*CONVOLUTIONS, *TRANSPOSED, *VOLUMES, *PRODUCTS)
