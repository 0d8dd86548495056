"""The index algebra: every simplification equals brute force, bounds hold, normal forms are identical objects."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from altbackend.ir import expr as ex
from altbackend.ir import value as va

SIZES = {"a": 2, "b": 3, "c": 4, "d": 6}
VARS = {n: ex.var(n, size) for n, size in SIZES.items()}
N, M = ex.sym("n", 2, 9), ex.sym("m", 1, 5)
POINTS = list(itertools.product(*(range(n) for n in SIZES.values())))
FUZZ = settings(max_examples=300, derandomize=True, deadline=None)

# A tree is ("var", name) | ("int", k) | ("sym", name) | (op, tree, tree); built as an Index and evaluated directly.
Tree = tuple[Any, ...]
BUILD: dict[str, Callable[..., ex.Index]] = {
    "add": ex.add,
    "sub": ex.sub,
    "mul": ex.mul,
    "floordiv": ex.floordiv,
    "mod": ex.mod,
    "max": ex.maximum,
    "min": ex.minimum,
}
DIRECT: dict[str, Callable[[int, int], int]] = {
    "add": int.__add__,
    "sub": int.__sub__,
    "mul": int.__mul__,
    "floordiv": int.__floordiv__,
    "mod": int.__mod__,
    "max": max,
    "min": min,
}
OPERATIONS: dict[type[ex.Atom], str] = {ex.FloorDiv: "floordiv", ex.Mod: "mod", ex.Maximum: "max", ex.Minimum: "min"}


def trees(symbols: bool) -> st.SearchStrategy[Tree]:
    names = ["n", "m"] if symbols else []
    leaves = st.one_of(
        st.tuples(st.just("var"), st.sampled_from(sorted(SIZES))),
        st.tuples(st.just("int"), st.integers(-5, 13)),
        *([st.tuples(st.just("sym"), st.sampled_from(names))] if names else []),
    )
    # divisors are positive: numbers, and sizes
    divisors: st.SearchStrategy[Tree] = st.tuples(st.just("int"), st.integers(1, 13))
    if names:
        divisors = st.one_of(divisors, st.tuples(st.just("sym"), st.sampled_from(names)))

    def extend(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        free = st.tuples(st.sampled_from(["add", "sub", "mul", "max", "min", "add"]), inner, inner)
        return st.one_of(free, st.tuples(st.sampled_from(["floordiv", "mod"]), inner, divisors))

    return st.recursive(leaves, extend, max_leaves=7)


def build(t: Tree) -> ex.Index:
    match t:
        case ("var", name):
            return ex.ix(VARS[name])
        case ("int", k):
            return int(k)
        case ("sym", name):
            return {"n": N, "m": M}[name]
        case (op, a, b):
            return BUILD[op](build(a), build(b))
    raise AssertionError(t)


def direct(t: Tree, env: dict[str, int]) -> int:
    match t:
        case ("int", k):
            return int(k)
        case (_, name):
            return env[name]
        case (op, a, b):
            return DIRECT[op](direct(a, env), direct(b, env))
    raise AssertionError(t)


def evaluate(e: ex.Index, env: dict[str, int]) -> int:
    """Evaluate a normal form at a point, atom by atom."""
    if isinstance(e, int):
        return e
    total = e.const
    for m, c in e.terms:
        for a in m:
            if isinstance(a, (ex.Var, ex.Sym)):
                c *= env[a.name]
            else:
                c *= DIRECT[OPERATIONS[type(a)]](*(evaluate(x, env) for x in a.operands))
        total += c
    return total


def points(symbols: bool) -> Iterator[dict[str, int]]:
    sizes = [(2, 1), (5, 3), (9, 5)] if symbols else [(0, 0)]
    for n, m in sizes:
        for at in POINTS:
            yield dict(zip(SIZES, at, strict=True)) | {"n": n, "m": m}


@pytest.mark.parametrize("symbols", [False, True])
def test_simplified_equals_direct_evaluation(symbols: bool) -> None:
    @FUZZ
    @given(trees(symbols))
    def run(t: Tree) -> None:
        e = build(t)
        lo, hi = ex.bounds(e)
        for env in points(symbols):
            value = direct(t, env)
            assert evaluate(e, env) == value
            assert lo <= value <= hi

    run()


@FUZZ
@given(trees(True))
def test_known_signs_are_true(t: Tree) -> None:
    e = build(t)
    values = [evaluate(e, env) for env in points(True)]
    if ex.known_nonnegative(e):
        assert min(values) >= 0
    if ex.known_less(e, 7):
        assert max(values) < 7


@FUZZ
@given(trees(True), st.integers(1, 3), st.integers(0, 5))
def test_substitution_commutes_with_evaluation(t: Tree, scale: int, shift: int) -> None:
    e = build(t)
    a = VARS["a"]
    # the result is in the range of `a`, as for every substitution of the compiler
    inside = ex.mod(ex.add(ex.mul(ex.ix(VARS["d"]), scale), shift), 2)
    replaced = ex.substitute(e, {a: inside})
    for env in points(True):
        moved = env | {"a": (env["d"] * scale + shift) % 2}
        assert evaluate(replaced, env) == evaluate(e, moved)


@FUZZ
@given(trees(True))
def test_printed_form_is_python_with_the_same_value(t: Tree) -> None:
    """The host program evaluates printed sizes."""
    e = build(t)
    text = compile(ex.show(e), "printed", "eval")
    for env in itertools.islice(points(True), 0, None, 17):
        assert eval(text, {"max": max, "min": min}, dict(env)) == evaluate(e, env)


@FUZZ
@given(trees(False), trees(False))
def test_equal_forms_are_one_object(s: Tree, t: Tree) -> None:
    a, b = build(s), build(t)
    assert ex.add(a, b) is ex.add(b, a) or ex.add(a, b) == ex.add(b, a)
    back = ex.sub(ex.add(a, b), b)
    assert all(evaluate(back, env) == evaluate(a, env) for env in itertools.islice(points(False), 0, None, 7))
    assert ex.sub(a, a) == 0
    copy = pickle.loads(pickle.dumps(a))
    assert copy is a or copy == a


@FUZZ
@given(trees(False))
def test_coefficient_splits_linear_expressions(t: Tree) -> None:
    e = build(t)
    for v in VARS.values():
        c = ex.coefficient(e, v)
        if c is None:
            continue
        rest = ex.sub(e, ex.mul(c, ex.ix(v)))
        assert v not in ex.vars_of(rest)
        assert v not in ex.vars_of(c)


def test_strides_of_parts_that_depend_on_one_variable() -> None:
    a, b, c = (ex.ix(VARS[n]) for n in "abc")
    looked_up = ex.lookup(va.index(ex.mul(b, 2)), 0, 9)
    tiled = ex.add(ex.mul(ex.floordiv(c, 2), 100), ex.mul(ex.mod(c, 2), 10))
    place = ex.add(ex.mul(a, 3), ex.mul(looked_up, 7), tiled)
    assert [ex.stride(place, VARS[n]) for n in "abcd"] == [3, 7, 100, 0]
    both = ex.add(ex.floordiv(ex.add(a, c), 2), ex.mul(a, b))
    assert ex.stride(both, VARS["a"]) is None


@FUZZ
@given(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=0, max_size=4))
def test_flatten_and_unflatten_are_inverse(sizes: list[int]) -> None:
    shape = tuple(sizes)
    for k, at in enumerate(itertools.product(*(range(n) for n in shape))):
        assert ex.flatten(shape, at) == k
        assert ex.unflatten(k, shape) == at
    variables = tuple(ex.var(f"v{k}", n) for k, n in enumerate(shape))
    position = tuple(ex.ix(v) for v in variables)
    assert ex.unflatten(ex.flatten(shape, position), shape) == position


def test_symbolic_flatten_and_unflatten_are_inverse() -> None:
    shape = (N, 3, M)
    at = tuple(ex.ix(ex.var(f"v{k}", n)) for k, n in enumerate(shape))
    assert ex.unflatten(ex.flatten(shape, at), shape) == at
    assert ex.strides_for(shape) == (ex.mul(3, M), M, 1)


ROW, COL = ex.ix(ex.var("i", 8)), ex.ix(ex.var("j", 4))
K = ex.ix(ex.var("k", N))
SIMPLIFIED: list[tuple[ex.Index, ex.Index]] = [
    (ex.floordiv(ex.add(ex.mul(ROW, 4), COL), 4), ROW),
    (ex.mod(ex.add(ex.mul(ROW, 4), COL), 4), COL),
    (ex.add(ex.mul(ex.floordiv(ROW, 3), 3), ex.mod(ROW, 3)), ROW),
    (ex.floordiv(ex.floordiv(ROW, 2), 2), ex.floordiv(ROW, 4)),
    (ex.mod(ex.mod(ROW, 4), 2), ex.mod(ROW, 2)),
    (ex.floordiv(ex.mul(ROW, 6), 4), ex.floordiv(ex.mul(ROW, 3), 2)),
    (ex.mod(ROW, 8), ROW),
    (ex.floordiv(ROW, 8), 0),
    (ex.mod(K, N), K),
    (ex.floordiv(K, N), 0),
    (ex.floordiv(ex.add(ex.mul(ROW, N), K), N), ROW),
    (ex.mod(ex.add(ex.mul(ROW, N), K), N), K),
    (ex.maximum(ROW, -1), ROW),
    (ex.minimum(COL, 3), COL),
    (ex.exact_div(ex.mul(N, 6), ex.mul(N, 2)) or 0, 3),
    (ex.ix(ex.var("one", 1)), 0),
]


@pytest.mark.parametrize("k", range(len(SIMPLIFIED)))
def test_simplifications_that_kernels_rely_on(k: int) -> None:
    got, want = SIMPLIFIED[k]
    assert got is want or got == want


def test_exact_div_refuses_what_does_not_divide() -> None:
    assert ex.exact_div(7, 2) is None
    assert ex.exact_div(N, 2) is None
    assert ex.exact_div(5, 0) is None
    assert ex.exact_div(0, 3) == 0


def test_bounds_saturate() -> None:
    big = ex.sym("big")
    assert ex.bounds(ex.mul(big, big, 8)) == (0, ex.UNBOUNDED)
    assert ex.bounds(ex.mul(big, -1)) == (-ex.UNBOUNDED, 0)
