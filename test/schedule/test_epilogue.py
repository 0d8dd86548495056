"""Which products join the kernels that read them, and the reasons of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir.loops import Extern
from altbackend.schedule import matmul_cost, target
from altbackend.schedule.deps import Deps
from altbackend.schedule.epilogue import Candidate
from altbackend.schedule.kernel import Kernel, show_kernel
from altbackend.schedule.matmul import Tiles, fits, shared_bytes
from altbackend.schedule.place import No
from test.graphs import Scheduled, schedule, trace

T = torch.Tensor
GPU = target.cuda()
TILES = Tiles(64, 64, 32, 4, 3)


def r(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> T:
    return torch.randn(sizes).to(dtype)


def always(p: Any, deps: Deps, c: Candidate) -> tuple[Tiles, str]:
    return TILES, "a test"


def run(fn: Callable[..., Any], *inputs: T, choose: Any = always, graph: int = 0, dynamic: bool = False) -> Scheduled:
    return schedule(trace(fn, *inputs, dynamic=dynamic)[graph], None, GPU, choose)


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
    assert (k.matmul.rows, k.matmul.columns, k.matmul.depth) == (512, 3072, 768)  # type: ignore[union-attr]
    assert k.stored == frozenset(q.node.out for q in k.stages[0].members[1:])  # the product itself is not
    assert "product 1x512x3072x768" in show_kernel(k)
    (taken,) = [d for d in s.decisions if d[0] == "template" and d[2] != "library call"]
    assert taken[2:] == (f"one kernel of {TILES}", "a test")


def test_without_a_chooser_nothing_changes() -> None:
    inputs = (r(4, 128, 768), r(3072, 768), r(3072), r(768, 3072), r(768))
    s = run(mlp, *inputs, choose=None)
    assert (s.kernels, s.calls) == (1, 2)
    refused = run(mlp, *inputs, choose=lambda p, d, c: No("not today"))
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


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_the_model_of_the_library_is_near_what_was_measured(sizes: tuple[int, int, int]) -> None:
    found: list[float] = []

    def keep(p: Any, deps: Deps, c: Candidate) -> No:
        found.append(matmul_cost.product_us(c.matmul, matmul_cost.LIBRARY))
        return No("looked at")

    rows, columns, depth = sizes
    inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((rows, depth), (columns, depth), (columns,))]
    run(lambda x, w, b: F.linear(x, w, b).relu(), *inputs, choose=keep)
    assert [us / MEASURED[sizes] for us in found] == [pytest.approx(1, abs=0.15)]


def test_the_model_refuses_without_a_clear_gain_and_odd_layouts() -> None:
    verdicts = []

    def model(p: Any, deps: Deps, c: Candidate) -> Any:
        verdicts.append(matmul_cost.Model(227 << 10).choose(p, deps, c))
        return verdicts[-1]

    def fn(x: T, w: T) -> T:
        return (x @ w).relu()

    run(fn, torch.empty(8192, 8192, dtype=torch.bfloat16), torch.empty(8192, 8192, dtype=torch.bfloat16), choose=model)
    run(fn, r(64, 97), r(97, 128), choose=model)
    low = [torch.empty(1024, 1024, dtype=torch.bfloat16) for _ in range(2)]
    run(fn, *low, choose=model)  # a third faster, and only a few microseconds
    run(fn, low[0].new_empty(12608, 768), low[0].new_empty(768, 3072), choose=model)
    assert [isinstance(v, No) for v in verdicts] == [True, True, True, False]
    assert verdicts[0].reason.startswith("no clear gain: ")
    assert verdicts[1].reason == "arg0_1 cannot be read 16 bytes at a time"


def candidate(fn: Callable[..., Any], *inputs: T) -> tuple[Any, Deps, Candidate]:
    """The one candidate of a function."""
    found: list[tuple[Any, Deps, Candidate]] = []

    def keep(p: Any, deps: Deps, c: Candidate) -> No:
        found.append((p, deps, c))
        return No("looked at")

    run(fn, *inputs, choose=keep)
    (one,) = found
    return one


def test_tiles_fit_in_shared_memory_or_the_library_call_stays() -> None:
    p, deps, c = candidate(lambda x, w: (x @ w).relu(), r(1024, 768), r(768, 1024))
    chosen = [matmul_cost.Model(shared, always=True).choose(p, deps, c) for shared in (227 << 10, 99 << 10, 48 << 10)]
    sizes = [shared_bytes(c.matmul, t[0]) for t in chosen if not isinstance(t, No)]
    assert [n <= limit for n, limit in zip(sizes, (227 << 10, 99 << 10), strict=True)] == [True, True]
    assert isinstance(chosen[-1], No)
    assert chosen[-1].reason == "no tiles fit in 49152 bytes of shared memory"


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
