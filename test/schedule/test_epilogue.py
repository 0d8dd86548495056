"""Products join the kernels that read them, or are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir.loops import Extern
from altbackend.schedule.deps import Deps
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel, show_kernel
from altbackend.schedule.loop_mapping import Refusal
from altbackend.schedule.products import cost
from altbackend.schedule.products.epilogue import Candidate
from altbackend.schedule.products.matmul import PRODUCT, Tiles, fits, shared_bytes
from altbackend.schedule.tiling.gpu import pressure
from test.graphs import Scheduled, schedule, trace

T = torch.Tensor
GPU = ScheduleContext(H200)
TILES = Tiles(64, 64, 32, 4, 3)


def r(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> T:
    return torch.randn(sizes).to(dtype)


def always(p: Any, deps: Deps, c: Candidate) -> tuple[Tiles, str]:
    return TILES, "a test"


def run(fn: Callable[..., Any], *inputs: T, choose: Any = always, graph: int = 0, dynamic: bool = False) -> Scheduled:
    return schedule(trace(fn, *inputs, dynamic=dynamic, computes=dynamic)[graph], None, GPU, choose)


def products(s: Scheduled) -> list[Kernel]:
    return [k for k in s.steps if not isinstance(k, Extern) and k.matmul is not None]


def reasons(s: Scheduled) -> list[str]:
    return [reason for kind, _, verdict, reason in s.decisions if kind == "template" and verdict == "library call"]


def mlp(x: T, w: T, b: T, v: T, c: T) -> T:
    return F.linear(F.gelu(F.linear(x, w, b)), v, c)


def test_an_mlp_is_one_kernel_and_one_library_call() -> None:
    s = run(mlp, r(4, 128, 768), r(3072, 768), r(3072), r(768, 3072), r(768))
    (k,) = products(s)
    assert (s.kernels, s.calls) == (1, 1)
    assert (k.matmul.rows, k.matmul.columns, k.matmul.depth) == (512, 3072, 768)
    assert k.stored == frozenset(q.node.out for q in k.stages[0].members[1:])  # the product itself is not
    assert "product 1x512x3072x768" in show_kernel(k)
    (taken,) = [d for d in s.decisions if d[0] == "template" and d[2] != "library call"]
    assert taken[2:] == (f"one kernel of {TILES}", "a test")


def test_without_a_chooser_nothing_changes() -> None:
    inputs = (r(4, 128, 768), r(3072, 768), r(3072), r(768, 3072), r(768))
    s = run(mlp, *inputs, choose=None)
    assert (s.kernels, s.calls) == (1, 2)
    refused = run(mlp, *inputs, choose=lambda p, d, c: Refusal("not today"))
    assert (refused.kernels, refused.calls) == (1, 2)
    assert "not today" in reasons(refused)


def test_what_is_saved_for_the_backward_is_stored_beside_the_result() -> None:
    leaves = [r(64, 96).requires_grad_(), r(128, 96).requires_grad_()]
    s = run(lambda x, w: F.gelu(F.linear(x, w)).square(), *leaves)
    (k,) = products(s)
    assert len(k.stored) == 2
    assert k.matmul is not None
    assert k.matmul.out in k.stored


def test_only_one_of_two_products_joins_their_common_reader() -> None:
    s = run(lambda x, g, u: F.silu(x @ g) * (x @ u), r(64, 96), r(96, 128), r(96, 128))
    assert (len(products(s)), s.kernels, s.calls) == (1, 1, 1)
    assert "the kernel computes another product already" in reasons(s)


def test_a_product_read_by_two_kernels_joins_one_and_is_stored_for_the_other() -> None:
    s = run(lambda x, w: ((y := x @ w).relu(), y.float().sum(1)), r(64, 96), r(96, 4096))
    for k in products(s):
        assert k.matmul is not None
        assert k.matmul.out in k.stored
    order = [k for k in s.steps if not isinstance(k, Extern)]
    assert not products(s) or order[0] is products(s)[0]


def test_columns_that_nobody_reads_are_not_computed() -> None:
    s = run(lambda x, w: (x @ w)[:, :1001].contiguous(), r(64, 96), r(96, 1008))
    (k,) = products(s)
    assert (s.kernels, s.calls) == (1, 0)
    assert k.matmul is not None
    assert (k.matmul.columns, k.matmul.right.strides) == (1001, (0, 1008, 1))
    others = run(lambda x, w: ((y := x @ w)[:, :1001] * 2, y.float().sum(1)), r(64, 96), r(96, 1008))
    assert all(k.matmul.columns == 1008 for k in products(others) if k.matmul is not None)
    later = run(lambda x, w: (x @ w)[:, 7:] * 2, r(64, 96), r(96, 1008))
    assert not products(later)


def test_a_kernel_that_waits_for_another_reader_of_the_product_stays_apart() -> None:
    def fn(x: T, w: T, v: T) -> T:
        y = x @ w
        return torch.sort(y).values + y

    s = run(fn, r(64, 96), r(96, 128), r(96, 128))
    assert not products(s)
    assert "the kernel needs another one that reads the product" in reasons(s)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], list[T]], str]] = {
    "reduction": (lambda x, w: (x @ w).softmax(-1), lambda: [r(64, 96), r(96, 128)], "is not pointwise"),
    "float32": (lambda x, w: (x @ w).relu(), lambda: [r(64, 96).float(), r(96, 128).float()], "must be exact"),
    "float64": (lambda x, w: (x @ w).relu(), lambda: [r(64, 96).double(), r(96, 128).double()], "no tensor core form"),
    "short": (lambda x, w: (x @ w).relu(), lambda: [r(8, 96), r(96, 128)], "a side is shorter than 16"),
    "strides": (
        lambda x, w: (x[:, ::2] @ w).relu(),
        lambda: [r(64, 192), r(96, 128)],
        "has neither contiguous rows nor contiguous columns",
    ),
    "other points": (lambda x, w: (x @ w)[:32] * 2, lambda: [r(64, 96), r(96, 128)], "other points"),
    "mirrored": (lambda x, w: (y := x @ w) + y.t(), lambda: [r(64, 96), r(96, 64)], "at other points"),
    "in place": (
        lambda x, w, y: y.add_(x @ w),
        lambda: [r(64, 96), r(96, 128), r(64, 128)],
        "is an input written in place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    fn, make, reason = REFUSED[name]
    s = run(fn, *make())
    assert not products(s)
    assert any(reason in text for text in reasons(s)), s.decisions


def test_symbolic_sizes_stay_with_the_library() -> None:
    s = run(lambda x, w: (x @ w).relu(), r(64, 96), r(96, 128), dynamic=True)
    assert not products(s)
    assert "its sizes are symbolic" in reasons(s)


# --- the model -------------------------------------------------------------------------------------------------------


# microseconds of linear with bias by the library on one H200, bfloat16, in a CUDA graph (`benchmarks.matmul_fit`)
MEASURED = {(12608, 3072, 768): 89.4, (8192, 3072, 768): 60.7, (8192, 768, 768): 18.1, (32768, 4096, 1024): 387.7}
# the same of gradients of weights, few results of long sums
DEEP = {
    (384, 96, 200704): 60.0,
    (768, 192, 50176): 36.1,
    (384, 1536, 12544): 32.9,
    (768, 768, 8192): 21.7,
    (768, 3072, 12608): 90.0,
    (1024, 1024, 4096): 17.2,
    (256, 2304, 65536): 112.9,
    (64, 64, 100000): 13.6,
}


@pytest.mark.parametrize("sizes", MEASURED | DEEP, ids=str)
def test_the_model_of_the_library_is_near_what_was_measured(sizes: tuple[int, int, int]) -> None:
    candidates: list[float] = []

    def keep(p: Any, deps: Deps, c: Candidate) -> Refusal:
        candidates.append(cost.library_us(c.matmul, H200.sms))
        return Refusal("looked at")

    rows, columns, depth = sizes
    inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((rows, depth), (columns, depth), (columns,))]
    run(lambda x, w, b: F.linear(x, w, b).relu(), *inputs, choose=keep)
    assert [us / (MEASURED | DEEP)[sizes] for us in candidates] == [
        pytest.approx(1, abs=0.15 if sizes in MEASURED else 0.3)
    ]


def test_few_results_of_long_sums_stay_with_the_library_which_splits_them() -> None:
    shapes = [(384, 96, 200704), (768, 192, 50176), (384, 1536, 12544)]
    for rows, columns, depth in shapes:
        x, g = (torch.empty(depth, n, dtype=torch.bfloat16) for n in (columns, rows))
        _, deps, c = candidates = candidate(lambda x, g: torch.mm(g.t(), x).float(), x, g)
        verdict = cost.Model(H200).choose(candidates[0], deps, c)
        assert isinstance(verdict, Refusal)
        assert verdict.reason.startswith("no clear gain: ")


def test_the_model_refuses_without_a_clear_gain_and_odd_layouts() -> None:
    verdicts = []

    def model(p: Any, deps: Deps, c: Candidate) -> Any:
        verdicts.append(cost.Model(H200).choose(p, deps, c))
        return verdicts[-1]

    def fn(x: T, w: T) -> T:
        return (x @ w).relu()

    run(fn, torch.empty(8192, 8192, dtype=torch.bfloat16), torch.empty(8192, 8192, dtype=torch.bfloat16), choose=model)
    run(fn, r(64, 97), r(97, 128), choose=model)
    low = [torch.empty(1024, 1024, dtype=torch.bfloat16) for _ in range(2)]
    run(fn, *low, choose=model)  # a third faster, and only a few microseconds
    run(fn, low[0].new_empty(12608, 768), low[0].new_empty(768, 3072), choose=model)
    assert [isinstance(v, Refusal) for v in verdicts] == [True, True, True, False]
    assert verdicts[0].reason.startswith("no clear gain: ")
    assert verdicts[1].reason == "arg0_1 cannot be read 16 bytes at a time"


def candidate(fn: Callable[..., Any], *inputs: T) -> tuple[Any, Deps, Candidate]:
    """The one candidate of a function."""
    candidates: list[tuple[Any, Deps, Candidate]] = []

    def keep(p: Any, deps: Deps, c: Candidate) -> Refusal:
        candidates.append((p, deps, c))
        return Refusal("looked at")

    run(fn, *inputs, choose=keep)
    (one,) = candidates
    return one


def test_tiles_fit_in_shared_memory_or_the_library_call_stays() -> None:
    p, deps, c = candidate(lambda x, w: (x @ w).relu(), r(1024, 768), r(768, 1024))
    choice = [
        cost.Model(replace(H200, shared_memory=n), always=True).choose(p, deps, c)
        for n in (227 << 10, 99 << 10, 48 << 10)
    ]
    sizes = [shared_bytes(c.matmul, t[0]) for t in choice if not isinstance(t, Refusal)]
    assert [n <= limit for n, limit in zip(sizes, (227 << 10, 99 << 10), strict=True)] == [True, True]
    assert isinstance(choice[-1], Refusal)
    assert choice[-1].reason == "no tiles fit in 49152 bytes of shared memory"


def _gelu_gradient(g: T, w: T, x: T) -> T:
    """Of 0.5 x (1 + tanh(...)) in the steps that autograd takes."""
    y, x = torch.mm(g, w).float(), x.float()
    t = torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0)))
    inner = (y * (0.5 * x)).bfloat16().float() * (1 - t * t) * 0.79788456
    return ((y * (t + 1)).bfloat16().float() * 0.5 + inner + inner * 0.044715 * 3 * x * x).bfloat16()


def test_tiles_whose_epilogue_needs_more_registers_than_a_thread_has_are_left_out() -> None:
    # registers, bytes of the stack by the compiler: 162 and 0 with tiles of 64x64, 255 and 2264 of 128x256
    low = [torch.empty(s, dtype=torch.bfloat16) for s in ((8192, 768), (768, 3072), (8192, 3072))]
    p, deps, c = candidate(_gelu_gradient, *low)
    choice = cost.Model(H200, always=True).choose(p, deps, c)
    assert not isinstance(choice, Refusal)
    assert (choice[0].rows, choice[0].columns) == (64, 64)
    p, deps, c = candidate(lambda g, w, x: torch.mm(g, w).relu(), *low)
    choice = cost.Model(H200, always=True).choose(p, deps, c)
    assert not isinstance(choice, Refusal)
    assert (choice[0].rows, choice[0].columns) == (128, 256)


def test_values_of_a_tile_that_are_alive_at_once() -> None:
    sizes = [(64, 96), (96, 128), (64, 128)]
    low = [torch.empty(s, dtype=torch.bfloat16) for s in sizes]
    counts = {}
    for name, fn in {
        "relu": lambda x, w, y: torch.relu(x @ w),
        "residual": lambda x, w, y: (x @ w) + y,
        "row": lambda x, w, y: (x @ w) * y[0],
    }.items():
        _, _, c = candidate(fn, *low)
        counts[name] = pressure.alive_at_once(c.fused.mapped, PRODUCT)
    # sums and what is made of them; the same and a loaded number as float32; a number of a column takes no tile
    assert counts == {"relu": 2.0, "residual": 3.0, "row": 2.0}


def test_what_descriptors_demand_of_the_operands() -> None:
    described = replace(TILES, descriptors=True)

    def fit(fn: Callable[..., Any], *inputs: T) -> bool:
        p, deps, c = candidate(fn, *inputs)
        return fits(p, deps.writers, c.matmul, described, 227 << 10)

    def overwritten(x: T, w: T) -> T:
        y = (x @ w).relu()
        x.mul_(2)
        return y

    assert fit(lambda x, w: (x @ w).relu(), r(64, 96), r(96, 128))
    assert fit(lambda x, w: (x @ w.t()).relu(), r(64, 96), r(128, 96))
    assert not fit(lambda x, w: (x @ w).relu(), r(64, 97), r(97, 128))
    assert not fit(lambda x, w: (x[:, 1:] @ w).relu(), r(64, 96), r(95, 128))
    assert not fit(lambda x, w: (x @ w).relu(), r(3, 64, 96), r(3, 96, 128))
    assert not fit(lambda x, w: (x.expand(64, 96) @ w).relu(), r(1, 96), r(96, 128))
    assert not fit(overwritten, r(64, 96), r(96, 128))
