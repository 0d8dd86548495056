"""Mutation, aliasing, several dtypes, and memory that is kept between calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from test.compare import check, compiled

pytestmark = pytest.mark.sample(3)


def _assign(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:, 1:3] = y[:, :2] * 2
    return x + 1


def _both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(y)
    y.add_(x)
    return x - y


def _swap(x: torch.Tensor, y: torch.Tensor) -> None:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


def _view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    v = x.view(-1)
    v[::2].add_(1)
    return x.sum() + v[3]


def _shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:] = x[:-1].clone() + y[1:]
    return x


def _transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.t().mul_(torch.arange(6.0)[:, None])
    return x.t()


def _row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[0] = x.sum(0)
    return x.sum(0) + y[0]


def _after_read(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = x * 2
    x.zero_()
    return old + y, x + old


def _softmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.copy_(torch.softmax(x, -1))
    return y.index_put_((torch.tensor([1, 0]),), x[:2])


def _flip(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(x.flip(0))
    y.copy_(y.flip(1) + x)


def _twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    z = x * y
    x.sub_(z)
    return z + x


MUTATIONS: dict[str, Callable[..., object]] = {
    f.__name__[1:]: f
    for f in (_assign, _both, _swap, _view, _shifted, _transposed, _row, _after_read, _softmax, _flip, _twice)
}


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_mutated_inputs(name: str) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    check(MUTATIONS[name], x, y)


@pytest.mark.parametrize("name", ["both", "swap", "shifted", "row", "flip", "after_read"])
def test_mutated_views_of_larger_storage(name: str) -> None:
    base, other = torch.randn(6, 12), torch.randn(6, 4)
    check(MUTATIONS[name], base[1:5, ::2], other.t()[:, :6].contiguous()[:4])
    check(MUTATIONS[name], torch.randn(6, 4).t(), torch.randn(4, 6))


def test_inputs_that_overlap_each_other() -> None:
    base = torch.randn(40)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + a.sum()

    check(fn, base[:24], base[8:32])


def test_mutation_by_several_threads() -> None:
    x, y = torch.randn(300, 300), torch.randn(300, 300)
    for name in ("both", "flip", "row", "twice"):
        f = MUTATIONS[name] if name != "twice" else _twice
        check(f, x, y, threads=3, parallel_threshold=0)


def _aliases(got: object, inputs: list[torch.Tensor]) -> list[tuple[str, int]]:
    """For each pair of results, and each result and input, whether they share memory."""
    outs = [o for o in got if isinstance(o, torch.Tensor)]  # type: ignore[attr-defined]
    storages = [o.untyped_storage().data_ptr() for o in outs]
    pairs = [("results", i * 100 + j) for i in range(len(outs)) for j in range(i) if storages[i] == storages[j]]
    given = [x.untyped_storage().data_ptr() for x in inputs]
    return pairs + [("input", i * 100 + j) for i, s in enumerate(storages) for j, g in enumerate(given) if s == g]


def test_results_alias_as_in_eager() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x * 2
        return [x, x.t(), x[1:], y.view(-1), z, z.t(), z[0], z + 0, y.expand(3, 4, 6), x.detach(), z.clone()]

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    check(fn, x, y)
    assert _aliases(compiled(fn)(x, y), [x, y]) == _aliases(fn(x, y), [x, y])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_one_of_several_results_alias_it(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        most, place = x.max(0)
        var, mean = torch.var_mean(x, 0)
        low, high = torch.aminmax(x, dim=1)
        a, b = (x * 2).split(3, 1)
        return [most, most[1:], place, place.view(2, 3), var, mean, mean[::2], low[2:], low[:2], high, a, a.t(), b]

    x = torch.randn(4, 6).to(dtype)
    check(fn, x)
    got, want = compiled(fn)(x), fn(x)
    assert _aliases(got, [x]) == _aliases(want, [x])


def check_aliases(fn: Callable[..., list[torch.Tensor]], *inputs: torch.Tensor, **options: Any) -> None:
    with torch.no_grad():
        got, want = compiled(fn, **options)(*inputs), fn(*inputs)
    assert _aliases(got, list(inputs)) == _aliases(want, list(inputs))
    for g, w in zip(got, want, strict=True):
        assert (g.stride(), g.storage_offset()) == (w.stride(), w.storage_offset())
        torch.testing.assert_close(g, w)


def test_what_computes_an_input_again_is_no_part_of_it() -> None:
    """A sum over one element and a choice between equals are loads of the input, but have storage of their own."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        total, chosen = x.sum(1, keepdim=True), torch.where(x > 0, x, x)
        return [total, total.diagonal(), chosen, chosen.permute(1, 0), x * 2, (x * 2).view(-1)]

    check_aliases(fn, torch.randn(6, 1))


