"""The parts of a tensor that its readers take along one dimension."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

_OUTPUTS = -1  # in place of a dimension: the parts of a split


@dataclass(frozen=True)
class Part:
    """The elements from `first` to before `end` along a dimension."""

    dim: int
    first: int
    end: int

    def overlaps(self, other: Part) -> bool:
        """Return whether an element may be in both parts."""
        return self.dim != other.dim or (self.first < other.end and other.first < self.end)


def part_taken(n: Node) -> Part | None:
    """Return the part of its first argument that a slice, a selection or an output of a split takes; None for others.

    Only parts between static limits are known.
    """
    if n.target is operator.getitem and isinstance(n.args[1], int):
        return Part(_OUTPUTS, n.args[1], n.args[1] + 1)
    if n.target not in (torch.ops.aten.slice.Tensor, torch.ops.aten.select.int) or n.kwargs:
        return None
    source, dim, *limits = n.args if len(n.args) > 1 else (*n.args, 0)
    shape = source.meta["val"].shape if isinstance(source, Node) else ()
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape) or not isinstance(size := shape[dim], int):
        return None
    if n.target is torch.ops.aten.select.int:
        (index,) = limits
        return Part(dim % len(shape), index % size, index % size + 1) if isinstance(index, int) and size else None
    first, end, *_ = (*limits, None, None)
    if not all(x is None or isinstance(x, int) for x in (first, end)):
        return None
    begin, stop, _ = slice(first, end).indices(size)
    return Part(dim % len(shape), begin, stop)


def most_of_an_element(parts: Sequence[tuple[Part, int]]) -> int:
    """Return the most readers of an element, given those of each part."""
    return max((sum(count for other, count in parts if part.overlaps(other)) for part, _ in parts), default=0)
