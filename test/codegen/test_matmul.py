"""Matrix products with fused epilogues: what their kernels compute, and which machine code they become."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F

from altbackend.codegen.triton.print_triton import TritonKernel
from altbackend.examples.gpt import GPT
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.products import cost, epilogue
from altbackend.schedule.products.matmul import PRODUCT, Matmul, Operand, Tiles, shared_bytes
from test import triton_run
from test.compare import as_list
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
SMALL = Tiles(32, 16, 16, 4, 2, band=2)
PERSISTENT = replace(SMALL, persistent=True)
GPU = ScheduleContext(H200)
A = Operand("", 0, (0, 1, 1))


@pytest.fixture(scope="module", autouse=True)
def machine_code() -> Iterator[None]:
    """Every kernel of this file compiles for sm_80 and sm_90, within their shared memory."""
    yield
    assert triton_run.compile_errors() == []


def taking(tiles: Tiles) -> epilogue.Choose:
    return lambda p, deps, c: (tiles, "a test")


def r(*sizes: int) -> T:
    return torch.randn(sizes)


def check(fn: Callable[..., Any], inputs: list[T], tiles: Tiles = SMALL, **options: Any) -> list[Any]:
    """No further from float64 than eager is, but for one rounding; gives the steps that ran."""
    seen: list[Any] = []
    compiled = triton_run.compiled(fn, choose=taking(tiles), seen=seen, capabilities=(80, 90), **options)
    got, want = as_list(compiled(*inputs)), as_list(fn(*inputs))
    exact = as_list(fn(*(x.double() for x in inputs)))
    for g, w, e in zip(got, want, exact, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        eps = max(torch.finfo(g.dtype).eps, torch.finfo(inputs[0].dtype).eps)
        size = float(e.abs().max())
        error, eager = float((g.double() - e).abs().max()), float((w.double() - e).abs().max())
        assert error <= eager + eps * size, (error, eager, size)
    return seen


def products(steps: list[Any]) -> list[str]:
    """The sources of the kernels that compute a product."""
    return [s[0].source for s in steps if not isinstance(s, Extern) and "tl.dot" in s[0].source]


def library_calls(steps: list[Any]) -> int:
    return sum(isinstance(s, Extern) for s in steps)


def one_kernel(steps: list[Any]) -> None:
    assert len(steps) == 1
    assert len(products(steps)) == 1


EPILOGUES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "bias": (lambda x, w, b: (x @ w) + b, [(64, 48), (48, 32), (32,)]),
    "bias and gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(70, 48), (90, 48), (90,)]),
    "tanh gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), [(70, 48), (90, 48), (90,)]),
    "relu": (lambda x, w: F.linear(x, w).relu(), [(40, 48), (50, 48)]),
    "scale": (lambda x, w: (x @ w) * 0.125, [(40, 48), (48, 50)]),
    "residual": (lambda x, w, b, y: F.linear(x, w, b) + y, [(40, 48), (50, 48), (50,), (40, 50)]),
    "column": (lambda x, w, y: (x @ w) * y, [(40, 48), (48, 50), (40, 1)]),
    "cast": (lambda x, w: torch.sigmoid((x @ w).float()), [(40, 48), (48, 50)]),
    "several results": (lambda x, w, b: ((y := F.linear(x, w, b)), F.gelu(y)), [(40, 48), (50, 48), (50,)]),
    "three dimensions": (lambda x, w, b: F.silu(F.linear(x, w, b)), [(3, 20, 48), (50, 48), (50,)]),
    "rows of a batch": (lambda x, w, y: F.linear(x, w) * y, [(3, 20, 48), (50, 48), (3, 1, 50)]),
    "addmm with factors": (
        lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2).relu(),
        [(40, 50), (40, 48), (48, 50)],
    ),
    "batched": (lambda x, y: (x @ y) * 0.125 + 1, [(3, 40, 48), (3, 48, 50)]),
    "batched and masked": (lambda x, y, m: (x @ y) + m, [(3, 40, 48), (3, 48, 50), (40, 50)]),
    "batched with a term": (lambda c, x, y: torch.baddbmm(c, x, y).sigmoid(), [(3, 1, 50), (3, 40, 48), (3, 48, 50)]),
    "depth that does not divide": (lambda x, w: (x @ w).relu(), [(33, 41), (41, 35)]),
    "cut to fewer columns": (lambda x, w, b: F.linear(x, w, b)[:, :41] * 2, [(40, 48), (56, 48), (56,)]),
    "transposed result": (
        lambda x, w, b: F.linear(x, w, b).view(2, 20, 4, 16).transpose(1, 2).contiguous() * 2,
        [(2, 20, 48), (64, 48), (64,)],
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fn, shapes = EPILOGUES[name]
    one_kernel(check(fn, [r(*s).to(dtype) for s in shapes]))


@pytest.mark.parametrize("band", [1, 3, 8])
def test_bands(band: int) -> None:
    torch.manual_seed(0)
    inputs = [r(150, 48).bfloat16(), r(48, 75).bfloat16()]
    one_kernel(check(lambda x, y: (x @ y).relu(), inputs, replace(SMALL, band=band)))


@pytest.mark.parametrize("tiles", [SMALL, PERSISTENT], ids=str)
@pytest.mark.parametrize("left", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("right", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("sizes", [(64, 32, 48), (75, 53, 41)], ids=["divides", "does not"])
def test_layouts(sizes: tuple[int, int, int], left: bool, right: bool, tiles: Tiles) -> None:
    torch.manual_seed(0)
    rows, columns, depth = sizes
    x = r(depth, rows).t() if left else r(rows, depth)
    y = r(columns, depth).t() if right else r(depth, columns)
    one_kernel(check(lambda x, y, b: F.gelu(x @ y + b), [x.bfloat16(), y.bfloat16(), r(columns).bfloat16()], tiles))


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("stored", [40, 48, 64])
def test_padding_behind_the_columns_is_read_and_not_stored(stored: int, turned: bool) -> None:
    def fn(x: T, w: T) -> T:
        return (x @ w)[:, :33].relu()

    torch.manual_seed(0)
    w = r(stored, 48).t() if turned else r(48, stored)
    steps = check(fn, [r(40, 48).bfloat16(), w.bfloat16()])
    one_kernel(steps)
    (source,) = products(steps)
    reads_all = f"tl.minimum(columns, {stored - 1})" if turned else f"columns < {stored}"
    assert (reads_all in source) == (stored % SMALL.columns != 0)
    assert "r0 < 33" in source


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("left", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("right", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("sizes", [(64, 32, 48), (72, 56, 40)], ids=["divides", "does not"])
def test_descriptors(sizes: tuple[int, int, int], left: bool, right: bool, persistent: bool) -> None:
    torch.manual_seed(0)
    rows, columns, depth = sizes
    x = r(depth, rows).t() if left else r(rows, depth)
    y = r(columns, depth).t() if right else r(depth, columns)
    tiles = replace(SMALL, descriptors=True, persistent=persistent)
    steps = check(lambda x, y, b: F.gelu(x @ y + b), [x.bfloat16(), y.bfloat16(), r(columns).bfloat16()], tiles)
    (source,) = products(steps)
    assert source.count("make_tensor_descriptor") == 2


def test_the_host_program_gives_each_program_its_scratch() -> None:
    torch.manual_seed(0)
    inputs = [r(64, 48).bfloat16(), r(48, 32).bfloat16()]
    for tiles in (SMALL, replace(SMALL, descriptors=True, persistent=True)):
        check(lambda x, w: (x @ w).relu(), inputs, tiles, host=True)


def residual(x: T, w: T, b: T, y: T) -> T:
    return F.gelu(F.linear(x, w, b)) + y


def one_real_kernel(tiles: Tiles, rows: int, columns: int, depth: int) -> TritonKernel:
    inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((rows, depth), (columns, depth), (columns,))]
    (gm,) = trace(residual, *inputs, torch.empty(rows, columns, dtype=torch.bfloat16))
    s = schedule(gm, None, GPU, taking(tiles))
    (kernel,) = [triton_run.emit(s.program, k, GPU)[0] for k in s.steps]
    return kernel


@pytest.mark.sample(6)
@pytest.mark.parametrize("tiles", [t for t in cost.SEARCH if t.descriptors], ids=str)
def test_memory_is_what_was_planned(tiles: Tiles) -> None:
    kernel = one_real_kernel(tiles, 4096, 3072, 768)
    shared, scratch = triton_run.memory_of(kernel, 90)
    planned = shared_bytes(Matmul("", torch.bfloat16, 1, 1, 1, 1, 1, A, A, (), 0, PRODUCT), tiles)
    assert scratch == kernel.scratch == (256 if tiles.descriptors else 0)
    assert shared <= planned <= 227 << 10


def test_older_devices_need_no_descriptors_in_memory() -> None:
    described = next(t for t in cost.TEMPLATES if t.descriptors)
    shared, scratch = triton_run.memory_of(one_real_kernel(described, 4096, 3072, 768), 80)
    assert shared <= 163 << 10
    assert scratch == 0


def test_operands_that_are_parts_of_a_tensor() -> None:
    torch.manual_seed(0)
    one_kernel(check(lambda x, w: (x[:, 8:56] @ w[1]).relu(), [r(40, 64).bfloat16(), r(3, 48, 32).bfloat16()]))


def test_gate_joins_the_second_product() -> None:
    def fn(x: T, gate: T, up: T) -> T:
        return F.silu(x @ gate) * (x @ up)

    torch.manual_seed(0)
    steps = check(fn, [r(40, 48).bfloat16(), r(48, 64).bfloat16(), r(48, 64).bfloat16()])
    assert (len(products(steps)), library_calls(steps), len(steps)) == (1, 1, 2)


def to_tf32(x: T) -> T:
    """Rounded to the 10 bits that tensor cores keep of a float32's fraction."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11).float()


