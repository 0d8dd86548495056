"""Cutting loops into rows, refining, splitting and merging: every rewrite visits the same points."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.expr import Atom, Index
from altbackend.ir.loops import Pointwise, Reduction, Scan
from altbackend.schedule.device import Cpu, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.loop_mapping import Kind, MappedNode, Refusal, cut_rows, fit, mappings, natural_rows
from altbackend.schedule.loop_refinement import common_refinement, mergeable, merged, split_loops
from test.compare import check
from test.graphs import schedule, trace

FUZZ = settings(max_examples=150, derandomize=True, deadline=None)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)
F32 = torch.float32


def loops(sizes: list[int]) -> tuple[tuple[Atom, ...], Index]:
    dims = tuple(ex.dim(k, n) for k, n in enumerate(sizes))
    return dims, ex.flatten(sizes, [ex.ix(d) for d in dims])


def values(e: Index, variables: tuple[Atom, ...]) -> list[int]:
    """`e` at every point of the variables, in loop order."""
    out = []
    for at in itertools.product(*(range(v.args[1]) for v in variables)):
        got = ex.substitute(e, dict(zip(variables, at, strict=True)))
        assert isinstance(got, int)
        out.append(got)
    return out


def accesses(p: MappedNode) -> Counter[tuple[int, ...]]:
    """(store index, load indices...) at every point of a placed node."""
    variables = (p.row, *p.inner)
    columns = [values(p.index, variables), *(values(i, variables) for _, i in va.loads(p.value))]
    return Counter(zip(*columns, strict=True))


@FUZZ
@given(SHAPES, st.integers(1, 48))
def test_cut_rows_keeps_every_point(sizes: list[int], rows: int) -> None:
    dims, index = loops(sizes)
    cut = cut_rows(dims, rows)
    if cut is None:
        return
    outer, inner, env = cut
    assert math.prod(v.args[1] for v in outer) == rows
    assert values(ex.substitute(index, env), (*outer, *inner)) == list(range(math.prod(sizes)))


@FUZZ
@given(SHAPES)
def test_cut_rows_finds_every_leading_product(sizes: list[int]) -> None:
    dims, _ = loops(sizes)
    for k in range(len(sizes) + 1):
        assert cut_rows(dims, math.prod(sizes[:k])) is not None


def test_cut_rows_refuses_what_does_not_divide() -> None:
    dims, _ = loops([4, 6])
    assert cut_rows(dims, 5) is None
    assert cut_rows(dims, 48) is None
    assert cut_rows(dims, 16) is None  # 6 loops cut in 4


def test_symbolic_rows() -> None:
    n = ex.sym("n", 2, 100)
    dims = (ex.dim(0, n), ex.dim(1, 6))
    for rows, parts in ((n, 1), (ex.mul(n, 2), 2), (ex.mul(n, 6), 2)):
        cut = cut_rows(dims, rows)
        assert cut is not None
        assert len(cut[0]) == parts
    assert cut_rows(dims, 7) is None


@FUZZ
@given(st.permutations([2, 3, 2, 5]), st.sets(st.integers(1, 3)), st.sets(st.integers(1, 3)))
def test_refine_gives_the_coarsest_common_chain(fine: list[int], first: set[int], second: set[int]) -> None:
    def grouped(cuts: set[int]) -> tuple[int, ...]:
        ends = [0, *sorted(cuts), 4]
        return tuple(math.prod(fine[a:b]) for a, b in itertools.pairwise(ends))

    chain = common_refinement([grouped(first), grouped(second)])
    assert chain is not None
    assert all(_is_merge(grouped(c), chain) for c in (first, second))
    assert len(chain) <= len(grouped(first | second))


def _is_merge(coarse: tuple[int, ...], fine: tuple[Index, ...]) -> bool:
    left = list(fine)
    for n in coarse:
        size = 1
        while size < n and left:
            size *= left.pop(0)  # type: ignore[operator]
        if size != n:
            return False
    return not left


def test_refine_refuses_chains_that_cross() -> None:
    assert common_refinement([(2, 3), (3, 2)]) is None
    assert common_refinement([(4,), (6,)]) is None
    assert common_refinement([(2, 3), (6,), (1, 6, 1)]) == (2, 3)
    assert common_refinement([(), (1,)]) == ()


@FUZZ
@given(SHAPES, st.integers(0, 3), st.booleans())
def test_rechain_and_merge_keep_every_access(sizes: list[int], split: int, transposed: bool) -> None:
    dims, index = loops(sizes)
    order = list(range(len(sizes)))[::-1] if transposed else list(range(len(sizes)))
    source = ex.flatten([sizes[k] for k in order], [ex.ix(dims[k]) for k in order])
    node = Pointwise("y", dims, index, va.load("x", source, F32))
    mapped = fit(node, math.prod(sizes[: split % (len(sizes) + 1)]))
    assert isinstance(mapped, MappedNode)
    before = accesses(mapped)
    chain = common_refinement([mapped.sizes, tuple(f for n in mapped.sizes for f in _factors(int(n)))])  # type: ignore[arg-type]
    assume(chain is not None)
    assert chain is not None
    fine = split_loops(mapped, chain)
    assert fine.sizes == chain
    assert accesses(fine) == before
    k = len(fine.inner) - 2
    while k >= 0:
        if mergeable(fine, k):
            fine = merged(fine, k)
            assert accesses(fine) == before
        k -= 1


def _factors(n: int) -> list[int]:
    factors = [p for p in (2, 3, 5) for _ in range(3) if n % p == 0 and n > 1]
    return [*factors[:1], n // factors[0]] if factors else [n]


def test_transposed_loops_do_not_merge() -> None:
    dims, index = loops([3, 4])
    straight = fit(Pointwise("y", dims, index, va.load("x", index, F32)), 1)
    turned = fit(Pointwise("y", dims, index, va.load("x", ex.add(ex.ix(dims[0]), ex.mul(ex.ix(dims[1]), 3)), F32)), 1)
    assert isinstance(straight, MappedNode)
    assert isinstance(turned, MappedNode)
    assert mergeable(straight, 0)
    assert not mergeable(turned, 0)


def reduction(parallel: tuple[int, ...], sizes: list[int], op: str = "sum") -> Reduction:
    dims, index = loops(sizes)
    keep = tuple(d for k, d in enumerate(dims) if k in parallel)
    out = ex.flatten([d.args[1] for d in keep], [ex.ix(d) for d in keep])
    return Reduction(
        "s", keep, tuple(d for k, d in enumerate(dims) if k not in parallel), out, op, va.load("x", index, F32)
    )


@pytest.mark.parametrize(
    ("parallel", "rows", "kind"),
    [
        ((0,), 3, Kind.IN_ROW),
        ((0,), 1, Kind.IN_ROW),
        ((1,), 3, Kind.CROSS_ROW),
        ((1,), 4, Kind.IN_ROW),
        ((), 3, Kind.CROSS_ROW),
        ((), 1, Kind.IN_ROW),
    ],
)
def test_kinds_of_placed_reductions(parallel: tuple[int, ...], rows: int, kind: Kind) -> None:
    mapped = fit(reduction(parallel, [3, 4]), rows)
    assert isinstance(mapped, MappedNode)
    assert mapped.kind is kind
    points = Counter(at[1:] for at in accesses(mapped).elements())
    assert points == Counter((k,) for k in range(12)), "every element is read exactly once"


def test_a_reduction_over_rows_is_tried_where_its_columns_also_divide() -> None:
    """4 columns cut into 2 rows of 2, or 2 rows accumulated: which one fits depends on what else is in the kernel."""
    ways = mappings(reduction((1,), [2, 4]), 2)
    assert not isinstance(ways, Refusal)
    assert [w.kind for w in ways] == [Kind.CROSS_ROW, Kind.IN_ROW]
    for w in ways:
        points = Counter(at[1:] for at in accesses(w).elements())
        assert points == Counter((k,) for k in range(8))


def test_refusals_have_reasons() -> None:
    no = fit(reduction((0,), [3, 4]), 5)
    assert isinstance(no, Refusal)
    assert no.reason == "its loops cannot be cut into the kernel's rows"
    mixed = fit(reduction((1,), [2, 3]), 6)
    assert isinstance(mixed, Refusal)
    assert "mix parallel and reduced" in mixed.reason


def test_a_scan_stays_inside_its_row() -> None:
    dims, index = loops([3, 4])
    scan = Scan("s", dims[:1], dims[1:], index, "sum", va.load("x", index, F32))
    assert natural_rows(scan)[0] == 3
    mapped = fit(scan, 3)
    assert isinstance(mapped, MappedNode)
    assert (mapped.kind, mapped.sizes) == (Kind.SCAN, (4,))
    assert isinstance(fit(scan, 12), Refusal)


def test_natural_rows_of_reductions() -> None:
    assert natural_rows(reduction((0,), [3, 4]))[0] == 3  # rows
    assert natural_rows(reduction((1,), [3, 4]))[0] == 3  # columns: run over the rows, accumulate
    assert natural_rows(reduction((), [3, 4])) == [None, 1]


@pytest.mark.parametrize(("sizes", "dim"), [((256, 6, 6, 6), 1), ((16, 64, 6, 6, 6), 2), ((64, 24, 5, 5), 1)], ids=str)
def test_results_that_are_neighbours_along_several_short_loops_run_side_by_side(
    sizes: tuple[int, ...], dim: int
) -> None:
    """Loops of equal sizes merge though sums and quotients of a softmax name them differently."""
    x = torch.randn(sizes)
    scheduled = schedule(trace(lambda x: x.log_softmax(dim), x)[0], ctx=ScheduleContext(Cpu(2)))
    (kernel,) = (k for k in scheduled.steps if isinstance(k, Kernel))
    columns = math.prod(sizes[dim + 1 :])
    assert [[ex.size_of(v) for v in s.inner] for s in kernel.stages] == [[sizes[dim], columns]] * len(kernel.stages)
    check(lambda x: x.log_softmax(dim), x)
