"""Host programs in C++ under torch.compile give what those in Python give: values, aliasing, errors, and all else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from altbackend.compile_pool import libraries
from altbackend.compiled import hosts
from altbackend.runtime import cpp_host, host
from test.torch_versions import no_check_of_custom_operators

calls_in_cpp = 0


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count the calls that a host program in C++ has finished."""
    global calls_in_cpp
    calls_in_cpp = 0
    whole = cpp_host._results

    def results(form: cpp_host.HostForm) -> Callable[[list[Any]], Any]:
        finish = whole(form)

        def counting(out: list[Any]) -> Any:
            global calls_in_cpp
            calls_in_cpp += 1
            return finish(out)

        return counting

    monkeypatch.setattr(cpp_host, "_results", results)
    with no_check_of_custom_operators():
        yield


def in_cpp(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="alt", options={"host": "cpp", "strict": True, **options})


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w) @ w.t(), -1) + x.mean()


def scaled(scale: float) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(x @ w) * scale @ w) * scale + 1

    return fn


def test_graphs_with_one_host_program_keep_their_own_kernels() -> None:
    """The text of the host program is the same, down to the user's line; the kernels differ in a constant."""
    x, w = torch.randn(5, 7), torch.randn(7, 7)
    functions = [scaled(0.25), scaled(2.0), scaled(-1.0)]
    options: dict[str, Any] = {"host": "cpp", "strict": True}
    compiled = [torch.compile(fn, backend="alt", dynamic=False, options=options) for fn in functions]
    for _ in range(2):
        for f, fn in zip(compiled, functions, strict=True):
            torch.testing.assert_close(f(x, w), fn(x, w))
    assert calls_in_cpp == 6


def test_a_call_runs_in_cpp_and_under_a_mode_in_python() -> None:
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, w = torch.randn(5, 7), torch.randn(7, 7)
    f = in_cpp(mixed)
    torch.testing.assert_close(f(x, w), mixed(x, w))
    assert calls_in_cpp == 1
    call = _inner(f, x, w)
    with Log():
        call([x, w])
    assert calls_in_cpp == 1
    assert any("mm" in name for name in seen)


def _inner(f: Callable[..., Any], *inputs: Any) -> Callable[[list[Any]], Any]:
    """Return the compiled graph of a function, without Dynamo and AOTAutograd around it."""
    found: list[Any] = []
    whole = hosts.on_cpu
    with pytest.MonkeyPatch.context() as patch:

        def noted(*args: Any) -> Any:
            found.append(whole(*args))
            return found[-1]

        patch.setattr(hosts, "on_cpu", noted)
        torch._dynamo.reset()
        f(*inputs)
    global calls_in_cpp
    calls_in_cpp = 1
    return found[0]


def test_aliases_and_written_inputs() -> None:
    def f(x: torch.Tensor, buffer: torch.Tensor) -> tuple[Any, ...]:
        buffer.add_(x.sum(0))
        y = x @ x.t()
        return x, x[1:], y.view(-1), buffer, y.t() @ x

    x, expected = torch.randn(4, 4), torch.randn(4)
    actual = expected.clone()
    a = in_cpp(f)(x, actual)
    b = f(x, expected)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(actual, expected)
    assert a[0] is x
    assert a[1].data_ptr() == x[1:].data_ptr()
    assert a[3].data_ptr() == actual.data_ptr()
    assert calls_in_cpp == 1


def test_sizes_and_numbers_vary() -> None:
    def f(x: torch.Tensor, n: int) -> tuple[Any, ...]:
        return (x @ x.t()).sum(-1) * n, x.shape[0] + n, x[: n + 1].cumsum(0)

    compiled = torch.compile(f, backend="alt", dynamic=True, options={"host": "cpp", "strict": True})
    for rows, n in ((5, 3), (9, 7), (6, 2)):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x, n), f(x, n))
    assert calls_in_cpp == 3