def test_float32_only_as_tf32() -> None:
    torch.manual_seed(0)
    inputs = [r(40, 48), r(48, 50)]
    assert not products(check(lambda x, w: (x @ w).relu(), inputs))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        (source,) = products(check(lambda x, w: (x @ w).relu(), [to_tf32(x) for x in inputs]))
        got = triton_run.compiled(lambda x, w: (x @ w).relu(), choose=taking(SMALL), seen=[])(*inputs)
    finally:
        torch.set_float32_matmul_precision(before)
    assert 'input_precision="tf32"' in source
    x, w = (to_tf32(x).double() for x in inputs)  # the cores drop bits, so that kernels round before
    torch.testing.assert_close(got, (x @ w).relu().float(), rtol=1e-5, atol=1e-5)


def test_eager_numerics_round_the_product_first() -> None:
    """Both ways differ where a value between two bfloat16 numbers is scaled."""
    x, w = torch.full((16, 16), 1.0), torch.full((16, 16), 1.0)
    x[:, 0] = 1.0078125  # the sums are 16.0078125, which bfloat16 rounds to 16
    x, w = x.bfloat16(), w.bfloat16()
    got = {}
    for fast in (True, False):
        ctx = ScheduleContext(H200, fast_math=fast)
        fn = triton_run.compiled(lambda x, w: (x @ w).float() - 16, choose=taking(SMALL), ctx=ctx)
        got[fast] = fn(x, w)
    assert (got[True] == 0.0078125).all()
    assert (got[False] == 0).all()


