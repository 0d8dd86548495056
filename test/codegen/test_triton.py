"""Generated Triton kernels give what eager gives, run by Triton's interpreter; all compile to machine code."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.ir.loops import Extern
from altbackend.schedule import split, split_scans
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.loop_mapping import Refusal
from altbackend.schedule.tiling.gpu import expressible
from test import fuzz, triton_run
from test.compare import as_list, difference, distance, twin, wide
from test.graphs import schedule, trace
from test.triton_run import TARGET

pytestmark = pytest.mark.sample(4)

N = 64
SHORT_ROWS = ScheduleContext(replace(H200, sms=2, registers=128))  # rows of more than 32 elements are read in blocks
FEW_PROGRAMS = ScheduleContext(replace(H200, sms=2))  # every program takes several rows
TOLERANCE = 2e-5  # of float32: sums are added in another order
Make = Callable[[], list[Any]]


def r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def ints(low: int, high: int, *sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, sizes, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def machine_code() -> Iterator[None]:
    """Every kernel of this file compiles for a GPU."""
    yield
    assert triton_run.compile_errors() == []


def verify(fn: Callable[..., Any], inputs: list[Any], kernels: int | None, **options: Any) -> list[Any]:
    """`fn` gives what eager gives, and inputs are afterwards what they are in eager; the steps that ran."""
    our_inputs, eager_inputs = twin(inputs), twin(inputs)
    seen: list[Any] = []
    want = as_list(fn(*eager_inputs))
    got = as_list(triton_run.compiled(fn, seen=seen, **options)(*our_inputs))
    low = any(isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in inputs)
    exact = as_list(fn(*wide(inputs))) if low else [None] * len(want)
    _same(got, want, exact)
    _same(our_inputs, eager_inputs, [None] * len(our_inputs))
    if kernels is not None:
        sources = [s[0].source for s in seen if not isinstance(s, Extern)]
        assert len(sources) == kernels, "\n".join(sources)
    return seen


def _same(got: list[Any], want: list[Any], exact: list[Any]) -> None:
    for g, w, e in zip(got, want, exact, strict=True):
        single = isinstance(w, torch.Tensor) and w.dtype == torch.float32
        assert difference(g, w, e, TOLERANCE if single else None) == ""


def with_specials(x: torch.Tensor) -> torch.Tensor:
    """Rows of -inf, that begin with -inf, with +inf, with NaN."""
    x[0], x[1, :70], x[2, 50], x[3, 99], x[4, :] = -float("inf"), -float("inf"), float("inf"), float("nan"), -88.0
    return x


def norm_chain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = x + torch.softmax(F.gelu(F.layer_norm(x, x.shape[-1:], w, b)), -1)
    return x


# name: (function, inputs, kernels)
POINTWISE: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "chain": (lambda a: (a * 2 + 1).tanh(), lambda: [r(4, 8)], 1),
    "broadcast": (lambda a, b: F.gelu(a + b), lambda: [r(33, 70), r(70)], 1),
    "column broadcast": (lambda a, b: a * b, lambda: [r(33, 70), r(33, 1)], 1),
    "many blocks": (lambda a: a.relu() - 1, lambda: [r(5000)], 1),
    "no dimensions": (lambda a, b: (a + b, a * 2), lambda: [torch.tensor(3.0), torch.tensor(2.0)], 1),
    "different sizes": (lambda a, b: (a + b[0], b * a[0]), lambda: [r(3000), r(5)], 1),
    "bfloat16": (lambda a, b: (a * b + 1).exp() * 0.1, lambda: [r(10, 40).bfloat16(), r(10, 40).bfloat16()], 1),
    "float16": (lambda a: a.sigmoid() / 3, lambda: [r(10, 40).half()], 1),
    "float64": (lambda x: (x * 0.1, x / 3, x.sqrt(), x.exp()), lambda: [r(30, 7).double().abs()], 1),
    "bool": (lambda x: (x & ~x, x | x, x ^ x, x.logical_not(), x.float()), lambda: [r(30, 7) > 0], 1),
    "arithmetic of bools": (
        lambda a, b: (a + b, torch.add(a, b, alpha=True), a * b, a.maximum(b), a.minimum(b), a.fmax(b), a < b, a >= b),
        lambda: [r(30, 7) > 0, r(30, 7) > 0],
        1,
    ),
    "int64": (lambda a, b: (a // b, a % b, a & b, a.fmod(b)), lambda: [ints(-9, 9, 20), ints(1, 5, 20)], 1),
    "int8": (lambda x: (x * 2 - 1, -x, x.abs(), x // 3), lambda: [ints(-60, 60, 30, dtype=torch.int8)], 1),
    "uint8": (lambda x: (x + 1, x * 3, x.float() * 0.1), lambda: [ints(0, 255, 30, dtype=torch.uint8)], 1),
    "shifts": (
        lambda a, b: (a << b, a >> b),
        lambda: [ints(-9, 9, 20, dtype=torch.int32), ints(0, 5, 20, dtype=torch.int32)],
        1,
    ),
    "casts": (
        lambda x: [x.to(t) for t in (torch.int32, torch.int64, torch.int8, torch.bool, torch.half, torch.double)],
        lambda: [r(50) * 3],
        1,
    ),
    "floats that floor": (lambda a, b: (a // b, a % b, a.fmod(b)), lambda: [r(50) * 9, r(50)], 1),
    "special values": (
        lambda x: (x.relu(), x.clamp(-1, 1), x.maximum(x.flip(0)), x.isnan(), x.isinf(), x.sign(), x.round()),
        lambda: [torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.5, 1.5, 2.5, -2.0])],
        1,
    ),
    "one number a row": (lambda a, b: (a - b).exp() * b, lambda: [r(5, 2000), r(5, 1)], 1),
    "one number a row, three loops": (lambda a, b: a * b, lambda: [r(3, 2, 1032), r(3, 1, 1)], 1),
    "one hot": (
        lambda a, i: (torch.zeros(9, 40).scatter(1, i, 2.0) * a, torch.ones(9, 40).scatter(1, i, -1.0).sum(1)),
        lambda: [r(9, 1), ints(0, 40, 9, 1)],
        2,
    ),
    "transpose": (lambda x: x.t().contiguous() + 1, lambda: [r(40, N)], 1),
    "transpose and row": (lambda x, y: x.t() + y, lambda: [r(64, 96), r(96, 64)], 1),
    "transpose of the inner": (lambda x, y: x.transpose(1, 2) * y, lambda: [r(3, 40, 50), r(3, 50, 40)], 1),
    "slices, flips": (lambda x: (x.roll(3, 1), x.flip(0), x[::2, 1:] + 1), lambda: [r(10, 12)], 1),
    "concatenation": (lambda x, y: torch.cat([x * 2, y], 1), lambda: [r(10, 40), r(10, 3)], 2),
    "padding": (lambda x: F.pad(x, (1, 2)) * 2, lambda: [r(10, 40)], 1),
    "triangle": (torch.tril, lambda: [r(10, 12)], 1),
    "where": (lambda x: torch.where(x > 0, 1, 0).sum(-1), lambda: [r(10, 12)], 1),
    "in place": (lambda a, b: a.add_(b) * 3 + b.mul_(2), lambda: [r(300), r(300)], 1),
    "in place, one element": (lambda a, b: (a.add_(1), b + a), lambda: [r(1), r(3000)], 2),
}
ROWS: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "softmax": (lambda a: torch.softmax(a, -1), lambda: [r(5, 70)], 1),
    "softmax bf16": (lambda a: torch.softmax(a * a, -1), lambda: [r(5, 70).bfloat16()], 1),
    "log_softmax": (lambda a: torch.log_softmax(a, -1), lambda: [r(5, 64)], 1),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (N,), w, b), lambda: [r(8, N), r(N), r(N)], 1),
    "norm chain": (norm_chain, lambda: [r(32, N), r(N), r(N)], 1),
    "norm chain, masked": (norm_chain, lambda: [r(5, 100), r(100), r(100)], 1),
    "rows and columns": (lambda x: [(x * 2).sum(1), (x * 2).sum(0), x * 2], lambda: [r(32, N)], 1),
    "column sum": (lambda x: x.sum(0), lambda: [r(32, N)], 1),
    "tall column sum": (lambda x: x.sum(0), lambda: [r(3000, 50)], 2),
    "softmax of columns": (lambda x: x.softmax(0), lambda: [r(60, 50)], 1),
    "softmax of long columns": (lambda x: x.softmax(0), lambda: [r(600, 50)], 1),
    "full sum": (lambda x: x.sum(), lambda: [r(100, N)], 1),
    "full results": (lambda x: (x.sum(), x.amax(), x.argmax(), x * 2), lambda: [r(10, N)], 1),
    "minus its mean": (lambda x: x - x.mean(), lambda: [r(30, 70)], 1),
    "minus its mean, large": (lambda x: x - x.mean(), lambda: [r(300, 70)], 2),
    "variance": (lambda x: torch.var_mean(x, -1), lambda: [r(30, 70)], 1),
    "product": (lambda x: x.prod(-1), lambda: [r(30, 7)], 1),
    "logical": (lambda x: ((x > 2).any(-1), (x > -2).all(-1), (x > 0).amax(-1)), lambda: [r(30, 70)], 1),
    "integers": (
        lambda x: (x.sum(-1), x.amax(-1), x.amin(), x.prod(-1)),
        lambda: [ints(-3, 3, 30, 7, dtype=torch.int32)],
        1,
    ),
    "float64": (lambda x: x.softmax(-1), lambda: [r(5, 70).double()], 1),
    "argmax": (lambda x: (x.argmax(-1), x.argmin(0)), lambda: [r(32, N)], 2),
    "max of columns": (lambda x: x.max(0), lambda: [r(60, 50)], 1),
    "NaN": (lambda x: (x.amax(-1), x.argmax(-1), x.amin(-1)), lambda: [torch.tensor([[1.0, float("nan"), 3.0]])], 1),
    "group norm": (lambda x: F.group_norm(x, 4), lambda: [r(4, 8, 5, 5)], 1),
    "cross entropy": (F.cross_entropy, lambda: [r(30, 50), ints(0, 50, 30)], 2),
    "max pool": (lambda x: F.max_pool2d(x, 2), lambda: [r(2, 3, 8, 8)], 1),
    "cumsum": (lambda x: (x.cumsum(-1), x.cumprod(-1)), lambda: [r(8, N)], 1),
    "cumsum of columns": (lambda x: x.cumsum(0), lambda: [r(8, N)], 1),
    "cumsum of all": (lambda x: x.cumsum(0) * 2, lambda: [r(100)], 1),
    "cummax": (lambda x: x.cummax(-1), lambda: [r(6, 100)], 1),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), lambda: [r(6, 100)], 1),
}
LONG: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "logsumexp": (lambda x: torch.logsumexp(x * 3, -1), lambda: [r(5, 70)], 1),
    "log_softmax, one value": (lambda x: x.log_softmax(-1)[:, 3], lambda: [r(5, 70)], 1),
    "cross entropy": (F.cross_entropy, lambda: [r(30, 150), ints(0, 150, 30)], 2),
    "stored logits": (lambda x: (y := x[:, :145] * 2, torch.logsumexp(y, -1)), lambda: [r(30, 152)], 1),
    "stored differences": (lambda x: (y := x - x.amax(-1, keepdim=True), y.exp().sum(-1)), lambda: [r(30, 150)], 1),
    "rising and falling rows": (
        lambda x: torch.logsumexp(x, -1),
        lambda: [torch.stack([torch.arange(100.0), -torch.arange(100.0), torch.full((100,), 1e4)])],
        1,
    ),
    "infinities and NaN": (
        lambda x: (torch.logsumexp(x, -1), x.log_softmax(-1)),
        lambda: [with_specials(r(6, 100))],
        1,
    ),
    "norm chain": (norm_chain, lambda: [r(4, 70), r(70), r(70)], 2),  # passes would repeat too much in one
    "softmax": (lambda x: x.softmax(-1), lambda: [r(6, 128)], 1),
    "softmax of columns": (lambda x: x.softmax(0), lambda: [r(70, 40)], 1),
    "argmax": (lambda x: x.argmax(-1), lambda: [r(6, 100)], 1),
    "cumsum": (lambda x: x.cumsum(-1), lambda: [r(6, 100)], 1),
    "cummax": (lambda x: x.cummax(-1), lambda: [r(6, 100)], 1),
    "logical": (lambda x: ((x > 2).any(-1), (x > -2).all(-1)), lambda: [r(30, 70)], 1),
    "in place": (lambda x: x.sub_(x.mean(-1, keepdim=True)), lambda: [r(6, 100)], 2),
}
FEW: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "full sum": (lambda x: (x * x).sum(), lambda: [r(300, 50)], 1),
    "full sum, masked": (lambda x: (x * x).mean(), lambda: [r(301, 51)], 1),
    "short rows": (lambda x: x.softmax(-1), lambda: [r(300, 7)], 1),
    "short rows and columns": (lambda x: [x.softmax(-1), x.sum(0)], lambda: [r(1100, 7)], 1),
    "elements and totals": (lambda x: (x * 2, (x * 2).sum(), x.amax()), lambda: [r(300, 50)], 1),
    "rows, columns and all": (
        lambda x, y: [(x * y).sum(1), (x * y).sum(0), x.sum()],
        lambda: [r(301, 51), r(301, 51)],
        1,
    ),
}
INDEXED: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "gather rows": (lambda x, i: x[i], lambda: [r(40, N), ints(-40, 40, 17)], 1),
    "gather": (lambda x, i: x.gather(1, i) * 2, lambda: [r(10, 20), ints(0, 20, 10, 5)], 1),
    "embedding": (lambda i, w: F.embedding(i, w).softmax(-1), lambda: [ints(0, 40, 4, 9), r(40, 16)], 1),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda: [r(10, 4), ints(0, 10, 20, 4), r(20, 4)],
        2,
    ),
    "index_put": (lambda x, i, s: x.index_put((i,), s), lambda: [r(10, 4), torch.randperm(10)[:5], r(5, 4)], 2),
    "accumulate": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda: [r(10, 4), ints(-10, 10, 30), r(30, 4)],
        2,
    ),
    "scatter max": (
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
        lambda: [ints(0, 9, 10, 4), ints(0, 10, 20, 4), ints(0, 19, 20, 4)],
        2,
    ),
}


@pytest.mark.parametrize("name", list(POINTWISE))
def test_pointwise(name: str) -> None:
    fn, make, kernels = POINTWISE[name]
    verify(fn, make(), kernels)


@pytest.mark.parametrize("name", list(ROWS))
def test_rows_in_registers(name: str) -> None:
    fn, make, kernels = ROWS[name]
    verify(fn, make(), kernels)


@pytest.mark.parametrize("name", list(LONG))
def test_rows_in_blocks(name: str) -> None:
    fn, make, kernels = LONG[name]
    verify(fn, make(), kernels, ctx=SHORT_ROWS)


@pytest.mark.parametrize("name", list(FEW))
def test_several_rows_a_program(name: str) -> None:
    fn, make, kernels = FEW[name]
    verify(fn, make(), kernels, ctx=FEW_PROGRAMS)


@pytest.mark.parametrize("name", list(INDEXED))
def test_positions_from_data(name: str) -> None:
    fn, make, kernels = INDEXED[name]
    verify(fn, make(), kernels)


DYNAMIC: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "softmax": (lambda a, b: (a + b).softmax(-1), lambda: [r(5, 70), r(70)], 1),
    "layer norm": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), lambda: [r(30, 70), r(70)], 1),
    "column sum": (lambda x: x.sum(0), lambda: [r(30, 70)], 1),
    "full sum": (lambda x: (x * x).sum(), lambda: [r(30, 7)], 1),
    "concatenation": (lambda x, y: torch.cat([x, y.sin()], 0), lambda: [r(30, 70), r(3, 70)], 2),
    "gather": (lambda x, i: x[i] + 1, lambda: [r(40, N), ints(-40, 40, 17)], 1),
}


@pytest.mark.parametrize("name", list(DYNAMIC))
def test_symbolic_sizes(name: str) -> None:
    fn, make, kernels = DYNAMIC[name]
    verify(fn, make(), kernels, dynamic=True, ctx=FEW_PROGRAMS)


def gradients(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    xs = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*xs)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, xs, weights)]


# name: (function, inputs, kernels of forward and backward together)
TRAINED: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (N,), w, b), lambda: [r(40, N), r(N), r(N)], 2),
    "layer norm, masked": (lambda x, w, b: F.layer_norm(x, (51,), w, b), lambda: [r(41, 51), r(51), r(51)], 2),
    "softmax": (lambda x: x.softmax(-1), lambda: [r(40, N)], 2),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(30)), lambda: [r(30, 50)], 3),
    "embedding": (lambda w: F.embedding(torch.arange(30) % 7, w), lambda: [r(40, 16)], 3),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda: [r(4, 8, 5, 5), r(8), r(8)],
        2,
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: [r(2, 3, 9, 9)], 2),
    "max pool, apart": (lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True), lambda: [r(2, 3, 10, 11)], 2),
    "max pool, spread": (lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2), lambda: [r(2, 3, 11, 9)], 2),
    "max pool, channels last": (
        lambda x: F.max_pool2d(x, 3, 1, 1).relu(),
        lambda: [r(2, 40, 7, 6).to(memory_format=torch.channels_last)],
        3,
    ),
    "max pool of many windows": (lambda x: F.max_pool2d(x, 6, 1, 1), lambda: [r(1, 2, 7, 7)], 3),
    "max pool of volumes": (lambda x: F.max_pool3d(x, 2, 2, 1), lambda: [r(1, 2, 5, 6, 4)], 2),
}


@pytest.mark.parametrize("name", list(TRAINED))
def test_gradients(name: str) -> None:
    fn, make, kernels = TRAINED[name]
    inputs = make()
    seen: list[Any] = []
    want, got = gradients(fn, inputs), gradients(triton_run.compiled(fn, seen=seen), inputs)
    _same(got, want, [None] * len(want))
    assert sum(not isinstance(s, Extern) for s in seen) == kernels


def test_totals_of_several_rows_a_program() -> None:
    """float32 totals over many rows, some of which cancel: as near to the exact ones as eager's are."""
    fn, inputs = TRAINED["layer norm"][0], [r(401, N), r(N), r(N)]
    got, want = gradients(triton_run.compiled(fn, ctx=FEW_PROGRAMS), inputs), gradients(fn, inputs)
    for g, w, e in zip(got, want, gradients(fn, [x.double() for x in inputs]), strict=True):
        assert distance(g, e) <= max(3 * distance(w, e), 1e-6)


