"""The interpreter against torch, on programs written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from altbackend.ir import interp
from altbackend.ir import value as va
from altbackend.ir.loops import HostNumber, Program, Reduction, Scan, Scatter, View
from test.ir.programs import COLS, F32, FLAT, ROW, ROWS, X, buffer, irregular, softmax, symbolic


def test_softmax_and_a_library_call() -> None:
    x = torch.randn(3, 4)
    z, y, seven, none = interp.run(softmax(), [x])
    torch.testing.assert_close(y.t(), torch.softmax(x, 1))
    torch.testing.assert_close(z, torch.softmax(x, 1) @ torch.softmax(x, 1).t())
    assert (seven, none) == (7, None)


def test_masks_gathers_scans_and_scatters() -> None:
    x, at, bins = torch.randn(3, 4), torch.tensor([2, -1, 0, 0]), torch.ones(4)
    want = bins + torch.zeros(4).index_add(0, at % 4, x.sum(0))
    padded, taken, running = interp.run(irregular(), [x, at, bins])
    assert torch.equal(padded, torch.nn.functional.pad(x[:, 1:], (0, 1), value=-1))
    assert torch.equal(taken, x[:, at])
    torch.testing.assert_close(running, x.cumsum(1))
    torch.testing.assert_close(bins, want)  # updated in place


@pytest.mark.parametrize("n", [2, 7, 1000])
def test_symbols(n: int) -> None:
    x = torch.randn(n, 4)
    s, size = interp.run(symbolic(), [n, x])
    torch.testing.assert_close(s, x.sum(0))
    assert size == 4 * n


def test_numbers_of_the_host_are_outputs() -> None:
    p = symbolic()
    p = replace(p, outputs=(HostNumber(f"{p.inputs[0]} // 2 + 1"),))
    assert interp.run(p, [8, torch.randn(8, 8)]) == [5]


def test_inputs_with_offset_and_strides_keep_their_place() -> None:
    base = torch.randn(30)
    x = base.as_strided((3, 4), (4, 1), 5)
    _, y, _, _ = interp.run(softmax(), [x])
    torch.testing.assert_close(y.t(), torch.softmax(x, 1))


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.Tensor.sum,
    "prod": torch.Tensor.prod,
    "max": torch.Tensor.amax,
    "min": torch.Tensor.amin,
}


@pytest.mark.parametrize("op", list(REDUCTIONS))
def test_reductions(op: str) -> None:
    x = torch.randn(3, 4)
    node = Reduction("s", (ROWS,), (COLS,), ROW, op, X)
    p = Program({"x": buffer("x", 3, 4, kind="input"), "s": buffer("s", 3)}, ("x",), (node,), (View("s", (3,), (1,)),))
    torch.testing.assert_close(interp.run(p, [x])[0], REDUCTIONS[op](x, 1))


@pytest.mark.parametrize("op", ["any", "all"])
def test_logical_reductions(op: str) -> None:
    x = torch.tensor([[False, False, True, False], [True] * 4, [False] * 4])
    buffers = {"x": buffer("x", 3, 4, dtype=torch.bool, kind="input"), "s": buffer("s", 3, dtype=torch.bool)}
    node = Reduction("s", (ROWS,), (COLS,), ROW, op, va.load("x", FLAT, torch.bool))
    p = Program(buffers, ("x",), (node,), (View("s", (3,), (1,)),))
    assert torch.equal(interp.run(p, [x])[0], getattr(x, op)(1))


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_scans(op: str) -> None:
    x = torch.randn(3, 4)
    node = Scan("s", (ROWS,), (COLS,), FLAT, op, X)
    buffers = {"x": buffer("x", 3, 4, kind="input"), "s": buffer("s", 3, 4)}
    got = interp.run(Program(buffers, ("x",), (node,), (View("s", (3, 4), (4, 1)),)), [x])[0]
    want = {"sum": x.cumsum(1), "prod": x.cumprod(1), "max": x.cummax(1).values, "min": x.cummin(1).values}[op]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("mode", "reduce"), [("prod", "prod"), ("max", "amax"), ("min", "amin")])
def test_scatter_modes(mode: str, reduce: str) -> None:
    x, at, bins = torch.randn(3, 4), torch.tensor([2, 1, 0, 2]), torch.ones(4)
    want = bins.scatter_reduce(0, at.repeat(3), x.reshape(-1), reduce)
    p = irregular()
    scatter = p.nodes[-1]
    assert isinstance(scatter, Scatter)
    changed = Scatter(scatter.out, scatter.dims, scatter.index, scatter.value, mode)
    interp.run(Program(p.buffers, p.inputs, (*p.nodes[:-1], changed), p.outputs), [x, at, bins])
    torch.testing.assert_close(bins, want)


def test_constants_are_bound_by_name() -> None:
    constant = buffer("c", 3, 4, kind="const")
    node = Reduction("s", (ROWS,), (COLS,), ROW, "sum", va.load("c", FLAT, F32))
    p = Program({"c": constant, "s": buffer("s", 3)}, (), (node,), (View("s", (3,), (1,)),))
    c = torch.randn(3, 4)
    torch.testing.assert_close(interp.run(p, [], {"c": c})[0], c.sum(1))
