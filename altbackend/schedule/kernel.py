"""From a fused group to a kernel: common loops, the order of stages, and where each value lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Origin, Program, Scatter
from .deps import Deps
from .device import Target
from .fusion.fuse import Group, row_local, same_point, split_row
from .loop_mapping import MappedNode, Refusal, common_refinement, fit, mergeable, merged, split_loops
from .products.matmul import Matmul
from .tiling.cpu.row_counters import of_rows

GLOBAL, SCRATCH, SCALAR, FORWARD = "global", "scratch", "scalar", "forward"


@dataclass(frozen=True)
class Stage:
    """Members that share one loop nest over `inner`."""

    inner: tuple[Atom, ...]
    members: tuple[MappedNode, ...]


@dataclass(frozen=True)
class Kernel:
    """`rows` run in parallel, each through all stages. `flat`: one row, its single loop is run in parallel.

    `storage` says per written buffer where later stages find it; a global buffer is stored as well.
    `scratch` gives elements per row of each buffer kept on chip. `in_place` pairs (read, stored): the stored buffer
    may take the storage of the read one, if that dies here. `matmul`: the first member's sums are a matrix product.
    `limits`: iterations that loops of a last, smaller tile have. `digits`: variables that count with the row's number.
    """

    rows: Index
    flat: bool
    stages: tuple[Stage, ...]
    storage: dict[str, str]
    stored: frozenset[str]
    scratch: dict[str, Index]
    work: Index
    members: tuple[int, ...]
    origins: tuple[Origin, ...]
    in_place: tuple[tuple[str, str], ...] = ()
    matmul: Matmul | None = None
    tail_bounds: Mapping[Atom, Index] = field(default_factory=dict)
    row_counters: tuple[Atom, ...] = ()


def build(p: Program, deps: Deps, g: Group, target: Target) -> Kernel:
    """The kernel of a fused group."""
    mapped = _common_loops(g.mapped if target.registers else _spread_rows(g.mapped))
    tail_bounds: dict[Atom, Index] = {}
    if not target.registers:  # a GPU's tiles are cut when the code is generated
        mapped, tail_bounds = _tile_transposed(mapped)
    rows = ex.size_of(mapped[0].row)
    stages = _stages(p, mapped)
    storage, stored, scratch = _storage(p, deps, g, mapped, stages)
    row_counters: tuple[Atom, ...] = ()
    if not target.registers and not scratch and not tail_bounds:  # a place in scratch is told from the row's number
        mapped, row_counters = of_rows(mapped)
    numbered: dict[int, list[MappedNode]] = {}
    for q, s in zip(mapped, stages, strict=True):
        numbered.setdefault(s, []).append(q)
    out = []
    for s in sorted(numbered):
        chains: dict[tuple[Atom, ...], list[MappedNode]] = {}
        for q in numbered[s]:
            chains.setdefault(q.inner, []).append(q)
        out += [Stage(inner, tuple(qs)) for inner, qs in chains.items()]
    flat = rows == 1 and len(out) == 1 and len(out[0].inner) == 1 and all(_parallel_alone(q) for q in mapped)
    return Kernel(
        rows=rows,
        flat=flat,
        stages=tuple(out),
        storage=storage,
        stored=stored,
        scratch=scratch,
        work=_work(mapped),
        members=tuple(g.members),
        origins=tuple(o for q in mapped for o in q.node.origins),
        in_place=_in_place(p, out, stored, deps),
        matmul=g.matmul,
        tail_bounds=tail_bounds,
        row_counters=row_counters,
    )


def _in_place(p: Program, stages: list[Stage], stored: frozenset[str], deps: Deps) -> tuple[tuple[str, str], ...]:
    """Pairs of temporaries where every read of the first is at the point of the second's store, and comes before it.

    Within one loop body members run in order: one after the storing member would read what that has overwritten.
    """
    members = [q for s in stages for q in s.members]
    loads: dict[str, list[tuple[int, Index]]] = {}
    for n, q in enumerate(members):
        for b, index in va.loads(q.value):
            loads.setdefault(b, []).append((n, index))
    pairs: list[tuple[str, str]] = []
    taken: set[str] = set(stored)
    for n, q in enumerate(members):
        out = p.buffers[q.node.out]
        if q.kind != "point" or out.name not in stored or out.name in deps.escaping:
            continue
        for a, uses in loads.items():
            source = p.buffers[a]
            same = source.extent == out.extent and source.dtype == out.dtype
            if a in taken or a in deps.escaping or source.kind != "temp" or not same:
                continue
            if all(at <= n and index is q.index for at, index in uses):
                pairs.append((a, out.name))
                taken.add(a)
                break
    return tuple(pairs)


def _parallel_alone(q: MappedNode) -> bool:
    return q.kind == "point" or (q.kind == "inner" and not q.node.dims)


def _work(mapped: list[MappedNode]) -> Index:
    """Rough cost in element operations: points times (loads + flops / 4 + 1), summed over members."""
    total: Index = 0
    for q in mapped:
        weight = 1 + len(va.loads(q.value)) + va.flops(q.value) // 4
        total = ex.add(total, ex.mul(weight, ex.prod((ex.size_of(q.row), *q.sizes))))
    return total


def _spread_rows(mapped: list[MappedNode]) -> list[MappedNode]:
    """A pointwise kernel whose loops do not merge into one runs all but the fastest as rows."""
    if ex.size_of(mapped[0].row) != 1 or any(q.kind != "point" for q in mapped):
        return mapped
    chain = common_refinement([q.sizes for q in mapped])
    if chain is None:
        return mapped
    together = _merge_all([split_loops(q, chain) for q in mapped])
    sizes = together[0].sizes
    if len(sizes) < 2:
        return mapped
    rows = ex.prod(sizes[:-1])
    again = [fit(q.node, rows) for q in mapped]
    if any(isinstance(q, Refusal) for q in again):
        return mapped
    spread = [q for q in again if isinstance(q, MappedNode)]
    # one row holds everything; a row of several holds only its own part
    return spread if all(_reads_own_row(spread[:n], q) for n, q in enumerate(spread)) else mapped


def _reads_own_row(writers: list[MappedNode], reader: MappedNode) -> bool:
    return all(
        same_point(w, reader) or row_local(w, reader, b, index) is None
        for b, index in va.loads(reader.value)
        for w in writers
        if w.node.out == b
    )


TILE = 16  # one cache line of float32, one AVX-512 vector


def _tile_transposed(mapped: list[MappedNode]) -> tuple[list[MappedNode], dict[Atom, Index]]:
    """Loads that run against the stores: rows in blocks of TILE, columns in blocks of TILE inside them.

    o = TILE*o' + a and i0 = TILE*b + c, run as b, a, c: each cache line of either side is used up while in L1. The
    second result limits a and c where the last blocks are, or may be, smaller.
    """
    row, inner = mapped[0].row, mapped[0].inner
    if len(inner) != 1 or any(q.kind != "point" or q.inner != inner for q in mapped):
        return mapped, {}
    rows, columns = ex.size_of(row), ex.size_of(inner[0])
    against = any(_against(q, i, inner[0], rows) for q in mapped for _, i in va.loads(q.value))
    few = (isinstance(rows, int) and rows < TILE) or (isinstance(columns, int) and columns < 4 * TILE)
    # strides that are no multiple of a line meet in few sets of the cache: where they are known, tiles gain nothing
    odd = isinstance(rows, int) and isinstance(columns, int) and (rows % TILE or columns % TILE)
    if not against or few or odd:
        return mapped, {}
    o, a = ex.var(row.args[0], _blocks_of(rows)), ex.var("i1", TILE)
    b, c = ex.var("i0", _blocks_of(columns)), ex.var("i2", TILE)
    env = {
        row: ex.add(ex.mul(ex.ix(o), TILE), ex.ix(a)),
        inner[0]: ex.add(ex.mul(ex.ix(b), TILE), ex.ix(c)),
    }
    tail_bounds: dict[Atom, Index] = {}
    if ex.exact_div(rows, TILE) is None or ex.exact_div(columns, TILE) is None:
        tail_bounds = {a: ex.sub(rows, ex.mul(ex.ix(o), TILE)), c: ex.sub(columns, ex.mul(ex.ix(b), TILE))}
    cut = [
        replace(q, row=o, inner=(b, a, c), index=ex.substitute(q.index, env), value=q.value.substitute(env))
        for q in mapped
    ]
    return cut, tail_bounds


def _blocks_of(n: Index) -> Index:
    return ex.floordiv(ex.add(n, TILE - 1), TILE)


def _against(q: MappedNode, index: Index, column: Atom, rows: Index) -> bool:
    """A load with unit step along the rows and a longer one along the columns."""
    step = ex.coefficient(index, column)
    if step is None or step in (0, 1) or ex.vars_of(step):
        return False
    return ex.sub(ex.substitute(index, {q.row: 1}), ex.substitute(index, {q.row: 0})) == 1


def _common_loops(mapped: list[MappedNode]) -> list[MappedNode]:
    """Give members with equally many inner points the same loops, as few as their indices allow."""
    classes: dict[Index, list[int]] = {}
    for k, q in enumerate(mapped):
        classes.setdefault(ex.prod(q.sizes), []).append(k)
    out = list(mapped)
    for members in classes.values():
        chain = common_refinement([mapped[k].sizes for k in members])
        if chain is not None and any(_cuts_scan(mapped[k], chain) for k in members):
            chain = None
        sets = [members] if chain is not None else [[k] for k in members]
        for part in sets:
            sizes = chain if chain is not None else tuple(n for n in mapped[part[0]].sizes if n != 1)
            done = _merge_all([split_loops(mapped[k], sizes) for k in part])
            final = done[0].sizes
            for k, q in zip(part, done, strict=True):
                out[k] = split_loops(q, final)
    return out


def _cuts_scan(q: MappedNode, chain: tuple[Index, ...]) -> bool:
    """Whether `chain` splits the loop that a scan runs along; its running value lives for one innermost loop."""
    return q.kind == "scan" and chain[-1:] != tuple(n for n in q.sizes if n != 1)[-1:]


def _merge_all(mapped: list[MappedNode]) -> list[MappedNode]:
    k = len(mapped[0].inner) - 2
    while k >= 0:
        if all(mergeable(q, k) for q in mapped):
            mapped = [merged(q, k) for q in mapped]
        k -= 1
    return mapped


def _stages(p: Program, mapped: list[MappedNode]) -> list[int]:
    stages: list[int] = []
    for n, reader in enumerate(mapped):
        names = {b for b, _ in va.loads(reader.value)}
        at = 0
        for writer, s in zip(mapped[:n], stages, strict=True):
            if writer.node.out in names:
                together = writer.inner == reader.inner and same_point(writer, reader)
                at = max(at, s if together else s + 1)
            out = reader.node.out
            if p.buffers[out].kind != "temp" and any(b == out for b, _ in va.loads(writer.value)):
                at = max(at, s)
        stages.append(at)
    return stages


def _storage(
    p: Program, deps: Deps, g: Group, mapped: list[MappedNode], stages: list[int]
) -> tuple[dict[str, str], frozenset[str], dict[str, Index]]:
    members = set(g.members)
    storage: dict[str, str] = {}
    stored: set[str] = set()
    scratch: dict[str, Index] = {}
    for writer, s in zip(mapped, stages, strict=True):
        b = writer.node.out
        escapes = b in deps.escaping or any(r not in members for r in deps.readers.get(b, ()))
        if escapes:
            stored.add(b)
        if writer.kind in ("outer", "scatter"):
            storage[b] = GLOBAL
            continue
        kept = ex.prod(ex.size_of(v) for v in writer.inner if v not in writer.reduced)
        later = any(
            t > s or q.inner != writer.inner
            for q, t in zip(mapped, stages, strict=True)
            if any(name == b for name, _ in va.loads(q.value))
        )
        if kept == 1:
            storage[b] = SCALAR
        elif not later and writer.kind == "point":
            storage[b] = FORWARD
        elif escapes:
            storage[b] = GLOBAL
        else:
            storage[b] = SCRATCH
            scratch[b] = kept
    return storage, frozenset(stored), scratch


def scratch_index(q: MappedNode, index: Index) -> Index:
    """Position within the row's scratch of a global element index."""
    parts = split_row(index, q.row)
    assert parts is not None, f"{index} mixes row and column"
    return parts[1]


def show_kernel(k: Kernel) -> str:
    """Text form: rows, then per stage its loops and members with their storage."""
    kind = "flat" if k.flat else f"{ex.show(k.rows)} rows"
    lines = [f"kernel: {kind}"]
    if (m := k.matmul) is not None:
        lines.append(
            f"  product {m.batch}x{m.rows}x{m.columns}x{m.depth} of {m.left.buffer}, {m.right.buffer}: {m.tiles}"
        )
    for s in k.stages:
        loops = ", ".join(f"{v.args[0]}:{ex.show(ex.size_of(v))}" for v in s.inner) or "once"
        lines.append(f"  for {loops}")
        for q in s.members:
            where = k.storage.get(q.node.out, GLOBAL) + ("+global" if q.node.out in k.stored else "")
            over = ",".join(sorted(v.args[0] for v in q.reduced))
            what = q.node.mode if isinstance(q.node, Scatter) else getattr(q.node, "op", "")
            op = "" if q.kind == "point" else f"{q.kind} {what}({over}) "
            lines.append(f"    {q.node.out}[{ex.show(q.index)}] = {op}{q.value}  ({where})")
    return "\n".join(lines) + "\n"
