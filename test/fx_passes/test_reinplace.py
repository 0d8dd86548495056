"""Updated inputs are written in place: the right values, and only the bytes that change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend import fx_passes
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import reinplace
from altbackend.fx_passes.context import Context
from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Extern, Program, loop_vars
from altbackend.lowering.graph import lower_graph
from test.compare import compiled, twin
from test.graphs import trace

pytestmark = pytest.mark.sample(2)

T = torch.Tensor


@torch.library.custom_op("alt_test::append", mutates_args=("cache",))
def append(cache: T, k: T) -> T:
    cache[:, :1] += k[:, :1]
    return k * 2


@append.register_fake
def _(cache: T, k: T) -> T:
    return torch.empty_like(k)


def rows_by_index(x: T, i: T, v: T) -> None:
    x.index_put_((i,), v)


def one_column(x: T, i: T, v: T) -> None:
    x[:, 3] = v[0, 0]


def part_of_part(x: T, i: T, v: T) -> T:
    x[2:5, 8:40] = v[:, 8:40]
    return x[2:5].sum()


def index_of_part(x: T, i: T, v: T) -> None:
    x[1:900][i] = v


def cache_then_read(x: T, i: T, v: T) -> T:
    x.index_copy_(0, i, v)
    return x[i] * 2


def two_updates(x: T, i: T, v: T) -> T:
    x[0] = v[0]
    y = x[0:1] + v
    x.index_add_(0, i, v)
    return y


def scattered(x: T, i: T, v: T) -> None:
    x.scatter_(0, i[:, None].expand(3, 64), v)
    x.scatter_add_(0, i[:, None].expand(3, 64), v)


def largest(x: T, i: T, v: T) -> None:
    x.scatter_reduce_(0, i[:, None].expand(3, 64), v, "amax")


def moved_within(x: T, i: T, v: T) -> None:
    x[1:4] = x[0:3] + x[2:5]


def own_rows(x: T, i: T, v: T) -> None:
    x.index_put_((i,), x[i + 1] * 2)


def returned(x: T, i: T, v: T) -> T:
    x.index_put_((i,), v)
    return x


def custom(x: T, i: T, v: T) -> T:
    return append(x[:3], v) + append(x, x * 2)[:3]


SMALL = (rows_by_index, one_column, part_of_part, index_of_part, cache_then_read, two_updates, scattered, largest)
UPDATES = (*SMALL, moved_within, own_rows, returned)


def example() -> list[T]:
    return [torch.randn(1000, 64), torch.tensor([5, 1, 7]), torch.randn(3, 64)]


def bytes_moved(p: Program) -> int:
    """Bytes that loops store and load, counting each load at every point."""
    total = 0
    for node in p.nodes:
        if isinstance(node, Extern):
            continue
        points = ex.prod(ex.size_of(v) for v in loop_vars(node))
        assert isinstance(points, int)
        total += points * (
            node.value.dtype.itemsize + sum(p.buffers[b].dtype.itemsize for b, _ in va.loads(node.value))
        )
    return total


def lowered(fn: Callable[..., Any], *inputs: T, gpu: bool, disabled: str = "") -> Program:
    cfg = resolve(options={"strict": True, "disabled_passes": disabled})
    (gm,) = trace(fn, *inputs)
    log = Trace("test", cfg)
    program, _ = lower_graph(fx_passes.finish(fx_passes.post_grad(gm, cfg, log), cfg, log), cfg, on_gpu=gpu)
    return program


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("fn", [*UPDATES, custom], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_equals_eager(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    x, i, v = example()
    inputs = [(x * 9).to(dtype), i, (v * 9).to(dtype)]
    other = twin(inputs)
    want, got = fn(*inputs), compiled(fn)(*other)
    torch.testing.assert_close(other, inputs)
    torch.testing.assert_close(got, want)
    if fn is returned:
        assert got.data_ptr() == other[0].data_ptr()


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("fn", SMALL, ids=lambda f: f.__name__)
def test_only_changed_bytes_move(fn: Callable[..., Any], gpu: bool) -> None:
    x, i, v = example()
    few = bytes_moved(lowered(fn, x, i, v, gpu=gpu))
    all_of_it = bytes_moved(lowered(fn, x, i, v, gpu=gpu, disabled="re-inplacing"))
    assert few <= 20 * v.nbytes + (len(x) * 8 if fn is one_column else 0)
    assert all_of_it >= 2 * x.nbytes


def test_the_pass_fires_once() -> None:
    (gm,) = trace(two_updates, *example())
    cfg = resolve()
    gm = fx_passes.post_grad(gm, cfg, Trace("test", cfg))
    context = Context(cfg, Trace("test", cfg))
    assert reinplace.run(gm, context) == 1
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index_add.default)
    gm.recompile()
    x, i, v = example()
    other = twin([v, x, i])  # in the order of their first uses
    want = two_updates(x, i, v)
    torch.testing.assert_close(gm(*other)[0], want)
    torch.testing.assert_close(other[1], x)
    assert reinplace.run(gm, context) == 0


def reads_old_rows(x: T, i: T, v: T) -> T:
    old = x + 0
    y = torch.index_put(x, (i,), v)
    z = x.sum()  # after the update, of the values before it
    x.copy_(y)
    return z + old[0, 0]


def keeps_update(x: T, i: T, v: T) -> T:
    y = torch.index_put(x, (i,), v)
    x.copy_(y)
    return y


def after_a_product(x: T, i: T, v: T) -> T:
    x.mul_(0.5)
    x.index_put_((i,), x[i] + v)
    return x[0]


def view_of_old_rows(x: T, i: T, v: T) -> T:
    y = torch.index_put(x, (i,), v)
    z = x[4:6].clone()
    x.copy_(y)
    return z * 2


@pytest.mark.parametrize(
    "fn", [reads_old_rows, keeps_update, after_a_product, view_of_old_rows], ids=lambda f: f.__name__
)
def test_old_values_stay_where_they_are_read(fn: Callable[..., Any]) -> None:
    inputs = example()
    other = twin(inputs)
    want, run = fn(*inputs), compiled(fn)
    got = run(*other)
    torch.testing.assert_close([got, *other], [want, *inputs])
    if fn is keeps_update:
        other[0].zero_()
        torch.testing.assert_close(got, want)


def test_expanded_and_overlapping_inputs() -> None:
    base = torch.randn(40)
    windows = base.as_strided((8, 4), (2, 1))
    inputs = [windows, torch.tensor([1, 5]), torch.randn(2, 4)]
    assert bytes_moved(lowered(rows_by_index, *inputs, gpu=False)) >= windows.nbytes


def test_gradients_of_an_update() -> None:
    def fn(x: T, w: T, i: T) -> T:
        x.index_put_((i,), w * 2)
        return (x * w.sum()).sum()

    results = []
    for run in (fn, compiled(fn)):
        torch.manual_seed(0)
        x, w = torch.randn(10, 4), torch.randn(2, 4, requires_grad=True)
        run(x, w, torch.tensor([1, 3])).backward()
        results.append((x, w.grad))
    torch.testing.assert_close(results[1], results[0])


def test_position_out_of_range_writes_nothing_else() -> None:
    x, _, v = example()
    before = x.clone()
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(rows_by_index)(x, torch.tensor([5, 1000, 7]), v)
    torch.testing.assert_close(x[0], before[0])
    changed = (x != before).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {5, 7}


def test_unknown_pass_name() -> None:
    with pytest.raises(Exception, match="re-implacing"):
        torch.compile(lambda x: x + 1, backend="alt", options={"disabled_passes": "re-implacing", "strict": True})(
            torch.ones(2)
        )


# --- random programs ---


def program(seed: int) -> Callable[[T, T, T, T], Any]:
    """A function that updates its first two arguments in five random ways and reads them in between."""
    choose = random.Random(seed)
    steps = [choose.randrange(12) for _ in range(5)]
    numbers = [choose.randrange(1, 5) for _ in steps]

    def step(kind: int, n: int, x: T, y: T, i: T, v: T) -> T | None:
        match kind:
            case 0:
                x[n] = v[0] * n
            case 1:
                x[:, n] = y[:, n] + 1
            case 2:
                x[1:4, n : n + 3] = v[:, :3]
            case 3:
                x.index_put_((i,), v + n)
            case 4:
                y.index_add_(0, i, x[i] * 2)
            case 5:
                y[n:][i] = x[i]
            case 6:
                x.mul_(0.5)
            case 7:
                x.copy_(x.flip(0))
            case 8:
                return x.sum(0) + y[n]
            case 9:
                return x[n : n + 2].clone()
            case 10:
                y.diagonal()[1:4] = v[:, 0]
            case _:
                y[1:5] = y[0:4].clone()
                x.t()[n] = y[:, 0]
        return None

    def fn(x: T, y: T, i: T, v: T) -> list[T]:
        results = [step(kind, n, x, y, i, v) for kind, n in zip(steps, numbers, strict=True)]
        return [r for r in results if r is not None] + [x * 1, y[0]]

    return fn


def check(seed: int) -> None:
    torch.manual_seed(seed)
    inputs = [torch.randn(8, 8), torch.randn(8, 8), torch.randperm(4)[:3], torch.randn(3, 8)]
    other, fn = twin(inputs), program(seed)
    want, got = fn(*inputs), compiled(fn, dynamic=seed % 4 == 0)(*other)
    torch.testing.assert_close([*got, *other], [*want, *inputs], msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("seed", range(12))
def test_random_updates(seed: int) -> None:
    check(seed)
