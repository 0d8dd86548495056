"""Optimizer steps over many small parameters, where launching and looping cost more than the arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.cases.case import Built, Case, Preset

# (number of parameters, side of each square parameter)
PARAMETERS: dict[Preset, tuple[int, int]] = {"tiny": (4, 6), "cpu": (100, 64), "gpu": (300, 256), "serve": (100, 64)}


class OptimizerStep(nn.Module):
    """One step of an optimizer over its own parameters, whose gradients stay fixed."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], count: int, side: int) -> None:
        super().__init__()
        # Parameters as small as the learning rate, so that an error in the update shows in the parameters.
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(side, side) * 0.01) for _ in range(count))
        for weight in self.weights:
            weight.grad = torch.randn(side, side)
        self.optimizer = make(list(self.weights), lr=0.01, foreach=True)
        self.optimizer.step()  # creates the state, which a training loop does once

    def forward(self) -> None:
        self.optimizer.step()


def _case(name: str, optimizer: Any, **options: Any) -> Case:
    def build(preset: Preset) -> Built:
        return OptimizerStep(partial(optimizer, **options), *PARAMETERS[preset]), (), {}

    return Case(name, build, mode="step")


OPTIMIZER_CASES = (
    _case("adam", torch.optim.Adam),
    _case("adamw", torch.optim.AdamW, weight_decay=0.01),
    _case("sgd_momentum", torch.optim.SGD, momentum=0.9),
)
