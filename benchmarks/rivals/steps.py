"""The steps of a drawn program: layers and operators, each with its parameters as integers.

A step is written `name 1 2 3` in the text of a program. `draw` chooses parameters for a tensor's shape. It returns None
where the step does not apply. `build` returns the function of the tensor, a module where it has weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Parameters = tuple[int, ...]
Function = Callable[[Tensor], Tensor]
MIDDLE = 1  # the dimension of channels


class Family(Enum):
    """The place of a step in a drawn program: anchors begin one, the others follow."""

    ANCHOR = "anchor"
    POINTWISE = "pointwise"
    NORMALISATION = "normalisation"
    REDUCTION = "reduction"
    MOVEMENT = "movement"
    LOSS = "loss"


@dataclass(frozen=True)
class Step:
    """One kind of step."""

    family: Family
    draw: Callable[[random.Random, Shape], Parameters | None]
    build: Callable[[Parameters, Shape], Function]


class Weighted(nn.Module):
    """`function(x, weight)` with a weight of its own."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], shape: Shape, scale: float = 1.0) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape) * scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Branches(nn.Module):
    """The results of several functions of one tensor, concatenated over channels."""

    def __init__(self, *branches: Function) -> None:
        super().__init__()
        self.branches = branches
        self.modules_of_branches = nn.ModuleList([b for b in branches if isinstance(b, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], MIDDLE)


class Residual(nn.Module):
    """x + layer(x)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layer(x)
        return result


class Targets(nn.Module):
    """A loss of the tensor and of constant targets."""

    targets: Tensor

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], targets: Tensor) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("targets", targets)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.targets)


# --- anchors ---------------------------------------------------------------------------------------------------------

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHANNELS = WIDTHS[:10]


def _spatial(shape: Shape) -> int:
    """Return the number of spatial dimensions, 0 where there are none."""
    return len(shape) - 2 if 3 <= len(shape) <= 5 else 0


def _draw_conv(rng: random.Random, shape: Shape) -> Parameters | None:
    if not _spatial(shape):
        return None
    kernel = rng.choice((1, 3, 3, 3, 5, 7))
    return rng.choice(CHANNELS), kernel, rng.choice((1, 1, 1, 2)), rng.choice((0, kernel // 2))


def _conv(p: Parameters, shape: Shape) -> Function:
    channels, kernel, stride, padding = p
    return CONVOLUTIONS[_spatial(shape)](shape[1], channels, kernel, stride, padding)


def _draw_groups(rng: random.Random, shape: Shape) -> Parameters | None:
    groups = [g for g in (2, 4, 8, 32) if _spatial(shape) and shape[1] % g == 0]
    return (rng.choice(groups), rng.choice((3, 5))) if groups else None


def _grouped(p: Parameters, shape: Shape) -> Function:
    groups, kernel = p
    return CONVOLUTIONS[_spatial(shape)](shape[1], shape[1], kernel, padding=kernel // 2, groups=groups)


def _draw_depthwise(rng: random.Random, shape: Shape) -> Parameters | None:
    return (rng.choice((3, 5, 7)), rng.choice((1, 2))) if _spatial(shape) else None


def _depthwise(p: Parameters, shape: Shape) -> Function:
    kernel, stride = p
    layer = CONVOLUTIONS[_spatial(shape)]
    return layer(shape[1], shape[1], kernel, stride, kernel // 2, groups=shape[1])


def _draw_transposed(rng: random.Random, shape: Shape) -> Parameters | None:
    return (rng.choice(CHANNELS), rng.choice((2, 3, 4)), 2, rng.choice((0, 1))) if _spatial(shape) else None


def _transposed(p: Parameters, shape: Shape) -> Function:
    channels, kernel, stride, padding = p
    return TRANSPOSED[_spatial(shape)](shape[1], channels, kernel, stride, padding)


def _draw_width(rng: random.Random, shape: Shape) -> Parameters | None:
    width = rng.choice(WIDTHS) + (rng.randrange(7) if rng.random() < 0.2 else 0)
    return (width, rng.randrange(2)) if len(shape) in (2, 3) else None


def _linear(p: Parameters, shape: Shape) -> Function:
    return nn.Linear(shape[-1], p[0], bias=bool(p[1]))


def _matmul(p: Parameters, shape: Shape) -> Function:
    return Weighted(torch.matmul, (shape[-1], p[0]), shape[-1] ** -0.5)


def _residual(p: Parameters, shape: Shape) -> Function:
    return Residual(nn.Conv2d(shape[1], shape[1], 3, padding=1))


def _inception(p: Parameters, shape: Shape) -> Function:
    c, width = shape[1], p[0]
    pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(c, width, 1))
    return Branches(nn.Conv2d(c, width, 1), nn.Conv2d(c, width, 3, padding=1), pool)


def _attention(p: Parameters, shape: Shape) -> Function:
    heads, causal = p

    def attend(x: Tensor) -> Tensor:
        n, t, d = x.shape
        q = x.view(n, t, heads, d // heads).transpose(1, 2)
        scores = (q @ q.transpose(-2, -1)) * (d // heads) ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(t, t, device=x.device).triu(1).bool(), float("-inf"))
        return (scores.softmax(-1) @ q).transpose(1, 2).reshape(n, t, d)

    return attend


def _draw_heads(rng: random.Random, shape: Shape) -> Parameters | None:
    heads = [h for h in (2, 4, 8) if len(shape) == 3 and shape[2] % (8 * h) == 0]
    return (rng.choice(heads), rng.randrange(2)) if heads else None


def _embedding(p: Parameters, shape: Shape) -> Function:
    width, rows = p
    return Weighted(lambda x, w: F.embedding((x.abs() * 7).long() % rows, w), (rows, width))


# --- pointwise -------------------------------------------------------------------------------------------------------

ACTIVATIONS: tuple[Function, ...] = (
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    F.gelu,
    F.silu,
    F.hardswish,
    F.mish,
    F.elu,
    F.softplus,
    F.leaky_relu,
    F.hardtanh,
    F.softsign,
    F.hardsigmoid,
    F.selu,
    torch.exp,
)


def _per_channel(shape: Shape) -> Shape:
    """Return the shape of one number a channel, or a column where there are no channels."""
    return (shape[1], *(1,) * (len(shape) - 2)) if len(shape) > 3 else shape[-1:]


def _bias(p: Parameters, shape: Shape) -> Function:
    return Weighted(torch.add, _per_channel(shape))


def _scale(p: Parameters, shape: Shape) -> Function:
    return Weighted(torch.mul, _per_channel(shape))


def _arithmetic(p: Parameters, shape: Shape) -> Function:
    kind, number = p
    c = number / 4
    table: tuple[Function, ...] = (
        lambda x: x * c,
        lambda x: x + c,
        lambda x: x / (1 + c),
        lambda x: x.clamp(-c, c),
        lambda x: x - x.abs().clamp(max=c),
        lambda x: torch.where(x > c, x, -x),
        lambda x: x * torch.sigmoid(x * c),
        lambda x: (x * x + c).rsqrt(),
    )
    return table[kind]


def _gated(p: Parameters, shape: Shape) -> Function:
    def gate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, p[0])
        return a * ACTIVATIONS[p[1]](b)

    return gate


# --- normalisations --------------------------------------------------------------------------------------------------

BATCH_NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _draw_group_norm(rng: random.Random, shape: Shape) -> Parameters | None:
    groups = [g for g in (1, 2, 4, 8, 16, 32) if len(shape) > 2 and shape[1] % g == 0]
    return (rng.choice(groups),) if groups else None


def _rms(p: Parameters, shape: Shape) -> Function:
    dim = p[0]
    return lambda x: x * (x.square().mean(dim, keepdim=True) + 1e-5).rsqrt()


def _l_norm(p: Parameters, shape: Shape) -> Function:
    dim, order = p
    return lambda x: F.normalize(x, p=order, dim=dim)


# --- reductions ------------------------------------------------------------------------------------------------------

REDUCTIONS: tuple[Callable[[Tensor, list[int]], Tensor], ...] = (
    lambda x, dims: x.sum(dims),
    lambda x, dims: x.mean(dims),
    lambda x, dims: x.amax(dims),
    lambda x, dims: x.amin(dims),
    lambda x, dims: x.var(dims),
    lambda x, dims: x.norm(dim=dims),
    lambda x, dims: x.logsumexp(dims),
    lambda x, dims: x.abs().sum(dims, keepdim=True),
    lambda x, dims: x.mean(dims, keepdim=True),
    lambda x, dims: x.logsumexp(dims, keepdim=True),
)


def _draw_dims(rng: random.Random, shape: Shape) -> Parameters | None:
    dims = (
        sorted(rng.sample(range(len(shape)), rng.choice((1, 1, 1, 2, 2, 3)))) if len(shape) >= 3 else [len(shape) - 1]
    )
    return rng.randrange(len(REDUCTIONS)), *dims


def _reduce(p: Parameters, shape: Shape) -> Function:
    return lambda x: REDUCTIONS[p[0]](x, list(p[1:]))


def _draw_dim(rng: random.Random, shape: Shape) -> Parameters | None:
    return (rng.choice([d for d in range(len(shape)) if d] or [0]),)


def _pool(p: Parameters, shape: Shape) -> Function:
    kind, kernel, stride, padding = p
    d = _spatial(shape)
    layers = {0: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), 1: (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)}
    return layers[kind][d - 1](kernel, stride, padding)


def _draw_pool(rng: random.Random, shape: Shape) -> Parameters | None:
    if not _spatial(shape) or min(shape[2:]) < 4:
        return None
    kernel = rng.choice((2, 3))
    return rng.randrange(2), kernel, rng.choice((1, 2)), rng.choice((0, kernel // 2))


def _adaptive(p: Parameters, shape: Shape) -> Function:
    layer = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[_spatial(shape)]
    pool: nn.Module = layer(p[0])
    return pool


# --- movement --------------------------------------------------------------------------------------------------------


def _draw_permutation(rng: random.Random, shape: Shape) -> Parameters | None:
    dims = list(range(len(shape)))
    rng.shuffle(dims)
    return tuple(dims) if len(shape) > 1 else None


def _upsample(p: Parameters, shape: Shape) -> Function:
    mode = ("nearest", "bilinear")[p[0]]
    return lambda x: F.interpolate(x, scale_factor=2.0, mode=mode)


def _cat(p: Parameters, shape: Shape) -> Function:
    return lambda x: torch.cat([x, torch.relu(x), x * 2], p[0])


def _shuffle(p: Parameters, shape: Shape) -> Function:
    groups = p[0]
    return lambda x: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


# --- losses ----------------------------------------------------------------------------------------------------------


def _classes(p: Parameters, shape: Shape) -> Function:
    rows = (shape[0], *shape[2:])
    return Targets(F.cross_entropy, torch.arange(torch.Size(rows).numel()).reshape(rows) % shape[1])


ELEMENT_LOSSES = (F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.binary_cross_entropy_with_logits, F.huber_loss)


def _element_loss(p: Parameters, shape: Shape) -> Function:
    return Targets(ELEMENT_LOSSES[p[0]], torch.rand(shape))


def _divergence(p: Parameters, shape: Shape) -> Function:
    targets = torch.rand(shape).softmax(-1)
    return Targets(lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"), targets)


# --- the table -------------------------------------------------------------------------------------------------------


def _rank(*ranks: int) -> Callable[[random.Random, Shape], Parameters | None]:
    return lambda rng, shape: () if len(shape) in ranks else None


A, P, N, R, M, L = Family
STEPS: dict[str, Step] = {
    "conv": Step(A, _draw_conv, _conv),
    "grouped": Step(A, _draw_groups, _grouped),
    "depthwise": Step(A, _draw_depthwise, _depthwise),
    "transposed": Step(A, _draw_transposed, _transposed),
    "residual": Step(A, _rank(4), _residual),
    "inception": Step(A, lambda rng, s: (rng.choice(CHANNELS[:6]),) if len(s) == 4 else None, _inception),
    "linear": Step(A, _draw_width, _linear),
    "matmul": Step(A, _draw_width, _matmul),
    "gram": Step(A, _rank(3), lambda p, s: lambda x: x @ x.transpose(-2, -1)),
    "einsum": Step(A, _rank(3), lambda p, s: lambda x: torch.einsum("btd,bte->bde", x, x)),
    "attention": Step(A, _draw_heads, _attention),
    "embedding": Step(
        A, lambda rng, s: (rng.choice(WIDTHS), rng.choice((100, 5000))) if len(s) <= 2 else None, _embedding
    ),
    "activation": Step(P, lambda rng, s: (rng.randrange(len(ACTIVATIONS)),), lambda p, s: ACTIVATIONS[p[0]]),
    "bias": Step(P, _rank(2, 3, 4, 5), _bias),
    "scale": Step(P, _rank(2, 3, 4, 5), _scale),
    "arithmetic": Step(P, lambda rng, s: (rng.randrange(8), rng.randrange(1, 9)), _arithmetic),
    "gated": Step(
        P, lambda rng, s: (MIDDLE, rng.randrange(5)) if len(s) > 1 and s[1] % 2 == 0 and s[1] > 1 else None, _gated
    ),
    "batch_norm": Step(N, _rank(2, 3, 4, 5), lambda p, s: BATCH_NORMS[_spatial(s)](s[1])),
    "group_norm": Step(N, _draw_group_norm, lambda p, s: nn.GroupNorm(p[0], s[1])),
    "instance_norm": Step(N, _rank(3, 4), lambda p, s: F.instance_norm),
    "layer_norm": Step(N, _rank(2, 3), lambda p, s: nn.LayerNorm(s[-1])),
    "rms_norm": Step(N, _draw_dim, _rms),
    "normalize": Step(N, lambda rng, s: (rng.randrange(len(s)), rng.choice((1, 2))) if s else None, _l_norm),
    "softmax": Step(N, _draw_dim, lambda p, s: lambda x: x.softmax(p[0])),
    "log_softmax": Step(N, _draw_dim, lambda p, s: lambda x: x.log_softmax(p[0])),
    "reduce": Step(R, _draw_dims, _reduce),
    "argmax": Step(R, _draw_dim, lambda p, s: lambda x: x.argmax(p[0])),
    "argmin": Step(R, _draw_dim, lambda p, s: lambda x: x.argmin(p[0])),
    "max": Step(R, _draw_dim, lambda p, s: lambda x: x.max(p[0]).values),
    "pool": Step(R, _draw_pool, _pool),
    "adaptive": Step(R, lambda rng, s: (rng.choice((1, 1, 3, 7)),) if _spatial(s) else None, _adaptive),
    "cumsum": Step(R, _draw_dim, lambda p, s: lambda x: x.cumsum(p[0])),
    "permute": Step(M, _draw_permutation, lambda p, s: lambda x: x.permute(p).contiguous()),
    "upsample": Step(M, lambda rng, s: (rng.randrange(2),) if len(s) == 4 else None, _upsample),
    "cat": Step(M, _draw_dim, _cat),
    "shuffle": Step(M, lambda rng, s: (4,) if len(s) == 4 and s[1] % 4 == 0 else None, _shuffle),
    "flip": Step(M, _draw_dim, lambda p, s: lambda x: x.flip(p[0]) + x),
    "roll": Step(M, _draw_dim, lambda p, s: lambda x: x.roll(1, p[0]) - x),
    "pad": Step(M, _rank(4), lambda p, s: lambda x: F.pad(x, (1, 2, 1, 0))),
    "flatten": Step(M, _rank(3, 4, 5), lambda p, s: lambda x: x.flatten(1)),
    "cross_entropy": Step(L, lambda rng, s: () if len(s) >= 2 and s[1] > 1 else None, _classes),
    "element_loss": Step(L, lambda rng, s: (rng.randrange(len(ELEMENT_LOSSES)),), _element_loss),
    "divergence": Step(L, _rank(2, 3), _divergence),
}