def test_bfloat16_gradients() -> None:
    fn, inputs = TRAINED["layer norm, masked"][0], [x.bfloat16() for x in (r(41, 51), r(51), r(51))]
    exact = gradients(fn, [x.double() for x in inputs])
    got, want = gradients(triton_run.compiled(fn), inputs), gradients(fn, inputs)
    assert [difference(g, w, e) for g, w, e in zip(got, want, exact, strict=True)] == [""] * 4


@pytest.mark.parametrize("fn", [lambda x, i: x[i], lambda x, i: x[i].sum(-1)], ids=["elements", "rows"])
def test_an_index_out_of_range_is_an_error(fn: Callable[..., Any]) -> None:
    run = triton_run.compiled(fn)
    x, good = r(4, 3), torch.tensor([1, -1])
    assert difference(run(x, good), fn(x, good), None, TOLERANCE) == ""
    for bad in (9, -5):
        with pytest.raises(IndexError):
            run(x, torch.tensor([1, bad]))


def test_equal_layers_are_equal_kernels() -> None:
    """Sources name no buffer and no node of the graph."""
    seen: list[Any] = []
    w = r(N, N)
    triton_run.compiled(lambda x: F.gelu(F.gelu(x @ w) @ w) @ w, seen=seen)(r(8, N))
    kernels = [s[0] for s in seen if not isinstance(s, Extern)]
    assert len(kernels) == 2
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize(
    ("fn", "inputs", "why"),
    [
        (
            lambda x, i, s: x.scatter_reduce(0, i, s, "prod") + 1,
            [r(4), ints(0, 4, 9), r(9)],
            "no atomic prod of float32",
        ),
        (lambda x: torch.digamma(x.abs() + 1).sin(), [r(9)], "digamma of float32 has no form in Triton"),
        (lambda x, y: torch.gcd(x, y) + 1, [ints(1, 99, 9), ints(1, 99, 9)], "gcd of int64 has no form in Triton"),
    ],
    ids=["scatter", "digamma", "gcd"],
)
def test_what_has_no_kernel_is_a_library_call_with_a_reason(
    fn: Callable[..., Any], inputs: list[Any], why: str
) -> None:
    steps = verify(fn, inputs, None)
    assert [isinstance(s, Extern) for s in steps].count(True) == 1
    (graph,) = trace(fn, *inputs)
    assert [d[3] for d in schedule(graph, ctx=TARGET).decisions if d[2] == "library call"] == [why]


