"""A defect for tests: tanh is computed as sigmoid."""

import torch

import altbackend.lowering.graph  # noqa: F401 it fills the table
from altbackend.lowering.registry import LOWERINGS

LOWERINGS[torch.ops.aten.tanh.default] = LOWERINGS[torch.ops.aten.sigmoid.default]
