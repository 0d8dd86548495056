"""Cheap forms of functions err by less than an eighth of float16's rounding: against float64, on a dense range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from altbackend.codegen.triton import print_triton
from altbackend.ir.ops import OPS
from test import triton_run, triton_worker

BLOCK = 1 << 15
LIMIT = 2.0**-15
FAST = [name for name, row in OPS.items() if row.triton_fast]
# those whose result is positive are given what they are for; a sum's error counts by its largest term, here 1
RANGES = {"exp": (-80.0, 80.0), "sqrt": (1e-30, 1e30), "rsqrt": (1e-30, 1e30), "log": (1e-30, 1e30)}
SUMS = ("one_plus_erf",)


def operands(name: str) -> list[torch.Tensor]:
    low, high = RANGES.get(name, (-12.0, 12.0))
    x = torch.linspace(low, high, BLOCK)
    if low > 0:
        x = torch.logspace(-30, 30, BLOCK)
    small = torch.logspace(-30, 0, BLOCK // 4)
    x[: len(small)] = small if low > 0 else small * torch.tensor([1.0, -1.0]).repeat(len(small) // 2)
    divisor = torch.logspace(-3, 3, BLOCK) * torch.tensor([1.0, -1.0]).repeat(BLOCK // 2)
    return [x, divisor[torch.randperm(BLOCK)]][: OPS[name].arity]


def source(name: str) -> str:
    loads = [f"tl.load(in{k} + i)" for k in range(OPS[name].arity)]
    body = f"    tl.store(out + i, {(OPS[name].triton_fast or '').format(*loads)})"
    arguments = ", ".join(f"in{k}" for k in range(OPS[name].arity))
    head = f"@triton.jit\ndef kernel({arguments}, out, BLOCK: tl.constexpr):\n    i = tl.arange(0, BLOCK)\n"
    return "\n\n\n".join([print_triton._HEADER, *print_triton._helpers(body), head + body]) + "\n"


@pytest.mark.parametrize("name", FAST)
def test_error_is_hidden_by_16_bits(name: str) -> None:
    xs = operands(name)
    packed = [triton_worker.pack(x) for x in (*xs, torch.zeros(BLOCK))]
    job: tuple[Any, ...] = (source(name), packed, [], {"BLOCK": BLOCK}, 1)
    got = triton_worker.unpack(triton_run._worker(True).submit(triton_worker.launch, *job).result(100)[-1]).double()
    want: Any = OPS[name].ref(*(x.double() for x in xs))
    size = want.abs().clamp(min=1.0 if name in SUMS else 2.0**-126)
    assert ((got - want).abs() / size).max() < LIMIT


def test_signs_and_limits_of_tanh() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -30.0, 0.3]).repeat(BLOCK // 8)
    packed = [triton_worker.pack(t) for t in (x, torch.zeros(BLOCK))]
    job: tuple[Any, ...] = (source("tanh"), packed, [], {"BLOCK": BLOCK}, 1)
    got = triton_worker.unpack(triton_run._worker(True).submit(triton_worker.launch, *job).result(100)[-1])[:8]
    torch.testing.assert_close(got, x[:8].tanh(), equal_nan=True, rtol=1e-5, atol=0)
    assert got[:2].signbit().tolist() == [False, True]
