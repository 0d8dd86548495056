"""The host program of a GPU: what stays on the CPU, and what the launches wait for. No GPU is needed."""

from __future__ import annotations

import re

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.codegen.host import cuda_program
from altbackend.config.resolve import resolve
from altbackend.ir.loops import Extern, Loop
from test import triton_run
from test.graphs import Scheduled, schedule, trace

T = torch.Tensor
aten = torch.ops.aten


def printed(s: Scheduled) -> str:
    p = s.program
    launched: list[Extern | cuda_program.CudaLaunch] = []
    for n, step in enumerate(triton_run.steps_of(s)):
        if isinstance(step, Extern):
            launched.append(step)
        else:
            kernel, buffers, in_place = step
            p, more = cuda_program.launches(p, kernel, buffers, (), n, in_place)
            launched += more
    return cuda_program.build(p, launched).python


def test_cpu_tensors_beside_a_gpus_are_computed_by_torch_and_brought_to_kernels() -> None:
    """A step counter on the CPU: read by a kernel, counted up in place, and never written by one."""

    def fn(x: T, step: T, i: T) -> tuple[T, ...]:
        n = step + 1
        y = aten.index.Tensor(x, [i]) / n + aten._to_copy(step, device="cuda")
        step.copy_(n)
        return y, aten._to_copy(y.sum(), device="cpu"), i * 2, n * torch.tensor(2.0)

    with FakeTensorMode():
        fakes = torch.empty(8, 8, device="cuda"), torch.empty(()), torch.empty(3, dtype=torch.int64)
        graph = make_fx(fn, decomposition_table=decomp.table())(*fakes)
    s = schedule(graph, resolve(), triton_run.TARGET)
    calls = [str(n.target) for n in s.program.nodes if isinstance(n, Extern)]
    assert calls.count("aten.copy_.default") == 1
    assert {"aten.add.Tensor", "aten.mul.Tensor", "aten._to_copy.default"} <= set(calls)
    written = {s.program.buffers[n.out].device.type for n in s.program.nodes if isinstance(n, Loop)}
    assert written == {"cuda"}
    assert [s.program.buffers[o.buffer].device.type for o in s.program.outputs] == ["cuda", "cpu", "cpu", "cpu"]
    lines = [line.strip() for line in printed(s).splitlines()]
    assert "step_1_there = empty_cuda((), (), torch.float32).copy_(step_1, True)" in lines
    assert "i_1_there = empty_cuda((3,), (1,), torch.int64).copy_(i_1, True)" in lines
    launch = next(k for k, line in enumerate(lines) if line.startswith("kernel0("))
    brought = next(k for k, line in enumerate(lines) if line.startswith("P[") and "_there" in line)
    counted = next(k for k, line in enumerate(lines) if "op_copy_(step_1" in line)
    assert brought < launch < counted


def test_a_kernel_works_in_the_memory_of_a_dying_product() -> None:
    """The product's shape is that of its reader, or another one; a tensor that is read later keeps its memory."""

    def fn(x: T, w: T) -> tuple[T, T]:
        y = (x @ w).relu() * 2
        z = (y @ w).view(64, 8, 16).sigmoid()
        return (z.flatten(1) @ w).tanh(), z

    x, w = torch.randn(64, 128), torch.randn(128, 128)
    (gm,) = trace(fn, x, w)
    text = printed(schedule(gm, resolve(), triton_run.TARGET))
    reused = re.compile(r"^\s+buf\d+ = (buf\d+|view\(buf\d+, .*, 0\))$", re.MULTILINE)
    assert len(reused.findall(text)) == 3, text
    for got, want in zip(triton_run.compiled(fn)(x, w), fn(x, w), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_product_that_is_returned_or_read_again_keeps_its_memory() -> None:
    def fn(x: T, w: T) -> tuple[T, T, T]:
        y, z = x @ w, w @ x
        a = z.relu()
        return y.relu(), y, a @ z

    x, w = torch.randn(128, 128), torch.randn(128, 128)
    (gm,) = trace(fn, x, w)
    text = printed(schedule(gm, resolve(), triton_run.TARGET))
    assert not re.search(r"(buf\d+) = (buf\d+|view\(buf\d+, \(128, 128\), \(128, 1\), 0\))\n", text), text
    for got, want in zip(triton_run.compiled(fn)(x, w), fn(x, w), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
