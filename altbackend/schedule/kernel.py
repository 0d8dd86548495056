"""Build kernels from fused groups: common loops, the order of stages, and where each value is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Origin, Program, Scan, Scatter
from .access import reads_same_point, same_point, split_row
from .deps import Deps
from .device import Cpu, Device, Gpu
from .fusion.group import Group
from .loop_mapping import Kind, MappedNode
from .loop_refinement import common_refinement, split_loops, with_loops_of
from .products.matmul import Matmul
from .scan_terms import runs_one_by_one
from .tiling.cpu.index_ranges import split_ranges
from .tiling.cpu.row_counters import with_row_counters
from .tiling.cpu.transpose import merge_all, spread_rows, tile_transposed, turn_rows
from .tiling.gpu.row_numbers import number_rows
from .tiling.gpu.row_order import order_rows

GLOBAL, SCRATCH, SCALAR, FORWARD = "global", "scratch", "scalar", "forward"


@dataclass(frozen=True)
class Stage:
    """Nodes that share one loop nest over `inner`."""

    inner: tuple[Atom, ...]
    members: tuple[MappedNode, ...]


@dataclass(frozen=True)
class Storage:
    """The storage of a kernel's values.

    `kinds`: for each written buffer where later stages find its values. `stored`: buffers that the kernel writes to
    memory, whatever their kind. `scratch`: elements a row of each buffer in scratch.
    """

    kinds: dict[str, str]
    stored: frozenset[str]
    scratch: dict[str, Index]


@dataclass(frozen=True)
class Kernel:
    """A kernel of `rows` parallel rows, each of which runs all stages. `flat`: the single loop of one row is parallel.

    `storage`, `stored`, `scratch`: see `Storage`.
    `in_place`: pairs of a read buffer and a stored one, which may take its memory if the read one is dead afterwards.
    `matmul`: the first node's value is this matrix product.
    `tail_bounds`: iterations of loops in a last, smaller tile.
    `row_counters`: variables that count with the row.
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

    @property
    def nodes(self) -> list[MappedNode]:
        """Return the nodes of all stages in order."""
        return [q for s in self.stages for q in s.members]


def build(p: Program, deps: Deps, g: Group, device: Device) -> Kernel:
    """Build the kernel of a fused group. On a GPU its tiles are chosen later (`tiling.gpu`)."""
    tail_bounds: dict[Atom, Index] = {}
    if isinstance(device, Cpu):
        spread = _common_loops(spread_rows(g.mapped), apart=True)
        mapped, tail_bounds = tile_transposed(turn_rows(spread), device)
    else:
        stored = _stored(deps, g)
        ordered = order_rows(p, _common_loops(g.mapped, apart=False), stored, device)
        if all(q.kind is Kind.POINT for q in ordered):
            # nodes that run through memory in one order now may share a loop nest
            ordered = _common_loops(ordered, apart=g.matmul is None)
        # the rows of a product are those of its tiles
        mapped = ordered if g.matmul is not None else number_rows(p, ordered, stored, device)
    rows = ex.size_of(mapped[0].row)
    numbers = _stage_numbers(p, mapped, isinstance(device, Gpu))
    storage = _storage(deps, g, mapped, numbers)
    row_counters: tuple[Atom, ...] = ()
    # positions in scratch and in tiles are computed from the row's number
    if isinstance(device, Cpu) and not storage.scratch and not tail_bounds:
        mapped, row_counters = with_row_counters(mapped)
    stages = _stages(mapped, numbers)
    in_place = _in_place(p, stages, storage.stored, deps)
    flat = rows == 1 and len(stages) == 1 and len(stages[0].inner) == 1 and all(_is_parallel(q) for q in mapped)
    if isinstance(device, Cpu) and not flat and not tail_bounds:
        stages = tuple(part for s in stages for part in _ranges(s, storage.kinds))
    return Kernel(
        rows=rows,
        flat=flat,
        stages=stages,
        storage=storage.kinds,
        stored=storage.stored,
        scratch=storage.scratch,
        work=_work(mapped),
        members=g.members,
        origins=tuple(o for q in mapped for o in q.node.origins),
        in_place=in_place,
        matmul=g.matmul,
        tail_bounds=tail_bounds,
        row_counters=row_counters,
    )


def _ranges(s: Stage, kinds: Mapping[str, str]) -> list[Stage]:
    """Return a stage of pointwise nodes in pieces whose conditions are constant (`split_ranges`)."""
    plain = all(q.kind is Kind.POINT and kinds[q.node.out] in (FORWARD, GLOBAL) for q in s.members)
    return [Stage(*piece) for piece in split_ranges(s.inner, s.members)] if plain and s.inner else [s]


def _is_parallel(q: MappedNode) -> bool:
    """Return whether threads can share the points of a single row."""
    return q.kind is Kind.POINT or (q.kind is Kind.IN_ROW and not q.node.dims)


