"""Parameters in the strides that a graph was compiled for, where torch does not guard them (before torch 2.13)."""

from __future__ import annotations

import torch

from .boxed import Args, BoxedCall, Values, boxed
from .successor import follow

Layouts = tuple[tuple[int, tuple[int, ...], bool], ...]  # input, its strides, whether the graph writes it


def with_traced_strides(call: BoxedCall, layouts: Layouts) -> BoxedCall:
    """Return `call` with its inputs copied into the given strides if they differ. Costs 0.1 us per input and call.

    Raise RuntimeError for an input that the graph writes, since the writes would go to the copy.
    """
    if not layouts:
        return call
    compute = call

    @boxed
    def run(args: Args) -> Values:
        for k, strides, written in layouts:
            if args[k].stride() != strides:
                args[k] = _restrided(args[k], strides, k, written)
        return compute(args)

    def use(successor: BoxedCall) -> None:
        nonlocal compute
        compute = successor

    follow(call, use)
    return run


def _restrided(t: torch.Tensor, strides: tuple[int, ...], k: int, written: bool) -> torch.Tensor:
    if all(n <= 1 or a == b for n, a, b in zip(t.size(), t.stride(), strides, strict=True)):
        return t
    if written:
        raise RuntimeError(
            f"input {k} of a compiled graph, a parameter or buffer that it writes, has the strides {t.stride()} and "
            f"had {strides} when it was compiled; call torch._dynamo.reset() after changing the layout of a module"
        )
    with torch.no_grad():
        return torch.empty_strided(t.size(), strides, dtype=t.dtype, device=t.device).copy_(t)
