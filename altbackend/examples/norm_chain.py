"""Normalisations and pointwise work over the same rows: all of it can be one kernel per direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NormChain(nn.Module):
    """`repeats` times x + softmax(gelu(layer_norm(x))) over the rows of [N, width]."""

    def __init__(self, width: int = 1024, repeats: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + torch.softmax(F.gelu(norm(x)), dim=-1)
        return x
