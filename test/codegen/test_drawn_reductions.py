"""A few of the programs that `test.fuzz_reductions` draws."""

from __future__ import annotations

import random

import pytest
import torch

from test import fuzz_reductions as fuzz


@pytest.mark.parametrize("seed", range(6))
def test_kernels_of_joined_reductions_are_printed(seed: int) -> None:
    assert not fuzz.failure(fuzz.draw(random.Random(seed), small=False), fuzz.printed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_kernels_of_joined_reductions_are_right(seed: int) -> None:
    torch.manual_seed(seed)
    assert not fuzz.failure(fuzz.draw(random.Random(seed), small=True), fuzz.valued)
