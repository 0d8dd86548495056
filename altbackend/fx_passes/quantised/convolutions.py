"""CPU inference: convolutions of dequantised bytes by oneDNN, with packed weights.

    quantise(post(convolution(dequantise(x), dequantise(w), bias) + dequantise(y))) -> one call, of bytes

The call has no zero points of weights. Where a parameter holds them, the weight prologue checks that they are 0. If
they are not, the call computes in float32. A quantisation that follows joins the call if its bounds are those of its
dtype. oneDNN rounds once, eager in every step; results differ by one quantum at most.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ...aten.name import operator_of
from ...compat.torch_api import exact_byte_products
from ...debug.trace import DecisionKind
from ...runtime.quantised import POST_OPS, quantised_convolution
from ..context import Context
from ..graph import Convolution, aten, convolution_of, fake_mode, insert, is_call, only_user, propagate, replace, val
from ..mixed_layouts import is_channels_last
from ..onednn_epilogues import Unary, unary_of
from .forms import Dequantised, dequantised, operator_of_library
from .products import is_whole

DEEPEST = 1 << 15  # terms of a sum, each at most 255 * 128 in size, which 32 bits hold


@dataclass(frozen=True)
class Quantise:
    """A call that quantises with numbers: its scale, zero point and dtype."""

    call: Node
    scale: float
    zero: int
    dtype: torch.dtype


def run(gm: GraphModule, ctx: Context) -> int:
    """Call oneDNN for convolutions of dequantised bytes; return their number."""
    constant, new = ctx.constant_nodes(gm), []
    for n in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        convolution = convolution_of(n)
        x, weight = dequantised(convolution.x), dequantised(convolution.weight)
        if x is None or weight is None:
            continue
        if reason := _refusal(convolution, x, weight, constant, ctx.freezes):
            ctx.trace.decision(DecisionKind.QUANTISED, n.name, "left as floats", reason)
            continue
        new.append(_rewrite(gm, n, x, weight))
        ctx.trace.decision(DecisionKind.QUANTISED, n.name, "quantised convolution", f"with {_described(new[-1])}")
    propagate(gm, new)
    return len(new)


def _refusal(c: Convolution, x: Dequantised, w: Dequantised, constant: set[Node], freezes: bool) -> str:
    """Return why a convolution stays one of floats, or ""."""
    fake, kernel = val(x.integers), val(w.integers)
    if not freezes:
        return "weights are packed once or never, and this graph keeps nothing"
    parameters = (w.integers, w.scale, w.zero, c.bias)
    if any(isinstance(p, Node) and p not in constant for p in parameters):
        return "a weight that is no parameter"
    if c.transposed or fake.dim() != 4:
        return "only two-dimensional convolutions that are not transposed"
    if fake.dtype != torch.uint8 or kernel.dtype != torch.int8:
        return f"a product of {fake.dtype} and {kernel.dtype}: oneDNN takes uint8 and int8"
    if isinstance(x.scale, Node) or isinstance(x.zero, Node) or x.axis is not None or x.per_row:
        return "the scale of the image is no number"
    if w.axis not in (None, 0) or w.per_row or not is_whole(x) or not is_whole(w):
        return "scales along another dimension than output channels"
    if kernel[0].numel() > DEEPEST:
        return f"sums of {kernel[0].numel()} terms: 32 bits hold {DEEPEST}"
    if not isinstance(w.zero, Node) and w.zero not in (None, 0):
        return "a weight with a zero point"
    if not all(isinstance(s, int) and s > 0 for s in fake.shape[1:]):
        return "an image of symbolic size"
    if any(val(n).dtype != torch.float32 for n in (c.x, c.weight, c.bias) if isinstance(n, Node)):
        return "a result of 16 bits"
    if operator_of("onednn::qconv_pointwise") is None:
        return "this version of torch has no such call of oneDNN"
    return "" if exact_byte_products() else "this processor's products of bytes are not exact"


def _rewrite(gm: GraphModule, n: Node, x: Dequantised, w: Dequantised) -> Node:
    c = convolution_of(n)
    image, channels = x.integers, val(w.integers).shape[0]
    x_zero = int(x.zero or 0)  # type: ignore[arg-type]
    if not is_channels_last(val(image)):
        image = insert(gm.graph, n, aten.clone.default, (image,), {"memory_format": torch.channels_last})
    scales = scales_of(gm, n, w, channels)
    geometry: list[Argument] = [c.stride, c.padding, c.dilation, c.groups]
    with gm.graph.inserting_before(n):
        sizes = [s if isinstance(s, int) else s.node.hint for s in val(image).shape]
        arguments: tuple[Argument, ...] = (w.integers, scales, x.scale, x_zero, *geometry)
        packed = gm.graph.call_function(
            torch.ops.onednn.qconv_prepack.default, (*arguments, None if None in sizes else sizes)
        )
    packed.meta = {"val": val(w.integers), "opaque": True}
    zero, symmetric = checked_zeros(gm, n, w)
    added = _added(n)
    unary, quantise = epilogue(n if added is None else added.call)
    if added is not None and (quantise is None or quantise.dtype != val(added.operand.integers).dtype):
        added, (unary, quantise) = None, epilogue(n)
    summed = n if added is None else added.call
    last = quantise.call if quantise is not None else unary[1] if unary is not None else n
    out, post = as_arguments(unary, quantise)
    operand: list[Argument] = [] if added is None else [added.argument]
    with gm.graph.inserting_before(last):
        new = gm.graph.call_function(
            quantised_convolution,
            (
                image,
                x.scale,
                x_zero,
                packed,
                symmetric,
                w.integers,
                scales,
                zero,
                c.bias,
                geometry,
                out,
                post,
                *operand,
            ),
        )
    new.meta = dict(last.meta)
    new.meta["val"] = _channels_last(last)
    new.meta["fixed_val"] = True
    replace(last, new)
    erase_unread(gm, summed, unary)
    erase_unread(gm, n, None)
    return new


@dataclass(frozen=True)
class Addition:
    """A call that adds a dequantised tensor to a convolution."""

    call: Node
    operand: Dequantised

    @property
    def argument(self) -> Argument:
        """Return the argument `added` of `quantised_convolution`."""
        d = self.operand
        assert not isinstance(d.zero, Node)
        return [d.integers, d.scale, int(d.zero or 0)]


def _added(n: Node) -> Addition | None:
    """Return the addition of a dequantised channels-last image that alone reads a convolution."""
    user = only_user(n)
    if user is None or not is_call(user, aten.add.Tensor) or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is n else user.args[0]
    d = dequantised(other)
    if d is None or other is n or d.axis is not None or d.per_row or not is_whole(d):
        return None
    fake = val(d.integers)
    same = tuple(fake.shape) == tuple(val(n).shape) == tuple(val(user).shape) and is_channels_last(fake)
    numbers = not isinstance(d.scale, Node) and not isinstance(d.zero, Node)
    return Addition(user, d) if same and numbers and fake.dtype == torch.uint8 else None


def as_arguments(unary: tuple[Unary, Node] | None, quantise: Quantise | None) -> tuple[list[Argument], list[Argument]]:
    """Return an epilogue as the arguments `out` and `post` of calls of oneDNN."""
    post: list[Argument] = ["none", [], ""] if unary is None else [unary[0].name, list(unary[0].scalars), ""]
    out: list[Argument] = [1.0, 0, torch.float32]
    return out if quantise is None else [quantise.scale, quantise.zero, quantise.dtype], post


def erase_unread(gm: GraphModule, n: Node, unary: tuple[Unary, Node] | None) -> None:
    """Erase a product and its activation once another call has replaced the last of them."""
    for old in [*([] if unary is None else [unary[1]]), n]:
        if not old._erased and not old.users:
            gm.graph.erase_node(old)


def _channels_last(n: Node) -> torch.Tensor:
    fake: torch.Tensor = val(n)
    with fake_mode(n.graph) or contextlib.nullcontext():
        return fake.contiguous(memory_format=torch.channels_last)


def scales_of(gm: GraphModule, before: Node, w: Dequantised, channels: int) -> Node:
    """Return the scales of the output channels as a vector of float32."""
    if not isinstance(w.scale, Node):
        # of the weight, so that it depends on a parameter and the prologue computes it
        args: tuple[Argument, ...] = (w.integers, [channels], float(w.scale))
        return insert(gm.graph, before, aten.new_full.default, args, {"dtype": torch.float32})
    scale = w.scale
    if val(scale).dtype != torch.float32:
        scale = insert(gm.graph, before, aten._to_copy.default, (scale,), {"dtype": torch.float32})
    if w.axis is None:
        flat = insert(gm.graph, before, aten.reshape.default, (scale, [1]))
        scale = insert(gm.graph, before, aten.expand.default, (flat, [channels]))
        scale = insert(gm.graph, before, aten.clone.default, (scale,), {"memory_format": torch.contiguous_format})
    return scale


def checked_zeros(gm: GraphModule, before: Node, w: Dequantised) -> tuple[Node | None, Node | None]:
    """Return the zero points of a weight, and whether all are 0, as a tensor that the prologue computes."""
    if not isinstance(w.zero, Node):
        return None, None
    is_zero = insert(gm.graph, before, aten.eq.Scalar, (w.zero, 0))
    return w.zero, insert(gm.graph, before, aten.all.default, (is_zero,))


def epilogue(n: Node) -> tuple[tuple[Unary, Node] | None, Quantise | None]:
    """Return the activation and the quantisation that alone read a convolution, each with its call."""
    last, unary = n, None
    user = only_user(n)
    post = unary_of(user)
    if post is not None and user is not None and post.name in POST_OPS:
        unary, last = (post, user), user
    quantise = quantise_of(only_user(last))
    return unary, quantise


def quantise_of(n: Node | None) -> Quantise | None:
    """Return the parts of a call that quantises with numbers to the whole range of a byte, or None."""
    if n is None or operator_of_library(n) != "quantize_per_tensor.default":
        return None
    arguments: tuple[Any, ...] = n.args
    _, scale, zero, low, high, dtype = arguments
    if dtype not in (torch.uint8, torch.int8) or not isinstance(scale, float) or not isinstance(zero, int):
        return None
    limits = torch.iinfo(dtype)
    whole = (low, high) == (limits.min, limits.max) and limits.min <= zero <= limits.max and scale > 0
    return Quantise(n, scale, zero, dtype) if whole else None


def _described(n: Node) -> str:
    arguments: tuple[Any, ...] = n.args
    out, post, *added = arguments[10:]
    return f"{'an addition, ' if added else ''}{post[0]} and a result of {out[2]}"
