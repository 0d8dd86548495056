"""Compiled code on a GPU that is not the current one, and on two at once. Skipped where there are fewer than two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from test.gpu.test_cuda import build, check_close, gradients_of_loss, norms

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
T = torch.Tensor


def inputs(device: str, dtype: torch.dtype = torch.float32) -> list[T]:
    torch.manual_seed(0)
    return [x.to(device, dtype) for x in (torch.randn(64, 256), torch.rand(256) + 0.5, torch.randn(256))]


def mlp(x: T, w: T, b: T) -> T:
    return F.gelu(x * w + b).square().mean()


def test_a_graph_runs_where_its_tensors_are() -> None:
    got = build(norms)(*inputs("cuda:1"))
    assert got.device.index == 1
    assert torch.cuda.current_device() == 0
    check_close(got, norms(*inputs("cuda:1")), norms(*inputs("cuda:1", torch.float64)))


def test_one_function_on_one_device_after_the_other() -> None:
    run = build(norms)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        check_close(run(*inputs(device)), norms(*inputs(device)), norms(*inputs(device, torch.float64)))


def test_gradients_on_the_second_device() -> None:
    def leaves(dtype: torch.dtype) -> list[T]:
        return [x.requires_grad_() for x in inputs("cuda:1", dtype)]

    got, want = gradients_of_loss(build(mlp), *leaves(torch.float32)), gradients_of_loss(mlp, *leaves(torch.float32))
    check_close(got, want, gradients_of_loss(mlp, *leaves(torch.float64)))


def test_threads_with_a_device_each() -> None:
    run = build(norms)
    held = {device: inputs(device) for device in ("cuda:0", "cuda:1")}  # threads share the generator
    for xs in held.values():
        run(*xs)

    def often(device: str) -> None:
        xs = held[device]
        with torch.cuda.device(device):
            want, exact = norms(*xs), norms(*(x.double() for x in xs))
            for _ in range(50):
                check_close(run(*xs), want, exact)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(often, ("cuda:0", "cuda:1")))


def test_a_side_stream_of_the_second_device() -> None:
    run, side = build(norms), torch.cuda.Stream("cuda:1")
    xs = inputs("cuda:1")
    run(*xs)
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(side):
        got = run(*xs)
    side.synchronize()
    check_close(got, norms(*xs), norms(*inputs("cuda:1", torch.float64)))


def test_a_graph_over_two_devices() -> None:
    def fn(x: T, w: T, b: T) -> T:
        y = F.gelu(x * w + b).to("cuda:1")
        return torch.softmax(y * 2, -1).to("cuda:0") + x

    xs = inputs("cuda:0")
    check_close(build(fn)(*xs), fn(*xs), fn(*inputs("cuda:0", torch.float64)))
