"""Training steps for `python -m altbackend memory-curve`: each function returns (module, inputs).

python -m altbackend memory-curve benchmarks/memory_cases.py:small_gpt
python -m altbackend memory-curve benchmarks/memory_cases.py:gpt2 --device cuda
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from altbackend.examples.gpt import GPT


def small_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a GPT of 6 layers and 8 sequences of 128 tokens, which a CPU trains in a fraction of a second."""
    torch.manual_seed(0)
    return GPT(layers=6, width=128, heads=4, vocabulary=256, length=128), (torch.randint(0, 256, (8, 128)),)


class LanguageModel(nn.Module):
    """A GPT in bfloat16 with the loss of the next token, for tokens [N, T]."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.gpt(tokens)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the sizes of GPT-2 (124 million parameters) and 8 sequences of 1024 tokens."""
    torch.manual_seed(0)
    gpt = GPT(layers=12, width=768, heads=12, vocabulary=50257, length=1024)
    return LanguageModel(gpt), (torch.randint(0, 50257, (8, 1024)),)