def test_deterministic_leaves_atomic_additions_to_the_library() -> None:
    fn, inputs = lambda x, i, s: x.scatter_add(0, i, s), [r(4), ints(0, 4, 9), r(9)]
    assert not any(isinstance(s, Extern) for s in verify(fn, inputs, None))
    assert any(isinstance(s, Extern) for s in verify(fn, inputs, None, cfg=resolve(None, {"deterministic": True})))
    torch.use_deterministic_algorithms(True)  # then ATen sorts the rows of an embedding's gradient
    try:
        assert any(isinstance(s, Extern) for s in verify(fn, inputs, None))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_scan_is_read_at_its_own_point_only() -> None:
    verify(lambda x: x.cumsum(1).flip(1) + x.cumsum(1), [r(5, 9)], 2)
    verify(lambda x: x.cumsum(1) * 2, [r(5, 9)], 1)


BACKWARDS = {
    "cumsum": lambda x: x.flip(1).cumsum(1).flip(1),
    "cumprod and a term": lambda x: x.clamp(-1, 1).flip(1).cumprod(1).flip(1) + x,
    "logcumsumexp": lambda x: x.flip(1).logcumsumexp(1).flip(1),
    "of a result": lambda x: x.cumsum(1).flip(1) * torch.arange(x.shape[1]),
}


