"""Checks are made where eager makes them, before anything that counts on them runs; memory outside is never touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test import fresh, triton_run
from test.compare import as_list, compiled, difference, twin
from test.torch_versions import since

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
HUGE = 1 << 40  # a size or a position that is far outside of every mapping


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    both = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch({**both, "recompile_limit": 64}):
        yield


def outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return as_list(fn(*args))
    except Exception as cause:
        return cause


def check_calls(fn: Callable[..., Any], calls: list[tuple[Any, ...]], run: Callable[..., Any] | None = None) -> None:
    """The same results as eager's, or an exception of the same type; inputs hold the same afterwards where none is."""
    run = run or compiled(fn)
    for args in calls:
        mine, theirs = twin(args), twin(args)
        got, want = outcome(run, tuple(mine)), outcome(fn, tuple(theirs))
        if isinstance(want, Exception) or isinstance(got, Exception):
            assert type(got) is type(want), f"{got!r} instead of {want!r} for {args}"
            continue
        pairs = zip((*got, *mine), (*want, *theirs), strict=True)
        assert not [text for g, w in pairs if (text := difference(g, w))], f"{got} instead of {want} for {args}"


def part(x: T, n: Any) -> T:
    k = n.sum().item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k] * 2


def one_number(x: T, n: Any) -> T:
    k = n.sum().item()
    torch._check(k == 3)
    return x.new_ones(k) + x[:k]


def message(x: T, n: Any) -> T:
    k = n.sum().item()
    torch._check(k < 7, lambda: "k is less than 7")
    return x * k


def allocated(x: T, n: Any) -> T:
    return x.new_zeros(n.sum().item()) + 1


def ranged(x: T, n: Any) -> T:
    k = n.sum().item()
    torch._constrain_as_size(k, 2, 5)
    return x.new_zeros(k) + x[0]


def in_range(x: T, n: Any) -> T:
    k = n.sum().item()
    torch.sym_constrain_range(k, min=2, max=5)
    return x * k


def pieces(x: T, n: Any) -> tuple[T, ...]:
    k = n.sum().item()
    torch._check(k >= 0)
    return torch.split(x * 2, [k, 10 - k])


def two_pieces(x: T, n: Any) -> list[T]:
    return [p + 1 for p in torch.split(x, n.tolist())]


def asserted(x: T, n: Any) -> T:
    k = n.sum().item()
    torch.ops.aten._assert_scalar(k > 3, "more than three")
    return x * 2


def of_floats(x: T, n: Any) -> T:
    f = (n.sum() / 2).item()
    torch._check(f < 3.5)
    return x * f


def asserted_of_tensors(x: T, n: Any) -> T:
    torch.ops.aten._assert_async.msg((n > 0).all(), "all positive")
    return x * 2


def reshaped(x: T, n: Any) -> T:
    return x.view(n.sum().item(), 2) * 2


def folded(x: T, n: Any) -> T:
    k = n.sum().item()
    torch._check(k >= 0)
    return x.new_zeros(k * 2).reshape(2, k) + 1


def selected(x: T, n: Any) -> tuple[T, T]:
    k = n.sum().item()
    return x[k] * 2, torch.select(x, 0, k)


def as_many(x: T, n: Any) -> T:
    kept = x[x > n.sum()]
    torch._check(kept.shape[0] == 4)
    return kept + x[:4]


def as_many_as_rows(x: T, n: Any) -> T:
    i = torch.nonzero(x > n.sum())
    torch._check(i.shape[0] == x.shape[0])
    return i[:, 0] + x


def even(x: T, n: Any) -> T:
    kept = x[x > n.sum()]
    torch._check(kept.shape[0] % 2 == 0)
    return kept.view(-1, 2).sum(1)


def classes(x: T, n: Any) -> T:
    return F.one_hot(n, 4) * 2


def repeated(x: T, n: Any) -> T:
    return torch.repeat_interleave(x[: n.shape[0]], n) * 2