class TestSource(expecttest.TestCase):
    maxDiff = None

    def test_linear_and_residual(self) -> None:
        def fn(x: T, w: T, b: T, y: T) -> T:
            return F.relu(F.linear(x, w, b)) + y

        inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((1000, 96), (256, 96), (256,), (1000, 256))]
        (gm,) = trace(fn, *inputs)
        s = schedule(gm, None, GPU, taking(Tiles(128, 128, 64, 8, 3)))
        (k,) = [triton_run.emit(s.program, k, GPU)[0] for k in s.steps]
        text = f"# grid {k.grid[0]}, {k.constexprs}\n{k.source[k.source.index('def kernel(') :]}"
        self.assertExpectedInline(
            text,
            """\
# grid 16, {'XBLOCK': 128, 'RBLOCK': 128, 'KBLOCK': 64}
def kernel(in0, in1, in2, in3, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr, KBLOCK: tl.constexpr):
    program = tl.program_id(0)
    across = program % 8
    along = program // 8
    rows = across * XBLOCK + tl.arange(0, XBLOCK)
    columns = along * RBLOCK + tl.arange(0, RBLOCK)
    rows = tl.minimum(rows, 999)
    depth = tl.arange(0, KBLOCK)
    left = in0 + rows[:, None] * 96 + depth[None, :]
    right = in1 + depth[:, None] + columns[None, :] * 96
    sums = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    for begin in range(0, 96, KBLOCK):
        left_over = 96 - begin
        a = tl.load(left, mask=(depth < left_over)[None, :], other=0.0)
        b = tl.load(right, mask=(depth < left_over)[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
        left += KBLOCK
        right += KBLOCK
    x = across * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = x < 1000
    r0 = along * RBLOCK + tl.arange(0, RBLOCK)[None, :]
    # relu.default, add.Tensor
    t0 = tl.load(in2 + r0)
    t1 = tl.cast(t0, tl.float32)
    t2 = (sums + t1)
    t3 = largest(t2, tl.full([], 0, tl.float32))
    t4 = tl.load(in3 + (x * 256 + r0), mask=xmask, other=0.0)
    t5 = tl.cast(t4, tl.float32)
    t6 = (t3 + t5)
    t7 = tl.cast(t6, tl.bfloat16)
    tl.store(out0 + (x * 256 + r0), t7, mask=xmask)
""",
        )


