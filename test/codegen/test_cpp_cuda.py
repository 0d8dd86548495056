"""Host programs of GPUs in C++: launches, library calls, workspaces, checks and results. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from test import cpp_cuda_host, cuda_host, triton_run
from test.torch_versions import no_check_of_custom_operators

T = torch.Tensor


@pytest.fixture(autouse=True)
def without_modes() -> Iterator[None]:
    """No dispatch mode checks custom operators in the first call: a program in Python would run under it."""
    with no_check_of_custom_operators():
        yield


def through_cpp(fn: Callable[..., Any], *inputs: T) -> tuple[Any, list[str]]:
    texts: list[str] = []

    def build(s: Any, steps: Any, launch: Any) -> Any:
        text, call = cpp_cuda_host.build(s, steps, launch)
        texts.append(text)
        return text, call

    with patch.object(cuda_host, "build", build):
        return triton_run.compiled(fn, host=True, capabilities=())(*inputs), texts


def test_launches_and_library_calls() -> None:
    def f(x: T, w: T, b: T) -> tuple[T, ...]:
        y = F.gelu(torch.addmm(b, x, w)) @ w
        return torch.softmax(y, -1), y.t()[1:], y.sum(0)

    x, w, b = torch.randn(6, 16), torch.randn(16, 16), torch.randn(16)
    actual, (text,) = through_cpp(f, x, w, b)
    torch.testing.assert_close(actual, f(x, w, b), atol=1e-4, rtol=1e-4)
    assert "aoti_torch_cuda_" in text
    assert text.count("launch(frame") >= 2


def test_written_inputs_and_inputs_at_odd_addresses() -> None:
    def f(x: T, count: T) -> T:
        count.add_(1)
        return (x * 2).relu() @ x.t() + count

    storage = torch.randn(33)
    x, count = storage[1:33].view(4, 8), torch.zeros(4)
    expected = count.clone()
    actual, _ = through_cpp(f, x, count)
    torch.testing.assert_close(actual, f(x, expected))
    assert torch.equal(count, expected)


def test_a_wrong_index_is_an_error_of_the_next_call() -> None:
    def f(x: T, at: T) -> T:
        return x[at].sin() @ x.t()

    x, wrong, right = torch.randn(4, 4), torch.tensor([1, 9]), torch.tensor([1, 2])
    compiled: list[Any] = []

    def build(s: Any, steps: Any, launch: Any) -> Any:
        compiled.append(cpp_cuda_host.build(s, steps, launch)[1])
        return "", compiled[-1]

    with patch.object(cuda_host, "build", build):
        run = triton_run.compiled(f, host=True, capabilities=())
        torch.testing.assert_close(run(x, right), f(x, right))
        run(x, wrong)
        with pytest.raises(IndexError, match=r"an earlier call met an index out of range"):
            run(x, right)
        torch.testing.assert_close(run(x, right), f(x, right))


def test_small_temporaries_of_kernels_share_one_allocation() -> None:
    def f(x: T) -> tuple[T, T]:
        y = x.cumsum(0).cumsum(1).cumsum(0).cumsum(1).cumsum(0)
        return y.cumsum(1), y @ x.t()

    x = torch.randn(8, 8)
    actual, (text,) = through_cpp(f, x)
    torch.testing.assert_close(actual, f(x), atol=1e-3, rtol=1e-4)
    offsets = [int(line.split("small_at + ")[1].split(";")[0]) for line in text.splitlines() if "small_at + " in line]
    assert len(offsets) >= 3
    assert len(set(offsets)) < len(offsets), "the memory of a dead temporary is used again"
    assert text.count("empty_on_gpu(") == 4, "the shared one, the operand of the product, and two results"