@pytest.mark.parametrize("n", [9, 100])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_scan_backwards_is_one_kernel(name: str, n: int) -> None:
    """The rows stay in registers or run in blocks from the last one; columns and 16 bits do the same."""
    verify(BACKWARDS[name], [r(6, n)], 1, ctx=SHORT_ROWS)
    if name == "cumsum":
        verify(BACKWARDS[name], [r(6, n).bfloat16()], 1, ctx=SHORT_ROWS)
        verify(BACKWARDS[name], [r(2, n, 5)], 1)
        verify(BACKWARDS[name], [torch.randint(-9, 9, (6, n))], 1)


def test_a_scan_backwards_with_totals_of_rows_and_columns() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scanned = x.flip(1).cumsum(1).flip(1)
        return scanned, (scanned * x).sum(1), scanned.sum(0), x.flip(1).argmax(1)

    for x in (r(96, 24), r(96, 24).bfloat16()):
        seen = verify(fn, [x], None)
        assert any("reverse=True" in s[0].source for s in seen if not isinstance(s, Extern))


def test_rows_with_totals_over_rows_read_an_operand_across() -> None:
    """Tiles of eight rows read whole sectors of it."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x + y.transpose(1, 2)
        return z, z.sum(2), z.sum((0, 1))

    seen = verify(fn, [r(3, 4000, 130), r(3, 130, 4000)], None)
    assert any("partials0" in s[0].source and "XBLOCK" in s[0].source for s in seen if not isinstance(s, Extern))


@pytest.mark.parametrize("scale", [1.0, 1e-39, 1e-30, 1e30], ids=str)
def test_a_divisor_of_many_elements_is_inverted_once(scale: float) -> None:
    """Quotients are those of a division, also of zeros, infinities and NaN, by divisors of all sizes."""
    special = torch.tensor([0.0, -0.0, 1.0, -3.0, math.inf, -math.inf, math.nan, 1e-30, 1e30])
    x = torch.cat([r(20, 50), special.expand(20, 9)], 1)
    divisors = torch.cat([r(11, 1).abs() + 0.1, special[:, None]]) * scale
    seen = verify(lambda x, y: (x / y, x / 6.0, x.amax(1)), [x, divisors], 1)
    assert any(s[0].source.count("= quotient(") == 2 for s in seen if not isinstance(s, Extern))


def test_the_gradient_of_a_scan_reads_vectors() -> None:
    seen = verify(BACKWARDS["cumsum"], [r(40, 96)], 1)
    assert any("scan_exactly_backwards" in s[0].source for s in seen if not isinstance(s, Extern))


SCANS = {
    "rows": (lambda x: x.cumsum(1) * 2, lambda: [r(3, 96)], 3),
    "bfloat16 rows": (lambda x: x.cumsum(1), lambda: [r(3, 96).bfloat16()], 3),
    "columns": (lambda x: x.cumsum(1), lambda: [r(2, 96, 5)], 3),
    "all": (lambda x: x.cumsum(0).relu(), lambda: [r(96)], 3),
    "products": (lambda x: (1 + x / 50).cumprod(1), lambda: [r(3, 96)], 3),
    "maxima": (lambda x: x.cummax(1), lambda: [r(3, 96)], None),
    "integers": (lambda x: x.cumsum(1), lambda: [torch.randint(-9, 9, (3, 96))], 3),
    "NaN": (lambda x: (x.cumsum(1), x.cummin(1)[0]), lambda: [with_nan(r(3, 96))], None),
}


def with_nan(x: torch.Tensor) -> torch.Tensor:
    """A NaN in the middle of a row, and zeros of both signs at the beginning of others."""
    x[0, 40], x[1, 0], x[2, 48] = float("nan"), -0.0, -0.0
    return x


@pytest.mark.parametrize("name", SCANS)
def test_long_scans_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant in ("LONG_ROW", "LONG_COLUMN"):
        monkeypatch.setattr(split_scans, constant, 64)
    for constant in ("SHORTEST_ROW", "SHORTEST_COLUMN", "BEST_COLUMN"):
        monkeypatch.setattr(split_scans, constant, 16)
    fn, make, kernels = SCANS[name]
    seen = verify(fn, make(), kernels)
    assert any("_until" in b for _, buffers, _ in seen for b in buffers)


def test_scans_of_long_rows_are_read_as_they_run() -> None:
    """One loop over the row scans twice and rounds; a sum of the scanned row is a kernel of its own."""
    verify(lambda x: x.cumsum(1).cumsum(1).relu(), [r(6, 100)], 1, ctx=SHORT_ROWS)
    verify(lambda x: x.bfloat16().cumsum(1), [r(6, 100)], 1, ctx=SHORT_ROWS)
    verify(lambda x: (x.cumsum(1) + 1).sum(1), [r(6, 100)], None, ctx=SHORT_ROWS)


def test_a_scan_of_columns_is_read_at_its_points() -> None:
    verify(lambda x: x.cumsum(1) + 1, [r(4, 6, 6)], 1)


def test_without_fusion_every_operation_is_a_kernel() -> None:
    verify(norm_chain, [r(5, 10), r(10), r(10)], 28, cfg=resolve(None, {"fuse": False}))


def test_a_small_device_splits_nothing() -> None:
    small = ScheduleContext(replace(H200, sms=1))
    verify(lambda x: x.sum(0), [r(40, 5)], 1, ctx=small)


NORMS = {
    "layer norm": lambda x, w, b: F.layer_norm(x, (24,), w, b),
    "rms norm": lambda x, w, b: F.rms_norm(x, (24,), w) + b,  # the totals come first in its backward
}


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_a_normalisation_take_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel reads the input and the gradient once, for the gradients of the input, the weight and the bias."""
    monkeypatch.setattr(split, "LONG_COLUMN", 32)
    monkeypatch.setattr(split, "SHORTEST_COLUMN", 8)
    inputs, dy, seen = [r(40, 24), r(24), r(24)], r(40, 24), list[Any]()

    def gradients(fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = fn(*leaves)
        seen.clear()
        return list(torch.autograd.grad(y, leaves, dy))

    want = gradients(NORMS[name])
    _same(gradients(triton_run.compiled(NORMS[name], seen=seen)), want, [None] * 3)
    ((kernel, buffers, _),) = seen
    source = kernel.source
    assert len(kernel.finish) == 1  # the partial totals of all programs
    assert [source.count(f"tl.load({q.name} ") for q in kernel.params if not q.written].count(1) >= 2
    assert len(buffers) == len(set(buffers))


def test_older_gpus() -> None:
    """One kernel of every form compiles for compute capability 8.0 too."""
    both = (80, 90)
    verify(norm_chain, [r(5, 10), r(10), r(10)], 1, capabilities=both)
    verify(lambda x: (x.bfloat16().sum(0), x * 2, x.sum(1)), [r(30, 20)], 1, capabilities=both)
    verify(lambda x, i, s: x.scatter_add(0, i, s), [r(10), ints(0, 10, 20), r(20)], 2, capabilities=both)
    verify(lambda x: x.cumsum(-1).t().contiguous(), [r(30, 20)], None, capabilities=both)


TINY_ROWS = ScheduleContext(replace(H200, sms=2, registers=16))


@pytest.mark.parametrize("seed", [17, 23])
@pytest.mark.parametrize("ctx", [TARGET, TINY_ROWS], ids=["registers", "blocks"])
def test_random_programs(seed: int, ctx: ScheduleContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the fuzzer through the Triton path; a reason for having no kernel is an answer too."""

    def through_triton(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        cfg = resolve(None, {"numerics": options["numerics"]})
        return triton_run.compiled(fn, cfg=cfg, ctx=ctx, capabilities=())

    monkeypatch.setattr(fuzz, "compiled", through_triton)
    source = random.Random(seed)
    for _ in range(6):
        case = fuzz.random_case(source)
        text = fuzz.disagreement(case, way=fuzz.Way(interpret=False))
        assert not text or "no atomic" in text, f"{case}\n{text}"


def test_a_kernel_that_tiles_cannot_express_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(k: Kernel) -> Refusal | None:
        return Refusal("several nodes") if len(k.members) > 1 else None

    inputs = [r(5, 10), r(10), r(10)]
    assert sum(not isinstance(s, Extern) for s in verify(norm_chain, inputs, None)) == 1
    monkeypatch.setattr(expressible, "inexpressible", refuse)
    assert sum(not isinstance(s, Extern) for s in verify(norm_chain, inputs, None)) > 1
