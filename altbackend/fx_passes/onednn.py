"""CPU inference: call oneDNN for linears and convolutions, with packed weights where that is faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ..compat.torch_api import unannotated
from ..debug.trace import DecisionKind
from . import onednn_small
from .context import Context
from .graph import aten, convolution_of, insert, is_call, replace, val
from .mixed_layouts import is_channels_last

mkldnn = torch.ops.mkldnn


def run(gm: GraphModule, ctx: Context) -> int:
    """Call oneDNN for linears and convolutions; with freezing, pack their weights."""
    count = call_onednn(gm, ctx.constant_nodes(gm), pack=ctx.freezes)
    packed = sum(bool(n.meta.get("opaque")) for n in gm.graph.nodes)
    ctx.trace.decision(
        DecisionKind.FREEZING, "linears and convolutions", "on oneDNN", f"{count}, {packed} with packed weights"
    )
    return count


def available() -> bool:
    """Return whether this build of torch has oneDNN and it is enabled."""
    return bool(unannotated(torch.backends.mkldnn.is_available)() and torch.backends.mkldnn.enabled)


def computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has products and convolutions of a dtype on this processor."""
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False


def call_onednn(gm: GraphModule, constant: set[Node], pack: bool = True) -> int:
    """Replace matmuls and convolutions whose weights are constant by calls of oneDNN; return their number.

    `pack`: store weights in oneDNN's own layout if that is faster; else oneDNN reads them in their present layout.
    """
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.addmm.default, aten.mm.default):
            count += _linear(gm, n, constant, pack)
        elif is_call(n, aten.convolution.default):
            count += _convolution(gm, n, constant, pack)
    return count


def _suit(*nodes: object) -> bool:
    """Return whether tensors have one dtype, which oneDNN computes, and are not empty."""
    fakes = [val(n) for n in nodes if isinstance(n, Node)]
    if len({x.dtype for x in fakes}) != 1 or not computes(fakes[0].dtype):
        return False
    return all(statically_known_true(s > 0) for x in fakes for s in x.shape)


def _linear(gm: GraphModule, n: Node, constant: set[Node], pack: bool) -> int:
    bias, x, wt = (None, *n.args) if n.target is aten.mm.default else n.args[:3]
    if n.kwargs or not isinstance(wt, Node) or wt not in constant or not isinstance(x, Node) or x in constant:
        return 0
    if bias is not None and (bias not in constant or val(bias).dim() != 1 or val(bias).shape[0] != val(wt).shape[1]):
        return 0
    if not _suit(x, wt, bias) or onednn_small.is_small_linear(val(x), val(wt)):
        return 0
    weight = insert(gm.graph, n, aten.permute.default, (wt, [1, 0]))
    constant.add(weight)
    if pack and not _fast_unpacked(val(wt)):
        rows = val(x).shape[0]
        batch = rows if isinstance(rows, int) else None
        weight = _packed(gm, n, mkldnn._reorder_linear_weight.default, (weight, batch))
        constant.add(weight)
    with gm.graph.inserting_before(n):
        new = gm.graph.call_function(mkldnn._linear_pointwise.default, (x, weight, bias, "none", [], ""))
    new.meta["val"] = val(n).contiguous() if not val(n).is_contiguous() else val(n)
    new.meta["stack_trace"] = n.meta.get("stack_trace")
    replace(n, new)
    return 1


def _fast_unpacked(wt: torch.Tensor) -> bool:
    """Return whether oneDNN is as fast on a weight (in, out) as on a packed copy, which costs time and memory.

    Measured with 1 to 512 rows in float32, time relative to packed: contiguous (in, out) takes 0.91 on AVX2 and 0.98 on
    AVX-512 (two threads each; 1.05 with four). Rows whose distance is a multiple of 2,048 bytes share cache sets and
    take up to 1.8. Weights (out, in) take 0.93 on AVX2 and 1.04 to 1.10 on AVX-512, some shapes 3.5.
    """
    return wt.dtype == torch.float32 and wt.is_contiguous() and wt.stride(0) * wt.element_size() % 2048 != 0


def _packed(gm: GraphModule, before: Node, target: Callable[..., object], args: tuple[Argument, ...]) -> Node:
    """Insert a call that packs a weight into oneDNN's own layout; only calls of oneDNN may take its result."""
    with gm.graph.inserting_before(before):
        new = gm.graph.call_function(target, args)
    new.meta["val"] = val(args[0])
    new.meta["opaque"] = True
    return new


@dataclass(frozen=True)
class _Geometry:
    """The arguments of a convolution; `output_padding` belongs to a transposed one, and is None otherwise."""

    stride: Argument
    padding: Argument
    dilation: Argument
    output_padding: Argument
    groups: int

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments in the order of oneDNN's operators."""
        turned = () if self.output_padding is None else (self.output_padding,)
        return (self.padding, *turned, self.stride, self.dilation, self.groups)


def _convolution(gm: GraphModule, n: Node, constant: set[Node], pack: bool) -> int:
    x, w, bias, stride, padding, dilation, transposed, output_padding, groups = convolution_of(n)
    if w not in constant or (bias is not None and bias not in constant) or not _suit(x, w, bias):
        return 0
    if not isinstance(w, Node) or val(x).dim() not in (4, 5) or not _sizes(val(x)):
        return 0
    if groups == 1 and onednn_small.is_small_convolution(val(x), val(w), val(n), transposed):
        return 0
    geometry = _Geometry(stride, padding, dilation, output_padding if transposed else None, groups)
    weight = w
    if pack and is_channels_last(val(x)):  # with a packed weight, every result is channels-last
        reorder = mkldnn._reorder_convolution_transpose_weight if transposed else mkldnn._reorder_convolution_weight
        weight = _packed(gm, n, reorder.default, (w, *geometry.arguments(), _sizes(val(x))))
        constant.add(weight)
    target = mkldnn._convolution_transpose_pointwise if transposed else mkldnn._convolution_pointwise
    with gm.graph.inserting_before(n):
        new = gm.graph.call_function(target.default, (x, weight, bias, *geometry.arguments(), "none", [], ""))
    new.meta = dict(n.meta)
    replace(n, new)
    return 1


def _sizes(x: torch.Tensor) -> list[int]:
    """Return the sizes for which a weight is packed, those of the first call; [] if data decides a size."""
    sizes = [onednn_small.size_hint(s) for s in x.shape]
    static_sizes = [s for s in sizes if s is not None]
    return static_sizes if len(static_sizes) == len(sizes) else []
