"""The compiled program refuses shapes and values that eager refuses, with an exception of the same type."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

from test.compare import compiled

T = torch.Tensor
X, AT = torch.tensor([0.5, -1.0, 3.0]), torch.tensor([1, -2, 3])


def positions(*sizes: int) -> T:
    return torch.zeros(*sizes, dtype=torch.int64)


# By the data of (x, at), or by shapes that some fake kernels accept.
REFUSED: dict[str, Callable[[T, T], Any]] = {
    "probabilities": lambda x, at: torch.bernoulli(x),
    "probability": lambda x, at: x.clone().bernoulli_(1.5),
    "uniform": lambda x, at: x.clone().uniform_(2, 1),
    "uniform from": lambda x, at: torch.ops.aten.uniform(x, 3.0),
    "reciprocal of integers": lambda x, at: at**-1,
    "power of integers": lambda x, at: torch.pow(at * 2, -3),
    "reciprocal of booleans": lambda x, at: (at > 0) ** -1,
    "cross-entropy of no probability": lambda x, at: F.binary_cross_entropy(x, x),
    "cross-entropies of no probability": lambda x, at: F.binary_cross_entropy(x, x, reduction="none"),
    "cross-entropy of NaN": lambda x, at: F.binary_cross_entropy(x.log().sigmoid(), x),
    "few elements under a mask": lambda x, at: x.masked_scatter(x < 9, x[:2]),
    "negative count": lambda x, at: torch.bincount(at),
    "class": lambda x, at: F.nll_loss(x.expand(3, 3), at),
    "select of a scalar": lambda x, at: torch.index_select(x.sum(), 0, positions(4)),
    "select of a matrix": lambda x, at: torch.index_select(x, 0, positions(2, 2)),
    "add to a scalar": lambda x, at: x.sum().index_add(0, positions(4), x.new_ones(4)),
    "reduce to a scalar": lambda x, at: x.sum().index_reduce(0, positions(4), x.new_ones(4), "amax"),
    "put nowhere": lambda x, at: x.sum().index_put((), x.new_ones(())),
    "edges": lambda x, at: torch.bucketize(x, x.new_ones(2, 2)),
}


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except Exception as cause:
        return cause


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, train: bool) -> None:
    fn = REFUSED[name]
    x = X.clone().requires_grad_(train)
    want, got = outcome(fn, x, AT), outcome(compiled(fn), x, AT)
    if type(got) is not type(want):  # in training, AOTAutograd itself raises another type for some shapes
        assert type(outcome(torch.compile(fn, backend="aot_eager"), x, AT)) is not type(want), f"{got!r}, not {want!r}"


def test_probabilities_in_range_pass() -> None:
    p, y = torch.rand(40, requires_grad=True), torch.rand(40)

    def fn(p: T, y: T) -> T:
        return F.binary_cross_entropy(p, y) + F.binary_cross_entropy(p, y, reduction="none").max()

    got, want = (torch.autograd.grad(f(p, y), p)[0] for f in (compiled(fn), fn))
    torch.testing.assert_close(got, want)
    ends = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert torch.equal(compiled(torch.bernoulli)(ends), ends)


CHUNKS = 8
WITH_ERRORS = [op for op in op_db if op.error_inputs_func is not None]


@pytest.mark.sample(8)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_error_inputs(chunk: int) -> None:
    """torch's own samples of wrong inputs; what aot_eager accepts too, or raises as another type, does not count."""
    wrong = [text for op in WITH_ERRORS[chunk::CHUNKS] for text in _accepted(op)]
    assert not wrong, "\n".join(wrong)


def _accepted(op: Any) -> list[str]:
    """Return the wrong inputs of an operator for which the compiled program does not raise what eager raises."""
    found = []
    for k, sample in enumerate(s.sample_input for s in op.error_inputs("cpu")):

        def fn(sample: Any = sample) -> Any:
            return op(sample.input, *sample.args, **sample.kwargs)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = outcome(fn)
            if not isinstance(want, Exception):
                continue
            got = _run(fn, "alt")
            if type(got) is not type(want) and type(_run(fn, "aot_eager")) is type(want):
                found.append(f"{op.name}, input {k}: {got!r} instead of {want!r}")
    return found


def _run(fn: Callable[[], Any], backend: str) -> Any:
    torch._dynamo.reset()
    return outcome(torch.compile(fn, backend=backend))
