"""Parameters in the strides that a graph was compiled for, where torch does not see to that (before torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[list[Any]], Sequence[Any]]
Layouts = tuple[tuple[int, tuple[int, ...], bool], ...]  # input, its strides, whether the graph writes it


def kept(call: Call, layouts: Layouts) -> Call:
    """`call` on inputs in the strides given: others are copied. 0.1 us an input and call where they are right.

    Raises RuntimeError for an input that the graph writes, whose copy would get what is meant for it.
    """
    if not layouts:
        return call

    def run(args: list[Any]) -> Sequence[Any]:
        for k, strides, written in layouts:
            if args[k].stride() != strides:
                args[k] = _laid_out(args[k], strides, k, written)
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _laid_out(t: torch.Tensor, strides: tuple[int, ...], k: int, written: bool) -> torch.Tensor:
    if all(n <= 1 or a == b for n, a, b in zip(t.size(), t.stride(), strides, strict=True)):
        return t
    if written:
        raise RuntimeError(
            f"input {k} of a compiled graph, a parameter or buffer that it writes, has the strides {t.stride()} and "
            f"had {strides} when it was compiled; call torch._dynamo.reset() after changing the layout of a module"
        )
    with torch.no_grad():
        return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)