def _work(mapped: Sequence[MappedNode]) -> Index:
    """Return a rough cost in element operations: points times (loads + flops / 4 + 1), summed over nodes."""
    total: Index = 0
    for q in mapped:
        weight = 1 + len(va.loads(q.value)) + va.flops(q.value) // 4
        total = ex.add(total, ex.mul(weight, ex.prod((ex.size_of(q.row), *q.sizes))))
    return total


# --- loops and stages ------------------------------------------------------------------------------------------------


def _common_loops(mapped: Sequence[MappedNode], apart: bool) -> list[MappedNode]:
    """Give nodes with equally many inner points the same loops, as few as indices allow; `apart` as in `_parts`."""
    classes: dict[Index, list[int]] = {}
    for k, q in enumerate(mapped):
        classes.setdefault(q.points, []).append(k)
    result = list(mapped)
    for positions in classes.values():
        chain = common_refinement([mapped[k].sizes for k in positions])
        if chain is not None and any(_cuts_scan(mapped[k], chain) for k in positions):
            chain = None
        for part in _parts(mapped, positions, chain, apart):
            sizes = chain if chain is not None else tuple(n for n in mapped[part[0]].sizes if n != 1)
            merged = merge_all([with_loops_of(mapped[k], sizes) for k in part])
            for k, q in zip(part, merged, strict=True):
                result[k] = split_loops(q, merged[0].sizes)
    return result


def _parts(
    mapped: Sequence[MappedNode], positions: list[int], chain: tuple[Index, ...] | None, apart: bool
) -> list[list[int]]:
    """Return which of the nodes at `positions` get the same loops: all of them, where they have a common `chain`.

    `apart`: nodes that touch nothing at the same place get loops of their own where these are fewer. An example is a
    softmax over the last of three loops of equal sizes, which is stored as the first of them.
    """
    if chain is None:
        return [[k] for k in positions]
    if not apart or len(chain) < 2:
        return [positions]
    if len(merge_all([with_loops_of(mapped[k], chain) for k in positions])[0].sizes) < 2:
        return [positions]
    split = {k: split_loops(mapped[k], chain) for k in positions}
    parts = _touching_together(split)
    return parts if any(_merges_further(parts, split, part) for part in parts) else [positions]


def _touching_together(split: Mapping[int, MappedNode]) -> list[list[int]]:
    """Return the positions of nodes in parts: nodes that read or store an element at the same place are in one."""
    parts: list[tuple[set[tuple[str, Index]], list[int]]] = []
    for k, q in split.items():
        places = {(q.node.out, q.index), *va.loads(q.value)}
        joined = [part for part in parts if part[0] & places]
        numbers = sorted([k, *(n for _, own in joined for n in own)])
        parts = [part for part in parts if all(part is not other for other in joined)]
        parts.append((places.union(*(touched for touched, _ in joined)), numbers))
    return [numbers for _, numbers in parts]


def _merges_further(parts: Sequence[list[int]], split: Mapping[int, MappedNode], part: list[int]) -> bool:
    every = [split[k] for numbers in parts for k in numbers]
    own = merge_all([split[k] for k in part])
    return len(own[0].sizes) < len(merge_all(every)[0].sizes)


def _cuts_scan(q: MappedNode, chain: tuple[Index, ...]) -> bool:
    """Return whether `chain` splits the loop that a scan runs along; its running value lives in one innermost loop."""
    return q.kind is Kind.SCAN and chain[-1:] != tuple(n for n in q.sizes if n != 1)[-1:]


def _stage_numbers(p: Program, mapped: Sequence[MappedNode], on_gpu: bool) -> list[int]:
    """Return the stage of every node: after those that it reads, in the same one where it reads the same point.

    A GPU's program computes a scan for a block of points at once, so that its readers need no loop of their own. On a
    CPU, costly terms of a scan have a loop of their own.
    """
    numbers: list[int] = []
    for n, reader in enumerate(mapped):
        names, out = {b for b, _ in va.loads(reader.value)}, reader.node.out
        number = 0
        for writer, s in zip(mapped[:n], numbers, strict=True):
            if writer.node.out in names:
                scanned = on_gpu and writer.kind is Kind.SCAN and reads_same_point(writer, reader, writer.node.out)
                apart = writer.inner != reader.inner or not (scanned or same_point(writer, reader))
                apart = apart or (not on_gpu and _has_own_loop(writer, reader))
                number = max(number, s + 1 if apart else s)
            if p.buffers[out].kind != "temp" and any(b == out for b, _ in va.loads(writer.value)):
                number = max(number, s)
        numbers.append(number)
    return numbers


def _has_own_loop(writer: MappedNode, reader: MappedNode) -> bool:
    """Return whether the writer computes terms of a scan that the scan's loop would compute one by one."""
    return writer.kind is Kind.POINT and isinstance(reader.node, Scan) and runs_one_by_one(reader.node, writer.value)


