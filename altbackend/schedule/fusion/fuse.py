"""Fusion: which loop nodes share a kernel.

Nodes are taken in program order; each joins the kernel that it shares the most bytes with, if its loops can
be placed on that kernel's rows and everything that it reads from the kernel is finished when it reads it.
Every refusal is recorded with its reason.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ...config.options import Config
from ...debug.trace import DecisionKind
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Buffer, Extern, Loop, Node, Program, Reduction, Scatter, reads, writes
from ...ir.ops import OPS
from ...ir.value import Value
from ..deps import Deps, analyse
from ..device import Target
from ..loop_mapping import (
    MappedNode,
    Refusal,
    common_refinement,
    fit,
    mappings,
    natural_rows,
    ordered_vars,
    split_loops,
)
from ..products.matmul import Matmul
from ..reachability import Reachability
from ..split import cuts_of
from . import gpu_rules

ROW_BYTES = 1 << 20  # what a row may keep on chip, about half of a typical L2
ANSWERS = 4096  # sizes of trees that are kept: a node is tried with many kernels
# Elements of one tensor that a point may read in a kernel that also reduces. The gradient of a 7x7 depthwise
# convolution in one kernel with a layer norm's backward spilled 5 kB of registers and wanted 850 kB of shared memory.
WIDEST_WINDOW = 24
HORIZONTAL_REACH = 24  # how many kernels back a node looks for one that reads the same data


@dataclass
class Group:
    """A kernel under construction. `rows` 1 with pointwise members only is a flat kernel.

    `matmul`: the product whose results the first member stands for (`epilogue`).
    """

    number: int
    rows: Index
    mapped: list[MappedNode]
    members: list[int]
    extern: Extern | None = None
    needs: set[int] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    matmul: Matmul | None = None
    operators: int = 0


Decision = Callable[[DecisionKind, str, str, str], None]


def fuse(p: Program, deps: Deps, cfg: Config, target: Target, decision: Decision) -> list[Group]:
    """Partition the nodes of `p` into kernels and library calls, in an order that respects `deps`."""
    groups: list[Group] = []
    reachability = Reachability()
    home: dict[int, Group] = {}
    for k, node in enumerate(p.nodes):
        needs = {home[d].number for d in deps.before[k]}
        group = None
        if not isinstance(node, Extern) and cfg.fuse:
            group = _join_best(p, deps, cfg, target, decision, groups, reachability, k, node, needs)
        if group is None:
            group = _open(len(groups), k, node, target)
            groups.append(group)
        group.needs |= needs - {group.number}
        reachability.add(group.number, needs)
        group.reads.update(reads(node))
        group.writes.update(writes(node))
        home[k] = group
    if target.registers and cfg.fuse:
        groups = _merge(p, deps, cfg, target, decision, groups, reachability)
    return order(groups)


def apart(p: Program, members: tuple[int, ...], target: Target) -> list[Group]:
    """The nodes of one kernel as kernels of their own, in order."""
    groups = []
    for k in members:
        g = _open(k, k, p.nodes[k], target)
        g.reads.update(reads(p.nodes[k]))
        g.writes.update(writes(p.nodes[k]))
        groups.append(g)
    return groups


def totals_over_rows(p: Program, cfg: Config, target: Target) -> frozenset[str]:
    """Buffers that a GPU kernel of whole rows totals as it goes (a LayerNorm's weight gradients).

    Splitting them would take them out of that kernel, to read everything once more.
    """
    if not target.registers or not any(_is_cut_column(n, target) for n in p.nodes):
        return frozenset()
    groups = fuse(p, analyse(p), cfg, target, lambda *a: None)
    return frozenset(q.node.out for g in groups for q in g.mapped if q.kind == "outer")


def _is_cut_column(n: Node, target: Target) -> bool:
    if not isinstance(n, Reduction) or not n.dims or ordered_vars(n)[-1] in n.rdims:
        return False
    return cuts_of(n, target) is not None


def _merge(
    p: Program,
    deps: Deps,
    cfg: Config,
    target: Target,
    decision: Decision,
    groups: list[Group],
    reachability: Reachability,
) -> list[Group]:
    """Join a kernel with one that it reads from, where a node between them brought the two together too late.

    On a GPU a kernel that is saved is a launch and a pass over memory that are saved.
    """
    alive = {g.number: g for g in groups}
    users: dict[int, set[int]] = {}
    for g in groups:
        for n in g.needs:
            users.setdefault(n, set()).add(g.number)
    for number in range(len(groups)):
        again = True
        while again and number in alive:
            again = False
            late = alive[number]
            for early in sorted((alive[n] for n in late.needs), key=lambda g: -g.number):
                both = _joined(p, deps, cfg, target, reachability, early, late)
                subject = f"kernel of {_opener(p, late)} with kernel of {_opener(p, early)}"
                if isinstance(both, Refusal):
                    decision(DecisionKind.FUSION, subject, "not fused", both.reason)
                    continue
                decision(DecisionKind.FUSION, subject, "fused", "the one reads from the other")
                alive[number] = both
                del alive[early.number]
                reachability.join(early.number, number)
                _redirect(alive, users, early, both)
                again = True
                break
    return list(alive.values())


def _redirect(alive: dict[int, Group], users: dict[int, set[int]], gone: Group, both: Group) -> None:
    """Whoever needed kernel `gone` needs `both`; `users` has the numbers of who needs each."""
    for n in gone.needs:
        users[n].discard(gone.number)
    for n in both.needs:
        users.setdefault(n, set()).add(both.number)
    for n in users.pop(gone.number, set()) - {both.number}:
        alive[n].needs = (alive[n].needs - {gone.number}) | {both.number}
        users.setdefault(both.number, set()).add(n)


def _opener(p: Program, g: Group) -> str:
    return writes(p.nodes[g.members[0]])[0] if writes(p.nodes[g.members[0]]) else "a library call"


def _joined(
    p: Program, deps: Deps, cfg: Config, target: Target, reachability: Reachability, early: Group, late: Group
) -> Group | Refusal:
    """One kernel of the nodes of both, placed anew in program order."""
    if early.extern is not None or late.extern is not None:
        return Refusal("a library call")
    others = late.needs - {early.number}
    if (via := reachability.path(others, early.number)) is not None:
        return Refusal(f"it needs kernel {via}, which needs the other")
    first, *rest = sorted((*early.members, *late.members))
    both = _open(late.number, first, p.nodes[first], target)
    for k in rest:
        node = p.nodes[k]
        assert not isinstance(node, Extern)
        if (no := _try_join(p, deps, cfg, target, None, both, k, node, set())) is not None:
            return no
    both.needs = (early.needs | others) - {early.number, late.number}
    both.reads, both.writes = early.reads | late.reads, early.writes | late.writes
    return both


def _open(number: int, k: int, node: Node, target: Target) -> Group:
    if isinstance(node, Extern):
        return Group(number, 1, [], [k], node)
    for rows in natural_rows(node, kept=target.registers):
        ways = mappings(node, 1 if rows is None else rows)
        if target.registers and not isinstance(ways, Refusal):
            ways = gpu_rules.openings(ways) or Refusal("no result would be complete before the last row")
        if not isinstance(ways, Refusal):
            return Group(number, 1 if rows is None else rows, [ways[0]], [k], operators=_operators(node.value))
    got = fit(node, 1)
    assert isinstance(got, MappedNode), f"{node} fits no kernel"
    return Group(number, 1, [got], [k], operators=_operators(node.value))


def _join_best(
    p: Program,
    deps: Deps,
    cfg: Config,
    target: Target,
    decision: Decision,
    groups: list[Group],
    reachability: Reachability,
    k: int,
    node: Loop,
    needs: set[int],
) -> Group | None:
    candidates: dict[int, Group] = {g: groups[g] for g in needs}
    read = frozenset(reads(node))
    for g in groups[-HORIZONTAL_REACH:]:
        if not g.reads.isdisjoint(read) or (target.registers and _are_siblings(g, node, needs)):
            candidates[g.number] = g
    scored = sorted(
        ((_shared_bytes(p, g, read), g.number) for g in candidates.values() if g.extern is None), reverse=True
    )
    for shared, number in scored:
        group = groups[number]
        refusal = _try_join(p, deps, cfg, target, reachability, group, k, node, needs)
        subject = f"{node.out} with kernel of {group.mapped[0].node.out}"
        if refusal is None:
            decision(DecisionKind.FUSION, subject, "fused", f"{shared} bytes shared")
            return group
        decision(DecisionKind.FUSION, subject, "not fused", refusal.reason)
    return None


def _are_siblings(g: Group, node: Loop, needs: set[int]) -> bool:
    """Small totals of what one kernel left behind (the two of a normalisation's backward): one launch for both."""
    first = g.mapped[0].node if g.mapped else None
    alike = isinstance(node, Reduction) and isinstance(first, Reduction) and first.dims == node.dims
    return alike and bool(node.dims) and bool(g.needs & needs)


def _shared_bytes(p: Program, g: Group, read: frozenset[str]) -> int:
    common = (read & g.writes) | (read & g.reads)
    return sum(_bytes(p.buffers[b]) for b in common)


def _bytes(b: Buffer) -> int:
    return ex.bounds(ex.substitute(b.numel, {s: min(s.hi, 1024) for s in ex.syms_of(b.numel)}))[1] * b.dtype.itemsize


def _try_join(
    p: Program,
    deps: Deps,
    cfg: Config,
    target: Target,
    reachability: Reachability | None,
    g: Group,
    k: int,
    node: Loop,
    needs: set[int],
) -> Refusal | None:
    """Put node `k` into `g` and give None, or say why not. `reach`: None if no other kernel stands between."""
    if len(g.members) >= cfg.max_fused_nodes:
        return Refusal(f"the kernel already holds max_fused_nodes={cfg.max_fused_nodes} nodes")
    size = _operators(node.value)
    if target.most_operators and g.operators + size > target.most_operators:
        return Refusal(f"one kernel would have more than {target.most_operators} operators, which take long to build")
    if target.registers and _window_in_totals([*(q.node for q in g.mapped), node]):
        return Refusal(f"a window of more than {WIDEST_WINDOW} elements beside a reduction takes too many registers")
    if isinstance(node, Scatter) or any(isinstance(q.node, Scatter) for q in g.mapped):
        return Refusal("a scatter runs alone")
    if reachability is not None and (via := reachability.path(needs, g.number)) is not None:
        return Refusal(f"it needs kernel {via}, which needs this kernel")
    flexible = g.rows == 1 and all(q.kind == "point" or not q.node.dims for q in g.mapped)
    options: list[Index] = [g.rows]
    if flexible:
        options = [1 if r is None else r for r in natural_rows(node, kept=target.registers)] + [1]
    reason: Refusal = Refusal("no common rows")
    for rows in dict.fromkeys(options):
        mapped = _replace_all(p, deps, cfg, target, g, node, rows)
        if isinstance(mapped, Refusal):
            reason = mapped
            continue
        g.rows, g.mapped = rows, mapped
        g.members.append(k)
        g.operators += size
        return None
    return reason


def _window_in_totals(nodes: list[Loop]) -> bool:
    return any(isinstance(n, Reduction) for n in nodes) and any(_window(n.value) > WIDEST_WINDOW for n in nodes)


@functools.lru_cache(ANSWERS)
def _window(value: Value) -> int:
    """At how many places a value reads one buffer, the one that it reads most."""
    return max(Counter(b for b, _ in va.loads(value)).values(), default=0)


@functools.lru_cache(ANSWERS)
def _operators(value: Value) -> int:
    return sum(v.op in OPS for v in va.walk(value))


def _replace_all(
    p: Program, deps: Deps, cfg: Config, target: Target, g: Group, node: Loop, rows: Index
) -> list[MappedNode] | Refusal:
    mapped: list[MappedNode] = []
    for q in g.mapped:
        got = fit(q.node, rows) if rows != g.rows else q
        if isinstance(got, Refusal):
            return Refusal(f"{q.node.out} on {ex.show(rows)} rows: {got.reason}")
        mapped.append(got)
    ways = mappings(node, rows, any_order=target.registers)
    if isinstance(ways, Refusal):
        return Refusal(f"{node.out} on {ex.show(rows)} rows: {ways.reason}")
    results = (_checked(p, deps, cfg, target, g, [*mapped, way], rows) for way in ways)
    refusal: Refusal | None = None
    for result in results:
        if not isinstance(result, Refusal):
            return result
        refusal = refusal or result
    assert refusal is not None
    return refusal


def _checked(
    p: Program, deps: Deps, cfg: Config, target: Target, g: Group, mapped: list[MappedNode], rows: Index
) -> list[MappedNode] | Refusal:
    if rows == 1 and any(q.kind == "inner" and q.node.dims and points(q) >= _alone(cfg, target) for q in mapped):
        return Refusal(f"with a single row it would run on one {target.one}")
    if target.registers and (no := gpu_rules.check(p, mapped, rows, target)) is not None:
        return no
    check = range(len(mapped)) if rows != g.rows else (len(mapped) - 1,)
    for n in check:
        if (no := _check_edges(p, deps, mapped, n, target, cfg, rows)) is not None:
            return no
    return (None if target.registers else _check_size(p, mapped, rows)) or mapped


def _check_edges(
    p: Program, deps: Deps, mapped: list[MappedNode], n: int, target: Target, cfg: Config, rows: Index
) -> Refusal | None:
    """Everything that member `n` reads from earlier members is there, in its row, when it reads it."""
    reader = mapped[n]
    for b, index in va.loads(reader.value):
        for writer in mapped[:n]:
            if writer.node.out != b:
                continue
            if (no := _edge(deps, writer, reader, b, index, _alone(cfg, target), target, rows)) is not None:
                return no
    return _check_overwrites(p, mapped, n)


def _alone(cfg: Config, target: Target) -> int:
    """Points that a kernel without parallel rows may not reach."""
    return target.row_limit if target.registers else cfg.parallel_threshold


def _edge(
    deps: Deps, writer: MappedNode, reader: MappedNode, b: str, index: Index, alone: int, target: Target, rows: Index
) -> Refusal | None:
    if writer.kind == "outer":
        return Refusal(f"{b} is complete only after the last row")
    if len(deps.writers[b]) > 1:
        return Refusal(f"{b} is filled piece by piece")
    if rows == 1 and writer.kind == "inner" and points(writer) >= alone:
        return Refusal(f"{b} reduces everything: fused, all of it would run on one {target.one}")
    if same_point(writer, reader):
        return None
    if target.registers:
        here = same_point_load(writer, reader, b)
        return gpu_rules.read_back(writer, reader, b, here, target) or row_local(writer, reader, b, index)
    if rows == 1 and writer.kind != "inner" and points(writer) >= alone:
        return Refusal(
            f"{b} is read at other points than it is written: fused, all of it would run on one {target.one}"
        )
    return row_local(writer, reader, b, index)


def points(q: MappedNode) -> int:
    """Points of all rows; a symbolic size counts as at most 1024."""
    total = ex.prod((ex.size_of(q.row), *q.sizes))
    return ex.bounds(ex.substitute(total, {s: min(s.hi, 1024) for s in ex.syms_of(total)}))[1]


def same_point(writer: MappedNode, reader: MappedNode) -> bool:
    """The reader uses at each inner point just what the writer stored there."""
    if writer.kind != "point":
        return False
    chain = common_refinement([writer.sizes, reader.sizes])
    if chain is None:
        return False
    w, r = split_loops(writer, chain), split_loops(reader, chain)
    return all(i is w.index or i == w.index for name, i in va.loads(r.value) if name == writer.node.out)


def split_row(index: Index, row: ex.Atom) -> tuple[Index, Index] | None:
    """`index` as (part of the row variable, rest), None when a term mixes both."""
    if isinstance(index, int):
        return 0, index
    row_part = ex.substitute(index, {v: 0 for v in index.vars if v is not row})
    rest = ex.sub(index, row_part)
    if row in ex.vars_of(rest):
        return None
    const = ex.substitute(row_part, {row: 0})
    if not isinstance(const, int):
        return None if ex.syms_of(const) else (row_part, rest)
    return ex.sub(row_part, const), ex.add(rest, const)


def covers(writer: MappedNode, part: Index) -> bool:
    """Whether the inner store positions `part` are exactly 0 .. n-1 for the n inner kept points."""
    kept = [v for v in writer.inner if v not in writer.reduced and ex.size_of(v) != 1]
    strides = []
    for v in kept:
        c = ex.coefficient(part, v)
        if c is None or ex.vars_of(c):
            return False
        strides.append((c, ex.size_of(v)))
    if ex.substitute(part, dict.fromkeys(kept, 0)) != 0:
        return False
    expected: Index = 1
    left = list(strides)
    while left:
        step = next((x for x in left if x[0] == expected), None)
        if step is None:
            return False
        left.remove(step)
        expected = ex.mul(expected, step[1])
    return True


def row_local(writer: MappedNode, reader: MappedNode, b: str, index: Index) -> Refusal | None:
    """The reader stays within what its own row of the writer stored."""
    w, r = split_row(writer.index, writer.row), split_row(index, reader.row)
    if w is None or r is None:
        return Refusal(f"{b} is addressed by row and column together")
    if w[0] is not r[0] and w[0] != r[0]:
        return Refusal(f"{b} is read from other rows than it is written in")
    if not covers(writer, w[1]):
        return Refusal(f"{b} is not written densely within a row")
    n = ex.prod(ex.size_of(v) for v in writer.inner if v not in writer.reduced)
    if not (ex.known_nonnegative(r[1]) and ex.known_less(r[1], n)):
        return Refusal(f"{b} is read beyond the row that writes it")
    return None


def _check_overwrites(p: Program, mapped: list[MappedNode], n: int) -> Refusal | None:
    """Overwriting an input in place: other members may read it only at the very point that is written."""
    mine = mapped[n]
    target = mine.node.out
    for k, other in enumerate(mapped):
        if k == n:
            continue
        read = p.buffers[target].kind != "temp" and any(b == target for b, _ in va.loads(other.value))
        if read and not (mine.kind == other.kind == "point" and same_point_load(mine, other, target)):
            return Refusal(f"{target} would be overwritten while the kernel still reads it")
        out = other.node.out
        if p.buffers[out].kind != "temp" and any(b == out for b, _ in va.loads(mine.value)):
            return Refusal(f"{out} is overwritten earlier in the kernel")
        if out == target and p.buffers[target].kind != "temp":
            return Refusal(f"{target} is written twice")
    return None


def same_point_load(writer: MappedNode, reader: MappedNode, b: str) -> bool:
    chain = common_refinement([writer.sizes, reader.sizes])
    if chain is None:
        return False
    w, r = split_loops(writer, chain), split_loops(reader, chain)
    return all(i is w.index for name, i in va.loads(r.value) if name == b)


def _check_size(p: Program, mapped: list[MappedNode], rows: Index) -> Refusal | None:
    """What the row keeps between its loops must stay on chip."""
    if rows == 1:
        return None
    total = 0
    for q in mapped:
        kept = ex.prod(ex.size_of(v) for v in q.inner if v not in q.reduced)
        total += ex.bounds(kept)[1] * p.buffers[q.node.out].dtype.itemsize if not ex.syms_of(kept) else 0
    if total > 8 * ROW_BYTES:
        return Refusal(f"a row would keep {total} bytes")
    return None


def order(groups: list[Group]) -> list[Group]:
    """Topological order: a kernel runs at the place of its first member, or as soon as what it needs is done.

    Later, and what it reads lives longer; earlier, and what it writes does.
    """
    by_number = {g.number: g for g in groups}
    waiting = {g.number: set(g.needs) for g in groups}
    users: dict[int, list[int]] = {}
    for g in groups:
        for n in g.needs:
            users.setdefault(n, []).append(g.number)
    place = {g.number: min(g.members) for g in groups}
    ready = [(place[n], place[n], n) for n, w in waiting.items() if not w]
    heapq.heapify(ready)
    out = []
    while ready:
        when, _, n = heapq.heappop(ready)
        out.append(by_number[n])
        for u in users.get(n, ()):
            waiting[u].discard(n)
            if not waiting[u]:
                heapq.heappush(ready, (max(when, place[u]), place[u], u))
    assert len(out) == len(groups), "the kernels depend on each other in a circle"
    return out
