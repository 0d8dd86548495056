"""One broken program per rule; the error names the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Extern, Node, Pointwise, Program, Reduction, View
from altbackend.ir.verify import InvalidIR, verify
from test.ir.programs import COL, COLS, F32, FLAT, I64, ROW, ROWS, X, buffer, irregular, softmax, symbolic


@pytest.mark.parametrize("make", [softmax, irregular, symbolic])
def test_sound_programs_pass(make: Callable[[], Program]) -> None:
    p = make()
    assert verify(p) is p


def one(node: Node, **more: Any) -> Program:
    """A program of one node over x[3, 4], flags[4] (int64) and out y[3, 4]."""
    buffers = [buffer("x", 3, 4, kind="input"), buffer("flags", 4, dtype=I64, kind="input"), buffer("y", 3, 4)]
    p = Program({b.name: b for b in buffers}, ("x", "flags"), (node,), (View("y", (3, 4), (4, 1)),))
    return dataclasses.replace(p, **more)


def store(value: va.Value, **more: Any) -> Program:
    return one(dataclasses.replace(Pointwise("y", (ROWS, COLS), FLAT, value), **more))


FLAG = va.load("flags", COL, I64)
BROKEN: dict[str, tuple[Callable[[], Program], str]] = {
    "unknown buffer": (lambda: store(va.load("nowhere", 0, F32)), "reads unknown buffer nowhere"),
    "used before written": (lambda: store(va.load("y", FLAT, F32)), "reads y before it is written"),
    "writes unknown": (lambda: store(X, out="nowhere"), "writes unknown buffer nowhere"),
    "output unwritten": (
        lambda: dataclasses.replace(store(X), nodes=()),
        "output y is never written",
    ),
    "variable twice": (lambda: store(X, dims=(ROWS, COLS, ROWS)), "names a loop variable twice"),
    "free variable in value": (lambda: store(X, dims=(ROWS,), index=ROW), "free variables"),
    "free variable in index": (
        lambda: store(va.const(0.0, F32), dims=(ROWS,)),
        "stores at an index with free variables",
    ),
    "reduction stores at a reduced variable": (
        lambda: one(Reduction("y", (ROWS,), (COLS,), FLAT, "sum", X)),
        "stores at an index with free variables",
    ),
    "load out of bounds": (lambda: store(va.load("x", ex.add(FLAT, 1), F32)), "in [1, 12] leaves x of 12"),
    "load below zero": (lambda: store(va.load("x", ex.sub(FLAT, 2), F32)), "in [-2, 9] leaves x of 12"),
    "store out of bounds": (lambda: store(X, index=ex.mul(FLAT, 2)), "in [0, 22] leaves y of 12"),
    "store of another dtype": (lambda: store(FLAG), "stores torch.int64 into torch.float32"),
    "load of another dtype": (lambda: store(va.load("flags", COL, F32)), "loads flags as torch.float32"),
    "condition not bool": (
        lambda: store(va.make("where", (FLAG, X, X), F32)),
        "where on a condition of torch.int64",
    ),
    "masked condition not bool": (
        lambda: store(va.make("masked", (X, X, X), F32)),
        "masked on a condition of torch.float32",
    ),
    "branches differ": (
        lambda: store(va.make("where", (va.apply("lt", X, X), X, FLAG), F32)),
        "where of torch.float32 and torch.int64",
    ),
    "mixed operands": (lambda: store(va.make("add", (X, FLAG), F32)), "add mixes"),
    "view of unequal ranks": (
        lambda: one(Extern(("y",), torch.ops.aten.relu.default, (View("x", (3, 4), (1,)),))),
        "view of x: 2 sizes, 1 strides",
    ),
    "view out of bounds": (
        lambda: one(Extern(("y",), torch.ops.aten.relu.default, (View("x", (3, 4), (4, 1), 1),))),
        "view of x reaches element 12 of 12",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_programs_are_named(name: str) -> None:
    make, text = BROKEN[name]
    with pytest.raises(InvalidIR) as caught:
        verify(make())
    assert text in str(caught.value)


def test_masked_loads_may_point_outside() -> None:
    cond = va.compare_index("lt", ex.add(FLAT, 1), 12)
    verify(store(va.masked(cond, va.load("x", ex.add(FLAT, 1), F32), va.const(0.0, F32))))