ONE_HOT = since(2, 13, "one_hot is traced without its check")
NUMBERS = (3, 0, 4, 11, -2, HUGE, 1, 3)
CHECKS = [
    part,
    one_number,
    message,
    allocated,
    ranged,
    in_range,
    pieces,
    asserted,
    of_floats,
    asserted_of_tensors,
    reshaped,
    folded,
    selected,
    as_many,
    as_many_as_rows,
    even,
    classes,
    repeated,
]


def named(checks: list[Callable[..., Any]]) -> list[Any]:
    return [pytest.param(f, marks=ONE_HOT if f is classes else (), id=f.__name__) for f in checks]


TOO_LARGE = {allocated, folded, repeated}  # eager itself cannot hold so much


def calls_of(fn: Callable[..., Any]) -> list[tuple[T, T]]:
    wanted = [n for n in NUMBERS if n != HUGE or fn not in TOO_LARGE]
    return [(torch.arange(1.0, 11.0), torch.tensor([n])) for n in wanted]


@pytest.mark.parametrize("fn", named(CHECKS))
def test_checks(fn: Callable[..., Any]) -> None:
    """At first and after a reset, when the graph comes from the cache."""
    if fn is selected:  # torch's own check of a position raises RuntimeError where eager's operator raises IndexError
        check_calls(fn, [(x, n) for x, n in calls_of(fn) if -10 <= int(n) < 10])
        with pytest.raises((IndexError, RuntimeError)):
            compiled(fn)(torch.arange(10.0), torch.tensor([HUGE]))
        return
    for _ in range(2):
        torch._dynamo.reset()
        check_calls(fn, calls_of(fn))


def test_sizes_that_a_list_of_numbers_gives() -> None:
    sizes = [[3, 7], [10, 0], [4, 5], [11, -1], [HUGE, 10 - HUGE], [5, 5]]
    check_calls(two_pieces, [(torch.arange(10.0), torch.tensor(s)) for s in sizes])


# Numbers of the user's program in an equality: Dynamo makes symbols of them and drops their inputs.
EQUALITIES: dict[str, Callable[[int, int], int]] = {
    "remainder": lambda n, m: n % 4,
    "sum": lambda n, m: n + 2,
    "difference": lambda n, m: 17 - n,
    "multiple": lambda n, m: n * 3,
    "multiple and more": lambda n, m: 7 - 2 * n,
    "two numbers": lambda n, m: n + 2 * m,
}