REAL_SHAPES = [(12608, 3072, 768), (200, 1000, 264)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("sizes", REAL_SHAPES, ids=str)
@pytest.mark.parametrize("tiles", cost.TEMPLATES, ids=str)
def test_real_tiles_become_machine_code(tiles: Tiles, sizes: tuple[int, int, int]) -> None:
    """`machine_code` waits for it; tensors stay empty, nothing runs."""
    kernel = one_real_kernel(tiles, *sizes)
    assert (kernel.num_warps, kernel.num_stages) == (tiles.warps, tiles.stages)
    triton_run.compile_later(kernel, (80, 90) if tiles.rows == 64 else (90,))


def test_training_of_a_transformer() -> None:
    """Products with GELU forward (its input is saved), with GELU's gradient backward; attention reads parts of one."""
    torch.manual_seed(0)
    model, tokens = GPT(1, 32, 2, 64, 16).bfloat16(), torch.randint(0, 64, (2, 16))

    def loss(m: torch.nn.Module) -> Callable[[T], T]:
        return lambda t: F.cross_entropy(m(t).float().flatten(0, 1), t.flatten())

    def gradients(m: torch.nn.Module, run: Callable[[T], T]) -> list[T]:
        m.zero_grad()
        run(tokens).backward()
        return [p.grad.double() for p in m.parameters() if p.grad is not None]

    seen: list[Any] = []
    exact = copy.deepcopy(model).double()
    want = gradients(exact, loss(exact))
    got = gradients(model, triton_run.compiled(loss(model), choose=taking(SMALL), seen=seen, capabilities=()))
    eager = gradients(model, loss(model))
    assert len(products(seen)) >= 2
    for g, w, e in zip(got, want, eager, strict=True):
        assert float((g - w).norm()) <= 2 * float((e - w).norm()) + 2**-7 * float(w.norm())
