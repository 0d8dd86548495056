"""Whole powers are products: special values as in eager, errors of a few units in the last place."""

from __future__ import annotations

import pytest
import torch

from test.compare import compiled

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1e38, -1e38, 1e-13, 3e-13]


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("p", [4, 5, 7, 8, 9, -3, -4, -7, -8, 4.0, 2.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_powers(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(2000) * 3]).to(dtype)
    got, want = compiled(lambda x: x**p)(x), x**p
    ulps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=ulps, atol=torch.finfo(dtype).tiny, equal_nan=True)
    assert torch.equal(torch.signbit(got[:4]), torch.signbit(want[:4]))


@pytest.mark.parametrize("p", [4, -3])
def test_eager_numerics_take_the_function(p: int) -> None:
    x = torch.randn(5000)
    assert torch.equal(compiled(lambda x: x**p, numerics="eager")(x), x**p)
