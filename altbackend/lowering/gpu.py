"""Operators that kernels of a GPU cannot compute; each becomes a library call."""

from __future__ import annotations

import torch

from ..ir import expr as ex
from ..ir.ops import ATOMIC, OPS, triton_spelling
from ..ir.value import Value
from .context import Ctx
from .registry import FallBack
from .tensor import Tensor


def expressible(ctx: Ctx, result: object) -> object:
    """Return the result of a lowering; raises FallBack if Triton has no spelling of an operator in it."""
    if ctx.gpu:
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                _check(ctx, t.value)
    return result


def _check(ctx: Ctx, root: Value) -> None:
    stack = [root]
    while stack:
        v = stack.pop()
        if v in ctx.expressible:
            continue
        if v.op in OPS and (kind := unspelled(v)):
            raise FallBack(f"{v.op} of {kind} has no form in Triton")
        ctx.expressible.add(v)
        stack.extend(v.args)
        index = v.attr[1] if v.op == "load" else v.attr if v.op in ("index", "wrap_index") else 0
        stack.extend(ex.lookups(index))


def unspelled(v: Value) -> str:
    """Return the dtype for which Triton lacks the operator of `v`, or ''."""
    kind = v.args[0].dtype if v.op != "where" else v.dtype
    return "" if triton_spelling(v.op, kind) else str(kind).removeprefix("torch.")


def scatter_refusal(ctx: Ctx, mode: str, dtype: torch.dtype) -> str:
    """Return the reason why a scatter has no kernel on a GPU, or ''."""
    if not ctx.gpu or mode == "set":
        return ""
    if dtype not in ATOMIC.get(mode, ()):
        return f"no atomic {mode} of {str(dtype).removeprefix('torch.')}"
    asked = ctx.cfg.deterministic or torch.are_deterministic_algorithms_enabled()
    if asked and dtype.is_floating_point:
        return "the order of atomic additions varies from run to run"
    return ""
