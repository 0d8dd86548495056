"""Gradients as a compiled backward takes them. No guard is asked for what autograd hands to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[list[Any]], Sequence[Any]]
_is_batched: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in memory as it reads: without torch's negative or conjugate bit, and not a zero without memory."""
    if gradient.is_neg() or gradient.is_conj() or gradient._is_zerotensor():
        out = torch.empty_strided(gradient.size(), gradient.stride(), dtype=gradient.dtype, device=gradient.device)
        return out.copy_(gradient)
    return gradient


def taking_any(backward: Call, first: int, end: int, negative: frozenset[int] = frozenset()) -> Call:
    """A compiled backward that takes gradients, its inputs from `first` to before `end`, as they may come.

    `negative`: those that were traced with torch's negative bit, as the results were that they belong to.
    Costs a third of a microsecond a gradient. Of several at once (`is_grads_batched`), each is computed by itself.
    """

    def run(args: list[Any]) -> Sequence[Any]:
        for k in range(first, end):
            g = args[k]
            if isinstance(g, torch.Tensor):
                if _is_batched(g):
                    return one_by_one(run, args, range(first, end), _levels())
                args[k] = torch._neg_view(plain(g).neg()) if k in negative else plain(g)
        return backward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def are_batched(gradients: Sequence[Any]) -> bool:
    """Whether autograd asks for the gradients of several cotangents at once."""
    return any(isinstance(g, torch.Tensor) and _is_batched(g) for g in gradients)


def one_by_one(backward: Call, args: list[Any], batched: Sequence[int], level: int | None = None) -> Sequence[Any]:
    """What a backward gives of arguments of which those numbered `batched` stand for several, at `level` and below."""
    level = _levels() if level is None else level
    if level == 0:
        return backward(list(args))
    apart = {k: torch._remove_batch_dim(args[k], level, 1, 0) for k in batched if isinstance(args[k], torch.Tensor)}
    count = max(t.shape[0] for t in apart.values())
    found = []
    for n in range(count):
        given = list(args)
        for k, t in apart.items():
            given[k] = t[n if t.shape[0] > 1 else 0]  # one that stands for itself at this level is given to all
        found.append(one_by_one(backward, given, batched, level - 1))
    args.clear()
    return tuple(_together(list(parts), level) for parts in zip(*found, strict=True))


def _together(parts: list[Any], level: int) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    return torch._add_batch_dim(torch.stack(parts), 0, level)


def _levels() -> int:
    """How many of torch's older batching modes, which autograd uses, are inside one another."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level
