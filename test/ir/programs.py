"""Small programs written by hand, one per kind of node, for the printer, the verifier and the interpreter."""

from __future__ import annotations

import torch

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Buffer, Extern, Origin, Pointwise, Program, Reduction, Scan, Scatter, View

F32, I64 = torch.float32, torch.int64
ROWS, COLS = ex.dim(0, 3), ex.dim(1, 4)
ROW, COL = ex.ix(ROWS), ex.ix(COLS)
FLAT = ex.add(ex.mul(ROW, 4), COL)
X = va.load("x", FLAT, F32)


def buffer(name: str, *sizes: int, dtype: torch.dtype = F32, kind: str = "temp") -> Buffer:
    return Buffer(name, dtype, sizes, ex.strides_for(sizes), kind=kind)


def softmax() -> Program:
    """Return a softmax over rows, then a library product of the result with its transpose."""
    buffers = [buffer("x", 3, 4, kind="input"), buffer("top", 3), buffer("e", 3, 4), buffer("total", 3)]
    buffers += [buffer("y", 3, 4), buffer("z", 3, 3)]
    shifted = va.apply("exp", va.apply("sub", X, va.load("top", ROW, F32)))
    share = va.apply("truediv", va.load("e", FLAT, F32), va.load("total", ROW, F32))
    origin = (Origin("softmax", "_softmax.default", "model.py:3: softmax(x)"),)
    nodes = (
        Reduction("top", (ROWS,), (COLS,), ROW, "max", X, origin),
        Pointwise("e", (ROWS, COLS), FLAT, shifted),
        Reduction("total", (ROWS,), (COLS,), ROW, "sum", va.load("e", FLAT, F32)),
        Pointwise("y", (ROWS, COLS), FLAT, share),
        Extern(("z",), torch.ops.aten.mm.default, (View("y", (3, 4), (4, 1)), View("y", (4, 3), (1, 4)))),
    )
    outputs = (View("z", (3, 3), (3, 1)), View("y", (4, 3), (1, 4)), 7, None)
    return Program({b.name: b for b in buffers}, ("x",), nodes, outputs)


def irregular() -> Program:
    """Return a masked load out of range, a gather with negative positions, a scan, and a scatter into an input."""
    buffers = [
        buffer("x", 3, 4, kind="input"),
        buffer("at", 4, dtype=I64, kind="input"),
        buffer("bins", 4, kind="input"),
    ]
    buffers += [buffer("padded", 3, 4), buffer("taken", 3, 4), buffer("running", 3, 4)]
    after = va.load("x", ex.add(FLAT, 1), F32)
    padded = va.masked(va.compare_index("lt", ex.add(COL, 1), 4), after, va.const(-1.0, F32))
    column = va.wrap_index(va.load("at", COL, I64), 4)
    where = va.wrap_index(va.load("at", COL, I64), 4)
    nodes = (
        Pointwise("padded", (ROWS, COLS), FLAT, padded),
        Pointwise("taken", (ROWS, COLS), FLAT, va.load("x", ex.add(ex.mul(ROW, 4), column), F32)),
        Scan("running", (ROWS,), (COLS,), FLAT, "sum", X),
        Scatter("bins", (ROWS, COLS), where, X, "add"),
    )
    outputs = tuple(View(n, (3, 4), (4, 1)) for n in ("padded", "taken", "running"))
    return Program({b.name: b for b in buffers}, ("x", "at", "bins"), nodes, outputs)


def symbolic() -> Program:
    """Return the column sums of a matrix of n rows; n is an input and a result."""
    n = ex.sym("n", 2, 1000)
    row = ex.dim(0, n)
    x = Buffer("x", F32, (n, 4), (4, 1), kind="input")
    at = ex.add(ex.mul(ex.ix(row), 4), COL)
    node = Reduction("s", (COLS,), (row,), COL, "sum", va.load("x", at, F32))
    return Program({"x": x, "s": buffer("s", 4)}, ("n", "x"), (node,), (View("s", (4,), (1,)), ex.mul(n, 4)))
