"""Scalar values: interning, folding, substitution, traversal."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from altbackend.ir import expr as ex
from altbackend.ir import value as va

F32, I64, BOOL = torch.float32, torch.int64, torch.bool
ROW, COL = ex.var("i", 8), ex.var("j", 4)
X = va.load("x", ex.ix(ROW), F32)


def test_equal_trees_are_one_object() -> None:
    assert va.apply("add", X, va.const(1.0, F32)) is va.apply("add", va.load("x", ex.ix(ROW), F32), va.const(1, F32))
    assert va.load("x", ex.ix(ROW), F32) is not va.load("x", ex.ix(COL), F32)
    assert va.load("x", 0, F32) is not va.load("x", 0, torch.float64)


def test_constants_that_python_calls_equal_are_distinct() -> None:
    assert va.const(0.0, F32) is not va.const(-0.0, F32)
    assert math.copysign(1, va.const(-0.0, F32).attr) == -1
    assert va.const(1, I64) is not va.const(True, BOOL)
    kinds = [va.make("const", (), F32, x) for x in (1, 1.0, True)]
    assert len(set(map(id, kinds))) == 3
    assert va.const(math.nan, F32) is va.const(float("nan"), F32)
    assert math.isnan(va.const(math.nan, F32).attr)


def test_constants_take_the_kind_of_their_dtype() -> None:
    assert [type(va.const(1, d).attr) for d in (F32, I64, BOOL, torch.complex64)] == [float, int, bool, int]


def test_values_pickle_to_themselves() -> None:
    v = va.apply("mul", X, va.cast(va.index(ex.add(ex.ix(ROW), 3)), F32))
    assert pickle.loads(pickle.dumps(v)) is v


def test_cast() -> None:
    assert va.cast(X, F32) is X
    assert va.cast(va.const(3, I64), F32) is va.const(3.0, F32)
    for inexact in (va.const(0.1, torch.float64), va.const(-1, I64), va.const(2**24 + 1, I64)):
        rounded = va.cast(inexact, torch.bfloat16)
        assert rounded.op == "cast", "a constant that the target rounds or wraps is left to the target"


def test_conditions_fold() -> None:
    y = va.const(2.0, F32)
    true, false = va.const(True, BOOL), va.const(False, BOOL)
    assert va.where(true, X, y) is X
    assert va.where(false, X, y) is y
    assert va.where(va.apply("lt", X, y), X, X) is X
    assert va.masked(false, X, y) is y
    cond = va.apply("lt", X, y)
    assert va.conjunction(true, cond, true) is cond
    assert va.conjunction(cond, false) is false
    assert va.conjunction() is true


def test_index_comparisons_fold_where_ranges_decide() -> None:
    i = ex.ix(ROW)
    folded = [
        ("lt", i, 8, True),
        ("lt", i, 0, False),
        ("ge", i, 0, True),
        ("ge", i, 8, False),
        ("lt", ex.add(i, 8), 8, False),
    ]
    for op, a, b, want in folded:
        assert va.compare_index(op, a, b) is va.const(want, BOOL)
    assert va.compare_index("lt", i, 4).op == "lt"


def test_substitute_reaches_indices_lookups_and_values() -> None:
    at = va.wrap_index(va.load("at", ex.ix(ROW), I64), 10)
    v = va.apply("add", va.load("x", ex.add(at, ex.mul(ex.ix(ROW), 10)), F32), va.cast(va.index(ex.ix(ROW)), F32))
    assert v.vars == {ROW}
    moved = v.substitute({ROW: ex.add(ex.ix(COL), 2)})
    assert moved.vars == {COL}
    assert str(moved) == "add(x[10*j + [wrap(at[j + 2], 10)] + 20], float32(index(j + 2)))"
    assert v.substitute({ROW: 3}).vars == frozenset()
    assert v.substitute({COL: 3}) is v


def test_rewrite_maps_loads_after_substitution() -> None:
    v = va.apply("mul", X, X)
    seen: list[str] = []

    def replace(load: va.Value) -> va.Value | None:
        seen.append(str(load))
        return va.const(2.0, F32) if load.attr[0] == "x" else None

    assert va.rewrite(v, env={ROW: 5}, on_load=replace) is va.apply("mul", va.const(2.0, F32), va.const(2.0, F32))
    assert seen == ["x[5]"]


def test_walk_gives_arguments_first_each_once() -> None:
    at = va.wrap_index(va.load("at", 0, I64), 10)
    v = va.apply("add", va.load("x", at, F32), va.load("x", at, F32))
    order = list(va.walk(v))
    assert [n.op for n in order] == ["load", "wrap_index", "load", "add"]
    assert list(va.loads(v)) == [("at", 0), ("x", at)]


def test_deep_trees_do_not_recurse_in_walk() -> None:
    v = X
    for _ in range(5000):
        v = va.make("neg", (v,), F32)
    assert sum(1 for _ in va.walk(v)) == 5001


def test_flops_counts_shared_parts_once() -> None:
    e = va.apply("exp", X)
    assert va.flops(va.apply("add", e, e)) == va.flops(e) + 1


def test_arity_is_checked() -> None:
    with pytest.raises(TypeError, match="add takes 2"):
        va.apply("add", X)


def test_comparisons_give_bool_and_where_takes_its_branches_dtype() -> None:
    c = va.apply("lt", X, X)
    assert c.dtype == BOOL
    assert va.apply("where", c, X, X).dtype == F32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("number", [0.0, 0.1, 0.3, 1.0, 200.0, 1234.567, 70000.3])
def test_a_constant_is_rounded_to_its_dtype_before_it_is_cast(number: float, dtype: torch.dtype) -> None:
    folded = va.cast(va.const(number, dtype), torch.float64)
    if folded.op == "const":
        assert folded.attr == torch.tensor(number, dtype=dtype).double().item()
