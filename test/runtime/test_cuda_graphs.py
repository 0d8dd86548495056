"""The logic of replayed calls, with a recorder that works on a CPU: places, copies, pairs of forward and backward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from altbackend.runtime.cuda_graphs import ALL, Recorded, Signature
from altbackend.runtime.frozen import Frozen, Versions

T = torch.Tensor
Call = Callable[[list[Any]], Sequence[Any]]


def at_address(a: T) -> T:
    """The same memory, of which nobody knows that it is used."""
    n = 4 * (sum((size - 1) * step for size, step in zip(a.size(), a.stride(), strict=True)) + 1)
    raw = torch.frombuffer((ctypes.c_char * n).from_address(a.data_ptr()), dtype=a.dtype)
    return raw.as_strided(a.size(), a.stride())


class Recorder:
    """Like a CUDA graph: recording runs nothing, a replay reads and writes the places that were recorded."""

    def __init__(self) -> None:
        self.shared = object()
        self.records = self.replays = 0
        self.pools: list[Any] = []
        self.refuses = False

    def pool(self) -> Any:
        return object()

    def busy(self) -> bool:
        return False

    def empty(self, t: T) -> T:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)

    def record(self, call: Call, args: list[Any], pool: Any) -> tuple[Callable[[], None], Sequence[Any]]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.records += 1
        self.pools.append(pool)
        before = [a.clone() if isinstance(a, T) else a for a in args]
        outs = call(list(args))
        for a, b in zip(args, before, strict=True):
            if isinstance(a, T):
                a.copy_(b)
        own = {a.untyped_storage().data_ptr() for a in args if isinstance(a, T)}
        places = [at_address(a) if isinstance(a, T) else a for a in args]

        def replay() -> None:
            self.replays += 1
            for old, new in zip(outs, call(list(places)), strict=True):
                if isinstance(old, T) and old.untyped_storage().data_ptr() not in own:
                    old.copy_(new)

        return replay, outs


def signature(
    static: Sequence[int] = (), outputs: int = ALL, sized: bool = False, most: int = 4, **more: Any
) -> Signature:
    written = frozenset(more.pop("written", ()))
    return Signature("graph", frozenset(static), 100, written, outputs, sized, most, **more)


def boxed(fn: Callable[..., Sequence[Any]]) -> Call:
    def call(args: list[Any]) -> Sequence[Any]:
        outputs = list(args)
        args.clear()
        return fn(*outputs)

    return call


def test_results_that_the_caller_holds_are_never_overwritten() -> None:
    recorder, w = Recorder(), torch.randn(8)
    run = Recorded(boxed(lambda x, w: (x * w, x.sum())), signature(static=[1]), recorder)
    outputs = []
    for k in range(1000):
        x = torch.full((8,), float(k))
        outputs.append(run([x, w]))
    for k, (y, total) in enumerate(outputs):
        torch.testing.assert_close(y, k * w)
        assert total == 8 * k
    assert (recorder.records, recorder.replays) == (1, 999)


def test_the_list_of_arguments_is_emptied() -> None:
    run = Recorded(boxed(lambda x: (x + 1,)), signature(), Recorder())
    for _ in range(3):
        args: list[object] = [torch.ones(3)]
        run(args)
        assert args == []


def test_a_parameter_at_another_address_is_recorded_anew_up_to_the_limit() -> None:
    recorder = Recorder()
    run = Recorded(boxed(lambda x, w: (x * w,)), signature(static=[1], most=3), recorder)
    weights = [torch.randn(4) for _ in range(6)]
    x = torch.randn(4)
    for _ in range(3):
        for w in weights:
            torch.testing.assert_close(run([x, w])[0], x * w)
    assert recorder.records == 3


def test_sizes_are_recorded_apart_and_run_plainly_past_the_limit() -> None:
    recorder = Recorder()
    run = Recorded(boxed(lambda n, x: (x * n, n)), signature(sized=True, most=2), recorder)
    for _ in range(3):
        for n in range(1, 6):
            x = torch.randn(n)
            y, m = run([n, x])
            torch.testing.assert_close(y, x * n)
            assert m == n
    assert recorder.records == 2


def test_strides_of_zero_and_offsets() -> None:
    run = Recorded(boxed(lambda x, y: (x + y, x)), signature(), Recorder())
    for _ in range(3):
        x, y = torch.randn(1, 5).expand(4, 5), torch.randn(3, 4, 5)[1]
        got, same = run([x, y])
        torch.testing.assert_close(got, x + y)
        assert same is x


def test_views_of_one_result_stay_views_of_each_other() -> None:
    def fn(x: T) -> tuple[T, T, T]:
        y = x * 2
        return y, y[1:, :2], y.t()

    run = Recorded(boxed(fn), signature(), Recorder())
    for _ in range(3):
        x = torch.randn(3, 4)
        got = run([x])
        for g, w in zip(got, fn(x), strict=True):
            torch.testing.assert_close(g, w)
            assert (g.stride(), g.storage_offset()) == (w.stride(), w.storage_offset())
        got[0].zero_()
        assert not got[1].any()
        assert not got[2].any()


def test_inputs_that_the_graph_writes() -> None:
    def fn(x: T, state: T) -> tuple[T, T]:
        state.add_(x)
        return state * 2, state[1:]

    run, state, want = Recorded(boxed(fn), signature(written=[1]), Recorder()), torch.zeros(4), torch.zeros(4)
    for _ in range(4):
        x = torch.randn(4)
        want += x
        twice, part = run([x, state])
        torch.testing.assert_close(state, want)
        torch.testing.assert_close(twice, want * 2)
        assert part.data_ptr() == state.data_ptr() + 4


def pair(recorder: Recorder) -> tuple[Recorded, Recorded]:
    """y = sin(x) * w forward, leaving w, the input and cos(x); its backward."""

    def backward(w: T, x: T, c: T, grad: T) -> tuple[T, T]:
        return grad * c * w, grad * x.sin()

    forward = Recorded(
        boxed(lambda x, w: (x.sin() * w, w, x, x.cos())), signature(static=[1], outputs=1, most=8), recorder
    )
    return forward, Recorded(boxed(backward), signature(most=8, follows=True), recorder)


def test_a_backward_reads_what_its_own_forward_left() -> None:
    recorder, w = Recorder(), torch.randn(5)
    forward, backward = pair(recorder)
    for ahead in (1, 1, 1, 2, 3, 1, 2):
        started = []
        for _ in range(ahead):
            x = torch.randn(5)
            y, *left = forward([x, w])
            started.append((x, y, left))
        while started:
            x, y, left = started.pop()
            grad = torch.randn(5)
            dx, dw = backward([*left, grad])
            del left
            torch.testing.assert_close(y, x.sin() * w)
            torch.testing.assert_close(dx, grad * x.cos() * w)
            torch.testing.assert_close(dw, grad * x.sin())
    assert recorder.replays > 10
    # a backward takes its memory where its forward did; two forwards never share theirs
    assert len(set(map(id, recorder.pools))) == 2
    assert recorder.shared not in recorder.pools


def test_what_a_forward_left_is_not_copied() -> None:
    recorder, w = Recorder(), torch.randn(5)
    forward, backward = pair(recorder)
    for _ in range(3):
        _, *left = forward([torch.randn(5), w])
        backward([*left, torch.randn(5)])
        del left
    (recording,) = backward.recordings[()]
    assert set(recording.buffers) == {3}


def test_a_call_that_cannot_be_recorded_runs_plainly() -> None:
    recorder = Recorder()
    recorder.refuses = True
    run = Recorded(boxed(lambda x: (x + 1,)), signature(), recorder)
    for _ in range(3):
        torch.testing.assert_close(run([torch.ones(3)])[0], torch.full((3,), 2.0))
    assert "not permitted" in run.reason


def test_the_check_of_earlier_calls_runs_before_a_replay() -> None:
    call = boxed(lambda x: (x + 1,))
    recording: list[int] = []
    call.check = lambda: recording.append(1)  # type: ignore[attr-defined]
    run = Recorded(call, signature(), Recorder())
    for _ in range(4):
        run([torch.ones(3)])
    assert len(recording) == 3  # the first call was plain and checks by itself


def test_work_on_parameters_keeps_its_place_when_a_parameter_changes() -> None:
    recorder, w = Recorder(), torch.randn(4)
    main = Recorded(boxed(lambda x, folded: (x * folded,)), signature(static=[1]), recorder)
    run = Frozen(main, lambda w: (w * 2,), (0,), (1,), Versions, in_place=True)
    for k in range(6):
        x = torch.randn(4)
        torch.testing.assert_close(run([x, w])[0], x * w * 2)
        if k == 3:
            w.add_(1)
    assert recorder.records == 1


@pytest.mark.parametrize("fresh", [True, False])
def test_a_parameters_own_storage_is_never_written(fresh: bool) -> None:
    old, new = torch.randn(4), torch.randn(4)
    copy_of_old = old.clone()
    run = Frozen(boxed(lambda a: (a * 3,)), lambda w: (w.view(2, 2),), (), (0,), Versions, in_place=True)
    torch.testing.assert_close(run([old])[0], old.view(2, 2) * 3)
    torch.testing.assert_close(run([new.clone() if fresh else new])[0], new.view(2, 2) * 3)
    torch.testing.assert_close(old, copy_of_old)
