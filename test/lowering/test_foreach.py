"""Operators on lists of tensors are decomposed into operators on each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from altbackend.report import stats
from test.compare import check, compiled

Pair = list[torch.Tensor]


def _in_place(a: Pair, b: Pair) -> Pair:
    torch._foreach_add_(a, b)
    torch._foreach_zero_(b)
    return a


FORMS: dict[str, Callable[[Pair, Pair], Sequence[torch.Tensor]]] = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=0.5),
    "number": lambda a, b: torch._foreach_mul(torch._foreach_sub(a, 2.0), 0.5),
    "numbers": lambda a, b: torch._foreach_div(a, [2.0, 3.0]),
    "scalar tensor": lambda a, b: torch._foreach_mul(a, torch.tensor(3.0)),
    "unary": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    "addcdiv": lambda a, b: torch._foreach_addcdiv(a, b, torch._foreach_exp(b), 0.3),
    "addcmul, numbers": lambda a, b: torch._foreach_addcmul(a, b, b, [0.3, 2.0]),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.3),
    "maximum": lambda a, b: [*torch._foreach_maximum(a, b), *torch._foreach_maximum(a, 0.1)],
    "minimum, numbers": lambda a, b: torch._foreach_minimum(a, [0.1, 0.2]),
    "pow": lambda a, b: [*torch._foreach_pow(torch._foreach_abs(a), 2.5), *torch._foreach_pow(2.0, b)],
    "norm": lambda a, b: [*torch._foreach_norm(a), *torch._foreach_norm(a, 1)],
    "in place": lambda a, b: _in_place(a, b),
}


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_results(form: str, dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(3, 4).to(dtype),
        torch.randn(7).to(dtype),
        torch.randn(3, 4).to(dtype),
        torch.ones(7).to(dtype),
    ]
    before = stats.snapshot()
    check(lambda a, b, c, d: list(FORMS[form]([a, b], [c, d])), *tensors)
    assert (stats.snapshot() - before).library_calls == 0


def test_optimizer_step() -> None:
    """Adam on lists of tensors: one fused step without library calls."""

    def step(p: Pair, g: Pair, m: Pair, v: Pair) -> None:
        torch._foreach_lerp_(m, g, 0.1)
        torch._foreach_mul_(v, 0.99)
        torch._foreach_addcmul_(v, g, g, 0.01)
        root = torch._foreach_sqrt(v)
        torch._foreach_add_(root, 1e-8)
        torch._foreach_addcdiv_(p, m, root, -0.01)

    def state() -> list[Pair]:
        torch.manual_seed(3)
        return [[torch.rand(5, 3), torch.rand(8)] for _ in range(4)]

    compiled_state, eager_state = state(), state()
    before = stats.snapshot()
    compiled(step)(*compiled_state)
    step(*eager_state)
    torch.testing.assert_close(compiled_state, eager_state)
    assert (stats.snapshot() - before).library_calls == 0
