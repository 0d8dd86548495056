"""Where a cheaper form of a function is hidden by the rounding to 16 bits that follows.

A kernel all of whose floats in memory have 16 bits may use the cheap forms everywhere. In other kernels (a training
step stores float32 statistics beside 16-bit activations) a function may be cheap if everything that it reaches is
rounded first, through arithmetic that keeps the size of an error.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ....ir import value as va
from ....ir.loops import Loop, Program, Reduction, reads, writes
from ....ir.ops import LOW_PRECISION, OPS
from ....ir.value import Value
from ...kernel import Kernel
from ...loop_mapping import MappedNode

FAST_MATH = "fast_"  # operators with this before their name are printed in their cheap form
ARITHMETIC = frozenset({"add", "sub", "mul", "truediv", "neg", "abs", "maximum", "minimum", "where", "masked", "relu"})
TOTALS = frozenset({"sum", "max", "min"})


def only_low_precision(p: Program, k: Kernel) -> bool:
    """Whether every float that the kernel reads or stores is rounded to 16 bits.

    Then functions may err by an eighth of that rounding, which is far more than the cheap forms of float32 do.
    """
    made = {b for m in k.members for b in writes(p.nodes[m])}
    names = {b for m in k.members for b in reads(p.nodes[m])} - made | k.stored
    floats = {p.buffers[b].dtype for b in names if p.buffers[b].dtype.is_floating_point}
    return bool(floats) and floats <= LOW_PRECISION


def cheapened(p: Program, k: Kernel) -> dict[Loop, Value]:
    """The values of members in which rounding hides functions, with these in their cheap form.

    By node: several may write parts of one buffer.
    """
    members = [q for s in k.stages for q in s.members]
    seen: dict[str, bool] = defaultdict(bool)  # whether an error in a buffer's values reaches anything unrounded
    shown: set[Value] = set()  # of all members: what one of them needs exactly is not computed twice
    for q in reversed(members):
        b = q.node.out
        rounded = p.buffers[b].dtype in LOW_PRECISION
        exposed = not rounded and (b in k.stored or seen[b] or not _keeps_size(q))
        parts = _shown(q.value, exposed)
        for v in parts:
            if v.op == "load":
                seen[v.attr[0]] = True
        shown |= parts
    found = [(q, _with_cheap(q.value, shown)) for q in members]
    return {q.node: value for q, value in found if value is not q.value}


def _keeps_size(q: MappedNode) -> bool:
    """Whether an error in a member's value is as large in its result."""
    return q.kind == "point" or (isinstance(q.node, Reduction) and q.node.op in TOTALS)


def _shown(root: Value, exposed: bool) -> set[Value]:
    """The parts of a tree an error of which reaches something unrounded. `exposed`: whether the root's does."""
    shown = {root} if exposed else set()
    for v in reversed(list(va.walk(root))):  # users before arguments
        if v.op == "cast" and v.dtype in LOW_PRECISION:
            continue
        if v in shown or not (v.op in ARITHMETIC or _widens(v)):
            shown.update(v.args)
        elif v.op in ("where", "masked"):
            shown.add(v.args[0])  # a comparison
    return shown


def _widens(v: Value) -> bool:
    return v.op == "cast" and v.dtype.is_floating_point


def _with_cheap(root: Value, shown: set[Value]) -> Value:
    memo: dict[Value, Value] = {}
    for v in va.walk(root):
        args = tuple(memo.get(a, a) for a in v.args)
        op = v.op
        if v not in shown and v.dtype == torch.float32 and op in OPS and OPS[op].triton_fast:
            op = FAST_MATH + op
        memo[v] = v if op == v.op and args == v.args else va.make(op, args, v.dtype, v.attr)
    return memo[root]
