"""Library calls for a graph's random numbers: its seeds from torch's generator, and numbers computed from a seed.

The calls serve tensors whose size only data decides, where no kernel can run. Kernels produce the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir import philox

Shape = Tensor | Sequence[int]
EXACT_BITS = {torch.bfloat16: 8, torch.float16: 11}  # bits of a uniform number below 1 that do not round up to 1


def philox_seeds(count: int, device: torch.device) -> list[Tensor]:
    """Return `count` seeds, int64 [2] each with the first element used, from the device's default generator.

    A seed has two elements because kernels assume addresses that are multiples of 16 bytes.
    """
    return list(torch.randint(-(2**63), 2**63 - 1, (count, 2), device=device).unbind())


def philox_uniform(seed: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), element k from counter k.

    `shape`: sizes, or a tensor with sizes and strides.
    """
    at = _counters(seed, shape)
    if dtype == torch.float64:
        return _like(((philox.bits(seed[0], at) >> 11) & (2**53 - 1)).double() * 2.0**-53, shape, dtype)
    u = philox.uniform(seed[0], at)
    if dtype in EXACT_BITS:
        u = torch.floor(u * 2.0 ** EXACT_BITS[dtype]) * 2.0 ** -EXACT_BITS[dtype]
    return _like(u, shape, dtype)


def philox_normal(seed: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers (Box and Muller, 1958), up to 5.9 deviations."""
    at = _counters(seed, shape)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, turn = philox.radius(seed[0], at).to(wide), philox.turn(seed[0], at).to(wide)
    return _like(torch.sqrt(torch.log(u + 2.0**-25) * -2.0) * torch.cos(turn * (2 * math.pi)), shape, dtype)


def philox_integers(seed: Tensor, shape: Shape, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return uniform integers in [low, high): the upper half of 32 bits times the range. high - low is at most 2^31."""
    word = philox.bits(seed[0], _counters(seed, shape)) & 0xFFFFFFFF
    return _like(((word * (high - low)) >> 32) + low, shape, dtype)


def _counters(seed: Tensor, shape: Shape) -> Tensor:
    sizes = shape.shape if isinstance(shape, Tensor) else shape
    return torch.arange(math.prod(sizes), device=seed.device).view(sizes)


def _like(x: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(shape, dtype=dtype).copy_(x) if isinstance(shape, Tensor) else x.to(dtype)
