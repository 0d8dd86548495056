"""Kernels that differ in sizes alone are one function, and compute what each computes by itself."""

from __future__ import annotations

import pytest
import torch

from altbackend.codegen.cpp import shared_kernels
from altbackend.codegen.cpp.shared_kernels import share
from test.compare import check


def _kernel(rows: int, columns: int, body: str = "p1[{0} * o + i0] = p0[{0} * o + i0];", simd: str = "") -> str:
    return f"""static void @(const float* p0, float* p1, const int max_threads) {{
    const alt::Share range = alt::share({rows}, thread, omp_get_num_threads());
    for (int64_t o = begin; o < end; ++o) {{
      #pragma omp simd{simd}
      for (int64_t i0 = 0; i0 < {columns}; ++i0) {{
        {body.format(columns)}
      }}
    }}
}}
"""


def test_sizes_that_differ_are_arguments() -> None:
    texts = [_kernel(784, 72), _kernel(196, 480), _kernel(784, 480)]
    functions = [share(texts)[text] for text in texts]
    assert len({f.text for f in functions}) == 1
    assert [f.sizes for f in functions] == [("784", "72"), ("196", "480"), ("784", "480")]
    assert "const int64_t size0, const int64_t size1, const int max_threads" in functions[0].text
    assert "alt::share(size0, thread," in functions[0].text
    assert "i0 < size1; ++i0" in functions[0].text
    assert "p1[size1 * o + i0] = p0[size1 * o + i0];" in functions[0].text


def test_sizes_in_common_stay_constants() -> None:
    texts = [_kernel(784, 72), _kernel(196, 72)]
    function = share(texts)[texts[0]]
    assert function.sizes == ("784",)
    assert "i0 < 72; ++i0" in function.text


def test_lone_kernels_stay_as_they_are() -> None:
    other = _kernel(784, 72, "p1[{0} * o + i0] = -p0[{0} * o + i0];")
    for text, function in share([_kernel(784, 96), other]).items():
        assert function == shared_kernels.Shared(text)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            _kernel(9, 72, "p1[o] += p0[i0];", " reduction(+: t0)"),
            _kernel(7, 72, "p1[o] += p0[i0];", " reduction(+: t0)"),
        ),
        (_kernel(9, 16), _kernel(7, 16)),
        (_kernel(9, 72, "p1[i0] = p0[3 * i0];"), _kernel(7, 72, "p1[i0] = p0[4 * i0];")),
        (_kernel(9, 72, "p1[i0] = p0[i0 % 3];"), _kernel(7, 72, "p1[i0] = p0[i0 % 5];")),
        (_kernel(9, 72, "a0_pitch = (72 + 15) / 8 * 8;"), _kernel(7, 72, "a0_pitch = (72 + 15) / 8 * 8;")),
    ],
    ids=["total", "short", "step", "divisor", "accumulators"],
)
def test_what_a_constant_speeds_up_or_decides_is_not_shared(first: str, second: str) -> None:
    assert {f.sizes for f in share([first, second]).values()} == {()}


def test_shared_functions_compute_what_eager_does() -> None:
    def gates(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        for image in (x, y, z):
            mean = image.mean(0)
            parts += [mean, torch.mm(image, image.T), image * torch.nn.functional.hardsigmoid(mean @ mean * mean)]
        return parts

    check(gates, torch.randn(49, 320), torch.randn(37, 480), torch.randn(31, 961))
