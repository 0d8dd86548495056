"""The arguments of convolutions beside their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Geometry(NamedTuple):
    """The arguments that the operators of convolution take between their tensors and the output mask."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def steps(self, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return stride, padding and dilation with a number for each of `rank` dimensions of a point."""
        stride, padding, dilation = (list(v) * (rank // len(v)) for v in (self.stride, self.padding, self.dilation))
        return stride, padding, dilation
