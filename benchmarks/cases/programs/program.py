"""The form of a program: a function over named layers, and the sizes it runs at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.case import Built, Case, Mode, Preset

Made = tuple[nn.Module, tuple[Any, ...]]


class Program(nn.Module):
    """`function(self, *inputs)`, with layers and parameters as attributes."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def weight(*shape: int) -> nn.Parameter:
    """Return a parameter of normal random numbers."""
    return nn.Parameter(torch.randn(*shape))


def case(
    name: str, gpu: tuple[int, ...], cpu: tuple[int, ...], make: Callable[..., Made], mode: Mode | None = None
) -> Case:
    """Return a case whose module and inputs are `make(*sizes)`, with the sizes of a GPU or of a CPU."""

    def build(preset: Preset) -> Built:
        module, inputs = make(*(gpu if preset in ("gpu", "serve") else cpu))
        return module, inputs, {}

    return Case(name, build, mode=mode, input_gradients=True)


def of(function: Callable[..., Tensor], *shapes: tuple[int, ...], **parts: Any) -> Made:
    """Return a program of `function(layers, *inputs)` over normal random inputs of the shapes."""
    return Program(function, **parts), tuple(torch.randn(*shape) for shape in shapes)
