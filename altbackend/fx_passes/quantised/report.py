"""Say in the log when a graph quantises but no product of it computes with the integers."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ...debug.trace import DecisionKind
from ...runtime.quantised import convolution_added_to, quantised_convolution, quantised_linear
from ..context import Context
from ..graph import aten
from .forms import is_quantise

_OF_INTEGERS = (
    *("_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_scaled_mm"),
    *("qlinear_pointwise", "qconv_pointwise", "qconv2d_pointwise", "_scaled_grouped_mm"),
)
_OURS = (quantised_convolution, quantised_linear, convolution_added_to)
_OF_FLOATS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default)


def run(gm: GraphModule, ctx: Context) -> int:
    """Record how many products of a quantised graph compute with integers; return 0, since the graph stays."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    conversions = sum(is_quantise(n) for n in calls)
    if conversions == 0:
        return 0
    of_integers = sum(_uses_integers(n) for n in calls)
    of_floats = sum(n.target in _OF_FLOATS for n in calls)
    if of_integers == 0 and of_floats:
        text = f"{conversions} conversions, but all {of_floats} products compute with floats: the lines above say why"
        ctx.trace.decision(DecisionKind.PERF_HINT, "quantised graph", "no product of integers", text)
    else:
        text = f"{conversions} conversions remain, in kernels; {of_floats} products of floats"
        ctx.trace.decision(DecisionKind.QUANTISED, "graph", f"{of_integers} products of integers", text)
    return 0


def _uses_integers(n: Node) -> bool:
    return n.target in _OURS or getattr(n.target, "_opname", "") in _OF_INTEGERS
