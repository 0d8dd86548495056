"""Backwards of one compiled forward in every order."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("retained", [(False, True), (True, False)])
def test_a_second_backward_after_one_that_kept_nothing(retained: tuple[bool, ...]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="alt", options={"strict": True, "warm_start": False})
    for again in retained:
        x = torch.randn(3, 4)
        model.zero_grad()
        loss = compiled(x).square().mean()
        for k in range(1 + again):
            loss.backward(retain_graph=again and k == 0)
        got = [p.grad for p in model.parameters()]
        model.zero_grad()
        want = torch.autograd.grad(model(x).square().mean() * (1 + again), list(model.parameters()))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)
