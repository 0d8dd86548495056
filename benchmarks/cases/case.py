"""The type of a benchmark case: a named module with inputs, and how to train it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Preset = Literal["tiny", "cpu", "gpu", "serve"]
Mode = Literal["inference", "training", "step"]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def mean_square(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Sum over the outputs of mean(output^2), as a float32 scalar."""
    outputs = (output,) if isinstance(output, Tensor) else output
    losses = [tensor.float().square().mean() for tensor in outputs]
    return torch.stack(losses).sum()


def class_loss(logits: Tensor) -> Tensor:
    """Cross entropy of logits [..., classes] against fixed labels (i mod classes for row i), in float32."""
    rows = logits.flatten(0, -2).float()
    labels = torch.arange(rows.shape[0], device=rows.device) % rows.shape[1]
    return F.cross_entropy(rows, labels)


@dataclass(frozen=True)
class Case:
    """One case of a suite.

    build: preset -> (module, args, kwargs), on torch's current default device, in float32, with random weights and
        inputs drawn from the global generator; the same seed gives the same case.
    loss: output of the module -> float32 scalar, used when training.
    mode: the only mode in which the case makes sense, or None where inference and training both do.
        A "step" changes the module's own parameters and takes no inputs (an optimizer step).
    autocast: in training, low precision means autocast over float32 parameters, else low-precision tensors.
    input_gradients: training also takes the gradients of the floating-point inputs.
    requires: optional packages that `build` imports.
    """

    name: str
    build: Callable[[Preset], Built]
    loss: Callable[[Any], Tensor] = mean_square
    mode: Mode | None = None
    autocast: bool = False
    input_gradients: bool = False
    requires: tuple[str, ...] = ()
