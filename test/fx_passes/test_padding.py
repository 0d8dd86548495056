"""Matrix products padded on a GPU: which ones, and that results keep values, dtype, shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.fx_passes import pad_matmul, padding_cost
from altbackend.fx_passes.graph import propagate
from tools import translated

T = torch.Tensor


def traced(fn: Callable[..., Any], *inputs: T) -> torch.fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(fn, decomposition_table=decomp.table())(*(mode.from_tensor(x) for x in inputs))


@pytest.fixture
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_cost.Padding, "pays", lambda self: True)


PRODUCTS: dict[str, Callable[[torch.dtype], list[T]]] = {
    "mm": lambda t: [torch.randn(9, 7), torch.randn(7, 5)],
    "addmm": lambda t: [torch.randn(5), torch.randn(9, 7), torch.randn(7, 5)],
    "addmm 2-d": lambda t: [torch.randn(9, 5), torch.randn(9, 7), torch.randn(7, 5)],
    "addmm row": lambda t: [torch.randn(9, 1), torch.randn(9, 7), torch.randn(7, 5)],
    "bmm": lambda t: [torch.randn(3, 9, 7), torch.randn(3, 7, 5)],
    "baddbmm": lambda t: [torch.randn(3, 9, 5), torch.randn(3, 9, 7), torch.randn(3, 7, 5)],
    "baddbmm row": lambda t: [torch.randn(3, 1, 5), torch.randn(3, 9, 7), torch.randn(3, 7, 5)],
}


@pytest.mark.usefixtures("everything_pays")
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product(name: str, dtype: torch.dtype, turned: bool) -> None:
    operator = getattr(torch, name.split()[0])
    torch.manual_seed(0)
    inputs = [x.to(dtype) for x in PRODUCTS[name](dtype)]

    def fn(*args: T) -> T:
        *bias, a, b = args
        kind = {"beta": 0.5, "alpha": 2} if bias else {}
        if turned:
            a, b = a.mT, b.mT
        result: T = operator(*bias, a, b, **kind)
        return result.sin()

    if turned:
        inputs[-2:] = [x.mT.contiguous() for x in inputs[-2:]]
    gm = traced(fn, *inputs)
    before = gm.graph.output_node().args[0].meta["val"]
    assert pad_matmul.pad(gm) == 1
    assert pad_matmul.pad(gm) == 0, "a padded product is padded again"
    propagate(gm)
    gm.graph.lint()
    gm.recompile()
    after = gm.graph.output_node().args[0].meta["val"]
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    torch.testing.assert_close(gm(*inputs), fn(*inputs), rtol=2e-2, atol=2e-2)
    (product,) = [n for n in gm.graph.nodes if n.target in pad_matmul._PRODUCTS]
    multiple = padding_cost.SECTOR // dtype.itemsize
    assert product.args[-1].meta["val"].shape[-1] % multiple == product.args[-1].meta["val"].shape[-2] % multiple == 0


def fired(dtype: torch.dtype, sizes: tuple[int, int, int]) -> bool:
    m, k, n = sizes
    with FakeTensorMode():
        gm = make_fx(lambda a, b: torch.mm(a, b) * 2)(torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype))
    return bool(pad_matmul.pad(gm))


def test_large_odd_products_gain_in_sixteen_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert fired(dtype, (8205, 2949, 5921))
        assert not fired(dtype, (8192, 2944, 5920))  # aligned
        assert not fired(dtype, (8192, 2952, 5928))  # aligned, though not to sectors
        assert not fired(dtype, (15, 2949, 33))  # bound by memory
        assert fired(dtype, (305_877, 128, 389))  # whose result takes longer to store in pieces than to copy
    assert not fired(torch.float64, (8205, 2949, 5921))


def test_float32_gains_only_as_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fired(torch.float32, (8205, 2949, 5921))
    monkeypatch.setattr(torch_api, "allows_tf32", lambda: True)
    assert fired(torch.float32, (8205, 2949, 5921))


def test_products_of_symbolic_sizes_stay() -> None:
    def fn(a: T, b: T) -> T:
        return a @ b

    gm = make_fx(fn, tracing_mode="symbolic")(torch.randn(8205, 299).bfloat16(), torch.randn(299, 591).bfloat16())
    assert pad_matmul.pad(gm) == 0


def test_products_of_inputs_are_padded_too() -> None:
    """The weights of a function are among its inputs: its inference graph has no parameters."""
    a, b = torch.empty(4097, 4097, dtype=torch.bfloat16), torch.empty(4097, 4097, dtype=torch.bfloat16)

    def run(backend: Any) -> None:
        with torch.no_grad():
            torch.compile(lambda x, y: (x @ y).sin(), backend=backend, dynamic=False)(a, b)

    def code(**options: Any) -> list[str]:
        return [c.python for c in translated.codes(run, "cuda", resolve(options=options))]

    assert code() != code(disabled_passes="pad matmuls")


def test_a_graph_without_inputs_has_nothing_to_move() -> None:
    def run(backend: Any) -> None:
        with torch.no_grad():
            torch.compile(lambda: torch.arange(5) * 2.5, backend=backend)()

    assert len(translated.codes(run, "cuda", resolve(options={"strict": True}))) == 1


@pytest.mark.parametrize(("size", "copies", "pays"), [(1025, 0, True), (1025, 3, False), (4097, 3, True)])
def test_a_copy_costs_a_launch(size: int, copies: int, pays: bool) -> None:
    """A lone call with products of this size waits for the processor, not for the GPU."""
    rate = padding_cost.RATES["16-bit"]
    sizes = (size, -(-size // 8) * 8)
    work, padded = (padding_cost.Work(2.0 * n**3, 6.0 * n**2) for n in sizes)
    assert padding_cost.Padding(rate, 2, work, padded, copies * 2 * size**2, copies).pays() == pays


@pytest.mark.parametrize(
    ("dtype", "batch", "sizes", "pays"),
    [
        (torch.bfloat16, 46_875, (10, 128, 10), False),
        (torch.bfloat16, 208_333, (9, 32, 9), False),
        (torch.bfloat16, 19_264, (10, 10, 384), True),  # a block of few rows is wider
        (torch.bfloat16, 78_125, (10, 9, 32), False),
        (torch.bfloat16, 14_201, (65, 64, 65), True),
        (torch.float16, 28_409, (33, 64, 33), True),
        (torch.bfloat16, 1_546, (197, 197, 64), True),
        (torch.float32, 46_875, (10, 128, 10), False),
        (torch.float32, 14_648, (50, 50, 64), True),
    ],
    ids=str,
)
def test_batched_products_of_few_rows_stay(
    dtype: torch.dtype, batch: int, sizes: padding_cost.Sizes, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels around the product pad its operands and read its result."""
    monkeypatch.setattr(torch_api, "allows_tf32", lambda: True)
    rows, depth, width = sizes
    with FakeTensorMode():
        a, b = torch.empty(batch, rows, depth, dtype=dtype), torch.empty(batch, depth, width, dtype=dtype)
        gm = make_fx(lambda a, b: torch.bmm(a.sin(), b.sin()) * 2)(a, b)
    assert bool(pad_matmul.pad(gm)) == pays


def test_an_operand_that_is_no_kernels_is_not_copied_for_few_rows() -> None:
    """A copy of 300 MB would take as long as the products of a matrix with its transpose."""
    with FakeTensorMode():
        gm = make_fx(lambda x: torch.bmm(x, x.mT) * 2)(torch.empty(75_088, 10, 128, dtype=torch.bfloat16))
    assert pad_matmul.pad(gm) == 0
