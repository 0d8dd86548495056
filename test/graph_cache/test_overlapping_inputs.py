"""Inputs that overlap differently from call to call, in graphs that write them; and the check of inputs' geometry."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from altbackend.errors import FallbackWarning
from altbackend.runtime import host
from altbackend.runtime.sharing import Watch, watched
from test import ways
from test.ways import Program

T = torch.Tensor
HERE = "test.graph_cache.test_overlapping_inputs"
STRICT: dict[str, Any] = {"strict": True}


def first_written(a: T, b: T) -> T:
    a.add_(1)
    return a * 2 + b


def second_written(a: T, b: T) -> tuple[T, T]:
    b.mul_(2)
    return a + b, b[1:]


def both_read(a: T, b: T) -> T:
    return a * 2 + b


def overlapping(by: int, count: int = 6) -> list[T]:
    x = torch.arange(30.0)
    return [x[:count], x[by : by + count]]


def apart() -> list[T]:
    return [torch.arange(6.0), torch.arange(6.0) + 1]


def side_by_side() -> list[T]:
    x = torch.arange(30.0)
    return [x[10:16], x[20:26]]


def columns(second: int) -> list[T]:
    x = torch.arange(30.0).view(6, 5)
    return [x[:, 1], x[:, second]]


def of_an_array() -> list[T]:
    """torch does not know that they share memory."""
    a = np.arange(12, dtype=np.float32)
    return [torch.from_numpy(a)[:6], torch.from_numpy(a)[3:9]]


def three() -> Callable[[], list[T]]:
    return lambda: overlapping(3)


CALLS: dict[str, tuple[ways.Inputs, ...]] = {
    "at first": (three(), apart, apart, lambda: overlapping(2), three(), side_by_side, apart),
    "later": (apart, three(), apart, lambda: overlapping(2), of_an_array, side_by_side, apart),
    "columns": (lambda: columns(2), lambda: columns(2), lambda: columns(1), lambda: columns(3)),
}
SIZES: dict[str, tuple[ways.Inputs, ...]] = {
    "at first, any size": (three(), apart, lambda: overlapping(2, 8), lambda: overlapping(3, 9)),
    "later, any size": (apart, three(), lambda: overlapping(2, 7), lambda: overlapping(9, 8)),
}
PROGRAMS = [
    Program(f"{fn.__name__}, {when}", fn, calls, dynamic=calls in SIZES.values(), options={"strict": False})
    for fn in (first_written, second_written, both_read)
    for when, calls in (CALLS | SIZES).items()
]


@pytest.fixture(scope="module")
def noted(request: pytest.FixtureRequest) -> ways.Everywhere:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return ways.once(f"{HERE}:PROGRAMS", request)


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_inputs_overlap_differently_from_call_to_call(program: Program, noted: ways.Everywhere) -> None:
    assert noted.wrong(program) == ""


def test_training_with_inputs_that_begin_to_overlap(tmp_path: Path) -> None:
    """The written input needs no gradient; what it shares memory with does."""

    def fn(w: T, a: T, b: T) -> T:
        a.add_(1)
        return (w * b).sin() + a

    def inputs(by: int | None) -> list[Any]:
        args = apart() if by is None else overlapping(by)
        return [torch.ones(6, requires_grad=True), *args]

    program = Program(
        "", fn, (lambda: inputs(None), lambda: inputs(3), lambda: inputs(1), lambda: inputs(None)), grad=True
    )
    want = ways.notes(program, fn)
    for _ in range(2):
        assert ways.disagreement(ways.notes(program, ways.compiled(program, tmp_path)), want) == ""


def test_memory_that_only_addresses_tell_of_is_warned_about() -> None:
    torch._dynamo.reset()
    fn = torch.compile(first_written, backend="alt", dynamic=False)
    fn(*apart())
    with pytest.warns(FallbackWarning, match="torch does not know that they share it"):
        result = fn(*of_an_array())
    assert torch.equal(result, first_written(*of_an_array()))


def test_which_overlaps_count() -> None:
    """Inputs by number; 2 and 3 are static. What is written may share no element with any other input."""
    x = torch.arange(40.0)
    cases: list[tuple[tuple[set[int], set[int]], list[Any], bool]] = [
        (({0}, {2, 3}), [x[:4], x[4:8], x[8:12], x[12:16]], True),
        (({0}, {2, 3}), [x[:4], x[3:8], x[8:12], x[12:16]], False),
        (({1}, {2, 3}), [x[:4], x[4:9], x[8:12], x[12:16]], False),
        (({2}, {2, 3}), [x[:4], x[4:9], x[8:12], x[12:16]], False),
        (({3}, {2, 3}), [x[:4], x[4:9], x[8:12], x[12:16]], True),  # those that overlap are only read
        (({0}, {2, 3}), [x[14:15], x[:4], x[4:30], x[31:32]], False),  # lies in the midst of another
        (({0}, {2, 3}), [x[14:16], x[:4], x[:4], x[:20]], False),  # behind a shorter one that begins there too
        (({0}, set()), [x.view(10, 4)[:, :2], x.view(10, 4)[:, 2:], x[:0], torch.tensor(1.0)], True),  # side by side
        (({0}, set()), [x[:4], 7, x[3:5], None], False),
    ]
    for (written, static), args, right in cases:
        call = watched(lambda *_: True, Watch(frozenset(written), frozenset(static)), lambda *_: False)
        assert call(*args) is right, args
        assert call(*args) is right, args  # with what is known of the static ones


def pack(x: T) -> T:
    return x


def turned(x: T) -> T:
    """The same elements, with other strides."""
    return x.t().contiguous().t()


def test_hooks_may_give_saved_tensors_other_strides() -> None:
    x, w = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    torch._dynamo.reset()
    fn = torch.compile(lambda x, w: (x * w).sin(), backend="alt", options=STRICT)
    with torch.autograd.graph.saved_tensors_hooks(pack, turned):
        out = fn(x, w)
    (result,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(result, torch.autograd.grad((x * w).sin().sum(), w)[0])


def test_size_asserts_looks_at_what_no_guard_knows() -> None:
    def call(sizes: tuple[int, ...]) -> None:
        host.check_input(torch.randn(3, 4), "x", torch.float32, sizes, (4, 1))

    call((3, 4))
    with pytest.raises(
        AssertionError, match=r"input x .* is torch.float32 \(3, 4\) by \(4, 1\), and it was compiled for"
    ):
        call((4, 4))


def test_size_asserts_passes_what_is_right(tmp_path: Path) -> None:
    def fn(x: T, n: int) -> T:
        return x[:n].t() * n

    def arguments(n: int) -> list[Any]:
        return [torch.randn(n + 2, 3), n]

    options = {**STRICT, "size_asserts": True}
    program = Program("", fn, tuple(functools.partial(arguments, n) for n in (3, 5, 4)), dynamic=True, options=options)
    torch.manual_seed(0)
    want = ways.notes(program, fn)
    torch.manual_seed(0)
    assert ways.disagreement(ways.notes(program, ways.compiled(program, tmp_path)), want) == ""


def test_size_asserts_sees_storage_that_is_gone() -> None:
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x * 2, backend="alt", options={**STRICT, "size_asserts": True})
    x = torch.ones(8)
    fn(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="reaches beyond its storage of 0 bytes"):
        fn(x)
