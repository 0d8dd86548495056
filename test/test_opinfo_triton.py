"""Operators of torch's own database on a GPU's path without a GPU: Triton's interpreter, the printed host program.

A fixed part of the database: every operator is met with `python -m benchmarks.coverage --device triton`, on a GPU with
`--device cuda`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.opinfo import BROKEN, Case, Settings, cases_of, check, database

pytestmark = pytest.mark.sample(6)

# whatever was once wrong or had no kernel, and one or two of each family
OPERATORS = """
add as_strided_scatter cat clamp_max cumulative_trapezoid digamma fft.rfft fliplr gcd __getitem__
grid_sampler_2d index_fill index_put index_reduce.prod item lerp logcumsumexp masked.cumsum masked.prod
masked_select mm narrow nn.functional.avg_pool2d nn.functional.cross_entropy nn.functional.gelu nn.functional.glu
nn.functional.interpolate.bilinear nn.functional.layer_norm nn.functional.max_pool2d nn.functional.pad.reflect
nonzero pow remainder repeat_interleave scatter_add scatter_reduce.amax sgn softmax sort special.i0e stft sum
tensor_split unique var where
"""
ILL_CONDITIONED = Case("logcumsumexp", "float32", "backward")  # differences of numbers near 10^4 under an exponential
MACHINE_CODE = ("nn.functional.layer_norm", "nn.functional.max_pool2d", "scatter_add", "var")
SETTINGS = Settings("triton", samples=2)


def chosen() -> list[Case]:
    found = []
    for name in OPERATORS.split():
        dtypes = ["float32", *(["int64"] if name in ("gcd", "add", "sum", "sort") else [])]
        dtypes += ["bfloat16"] if name in ("nn.functional.gelu", "softmax", "pow") else []
        for dtype in dtypes:
            for op in database()[name]:
                found += cases_of(op, dtype, "cpu", ["forward", "backward"])
    return [c for c in dict.fromkeys(found) if c != ILL_CONDITIONED]


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", chosen(), ids=lambda c: f"{c.op}-{c.dtype}-{c.direction}")
def test_operator(case: Case) -> None:
    found = check(case, replace(SETTINGS, cubin=case.op in MACHINE_CODE))
    assert found.status not in BROKEN, found.detail
