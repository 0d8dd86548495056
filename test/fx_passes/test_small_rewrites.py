"""Small products, permutations as indices, joined concatenations: each fires once and equals eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import permutations, simplify, small_products
from altbackend.fx_passes.context import Context
from test.compare import check_gradients, compiled, twin
from test.graphs import trace
from tools.translated import Backend, codes

T = torch.Tensor


def context(device: str = "cpu") -> Context:
    cfg = resolve()
    return Context(cfg, Trace("test", cfg), device=device)


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


# --- small products ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("device", "a", "b"),
    [
        ("cpu", (5, 1), (1, 7)),
        ("cpu", (3, 5, 1), (3, 1, 7)),
        ("cpu", (40, 30), (30, 1)),
        ("cpu", (3, 5, 9), (3, 9, 1)),
        ("cpu", (3, 1, 9), (3, 9, 7)),
        ("gpu", (8192, 3), (3, 4)),
        ("gpu", (8192, 2, 3), (8192, 3, 4)),
    ],
)
def test_small_products(device: str, a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    (gm,) = trace(torch.matmul, x, y)
    before = gm.graph.output_node().args[0][0].meta["val"]  # type: ignore[index]
    assert [small_products.run(gm, context(device)) for _ in range(2)] == [1, 0]
    after = gm.graph.output_node().args[0][0].meta["val"]  # type: ignore[index]
    assert (after.dtype, after.shape, after.stride()) == (before.dtype, before.shape, before.stride())
    assert not any("mm" in t for t in targets(gm))
    gm.recompile()
    torch.testing.assert_close(gm(x, y)[0], torch.matmul(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [(1,), (40, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("depth", [1, 700])
def test_one_column_with_a_bias(depth: int, bias: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, b = (torch.randn(size).to(dtype) for size in ((40, depth), (depth, 1), bias))
    (gm,) = trace(torch.addmm, b, x, y)
    assert [small_products.run(gm, context("gpu")), small_products.run(gm, context("cpu"))] == [0, 1]
    gm.recompile()
    (got,), want = gm(b, x, y), torch.addmm(b.double(), x.double(), y.double())
    assert (got.dtype, got.stride()) == (dtype, torch.addmm(b, x, y).stride())
    assert (got - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rows", "depth"), [(1, 5000), (300, 1), (300, 64), (2, 3)])
def test_one_column_and_its_gradients(rows: int, depth: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(depth, 1)
    x = torch.randn(rows, depth)
    check_gradients(lambda x, w, b: torch.nn.functional.linear(x, w, b).tanh(), x, layer.weight, layer.bias)
    check_gradients(lambda x, w: torch.matmul(x, w), torch.randn(4, rows, depth), torch.randn(4, depth, 1))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_other_products_stay(device: str) -> None:
    for a, b in (((64, 3), (3, 4)), ((8192, 64), (64, 8)), ((3, 4), (4, 8192))):
        (gm,) = trace(torch.matmul, torch.randn(a), torch.randn(b))
        assert small_products.run(gm, context(device)) == 0


def pooled_pixels(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_pool2d(x, 3, 1, 1).permute(0, 2, 3, 1).reshape(-1, 5) @ torch.ones(5, 8)


def test_products_of_costly_operands_stay_on_a_gpu() -> None:
    """Each result would compute the quotients of its terms anew, or read the windows anew."""
    x, image = torch.randn(8192, 5, 5), torch.randn(2, 5, 64, 64)
    quotients, sums = (lambda x: (x / 3).transpose(1, 2) @ x), (lambda x: (x + 3).transpose(1, 2) @ x)
    for fn, operand, count in ((quotients, x, 0), (sums, x, 1), (pooled_pixels, image, 0)):
        (gm,) = trace(fn, operand)
        assert small_products.run(gm, context("gpu")) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_with_a_bias_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, b = (torch.randn(size).to(dtype) for size in ((8192, 3), (3, 4), (4,)))
    (gm,) = trace(torch.addmm, b, x, y)
    assert [small_products.run(gm, context("gpu")) for _ in range(2)] == [1, 0]
    gm.recompile()
    torch.testing.assert_close(gm(b, x, y)[0], torch.addmm(b, x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [None, (2,), (1,), (8192, 2), ()], ids=str)
def test_few_columns_of_many_rows_on_a_gpu(bias: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8192, 100).to(dtype), torch.randn(2, 100).to(dtype).t()
    operands = (x, y) if bias is None else (torch.randn(bias).to(dtype), x, y)
    product = torch.mm if bias is None else torch.addmm
    (gm,) = trace(product, *operands)
    assert [small_products.run(gm, context("gpu")) for _ in range(2)] == [1, 0]
    gm.recompile()
    (got,), want = gm(*operands), product(*(t.double() for t in operands))
    assert (got.dtype, got.stride()) == (dtype, (2, 1))
    assert (got - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()


def test_a_kernel_reads_rows_once_for_all_columns() -> None:
    weight, x = torch.randn(3, 64), torch.randn(8192, 64)

    def call(backend: Backend) -> None:
        with torch.no_grad():
            torch.compile(lambda x, w: torch.sigmoid(x) @ w.t(), backend=backend)(x, weight)

    (code,) = codes(call, "cuda", resolve())
    (job,) = code.jobs
    assert job.source.count("tl.load(in0") == 1


@pytest.mark.parametrize("rows", [(8192, 2000), (100, 64), (64, 8192)], ids=str)
def test_products_that_the_library_reads_well_stay_on_a_gpu(rows: tuple[int, int]) -> None:
    (gm,) = trace(torch.matmul, torch.randn(8192, 64), torch.randn(64, 0))
    assert small_products.run(gm, context("gpu")) == 0
    x = torch.randn(rows)
    (gm,) = trace(torch.matmul, x if rows[0] != 64 else x.t(), torch.randn(rows[1] if rows[0] != 64 else 64, 3))
    assert small_products.run(gm, context("gpu")) == 0


def test_outer_products_of_odd_values() -> None:
    x = torch.tensor([[0.0], [-0.0], [float("inf")], [float("nan")], [1e-40]])
    torch.testing.assert_close(compiled(torch.mm)(x, x.t()), torch.mm(x, x.t()), equal_nan=True)


# --- permutations ---


def read(x: T, v: T) -> T:
    return x[torch.randperm(8)[:5]]


def select(x: T, v: T) -> T:
    return torch.index_select(x, 1, torch.randperm(6))


def add(x: T, v: T) -> T:
    return torch.index_add(x, 0, torch.randperm(8)[:3], v, alpha=2)


def put(x: T, v: T) -> T:
    return torch.index_put(x, (torch.randperm(8)[:3],), v)


@pytest.mark.parametrize("fn", [read, select, add, put], ids=lambda f: f.__name__)
def test_permutations(fn: Callable[..., Any]) -> None:
    x, v = torch.randn(8, 6), torch.randn(3, 6)
    (gm,) = trace(fn, x, v)
    assert [permutations.run(gm, context()) for _ in range(2)] == [1, 0]
    assert any("_unsafe_index" in t for t in targets(gm))
    run = compiled(fn, fallback_random=True)
    torch.manual_seed(0)
    want = fn(x, v)
    torch.manual_seed(0)
    torch.testing.assert_close(run(*twin([x, v])), want)


def test_a_permutation_of_more_positions_is_checked() -> None:
    def fn(x: T) -> T:
        return x[torch.randperm(9)]

    (gm,) = trace(fn, torch.randn(9, 2))
    for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.randperm.default):
        n.args = (10,)
    assert permutations.run(gm, context()) == 0
    for other in (lambda x: x[torch.randint(0, 9, (4,))], lambda x: torch.index_put(x, (torch.randperm(9),), x, True)):
        (gm,) = trace(other, torch.randn(9, 2))
        assert permutations.run(gm, context()) == 0


# --- concatenations ---


def test_concatenations_join(tmp_path: Path) -> None:
    def fn(a: T, b: T) -> tuple[T, T]:
        inner = torch.cat([a, b], 1)
        return torch.cat([torch.cat([a, b], -1), b, torch.cat([a * 2, a], 1)], 1), torch.cat([inner.sin(), inner], 0)

    a, b = torch.randn(3, 4), torch.randn(3, 2)
    (gm,) = trace(fn, a, b)
    before = len(targets(gm))
    assert [simplify.join_cats(gm) for _ in range(2)] == [2, 0]
    gm.graph.eliminate_dead_code()
    assert len(targets(gm)) == before - 2
    torch.testing.assert_close(compiled(fn)(a, b), fn(a, b))


def test_concatenations_along_other_dimensions_or_with_other_readers_stay() -> None:
    def fn(a: T, b: T) -> tuple[T, T, T]:
        inner = torch.cat([a, b], 1)
        mixed = torch.cat([torch.cat([a, a]).double(), torch.cat([a, a], 1).reshape(6, 4).double()])
        return torch.cat([torch.cat([a, b], 1), torch.cat([a, b], 1)], 0), torch.cat([inner, b], 1) + inner.sum(), mixed

    a, b = torch.randn(3, 4), torch.randn(3, 2)
    torch.testing.assert_close(compiled(fn)(a, b), fn(a, b))
