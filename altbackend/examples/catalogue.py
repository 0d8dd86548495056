"""The examples by name, with inputs and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altbackend.examples.gpt import GPT
from altbackend.examples.norm_chain import NormChain
from altbackend.examples.resnet import ResNet
from altbackend.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Example:
    """A model, its inputs and its loss.

    `inference` and `training` give an input batch for each mode; `loss` maps the model's output to a scalar.
    """

    title: str
    model: Callable[[], nn.Module]
    inference: Callable[[], Tensor]
    training: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]


def first_class_loss(logits: Tensor) -> Tensor:
    """Return the cross entropy of [..., classes] against class 0."""
    rows = logits.flatten(0, -2)
    return F.cross_entropy(rows, rows.new_zeros(rows.shape[0], dtype=torch.int64))


def square_loss(output: Tensor) -> Tensor:
    """Return the mean of squares."""
    return output.square().mean()


def _tokens() -> Tensor:
    return torch.randint(0, 2048, (2, 128))


EXAMPLES: Mapping[str, Example] = MappingProxyType(
    {
        "norm-chain": Example(
            "norm chain",
            NormChain,
            lambda: torch.randn(2048, 1024),
            lambda: torch.randn(2048, 1024),
            square_loss,
        ),
        "gpt": Example("GPT decoder, 4 layers", GPT, _tokens, _tokens, first_class_loss),
        "resnet50": Example(
            "ResNet-50",
            ResNet,
            lambda: torch.randn(1, 3, 224, 224),
            lambda: torch.randn(4, 3, 96, 96),
            first_class_loss,
        ),
    }
)
