"""Training steps for `python -m altbackend memory-curve`: each function returns (module, inputs).

python -m altbackend memory-curve benchmarks/memory_cases.py:small_gpt
python -m altbackend memory-curve benchmarks/memory_cases.py:gpt2 --device cuda
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from altbackend.examples.gpt import GPT


def small_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a GPT of 6 layers and 8 sequences of 128 tokens, which a CPU trains in a fraction of a second."""
    torch.manual_seed(0)
    return GPT(layers=6, width=128, heads=4, vocabulary=256, length=128), (torch.randint(0, 256, (8, 128)),)


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the sizes of GPT-2 (124 million parameters) in bfloat16 and 8 sequences of 1024 tokens."""
    torch.manual_seed(0)
    model = GPT(layers=12, width=768, heads=12, vocabulary=50257, length=1024)
    return model.bfloat16(), (torch.randint(0, 50257, (8, 1024)),)
