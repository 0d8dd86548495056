"""Tensors with torch's negative bit, as the imaginary part of a conjugate is: memory holds the negative of the values.

A node that was traced as such a tensor stands for what is in memory. It is read by views, which keep the bit, and by
copies, for which tracing has put `clone`. A buffer with the bit is a tensor with the bit to library calls. Complex
tensors are left to those wholly.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.loops import Extern, View
from . import scalar as s
from .context import Ctx
from .registry import overload
from .tensor import Tensor

_NEG_VIEW, _CONJ = overload("_neg_view.default"), overload("_conj.default")


def is_negative(n: Any) -> bool:
    """Whether a node was traced as a tensor with the bit."""
    val = n.meta.get("val") if isinstance(n, torch.fx.Node) else None
    held = val if isinstance(val, (tuple, list)) else (val,)
    return any(isinstance(x, torch.Tensor) and _has_bit(x) for x in held)


def _has_bit(x: torch.Tensor) -> bool:
    return x.is_neg() and not x.is_complex()


def value(held: Any, n: Any) -> Any:
    """The values of a node, of which `held` is in memory; and the other way round."""
    return turned(held) if isinstance(held, Tensor) and is_negative(n) else held


def turned(t: Tensor) -> Tensor:
    return Tensor(t.sizes, t.dtype, s.neg(t.computed()))


def with_bit(ctx: Ctx, v: View, like: torch.Tensor) -> View:
    """`v` on a buffer that has the bit if `like`, the traced value, had it."""
    return v if ctx.buffers[v.buffer].negative or not _has_bit(like) else _viewed(ctx, v, like, _NEG_VIEW)


def with_bits(ctx: Ctx, v: View, like: torch.Tensor) -> View:
    """`v` on a buffer with the bits that `like`, the traced value, had; it lies in memory that has none."""
    for op, has in ((_CONJ, like.is_conj()), (_NEG_VIEW, like.is_neg())):
        v = _viewed(ctx, v, like, op) if has else v
    return v


def _viewed(ctx: Ctx, v: View, like: torch.Tensor, op: torch._ops.OpOverload) -> View:
    b = ctx.new_buffer(like.dtype, v.sizes, v.strides, ctx.buffers[v.buffer].device, _has_bit(like))
    ctx.emit(Extern((b.name,), op, (v,), aliases=(v.buffer,), origins=ctx.origins()))
    return View(b.name, v.sizes, v.strides)
