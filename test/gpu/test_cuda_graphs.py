"""`mode="reduce-overhead"` on a GPU against eager: `python -m pytest test/gpu`. Skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from altbackend import alt
from altbackend.runtime import cuda_graphs
from altbackend.runtime.capture import of_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
T = torch.Tensor


def replayed(fn: Any, **more: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=alt, options={"strict": True, "cudagraphs": True}, **more)


def recorded() -> list[cuda_graphs.Recorded]:
    gc.collect()
    return list(cuda_graphs.alive)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU()
    ).cuda()


def test_a_thousand_results_that_the_caller_holds_stay_right() -> None:
    net = model().eval()
    run = replayed(net)
    held = []
    with torch.no_grad():
        for k in range(1000):
            x = torch.full((1, 64), k / 100, device="cuda")
            held.append((x, run(x)))
        assert [len(r.recordings[()]) for r in recorded() if not r.reason] == [1]
        for x, y in held:
            torch.testing.assert_close(y, net(x), rtol=1e-5, atol=1e-5)


def test_mode_by_name_and_step_marks() -> None:
    net = model().eval()
    run = torch.compile(net, backend=alt, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(8, 64, device="cuda")
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_training_with_an_optimizer_equals_eager(ahead: int) -> None:
    """Several forwards before their backwards, running statistics, parameters that an optimizer changes."""

    def train(wrap: Callable[[nn.Module], Callable[..., Any]]) -> tuple[list[float], dict[str, T]]:
        net = model()
        run, losses = wrap(net), []
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(1)
        for _ in range(6):
            xs = [torch.randn(32, 64, device="cuda") for _ in range(ahead)]
            found = [run(x).square().mean() for x in xs]
            opt.zero_grad(set_to_none=True)
            sum(found).backward()
            opt.step()
            losses += [f.item() for f in found]
        return losses, net.state_dict()

    want, state = train(lambda net: net)
    got, mine = train(replayed)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, t in state.items():
        torch.testing.assert_close(mine[name], t, rtol=1e-3, atol=1e-4)
    assert any(r.recordings for r in recorded())


def test_gradients_are_accumulated_over_calls() -> None:
    net, twin = model().eval(), model().eval()
    run = replayed(net)
    for _ in range(5):
        x = torch.randn(16, 64, device="cuda")
        run(x).sum().backward()
        twin(x).sum().backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)


def test_random_numbers_differ_from_call_to_call_and_repeat_with_the_seed() -> None:
    run = replayed(lambda x: F.dropout(x, 0.5) + torch.rand_like(x))

    def draw() -> list[T]:
        torch.manual_seed(3)
        return [run(torch.ones(256, device="cuda")) for _ in range(4)]

    with torch.no_grad():
        draw()
        first, second = draw(), draw()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(first[0], first[1])


def test_sizes_past_the_limit_run_plainly() -> None:
    run = torch.compile(
        lambda x: F.softmax(x.sin() @ x.t(), -1),
        backend=alt,
        dynamic=True,
        options={"cudagraphs": True, "cudagraph_limit": 3},
    )
    with torch.no_grad():
        for _ in range(3):
            for n in range(2, 10):
                x = torch.randn(n, 16, device="cuda")
                torch.testing.assert_close(run(x), F.softmax(x.sin() @ x.t(), -1), rtol=1e-4, atol=1e-4)


def test_no_synchronisation_and_other_streams() -> None:
    net = model().eval()
    run, x = replayed(net), torch.randn(8, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.no_grad():
        want = net(x)
        run(x)
        run(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs = [run(x) for _ in range(3)]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                outs += [run(x) for _ in range(3)]
            torch.cuda.current_stream().wait_stream(side)
            outs += [run(x)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for y in outs:
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


def test_a_recording_that_fails_leaves_everything_usable() -> None:
    """An operator that waits for the device cannot be recorded."""
    run = torch.compile(lambda x: x.repeat_interleave((x > 9).long().sum().clamp(max=0).add(2).item()), backend=alt)
    call = cuda_graphs.Recorded(
        lambda args: (args[0] * args.pop().sum().item(),),
        cuda_graphs.Signature("graph", frozenset(), 9, frozenset(), cuda_graphs.ALL, False, 4),
        of_device(0),
    )
    for _ in range(4):
        x = torch.randn(5, device="cuda")
        torch.testing.assert_close(call([x])[0], x * x.sum())
    assert "captur" in call.reason
    assert run(torch.zeros(3, device="cuda")).numel() == 6
    torch.randn(5, device="cuda")


def test_a_graph_that_waits_for_the_host_runs_plainly_with_a_reason() -> None:
    run = torch.compile(lambda x, n: x * n + 1, backend=alt, options={"cudagraphs": True})
    for k in range(4):
        x, n = torch.randn(8, device="cuda"), torch.tensor(float(k))
        torch.testing.assert_close(run(x, n), x * n + 1)