def test_a_view_that_no_index_describes() -> None:
    """[s, m, n] as [2, s // 2 * m * n] needs divisions, where the strides are plain numbers."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        return [y.reshape(2, -1), y[-1], y.view(-1)[3:]]

    run = compiled(fn, dynamic=True)
    for sizes in ((6, 6, 2), (4, 3, 5)):
        x = torch.randn(sizes)
        got, want = run(x), fn(x)
        assert _aliases(got, [x]) == _aliases(want, [x])
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_views_of_a_convolution_that_runs_channels_last() -> None:
    conv, more = torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 8, 3)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = conv(x)
        z = more(y).relu()
        return [y, y[:, 1:], y[0], z[1:], z.transpose(1, 2), y + 1]

    check_aliases(fn, torch.randn(2, 8, 10, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_differentiable_view_at_a_symbolic_place(dtype: torch.dtype) -> None:
    """AOTAutograd cuts it from the result that it is a view of, at the place at which ours begins."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        most = x.max(0).values
        return most, most[:, most.shape[1] - 2 :: 2]

    torch._dynamo.reset()
    run = torch.compile(fn, backend="alt", dynamic=True, options={"strict": True})
    for sizes in ((4, 6, 3), (3, 5, 7)):
        x, y = (torch.randn(sizes, generator=torch.Generator().manual_seed(3)).to(dtype) for _ in range(2))
        got, want = run(x.requires_grad_()), fn(y.requires_grad_())
        assert [g.storage_offset() for g in got] == [w.storage_offset() for w in want]
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert torch.equal(*(torch.autograd.grad(r[1].sum(), z)[0] for r, z in ((got, x), (want, y))))


@pytest.mark.parametrize("as_traced", [True, False])
def test_a_view_of_an_input_that_no_index_describes(as_traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd makes results that are views of an input again by the strides and the place of what it is given.

    Either way to know them must do by itself: views as they were traced, and what a result then is.
    """

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        rows = x.reshape(-1, 1, 2)
        at = 51 % rows.shape[0]
        return [rows, rows.flip(0), rows[at : at + 3], x.sum() + rows[at, 0, 1]]

    if not as_traced:
        monkeypatch.setattr("altbackend.lowering.operators.view._as_traced", lambda *args: None)
    run = compiled(fn, dynamic=True)
    for a, b, begin in ((4, 3, 0), (4, 5, 0), (4, 3, 7), (6, 5, 3)):
        x = torch.arange(200)[begin : begin + a * 2 * b].reshape(a, 1, 2 * b)[..., ::2]
        got, want = run(x), fn(x)
        assert _aliases(got, [x]) == _aliases(want, [x])
        assert [g.data_ptr() == w.data_ptr() for g, w in zip(got, want, strict=True)] == [True, False, True, False]
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_same_result_twice() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        z = x.exp()
        return [z, z, z.sum(0), z.view(-1)]

    check(fn, torch.randn(3, 5))


def test_results_of_one_call_survive_the_next() -> None:
    run = compiled(lambda x: [(x * 2).softmax(-1), x.sum(0), (x @ x.t()).relu()])
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    first = run(x)
    kept = [t.clone() for t in first]
    run(y)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_nothing_is_returned_but_constants_and_none() -> None:
    x = torch.randn(3)
    check(lambda x: [None, 3, x * 2, 2.5, True, x.shape[0]], x)


def test_several_dtypes_in_one_graph() -> None:
    xs = [torch.arange(12).reshape(3, 4).to(d) for d in (torch.float32, torch.bfloat16, torch.int8, torch.bool)]
    xs.append(torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4))

    def fn(a: torch.Tensor, b: torch.Tensor, i: torch.Tensor, m: torch.Tensor, d: torch.Tensor) -> list[torch.Tensor]:
        mixed = [a + b, a * i, b * i, d + b, torch.where(m, a, d), (a > i) & m, i // 3 + m, b.float() + d]
        return [*mixed, (b * m).sum(0), (i + a).sum(1).to(torch.int32), (d * i).mean(), m.sum(), b.softmax(-1)]

    check(fn, *xs)


def test_constants_outlive_the_graph_that_held_them() -> None:
    """Kernels hold a pointer to a constant; something must hold the constant."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([3, 1])] + torch.tensor([0.5, 1.5, 2.5])

    run, x = compiled(fn), torch.randn(4, 3)
    run(x)
    gc.collect()
    filler = [torch.full((2,), 99) for _ in range(1000)]  # takes the place of whatever was freed
    assert torch.equal(run(x), fn(x))
    assert len(filler) == 1000


def test_empty_tensors() -> None:
    x = torch.randn(0, 5)
    check(lambda x: [x + 1, x.t() * 2, x.sum(0), x.sum(), torch.cat([x, x]), x.reshape(5, 0), x @ torch.ones(5, 2)], x)


def test_calls_from_several_threads() -> None:
    """Concurrent calls of one graph do not share a workspace."""
    run = compiled(lambda x: (torch.softmax(x, 0) @ x.t()).cumsum(1).sin().sum(0))
    inputs = [torch.randn(64, 64) for _ in range(4)]
    want = [run(x) for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        wrong.extend(k for _ in range(50) if not torch.equal(run(inputs[k]), want[k]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize(
    "options", [{"reuse_memory": False}, {"persistent_workspace": False}, {"fuse": False}], ids=str
)
def test_options_do_not_change_results(options: dict[str, Any]) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.softmax((x @ x.t()) * 0.3, -1)
        z = torch.nn.functional.layer_norm(y @ x, (8,))
        return [z.tanh(), y.sum(0), z.cumsum(0)]

    check(fn, torch.randn(6, 8), **options)


def test_in_place_storage_waits_for_later_reads() -> None:
    # `kept` is stored first, and its loop body then still reads `a`, which dies there
    def fn(p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = p @ q
        kept = r.sin()
        return kept @ q, (a.cos() * kept) @ q

    check(fn, *(torch.randn(32, 32) for _ in range(3)))
