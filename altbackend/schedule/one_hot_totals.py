"""Replace totals over rows that are zero but for one element by that element.

The gradient of a cross-entropy is subtracted from probabilities times its total over the classes, and is zero but for
the class of the label. Without a total to wait for, the kernel has no rows, and runs in any order over its points:

    sum over v of where(v == e, a, 0) = a     for a position e in the row, a and e without v

Rows are those of neighbours in memory. Along others the position varies from neighbour to neighbour, and a loop on a
CPU that checks it runs element by element: the exponentials beside it took 2.5 ms where a row of zeros takes 0.7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.atoms import Lookup
from ..ir.expr import Atom, Index
from ..ir.loops import Extern, Node, Pointwise, Program, Reduction, View, loop_vars, reads, writes
from ..ir.value import Value

MOST_FLOPS = 16  # float additions of an element that each reader computes rather than reads


def without_one_hot_totals(p: Program) -> Program:
    """Return `p` with sums over rows of one element as that element.

    Only rows that other nodes read too: their node still checks that the position lies in the row.
    """
    writers = Counter(b for n in p.nodes for b in writes(n))
    readers = Counter(b for n in p.nodes for b in set(reads(n)))
    final = {b for b in p.buffers if writers[b] == (p.buffers[b].kind == "temp")}  # the same whenever it is read
    rows = {
        n.out: n
        for n in p.nodes
        if isinstance(n, Pointwise) and n.out in final and readers[n.out] > 1 and final.issuperset(reads(n))
    }
    totals = {n.out: e for n in p.nodes if isinstance(n, Reduction) and (e := _element_of(n, rows)) is not None}
    if not totals:
        return p
    kept = {n.out for n in p.nodes if not isinstance(n, Extern) and n.out in totals and writers[n.out] > 1}
    kept |= {o.buffer for o in p.outputs if isinstance(o, View)}
    kept |= {b for n in p.nodes for b in set(reads(n)) & totals.keys() if not _computes_itself(n, totals[b])}
    nodes: list[Node] = []
    for n in p.nodes:
        if not isinstance(n, Extern) and n.out in totals:
            nodes += [totals[n.out]] if n.out in kept else []
        else:
            nodes.append(_with_elements(n, {b: e for b, e in totals.items() if b not in kept}))
    buffers = {name: b for name, b in p.buffers.items() if name not in totals or name in kept}
    return replace(p, nodes=tuple(nodes), buffers=buffers)


def _element_of(node: Reduction, rows: Mapping[str, Pointwise]) -> Pointwise | None:
    """Return the node that stores the only element of each row that `node` sums, or None for other sums."""
    if node.op != "sum" or len(node.rdims) != 1:
        return None
    value = node.value.args[0] if node.value.op == "cast" else node.value
    if value.op != "load" or value.attr[0] not in rows:
        return None
    writer = rows[value.attr[0]]
    if ex.coefficient(value.attr[1], node.rdims[0]) != 1:
        return None
    env = _same_loops(writer, loop_vars(node), value.attr[1])
    element = None if env is None else _element(writer.value.substitute(env), node.rdims[0])
    if element is None:
        return None
    return Pointwise(node.out, node.dims, node.index, va.cast(element, node.value.dtype), node.origins)


# --- readers compute an element themselves ---------------------------------------------------------------------------


def _computes_itself(node: Node, element: Pointwise) -> bool:
    """Return whether `node` can compute an element that costs little wherever it reads it."""
    if not isinstance(node, (Pointwise, Reduction)) or va.flops(element.value) > MOST_FLOPS:
        return False
    read = [index for b, index in va.loads(node.value) if b == element.out]
    return all(_same_loops(element, ex.vars_of(index), index) is not None for index in read)


def _with_elements(node: Node, elements: Mapping[str, Pointwise]) -> Node:
    if not isinstance(node, (Pointwise, Reduction)) or elements.keys().isdisjoint(reads(node)):
        return node

    def on_load(x: Value) -> Value | None:
        element = elements.get(x.attr[0])
        env = None if element is None else _same_loops(element, ex.vars_of(x.attr[1]), x.attr[1])
        return None if element is None or env is None else element.value.substitute(env)

    return replace(node, value=va.rewrite(node.value, on_load=on_load))


# --- rows of one element ---------------------------------------------------------------------------------------------


def _same_loops(writer: Pointwise, variables: Collection[Atom], index: Index) -> dict[Atom, Index] | None:
    """Return which of a reader's variables stands for each loop of the writer; None if it reads other elements."""
    if ex.lookups(index) or ex.lookups(writer.index):
        return None
    loops = {(ex.coefficient(index, v), ex.size_of(v)): v for v in variables}
    env: dict[Atom, Index] = {}
    for v in writer.dims:
        other = loops.get((ex.coefficient(writer.index, v), ex.size_of(v)))
        if other is None:
            return None
        env[v] = ex.ix(other)
    whole = len(env) == len(variables) == len(set(env.values()))
    return env if whole and ex.substitute(writer.index, env) == index else None


def _element(x: Value, v: Atom) -> Value | None:
    """Return the only element of a row along `v` that is not zero, or None where `x` is no such row."""
    match x.op:
        case "where" | "masked":
            cond, value, other = x.args
            if not _is_zero(other):
                return None
            if v not in cond.vars:
                inner = _element(value, v)
                return None if inner is None else va.make(x.op, (cond, inner, other), x.dtype, x.attr)
            return value if _selects_one(cond, v) and v not in value.vars else None
        case "mul":
            for row, factor in (x.args, x.args[::-1]):
                if v not in factor.vars and (inner := _element(row, v)) is not None:
                    return va.make("mul", (inner, factor), x.dtype, x.attr)
            return None
        case "cast" | "neg":
            inner = _element(x.args[0], v)
            return None if inner is None else va.make(x.op, (inner,), x.dtype, x.attr)
        case _:
            return None


def _is_zero(x: Value) -> bool:
    return x.op == "const" and x.attr == 0


def _selects_one(cond: Value, v: Atom) -> bool:
    """Return whether a condition holds for exactly one value of `v`: one that was read and checked against its size."""
    if cond.op != "eq" or any(a.op != "index" for a in cond.args):
        return False
    sides = [a.attr for a in cond.args]
    for own, other in (sides, sides[::-1]):
        atoms = [] if isinstance(other, int) else [a for monomial, _ in other.terms for a in monomial]
        if own != ex.ix(v) or len(atoms) != 1 or not isinstance(atoms[0], Lookup) or other != ex.ix(atoms[0]):
            continue
        position = atoms[0].value
        return position.op == "wrap_index" and position.attr == ex.size_of(v) and v not in position.vars
    return False