@pytest.mark.parametrize("name", list(EQUALITIES))
def test_numbers_equal_to_expressions_without_an_input(name: str) -> None:
    expression = EQUALITIES[name]

    def fn(x: T, p: tuple[int], q: tuple[int]) -> tuple[T, ...]:
        k = x.max().item()
        torch._check(k == expression(p[0], q[0]))
        return torch.arange(abs(k) + 1) * k, x + 2 * k, x * (k // 2), torch.tensor(5 * k - 1)

    run = compiled(fn, dynamic=True)
    for n in (3, 2, 6):
        x = torch.tensor([-30, expression(n, 2)])
        check_calls(fn, [(x, (n,), (2,))], run)


def test_a_number_that_is_no_multiple_fails_its_check() -> None:
    def fn(x: T, p: tuple[int]) -> T:
        k = x.max().item()
        torch._check(k == 3 * p[0])
        return x + k

    check_calls(fn, [(torch.tensor([0, 9]), (3,)), (torch.tensor([0, 4]), (3,))], compiled(fn, dynamic=True))


def test_a_multiple_and_more_is_checked() -> None:
    def fn(x: T, p: tuple[int]) -> T:
        k = int(x.max().item())
        torch._check(k == 2 * p[0] + 1)
        return torch.zeros(k)

    check_calls(fn, [(torch.tensor([0, 91]), (45,)), (torch.tensor([0, 90]), (45,))], compiled(fn, dynamic=True))


def test_a_number_without_an_input_is_what_tracing_decided() -> None:
    """The sum with one element is one kernel of one element, since tracing has found that n % 4 is 1."""

    def fn(x: T, p: tuple[int]) -> tuple[T, T]:
        k = x[0].item()
        rows = torch.zeros(min(int(k), 1000)) + 1
        torch._check(k == p[0] % 4)
        return rows, x * k

    run = compiled(fn, dynamic=True)
    check_calls(fn, [(torch.tensor([k, 2]), (45,)) for k in (1, 3, 0, 2)], run)


def equal_items(x: T, n: Any) -> T:
    a, b = n.sum().item(), n.max().item()
    torch._check(a >= 2)
    torch._check(a == b)
    return x[: a - 1] * b


@pytest.mark.parametrize("dynamic", [False, True])
def test_checks_of_a_number_that_equals_a_later_one(dynamic: bool) -> None:
    run = compiled(equal_items, dynamic=dynamic)
    for n in ([2, 0], [3, 0], [1, 0], [3, 1], [-1, 0]):
        check_calls(equal_items, [(torch.arange(9.0), torch.tensor(n))], run)


def begun(x: T, n: Any) -> T:
    k = n.sum().item()
    return x.narrow(0, k, 1) * 3


def test_views_that_begin_where_data_decides() -> None:
    run = compiled(begun, dynamic=True)
    for k in (0, 2, -1):
        check_calls(begun, [(torch.arange(12.0).view(4, 3), torch.tensor([k, 0]))], run)


def test_more_indices_than_dimensions() -> None:
    def write(x: T, at: T) -> T:
        return x.sum().index_put((at,), torch.tensor(2.0)) + 1

    check_calls(write, [(torch.arange(3.0), torch.tensor([0]))])


@pytest.mark.parametrize("fn", named([part, one_number, asserted, classes, as_many]))
def test_checks_by_the_host_program_of_a_gpu(fn: Callable[..., Any]) -> None:
    check_calls(fn, calls_of(fn), triton_run.compiled(fn, host=True))


@pytest.mark.parametrize("fn", [part, message, asserted_of_tensors, of_floats], ids=lambda f: f.__name__)
def test_checks_in_training(fn: Callable[..., Any]) -> None:
    def gradient(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: T, n: Any) -> Any:
            x = x.clone().requires_grad_()
            call(x, n).square().sum().backward()
            return x.grad

        return run

    check_calls(gradient(fn), calls_of(fn), gradient(compiled(fn)))


def test_nothing_is_written_before_a_check() -> None:
    def by_number(x: T, n: Any) -> T:
        x.mul_(2)
        k = n.sum().item()
        torch._check(k > 0)
        return x.add_(k)

    def by_tensor(x: T, n: Any) -> T:
        torch.ops.aten._assert_async.msg((n > 0).all(), "all positive")
        return x.add_(1)

    def by_index(x: T, n: Any) -> T:
        y = x[n] + 1
        x.add_(y.sum())
        return y

    for fn in (by_number, by_tensor, by_index):
        run, x = compiled(fn), torch.arange(5.0)
        run(x.clone(), torch.tensor([1]))
        before = x.clone()
        with pytest.raises((RuntimeError, IndexError)):
            run(x, torch.tensor([-7]))
        assert torch.equal(x, before)  # as if the program had not begun


def test_results_of_custom_operators_are_measured() -> None:
    """A fake kernel that promises another size than the operator's."""
    with torch.library._scoped_library("altbackend_test", "FRAGMENT") as library:
        library.define("first(Tensor x, int n) -> Tensor")
        library.impl("first", lambda x, n: x[: min(n, 3)].clone(), "CompositeExplicitAutograd")
        library.impl("first", lambda x, n: x.new_empty(n), "Meta")
        run = compiled(lambda x: torch.ops.altbackend_test.first(x, 5) * 2 + 1)
        with pytest.raises(
            AssertionError, match=r"returned torch.float32 \(3,\) .* fake kernel returned torch.float32 \(5,\)"
        ):
            run(torch.arange(10.0))


def test_checks_of_custom_operators() -> None:
    def kernel(x: T) -> T:
        torch._check(bool((x > 0).all()), lambda: "all are positive")
        return x.clone()

    with torch.library._scoped_library("altbackend_test", "FRAGMENT") as library:
        library.define("positive(Tensor x) -> Tensor")
        library.impl("positive", kernel, "CPU")
        library.impl("positive", torch.empty_like, "Meta")
        op = torch.ops.altbackend_test.positive

        def read(x: T) -> T:
            return op(x + 1) * 2

        def written(x: T) -> T:
            y = op(x + 1)
            x.mul_(3)
            return y

        for fn in (read, written):
            run = compiled(fn)
            for value in (1.0, -1.0, 2.0):
                check_calls(fn, [(torch.full((3,), value),)], run)
        x = torch.full((3,), -1.0)
        with pytest.raises(RuntimeError, match="all are positive"):
            compiled(written)(x)
        assert (x == -1).all()


WARM = """
import json, sys
import torch
from altbackend import alt
from test.differential import test_checks
torch._dynamo.config.capture_scalar_outputs = True
torch._dynamo.config.capture_dynamic_output_shape_ops = True
found = {}
for fn in test_checks.CHECKS[::8]:
    options = {"cache_dir": sys.argv[1], "strict": True}
    run = torch.compile(fn, backend=alt, dynamic=False, fullgraph=True, options=options)
    found[fn.__name__] = [repr(type(r)) if isinstance(r, Exception) else [t.tolist() for t in r]
                          for r in (test_checks.outcome(run, a) for a in test_checks.calls_of(fn)[:5])]
print(json.dumps(found))
"""


@pytest.mark.timeout(110)
def test_checks_in_another_process(tmp_path: Path) -> None:
    """From the cache, which keeps the checks with the code."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WARM, str(tmp_path)]  # which hashes in another order
    outcomes = (
        fresh.run(command[1:], env=env),
        subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=False),
    )
    assert [done.returncode for done in outcomes] == [0, 0], outcomes
    cold, warm = (json.loads(done.stdout.splitlines()[-1]) for done in outcomes)
    assert warm == cold
    assert any("RuntimeError" in r for results in cold.values() for r in results)


# Positions that the user's program computes, of both signs
def put(a: T, n: int) -> T:
    a[n] = -1
    return a * 2


def put_row(a: T, n: int) -> T:
    a[:, n] = a[:, n] + 1
    return a


@pytest.mark.parametrize("dynamic", [None, True], ids=["found out", "dynamic"])
@pytest.mark.parametrize("fn", [put, put_row, lambda a, n: a.select(0, n) + 1, lambda a, n: a[..., n].sin()])
def test_numbers_of_both_signs_as_positions(fn: Callable[..., Any], dynamic: bool | None) -> None:
    run = compiled(fn, dynamic=dynamic)
    for n in (2, 3, 5, -7, -1, 0, 1, -2, 6, -3):
        a = torch.arange(49.0).view(7, 7)
        check_calls(fn, [(a, n)], run)


@pytest.mark.parametrize("n", [2, -3, 9, -12, 0])
def test_slices_of_both_signs(n: int) -> None:
    def fn(a: T, n: int) -> tuple[T, ...]:
        return a[n:] + 1, a[:n] * 2, a.narrow(0, min(abs(n), 5), 2)

    check_calls(fn, [(torch.arange(7.0), n), (torch.arange(9.0), n)], compiled(fn, dynamic=True))


ONE, ROW = torch.ones(2), torch.ones(2, 4)
INDEXING: dict[str, Callable[[T, T, T], Any]] = {
    "index": lambda x, y, i: x[i],
    "index of two": lambda x, y, i: y[i, i % 4],
    "index_put": lambda x, y, i: x.index_put((i,), ONE),
    "index_put added": lambda x, y, i: x.index_put((i,), ONE, accumulate=True),
    "gather": lambda x, y, i: x.gather(0, i),
    "scatter": lambda x, y, i: x.scatter(0, i, ONE),
    "scatter of a number": lambda x, y, i: x.scatter(0, i, 2.0),
    "scatter_add": lambda x, y, i: x.scatter_add(0, i, ONE),
    "scatter_reduce": lambda x, y, i: x.scatter_reduce(0, i, ONE, "amax"),
    "index_select": lambda x, y, i: y.index_select(0, i),
    "index_add": lambda x, y, i: x.index_add(0, i, ONE),
    "index_add of rows": lambda x, y, i: y.index_add(0, i, ROW),
    "index_copy": lambda x, y, i: y.index_copy(0, i, ROW),
    "index_fill": lambda x, y, i: x.index_fill(0, i, 2.0),
    "index_reduce": lambda x, y, i: x.index_reduce(0, i, ONE, "prod"),
    "embedding": lambda x, y, i: F.embedding(i, y),
    "take": lambda x, y, i: x.take(i),
    "put": lambda x, y, i: x.put(i, ONE),
    "take_along_dim": lambda x, y, i: torch.take_along_dim(x, i, 0),
    "one_hot": lambda x, y, i: F.one_hot(i, 4),
    "nll_loss": lambda x, y, i: F.nll_loss(y[:2], i),
    "cross_entropy": lambda x, y, i: F.cross_entropy(y[:2], i),
    "max_unpool": lambda x, y, i: F.max_unpool1d(x[None, :2], i[None], (2,)),
    "take of one": lambda x, y, i: (x[:1].take(i), y[:1, :1].take(i % 3 - 1)),
    "of one row": lambda x, y, i: (x[:1][i], y[:1].gather(0, i[None, :1]), F.embedding(i, y[:1])),
    "of an expanded row": lambda x, y, i: (y[:1].expand(5, 4)[i], torch.zeros(5)[i]),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", [pytest.param(n, marks=ONE_HOT) if n == "one_hot" else n for n in INDEXING])
def test_positions_out_of_range(name: str) -> None:
    def fn(x: T, y: T, i: T) -> Any:
        return INDEXING[name](x, y, i)

    x, y = torch.arange(10.0), torch.arange(40.0).view(10, 4)
    run = compiled(fn)
    for i in ([1, 2], [1, 12], [1, -1], [-10, 0], [-11, 0], [0, HUGE], [3, 1]):
        check_calls(fn, [(x, y, torch.tensor(i))], run)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", [n for n in INDEXING if n not in ("one_hot", "max_unpool")])
def test_a_number_out_of_range_as_position(name: str) -> None:
    """The indexed tensor is in memory, or every element of it is the same."""

    def fn(x: T, y: T, n: int) -> Any:
        i = torch.tensor([n, 1])
        filled = INDEXING[name](torch.zeros(10), torch.ones(10, 4), i)
        return [*as_list(INDEXING[name](x, y, i)), *as_list(filled)]

    x, y = torch.arange(10.0), torch.arange(40.0).view(10, 4)
    run = compiled(fn, dynamic=True)
    for n in (2, 3, 12, -1, -11):
        check_calls(fn, [(x, y, n)], run)


SELECTS: dict[str, Callable[[T, int], T]] = {
    "filled": lambda x, n: torch.full((min(x.shape[0], 99),), 2.0)[n] - 1,
    "expanded": lambda x, n: x[:1].expand(10)[n] * 2,
    "a column": lambda x, n: x[:1, None].expand(3, 10)[:, n] * 2,
    "scattered": lambda x, n: torch.select_scatter(torch.zeros(10), torch.zeros(()), 0, n) + x,
    "an index": lambda x, n: torch.zeros(10)[torch.tensor([n])] + x[0],
    "an embedding": lambda x, n: F.embedding(torch.tensor([n]), torch.ones(10, 2)) + x[0],
}


@pytest.mark.parametrize("name", list(SELECTS))
def test_a_number_out_of_range_in_a_tensor_of_equal_elements(name: str) -> None:
    run = compiled(SELECTS[name], dynamic=True)
    for n in (2, 3, 9, 10, -1, -10, -11):
        check_calls(SELECTS[name], [(torch.arange(10.0), n)], run)


def test_an_error_names_position_and_size() -> None:
    x = torch.arange(10.0)
    with pytest.raises(IndexError, match=r"index 12 is out of bounds .* size 10 .*test_checks.py"):
        compiled(lambda x, i: x[i])(x, torch.tensor([1, 12]))
    with pytest.raises(RuntimeError, match=r"index -3 is out of bounds .* size 10"):
        compiled(lambda x, i: x.gather(0, i))(x, torch.tensor([1, -3]))


def test_positions_in_a_dimension_without_elements() -> None:
    def fn(x: T, i: T) -> tuple[T, ...]:
        return x[i], x.index_select(0, i), x.gather(0, i[:, None].expand(-1, 3))

    run = compiled(fn, dynamic=None)
    for rows in (4, 5, 0, 1):
        for i in ([0, 0], [3, 1], []):
            x = torch.rand(rows, 3)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            check_calls(fn, [(x, torch.tensor(i, dtype=torch.int64))], run)

    def kept(x: T, i: T) -> T:
        return (x[x[:, 0] > 0] * 2)[i]

    check_calls(kept, [(torch.tensor([[1.0], [s * 1.0]]), torch.tensor([0, 1])) for s in (1, -1)])
    with pytest.raises(IndexError):
        compiled(kept)(torch.tensor([[-1.0], [-1.0]]), torch.tensor([0, 1]))


DIVISIONS: dict[str, Callable[[T, T], Any]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "number //": lambda a, b: 7 // b,
    "number %": lambda a, b: 7 % b,
    "// 0": lambda a, b: a // 0 + b,
    "% 0": lambda a, b: a % 0 + b,
    "padded": lambda a, b: F.pad(a // b, (1, 1)) + 1,
    "chosen": lambda a, b: torch.where(b != 0, a // b, a),
    "summed": lambda a, b: (a % b).sum(),
    "shortened": lambda a, b: (a // b)[1:],
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", list(DIVISIONS))
def test_integer_division_by_zero(name: str, dtype: torch.dtype) -> None:
    def fn(a: T, b: T) -> Any:
        return DIVISIONS[name](a, b)

    run = compiled(fn)
    for n in (3, 300):
        a, b = torch.arange(n).to(dtype), torch.full((n,), 3, dtype=dtype)
        check_calls(fn, [(a, b), (a, torch.cat((b[1:], b[:1] * 0))), (a + 1, b)], run)


def test_floats_are_divided_by_zero_on_both_devices_and_integers_on_a_gpu() -> None:
    check_calls(lambda a, b: (a // b, a % b), [(torch.arange(3.0), torch.zeros(3))])
    run = triton_run.compiled(lambda a, b: a // b, host=True)
    run(torch.arange(3), torch.zeros(3, dtype=torch.int64))  # eager raises nothing there, and no number is promised


EXTREMES: dict[str, Callable[[T], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of integers": lambda x: x.int().max(),
    "max dim": lambda x: x.max(0),
    "min other dim": lambda x: x.min(1),
    "of nothing": lambda x: x[:, :0].max(1),
    "argmin other dim": lambda x: x.argmin(1),
}


@pytest.mark.parametrize("name", list(EXTREMES))
def test_extremes_of_nothing(name: str) -> None:
    def fn(x: T) -> Any:
        return EXTREMES[name](x)

    check_calls(fn, [(torch.empty(0, 4),), (torch.arange(8.0).view(2, 4),)])
    run = compiled(fn, dynamic=None)
    for rows in (3, 5, 0, 1):
        x = torch.arange(rows * 4.0).view(rows, 4)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        check_calls(fn, [(x,)], run)


@pytest.mark.parametrize(("size", "position"), [(1, 1), (1, -2), (6, 6), (6, -7), (6, -6), (6, 5)])
def test_constant_positions_that_tracing_did_not_check(size: int, position: int) -> None:
    """torch 2.11 traces x[n] of a symbolic n, which it makes a constant afterwards, without a check."""

    def moved(graph: torch.fx.Graph) -> None:
        for n in graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
            n.update_arg(2, position)

    run = compiled(lambda x: x[0] * 2, post_grad_custom_pre_pass=moved, cache_graphs=False)
    x = torch.randn(size, 3)
    if -size <= position < size:
        torch.testing.assert_close(run(x), x[position] * 2)
    else:
        with pytest.raises(IndexError, match=r"out of range|out of bounds"):
            run(x)
