"""A softmax with cross-entropy saves its logits and numbers of each row, never probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

T = torch.Tensor
ROWS, CLASSES = 24, 70
LOSSES: dict[str, Callable[[T, T], T]] = {
    "cross entropy": F.cross_entropy,
    "log-softmax and nll": lambda x, y: F.nll_loss(torch.log_softmax(x, -1), y),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "ignored and weighted": lambda x, y: F.cross_entropy(x, y, torch.linspace(0.5, 1.5, CLASSES), ignore_index=3),
    "in float32": lambda x, y: F.cross_entropy(x.to(torch.bfloat16).float(), y),
}


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("from_product", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_only_logits_have_a_number_for_every_class(name: str, from_product: bool) -> None:
    torch.manual_seed(0)
    loss, y = LOSSES[name], torch.randint(0, CLASSES, (ROWS,))

    def fn(x: T, w: T, y: T) -> T:
        return loss(x @ w if from_product else x * w[0, 0], y)

    x = torch.randn(ROWS, 16 if from_product else CLASSES, requires_grad=True)
    w = torch.randn(16, CLASSES, requires_grad=True)
    result = torch.compile(fn, backend="alt", options={"strict": True})(x, w, y)
    node: Any = result.grad_fn
    large = [t for t in node.saved_tensors if t.shape == (ROWS, CLASSES)]
    logits = (x @ w if from_product else x).detach()
    assert len(large) == 1
    rounding = 0.05 if name == "in float32" else 1e-5
    torch.testing.assert_close(large[0].detach().float(), logits, atol=rounding, rtol=rounding)
    want = torch.autograd.grad(fn(x, w, y), (x, w))
    for mine, eager in zip(torch.autograd.grad(result, (x, w)), want, strict=True):
        torch.testing.assert_close(mine, eager, atol=1e-2 if name == "in float32" else 1e-5, rtol=1e-3)
