"""Structural checks of a loop program; tests run them on the result of every stage."""

from __future__ import annotations

from . import expr as ex
from . import value as va
from .loops import Extern, Node, Pointwise, Program, Reduction, Scan, Scatter, View, loop_vars, reads, views, writes


class InvalidIR(AssertionError):
    """Raised for a program that breaks a rule of the IR; the text names the node and the rule."""


def verify(p: Program) -> Program:
    """Return `p` if it is valid: buffers defined before use, indices in bounds, dtypes equal, loop variables bound.

    Raises InvalidIR.
    """
    defined = set(p.inputs) | {b.name for b in p.buffers.values() if b.kind != "temp"}
    for node in p.nodes:
        for name in reads(node):
            _require(name in p.buffers, node, f"reads unknown buffer {name}")
            _require(name in defined, node, f"reads {name} before it is written")
        for name in writes(node):
            _require(name in p.buffers, node, f"writes unknown buffer {name}")
        if isinstance(node, Extern):
            for v in views(node):
                _check_view(p, node, v)
        else:
            _check_loop(p, node)
        defined.update(writes(node))
    for o in p.outputs:
        if isinstance(o, View):
            _require(o.buffer in defined, None, f"output {o.buffer} is never written")
    return p


def _require(ok: bool, node: Node | None, text: str) -> None:
    if not ok:
        raise InvalidIR(f"{text}" + (f" in: {node}" if node is not None else ""))


def _check_loop(p: Program, node: Pointwise | Reduction | Scan | Scatter) -> None:
    bound = frozenset(loop_vars(node))
    _require(len(bound) == len(loop_vars(node)), node, "names a loop variable twice")
    _require(node.value.vars <= bound, node, f"free variables {set(node.value.vars - bound)}")
    parallel = frozenset(node.dims) if isinstance(node, Reduction) else bound
    _require(ex.vars_of(node.index) <= parallel, node, "stores at an index with free variables")
    out = p.buffers[node.out]
    _check_index(p, node, node.out, node.index)
    for name, index in va.loads(node.value):
        _check_index(p, node, name, index)
    _require(out.dtype == node.value.dtype, node, f"stores {node.value.dtype} into {out.dtype}")
    for v in va.walk(node.value):
        if v.op == "load":
            _require(v.dtype == p.buffers[v.attr[0]].dtype, node, f"loads {v.attr[0]} as {v.dtype}")
        if v.op in ("masked", "where"):
            _require(str(v.args[0].dtype) == "torch.bool", node, f"{v.op} on a condition of {v.args[0].dtype}")
            _require(v.args[1].dtype == v.args[2].dtype, node, f"{v.op} of {v.args[1].dtype} and {v.args[2].dtype}")
        elif v.op not in ("const", "load", "index", "cast", "wrap_index"):
            _require(len({a.dtype for a in v.args}) == 1, node, f"{v.op} mixes {[a.dtype for a in v.args]}")


def _check_index(p: Program, node: Node, name: str, index: ex.Index) -> None:
    lo, hi = ex.bounds(index)
    extent = p.buffers[name].extent
    if not isinstance(node, Extern) and any(ex.size_of(v) == 0 for v in loop_vars(node)):
        return
    if isinstance(extent, int) and not ex.syms_of(index) and not _is_masked(node) and extent > 0:
        _require(lo >= 0 and hi < extent, node, f"index {ex.show(index)} in [{lo}, {hi}] leaves {name} of {extent}")


def _is_masked(node: Node) -> bool:
    return not isinstance(node, Extern) and any(v.op == "masked" for v in va.walk(node.value))


def _check_view(p: Program, node: Node, v: View) -> None:
    _require(
        len(v.sizes) == len(v.strides), node, f"view of {v.buffer}: {len(v.sizes)} sizes, {len(v.strides)} strides"
    )
    if 0 not in v.sizes and v.dtype is None:
        last = ex.add(v.offset, *(ex.mul(ex.sub(n, 1), s) for n, s in zip(v.sizes, v.strides, strict=True)))
        extent = p.buffers[v.buffer].extent
        if isinstance(extent, int) and isinstance(last, int):
            _require(last < extent, node, f"view of {v.buffer} reaches element {last} of {extent}")
