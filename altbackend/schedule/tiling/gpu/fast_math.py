"""Find functions whose cheaper form is hidden by a rounding to 16 bits that follows.

A kernel whose floats in memory all have 16 bits may use the cheap forms everywhere. Other kernels store float32 too, as
a training step does its statistics. In such a kernel a function may be cheap if every result that depends on it is
rounded first, and the arithmetic between them does not magnify an error.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ....ir import value as va
from ....ir.loops import Loop, Program, Reduction, reads, writes
from ....ir.ops import LOW_PRECISION, OPS
from ....ir.value import Value
from ...kernel import Kernel
from ...loop_mapping import Kind, MappedNode

FAST_MATH = "fast_"  # the printer spells operators with this prefix in their cheap form
ARITHMETIC = frozenset({"add", "sub", "mul", "truediv", "neg", "abs", "maximum", "minimum", "where", "masked", "relu"})
TOTALS = frozenset({"sum", "max", "min"})


def only_low_precision(p: Program, k: Kernel) -> bool:
    """Return whether every float that the kernel reads or stores is rounded to 16 bits.

    Functions may then err by an eighth of that rounding, far more than the cheap forms of float32 do.
    """
    written = {b for m in k.members for b in writes(p.nodes[m])}
    names = {b for m in k.members for b in reads(p.nodes[m])} - written | k.stored
    floats = {p.buffers[b].dtype for b in names if p.buffers[b].dtype.is_floating_point}
    return bool(floats) and floats <= LOW_PRECISION


def with_fast_math(p: Program, k: Kernel) -> dict[Loop, Value]:
    """Return new values of nodes where a rounding hides the errors of functions: these take their cheap form.

    The key is the node, since several nodes may write parts of one buffer.
    """
    exposed_buffers: dict[str, bool] = defaultdict(bool)  # an error in the buffer's values reaches an unrounded result
    exposed: set[Value] = set()  # of all nodes, so that no function is computed both exactly and cheaply
    for q in reversed(k.nodes):
        b = q.node.out
        rounded = p.buffers[b].dtype in LOW_PRECISION
        root_exposed = not rounded and (b in k.stored or exposed_buffers[b] or not _keeps_error(q))
        parts = _exposed_parts(q.value, root_exposed)
        for v in parts:
            if v.op == "load":
                exposed_buffers[v.attr[0]] = True
        exposed |= parts
    values = [(q, _cheap_form(q.value, exposed)) for q in k.nodes]
    return {q.node: value for q, value in values if value is not q.value}


def _keeps_error(q: MappedNode) -> bool:
    """Return whether an error in a node's value is no larger in its result."""
    return q.kind is Kind.POINT or (isinstance(q.node, Reduction) and q.node.op in TOTALS)


def _exposed_parts(root: Value, root_exposed: bool) -> set[Value]:
    """Return the parts of a tree whose errors reach an unrounded result. `root_exposed`: whether the root's do."""
    exposed = {root} if root_exposed else set()
    for v in reversed(list(va.walk(root))):  # users before arguments
        if v.op == "cast" and v.dtype in LOW_PRECISION:
            continue
        if v in exposed or not (v.op in ARITHMETIC or _widens(v)):
            exposed.update(v.args)
        elif v.op in ("where", "masked"):
            exposed.add(v.args[0])  # a comparison
    return exposed


def _widens(v: Value) -> bool:
    return v.op == "cast" and v.dtype.is_floating_point


def _cheap_form(root: Value, exposed: set[Value]) -> Value:
    memo: dict[Value, Value] = {}
    for v in va.walk(root):
        args = tuple(memo.get(a, a) for a in v.args)
        op = v.op
        if v not in exposed and v.dtype == torch.float32 and op in OPS and OPS[op].triton_fast:
            op = FAST_MATH + op
        memo[v] = v if op == v.op and args == v.args else va.make(op, args, v.dtype, v.attr)
    return memo[root]
