"""The largest score of a row, which stable programs subtract themselves: softmax(s - max(s)) = softmax(s)."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .operators import Operation, aten, is_last, is_tensor, read

_MAXIMA = (torch.max, torch.amax, "max", "amax", aten.max.dim, aten.amax.default)


def shifted(call: Operation) -> tuple[Node, tuple[Node, ...]] | None:
    """Return (scores, calls) of a difference between scores and the largest of each row, or None.

    `calls`: those that compute the largest, in order. It may be detached, since its gradients sum to zero.
    """
    scores, n = call.get("input"), call.get("other")
    if call.name != "sub" or call.more or call.get("alpha", 1) != 1 or call.get("out") is not None:
        return None
    calls: list[Node] = []
    while isinstance(n, Node) and is_tensor(scores):
        calls.append(n)
        if n.target in _MAXIMA:
            return (scores, tuple(reversed(calls))) if _is_of_rows(n, scores) else None
        is_value = n.target is operator.getitem and n.args[1] == 0
        if not is_value and read(n).name != "detach":
            return None
        n = n.args[0]
    return None


def _is_of_rows(n: Node, scores: Node) -> bool:
    """Return whether a maximum is that of each row of the scores, as a column."""
    given = dict(zip(("input", "dim", "keepdim"), n.args, strict=False)) | n.kwargs
    dim = given.pop("dim", None)
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    whole = {"input", "keepdim"} == set(given) and given["keepdim"] is True
    return whole and given["input"] is scores and is_last(dim, scores)
