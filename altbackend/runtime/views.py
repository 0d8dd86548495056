"""Views rebuilt on another tensor: the view operators between a tensor and a view of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from .boxed import Function

_aten = torch.ops.aten
# The names are those of torch's functionalization.
OPERATORS: dict[str, Function] = {
    "_conj": _aten._conj.default,
    "_neg_view": _aten._neg_view.default,
    "_reshape_alias": _aten._reshape_alias.default,
    "_unsafe_view": _aten._unsafe_view.default,
    "alias": _aten.alias.default,
    "as_strided": _aten.as_strided.default,
    "detach": _aten.detach.default,
    "diagonal": _aten.diagonal.default,
    "expand": _aten.expand.default,
    "permute": _aten.permute.default,
    "select_int": _aten.select.int,
    "slice_Tensor": _aten.slice.Tensor,
    "split_Tensor": _aten.split.Tensor,
    "split_with_sizes": _aten.split_with_sizes.default,
    "squeeze": _aten.squeeze.default,
    "squeeze_dim": _aten.squeeze.dim,
    "squeeze_dims": _aten.squeeze.dims,
    "t": _aten.t.default,
    "transpose_int": _aten.transpose.int,
    "unbind_int": _aten.unbind.int,
    "unfold": _aten.unfold.default,
    "unsqueeze": _aten.unsqueeze.default,
    "view": _aten.view.default,
    "view_as_complex": _aten.view_as_complex.default,
    "view_as_real": _aten.view_as_real.default,
    "view_dtype": _aten.view.dtype,
}
# Methods and functions of torch whose parser takes the same arguments. They take 0.5 to 0.7 of the time of an operator.
_FUNCTIONS: dict[str, Function] = {
    "as_strided": torch.as_strided,
    "diagonal": torch.diagonal,
    "permute": torch.permute,
    "select_int": torch.select,
    "squeeze": torch.squeeze,
    "squeeze_dim": torch.squeeze,
    "squeeze_dims": torch.squeeze,
    "t": torch.t,
    "transpose_int": torch.transpose,
    "unfold": torch.Tensor.unfold,
    "unsqueeze": torch.unsqueeze,
    "view": torch.Tensor.view,
}
_IMPLICIT = {"expand": ("implicit",)}  # arguments that are keyword-only


@dataclass(frozen=True)
class Step:
    """A view operator by its name in `OPERATORS`. `part`: the index among several results, or -1 for a single result.

    `args` follow the tensor: numbers, lists of numbers, None, and dtypes by name.
    """

    name: str
    args: tuple[object, ...]
    part: int = -1


def replay(steps: Sequence[Step]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that applies the steps to a tensor. Raise KeyError for an unknown operator."""
    calls = [_call(s) for s in steps]
    if len(calls) == 1:
        return calls[0]

    def apply(base: torch.Tensor) -> torch.Tensor:
        for call in calls:
            base = call(base)
        return base

    return apply


def _call(s: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    op = _FUNCTIONS.get(s.name, OPERATORS[s.name])
    args = [getattr(torch, a) if isinstance(a, str) else a for a in s.args]
    names = _IMPLICIT.get(s.name, ())
    keywords = {name: args.pop() for name in names}
    if s.part >= 0:
        return lambda base: op(base, *args, **keywords)[s.part]
    if keywords:
        return lambda base: op(base, *args, **keywords)
    return lambda base: op(base, *args)
