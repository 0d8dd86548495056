"""Counter-based random numbers: Philox4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

These functions define the numbers; the C++ header and the Triton functions return the same bits. The arithmetic is
int64 and wraps. The key is a 64-bit seed and the counter is the 64-bit position of an element, so a number depends on
nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def words(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four independent 32-bit words, as int64 in [0, 2^32); `seed` and `counter` are int64 and broadcast."""
    x, y = counter & _WORD, (counter >> 32) & _WORD
    z = w = torch.zeros_like(x)
    key_x, key_y = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        a, b = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]  # a product of two 32-bit words fits in the low 64 bits
        x, y, z, w = ((b >> 32) & _WORD) ^ y ^ key_x, b & _WORD, ((a >> 32) & _WORD) ^ w ^ key_y, a & _WORD
        key_x, key_y = (key_x + _KEY_STEPS[0]) & _WORD, (key_y + _KEY_STEPS[1]) & _WORD
    return x, y, z, w


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Return float32 in [0, 1) with 24 random bits.

    Four consecutive counters take the four words of one block, so a kernel can compute the block once for all four.
    """
    four = torch.stack(torch.broadcast_tensors(*words(seed, counter >> 2)), -1)  # type: ignore[no-untyped-call]
    return _fraction(four.gather(-1, (counter & 3).expand(four.shape[:-1]).unsqueeze(-1)).squeeze(-1))


def radius(seed: Tensor, counter: Tensor) -> Tensor:
    """Return float32 in [0, 1) from the first word of the counter's block: the radius of Box-Muller."""
    return _fraction(words(seed, counter)[0])


def turn(seed: Tensor, counter: Tensor) -> Tensor:
    """Return float32 in [0, 1) from the second word of the same block, independent of `radius`: Box-Muller's angle."""
    return _fraction(words(seed, counter)[1])


def _fraction(word: Tensor) -> Tensor:
    return (word >> 8).to(torch.float32) * 2.0**-24


def bits(seed: Tensor, counter: Tensor) -> Tensor:
    """Return int64 with 64 random bits: the first word is the lower half, the second the upper."""
    x, y, _, _ = words(seed, counter)
    return x | (y << 32)
