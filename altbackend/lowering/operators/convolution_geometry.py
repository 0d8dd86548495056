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

    @staticmethod
    def of_each(v: Sequence[int], rank: int) -> list[int]:
        """Return an argument for each of `rank` dimensions of a point."""
        return list(v) * (rank // len(v))
