"""Gradients of images that a nearest-neighbour upsampling has enlarged by whole factors, as sums over windows.

    index_put(zeros, [.., y // f, x // g], grad, accumulate=True)[.., i, j]
        = sum of grad[.., f i + k, g j + l] over k < f, l < g

torch writes such an upsampling as a gather, whose gradient is a scatter. Positions in a scatter count as data, so that
its kernel adds element by element, in the order of the scattered dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..compat import torch_api
from .attention_mask import known_value
from .context import Context
from .graph import aten, insert, is_call, propagate, replace, val

_SCATTERS = (aten._unsafe_index_put.default, aten.index_put.default)
_POSITIONS = (torch.int32, torch.int64)


def run(joint: GraphModule, ctx: Context) -> int:
    """Replace the scatters of such gradients; return their number."""
    values: dict[Node, object] = {}
    sums: list[Node] = []
    for n in [n for target in _SCATTERS for n in joint.graph.find_nodes(op="call_function", target=target)]:
        if (factors := _factors(n, values)) is not None:
            sums.append(_summed(joint, n, factors))
            replace(n, sums[-1])
    propagate(joint, sums)
    return len(sums)


def _factors(n: Node, values: dict[Node, object]) -> list[int] | None:
    """Return how many elements of each dimension a sum adds up; None for a scatter that is no such gradient."""
    zeros, indices, grad, *accumulates = _arguments(n)
    fake, enlarged = val(n), val(grad)
    if not is_call(zeros, aten.full.default) or zeros.args[1] != 0 or accumulates != [True]:
        return None
    sizes = (*fake.shape, *enlarged.shape)
    if not all(isinstance(s, int) for s in sizes) or 0 in sizes:
        return None
    if enlarged.dtype != fake.dtype or not fake.dtype.is_floating_point:  # sums of integers have 64 bits
        return None
    leading = fake.dim() - sum(i is not None for i in indices)
    if enlarged.dim() != fake.dim() or len(indices) != fake.dim() or any(i is not None for i in indices[:leading]):
        return None
    if enlarged.shape[:leading] != fake.shape[:leading]:
        return None
    factors = [1] * leading
    for dim in range(leading, fake.dim()):
        factor, rest = divmod(enlarged.shape[dim], fake.shape[dim])
        shape = [enlarged.shape[dim], *[1] * (fake.dim() - 1 - dim)]
        if rest or not _counts(known_value(indices[dim], values), shape, factor):
            return None
        factors.append(factor)
    return factors if max(factors) > 1 else None


def _counts(positions: object, shape: Sequence[int], factor: int) -> bool:
    """Return whether positions of `shape` count up from 0 by one for each `factor` of them."""
    if not isinstance(positions, torch.Tensor) or positions.dtype not in _POSITIONS or positions.numel() != shape[0]:
        return False
    extra = positions.dim() - len(shape)
    if list(positions.shape) != [*[1] * extra, *shape]:
        return False
    with torch_api.real_tensors():
        numbers = positions.flatten().tolist()
    return numbers == [k // factor for k in range(shape[0])]


def _arguments(n: Node) -> tuple[Any, ...]:
    return n.args


def _summed(joint: GraphModule, n: Node, factors: Sequence[int]) -> Node:
    """Insert the sum of windows in front of the scatter `n` and return it."""
    grad, sizes = _arguments(n)[2], val(n).shape

    def add(target: Callable[..., object], *args: Argument) -> Node:
        return insert(joint.graph, n, target, args)

    split: list[int] = []
    dims: list[int] = []
    for size, factor in zip(sizes, factors, strict=True):
        split.append(size)
        if factor > 1:
            dims.append(len(split))
            split.append(factor)
    return add(aten.sum.dim_IntList, add(aten.view.default, grad, split), dims)
