"""Operators that are not torch's own: what they return is compared with what their fake kernels say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from altbackend.errors import FallbackWarning
from test.compare import check, compiled

T = torch.Tensor


@pytest.fixture
def define() -> Iterator[Callable[[str, Callable[[T], Any], Callable[[T], Any], str], Any]]:
    """Defines an operator `altbackend_results::name` of one tensor by its real and its fake kernel."""
    library = torch.library.Library("altbackend_results", "FRAGMENT")

    def made(name: str, real: Callable[[T], Any], fake: Callable[[T], Any], result: str = "Tensor") -> Any:
        library.define(f"{name}(Tensor x) -> {result}")
        library.impl(name, real, "CPU")
        library.impl(name, fake, "Meta")
        return getattr(torch.ops.altbackend_results, name)

    yield made
    library._destroy()


WRONG: dict[str, tuple[Callable[[T], Any], Callable[[T], Any], str]] = {
    "strides": (lambda x: x.t().clone() * 2, lambda x: x.new_empty(x.shape[1], x.shape[0]), "strides (1, 4)"),
    "sizes": (lambda x: x[:1] * 2, torch.empty_like, "(1, 4)"),
    "rank": (lambda x: x.sum(0), torch.empty_like, "(4,)"),
    "dtype": (lambda x: x.double(), torch.empty_like, "torch.float64"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_a_result_that_was_not_promised_is_an_error(kind: str, dynamic: bool, define: Any) -> None:
    real, fake, found = WRONG[kind]
    op = define(kind, real, fake)
    x = torch.randn(3, 4)
    for fn in (op, lambda x: op(x) + 1):
        torch._dynamo.reset()
        for _ in range(2):  # at every call of the same code
            with pytest.raises(AssertionError, match="fake kernel") as caught:
                compiled(fn, dynamic=dynamic)(x)
            assert found in str(caught.value)
            assert f"altbackend_results.{kind}.default" in str(caught.value)


def test_several_results_are_each_compared(define: Any) -> None:
    op = define("two", lambda x: (x + 1, x.t().clone()), lambda x: (x + 1, x.new_empty(4, 3)), "(Tensor, Tensor)")
    with pytest.raises(AssertionError, match="fake kernel"):
        compiled(lambda x: op(x)[0] + op(x)[1].sum())(torch.randn(3, 4))


def test_results_as_promised_in_any_layout(define: Any) -> None:
    turned = define("turned", lambda x: x.t().clone() * 2, lambda x: torch.empty_like(x.t()))
    number = define("number", lambda x: x.sum(), lambda x: x.new_empty(()))
    empty = define("empty", lambda x: x[:0].clone(), lambda x: x.new_empty(0, 4))
    for dynamic in (False, True):
        torch._dynamo.reset()
        for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(1, 4)):
            check(lambda x: (turned(x), turned(x) + 1, number(x) * 2, empty(x), empty(x) + 1), x, dynamic=dynamic)


@torch.library.custom_op("altbackend_results::found", mutates_args=())
def found(x: T) -> T:
    return x.nonzero().contiguous()


@found.register_fake
def _(x: T) -> T:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.dim()), dtype=torch.int64)


def test_a_result_whose_size_only_data_decides() -> None:
    for numbers in ([[0.0, 1.0], [2.0, 0.0]], [[0.0, 0.0]], [[1.0, 1.0]]):
        torch._dynamo.reset()
        x = torch.tensor(numbers)
        run = torch.compile(lambda x: found(x) + 1, backend="alt", fullgraph=True, options={"strict": True})
        assert torch.equal(run(x), x.nonzero() + 1)


def test_an_input_in_onednns_layout_runs_as_in_eager() -> None:
    dense = torch.randn(4, 8)
    x = dense.to_mkldnn()
    run = torch.compile(lambda x: x.relu(), backend="alt")
    torch.testing.assert_close(run(dense), dense.relu())
    with pytest.warns(FallbackWarning, match="oneDNN"):
        torch.testing.assert_close(run(x).to_dense(), dense.relu())
    for refused in (lambda x: x.sin(), lambda x: x + 1):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError) as eager:
            refused(x)
        with pytest.warns(FallbackWarning), pytest.raises(RuntimeError) as ours:
            torch.compile(refused, backend="alt")(x)
        assert str(eager.value) in str(ours.value)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="to_dense"):
        torch.compile(lambda x: x.relu(), backend="alt", options={"strict": True})(x)
