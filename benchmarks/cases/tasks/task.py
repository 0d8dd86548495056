"""The form of a task: a function of tensors, and inputs that grow with the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.case import Built, Case, Preset, mean_square

Inputs = tuple[Tensor, ...]
GPU_SCALE = 8


class Task(nn.Module):
    """`function(*inputs)` as a module without parameters: weights are inputs as well."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*inputs)


def task(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Callable[[int], Inputs],
    trains: bool = False,
    loss: Callable[[Any], Tensor] = mean_square,
) -> Case:
    """Return a case called as the function is, over `inputs(scale)`; training takes the inputs' gradients.

    The scale is 1 for a CPU and 8 for a GPU. Without `trains` the case runs in inference only.
    """

    def build(preset: Preset) -> Built:
        return Task(function), inputs(GPU_SCALE if preset in ("gpu", "serve") else 1), {}

    name = function.__name__.replace("_", " ")
    return Case(name, build, loss, None if trains else "inference", input_gradients=True)


def normal(*shape: int) -> Tensor:
    """Return normal random numbers."""
    return torch.randn(*shape)


def indices(count: int, *shape: int) -> Tensor:
    """Return random integers below `count`."""
    return torch.randint(count, shape)


def flags(share: float, *shape: int) -> Tensor:
    """Return random booleans, of which about `share` are true."""
    return torch.rand(*shape) < share
