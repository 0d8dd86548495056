"""A defect for tests: the lowering of softmax raises."""

import torch

import altbackend.lowering.graph  # noqa: F401 it fills the table
from altbackend.lowering.registry import LOWERINGS


def broken(*args: object, **kwargs: object) -> None:
    raise RuntimeError("injected: no softmax")


LOWERINGS[torch.ops.aten._softmax.default] = broken