def _stages(mapped: Sequence[MappedNode], numbers: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages in order; nodes of one stage number with different loops are stages of their own."""
    nests: dict[int, dict[tuple[Atom, ...], list[MappedNode]]] = {}
    for q, s in zip(mapped, numbers, strict=True):
        nests.setdefault(s, {}).setdefault(q.inner, []).append(q)
    return tuple(Stage(inner, tuple(nodes)) for s in sorted(nests) for inner, nodes in nests[s].items())


# --- storage ---------------------------------------------------------------------------------------------------------


def _stored(deps: Deps, g: Group) -> frozenset[str]:
    """Return the buffers that the kernel writes to memory, because something outside of it reads them."""
    members, written = set(g.members), (q.node.out for q in g.mapped)
    return frozenset(b for b in written if b in deps.escaping or not members.issuperset(deps.readers.get(b, ())))


def _storage(deps: Deps, g: Group, mapped: Sequence[MappedNode], numbers: Sequence[int]) -> Storage:
    storage, stored = Storage({}, frozenset(), {}), _stored(deps, g)
    for writer, s in zip(mapped, numbers, strict=True):
        b = writer.node.out
        if writer.kind in (Kind.CROSS_ROW, Kind.SCATTER):
            storage.kinds[b] = GLOBAL
        elif writer.results == 1:
            storage.kinds[b] = SCALAR
        elif writer.kind is Kind.POINT and not _read_by_other_loops(b, writer, s, zip(mapped, numbers, strict=True)):
            storage.kinds[b] = FORWARD
        elif b in stored:
            storage.kinds[b] = GLOBAL
        else:
            storage.kinds[b] = SCRATCH
            storage.scratch[b] = writer.results
    return Storage(storage.kinds, stored, storage.scratch)


def _read_by_other_loops(b: str, writer: MappedNode, s: int, nodes: Iterable[tuple[MappedNode, int]]) -> bool:
    """Return whether a node outside the writer's loop nest of stage `s` reads `b`."""
    return any(
        (number > s or q.inner != writer.inner) and any(name == b for name, _ in va.loads(q.value))
        for q, number in nodes
    )


def _in_place(p: Program, stages: Sequence[Stage], stored: frozenset[str], deps: Deps) -> tuple[tuple[str, str], ...]:
    """Return pairs of buffers where every read of the first comes before, and at the point of, the second's store.

    Nodes of one loop body run in order: a read after the storing node would see the overwritten value. The first is a
    temporary or a donated input, and there is at most one of each for a second. The second is a temporary, or a result
    of the program: a host program decides by where it keeps them which pairs it uses.
    """
    members = [q for s in stages for q in s.members]
    loads: dict[str, list[tuple[int, Index]]] = {}
    for n, q in enumerate(members):
        for b, index in va.loads(q.value):
            loads.setdefault(b, []).append((n, index))
    donated = [b for b in loads if p.buffers[b].donated]
    temporary = [b for b in loads if b not in deps.escaping]
    pairs: list[tuple[str, str]] = []
    taken: set[str] = set(stored)
    for n, q in enumerate(members):
        out = p.buffers[q.node.out]
        if q.kind is not Kind.POINT or out.name not in stored or out.kind != "temp":
            continue
        for sources in (donated, temporary):
            for name in sources:
                source = p.buffers[name]
                same = source.extent == out.extent and source.dtype == out.dtype
                if same and name not in taken and all(k <= n and index is q.index for k, index in loads[name]):
                    pairs.append((name, out.name))
                    taken.add(name)
                    break
    return tuple(pairs)


def scratch_index(q: MappedNode, index: Index) -> Index:
    """Return the position of a global element `index` within the row's scratch."""
    parts = split_row(index, q.row)
    assert parts is not None, f"{index} mixes row and column"
    return parts[1]


def show_kernel(k: Kernel) -> str:
    """Return the kernel as text: rows, then for each stage its loops and nodes with their storage."""
    lines = [f"kernel: {'flat' if k.flat else f'{ex.show(k.rows)} rows'}"]
    if (m := k.matmul) is not None:
        operands = f"{m.left.buffer}, {m.right.buffer}"
        lines.append(f"  product {m.batch}x{m.rows}x{m.columns}x{m.depth} of {operands}: {m.tiles}")
    for s in k.stages:
        loops = ", ".join(f"{v.args[0]}:{ex.show(ex.size_of(v))}" for v in s.inner) or "once"
        lines.append(f"  for {loops}")
        lines += [_show_node(k, q) for q in s.members]
    return "\n".join(lines) + "\n"


def _show_node(k: Kernel, q: MappedNode) -> str:
    storage = k.storage.get(q.node.out, GLOBAL) + ("+global" if q.node.out in k.stored else "")
    loops = ",".join(sorted(v.args[0] for v in q.reduced))
    operation = q.node.mode if isinstance(q.node, Scatter) else getattr(q.node, "op", "")
    text = "" if q.kind is Kind.POINT else f"{q.kind.value} {operation}({loops}) "
    return f"    {q.node.out}[{ex.show(q.index)}] = {text}{q.value}  ({storage})"