def test_training_frees_what_the_backward_has_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    actual = torch.autograd.grad(in_cpp(model)(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(actual, expected)
    assert calls_in_cpp == 2  # forward and backward


def test_errors_are_those_of_the_python_program() -> None:
    def f(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return (x @ x.t())[at].relu() @ x

    x, wrong = torch.randn(4, 4), torch.tensor([1, 9])
    with pytest.raises(IndexError) as python:
        torch.compile(f, backend="alt", options={"host": "python"})(x, wrong)
    torch._dynamo.reset()
    compiled = in_cpp(f)
    with pytest.raises(IndexError) as cpp:
        compiled(x, wrong)
    assert str(cpp.value) == str(python.value)
    assert "test_cpp_host.py" in str(cpp.value)
    assert calls_in_cpp == 0
    right = torch.tensor([1, 2])
    torch.testing.assert_close(compiled(x, right), f(x, right))
    assert calls_in_cpp == 1


def test_an_error_after_an_effect_is_raised_once() -> None:
    def f(x: torch.Tensor, at: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        torch._check(at.sum().item() < 4, lambda: "too much")
        return x @ x.t() + at.sum()

    count = torch.zeros(3)
    compiled = torch.compile(f, backend="alt", fullgraph=True, options={"host": "cpp", "strict": True})
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled(torch.randn(2, 2), torch.tensor([1, 1]), count)
        with pytest.raises(RuntimeError, match="u0 <= 3"):
            compiled(torch.randn(2, 2), torch.tensor([9]), count)
    assert count.max() <= 2


def test_random_numbers_equal_those_of_the_python_program() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ x.t(), 0.5) @ torch.rand(6, 6)

    x = torch.randn(6, 6)
    results = []
    for language in ("python", "cpp"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        results.append(torch.compile(f, backend="alt", options={"host": language})(x))
    assert torch.equal(*results)
    assert calls_in_cpp == 1


def test_threads_call_at_once() -> None:
    f = in_cpp(mixed)
    inputs = [(torch.randn(5, 7), torch.randn(7, 7)) for _ in range(4)]
    f(*inputs[0])
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(50):
            wrong.extend([k] * (not torch.allclose(f(*inputs[k]), mixed(*inputs[k]), atol=1e-5)))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert calls_in_cpp == 200


def many_steps(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.relu(x @ x)
    return x


def test_auto_builds_in_the_background_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces: list[host.Workspaces] = []
    make = host.Workspaces.__init__

    def noted(self: host.Workspaces, *args: Any) -> None:
        spaces.append(self)
        make(self, *args)

    monkeypatch.setattr(host.Workspaces, "__init__", noted)
    x = torch.rand(6, 6) / 3
    f = torch.compile(many_steps, backend="alt", options={"host": "auto"})
    for _ in range(hosts.CALLS_BEFORE_BUILD):
        torch.testing.assert_close(f(x), many_steps(x))
    assert calls_in_cpp == 0
    assert hosts.wait_until_built(60)
    torch.testing.assert_close(f(x), many_steps(x))
    assert calls_in_cpp == 1
    assert spaces
    assert not any(s.idle or s.spare for s in spaces)  # the program in Python has given its memory back
    torch._dynamo.reset()
    f(x)  # another graph with the same program begins with it
    assert calls_in_cpp == 2


def test_auto_leaves_short_graphs_and_broken_compilers_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    f = torch.compile(torch.relu, backend="alt", options={"host": "auto"})
    g = torch.compile(lambda x: many_steps(x + 1), backend="alt", options={"host": "auto"})
    monkeypatch.setattr(libraries, "_HOST", ("--no-such-flag",))
    for _ in range(8):
        f(torch.ones(3))
        g(torch.ones(3, 3))
    assert hosts.wait_until_built(60)
    g(torch.ones(3, 3))
    assert calls_in_cpp == 0


def test_what_has_no_form_in_cpp_stays_in_python_with_the_reason(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y - 1, (x,)) @ x

    x = torch.rand(3, 3)
    torch.testing.assert_close(in_cpp(f, debug_dir=str(tmp_path))(x), f(x))
    assert calls_in_cpp == 0
    lines = "".join(file.read_text() for file in tmp_path.rglob("decisions.txt")).splitlines()
    assert any("host program" in line and "cond" in line for line in lines)


def test_a_horizontal_kernel_of_several_parts() -> None:
    def products(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [y @ y.t() for y in torch._foreach_mul(torch._foreach_tanh(xs), -0.5)]

    xs = [torch.randn(s) for s in [(64, 33), (7, 3), (128, 5), (16, 16)]]
    f = in_cpp(products)
    torch.testing.assert_close(f(xs), products(xs))
    assert calls_in_cpp == 1
