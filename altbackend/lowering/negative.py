"""Tensors with torch's negative bit, such as the imaginary part of a conjugate: memory holds the negated values.

The lowered value of a node with the bit is the content of memory. Its readers are views, which keep the bit, and
`clone`, which tracing inserts for every other reader. A library call gets a buffer with the bit as a tensor with the
bit. Complex tensors are computed by library calls only.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.loops import Extern, View
from . import scalar as s
from .context import Ctx
from .tensor import Tensor

_NEG_VIEW, _CONJ = torch.ops.aten._neg_view.default, torch.ops.aten._conj.default


def is_negative(n: object) -> bool:
    """Return whether a node was traced as a tensor with the bit."""
    val = n.meta.get("val") if isinstance(n, torch.fx.Node) else None
    fakes = val if isinstance(val, (tuple, list)) else (val,)
    return any(isinstance(x, torch.Tensor) and _has_bit(x) for x in fakes)


def _has_bit(x: torch.Tensor) -> bool:
    return x.is_neg() and not x.is_complex()


def value(memory: Any, n: object) -> Any:
    """Return the values of a node from the content of its memory, or the content from the values."""
    return negated(memory) if isinstance(memory, Tensor) and is_negative(n) else memory


def negated(t: Tensor) -> Tensor:
    """Return `-t`."""
    return Tensor(t.sizes, t.dtype, s.neg(t.computed()))


def with_bit(ctx: Ctx, v: View, like: torch.Tensor) -> View:
    """Return `v` as a view of a buffer that has the bit if the traced value `like` has it."""
    return v if ctx.buffers[v.buffer].negative or not _has_bit(like) else _viewed(ctx, v, like, _NEG_VIEW)


def with_bits(ctx: Ctx, v: View, like: torch.Tensor) -> View:
    """Return `v`, a view of memory without bits, with the negative and conjugate bits of the traced `like`."""
    for op, has in ((_CONJ, like.is_conj()), (_NEG_VIEW, like.is_neg())):
        v = _viewed(ctx, v, like, op) if has else v
    return v


def _viewed(ctx: Ctx, v: View, like: torch.Tensor, op: torch._ops.OpOverload) -> View:
    b = ctx.new_buffer(like.dtype, v.sizes, v.strides, ctx.buffers[v.buffer].device, _has_bit(like))
    ctx.emit(Extern((b.name,), op, (v,), aliases=(v.buffer,), origins=ctx.origins()))
    return View(b.name, v.sizes, v.strides)
