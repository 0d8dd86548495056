"""Gradients in the form that a compiled backward takes. autograd hands them over without guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .boxed import Args, BoxedCall, Values, boxed

is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient without torch's negative or conjugate bit; a zero tensor without memory gets some."""
    if gradient.is_neg() or gradient.is_conj() or gradient._is_zerotensor():
        out = torch.empty_strided(gradient.size(), gradient.stride(), dtype=gradient.dtype, device=gradient.device)
        return out.copy_(gradient)
    return gradient


def accepting_any_gradient(
    backward: BoxedCall, first: int, end: int, negative: frozenset[int] = frozenset()
) -> BoxedCall:
    """Return a compiled backward that accepts its gradients, the inputs from `first` to before `end`, in any form.

    `negative`: gradients that were traced with torch's negative bit, as their results were. The check costs a third
    of a microsecond per gradient. Batched gradients (`is_grads_batched`) are computed one by one.
    """

    @boxed
    def run(args: list[object]) -> Values:
        for k in range(first, end):
            g = args[k]
            if isinstance(g, torch.Tensor):
                if is_batched(g):
                    return one_by_one(run, args, range(first, end), _levels())
                args[k] = torch._neg_view(plain(g).neg()) if k in negative else plain(g)
        return backward(args)

    return run


def are_batched(gradients: Sequence[object]) -> bool:
    """Return whether autograd asks for the gradients of several cotangents at once."""
    return any(isinstance(g, torch.Tensor) and is_batched(g) for g in gradients)


def one_by_one(backward: BoxedCall, args: Args, batched: Sequence[int], level: int | None = None) -> Values:
    """Return the gradients for arguments of which those numbered `batched` are batched, at `level` and below."""
    level = _levels() if level is None else level
    if level == 0:
        return backward(list(args))
    apart = {k: torch._remove_batch_dim(args[k], level, 1, 0) for k in batched if isinstance(args[k], torch.Tensor)}
    count = max(t.shape[0] for t in apart.values())
    results = []
    for n in range(count):
        inputs = list(args)
        for k, t in apart.items():
            inputs[k] = t[n if t.shape[0] > 1 else 0]  # an unbatched gradient serves all
        results.append(one_by_one(backward, inputs, batched, level - 1))
    args.clear()
    return tuple(_together(list(parts), level) for parts in zip(*results, strict=True))


def _together(parts: Args, level: int) -> object:
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    return torch._add_batch_dim(torch.stack(parts), 0, level)


def _levels() -> int:
    """Return the nesting depth of torch's older batching modes, which autograd uses."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level
