"""Fusion rules see complete groups, on both devices and where kernels merge; kernels fit the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.schedule.device import H200, Cpu, ScheduleContext
from altbackend.schedule.fusion import fuse
from altbackend.schedule.fusion.group import Fusion, Group, open_group
from altbackend.schedule.fusion.rules import common
from altbackend.schedule.fusion.rules.rule import Rule
from altbackend.schedule.loop_mapping import Refusal
from altbackend.schedule.reachability import Reachability
from test import triton_run
from test.graphs import Scheduled, schedule, trace

T = torch.Tensor
MOST_BUFFERS = 4
CPU, GPU = ScheduleContext(Cpu(2)), ScheduleContext(H200)


def few_buffers(fusion: Fusion, group: Group) -> Refusal | None:
    if len(group.reads) > MOST_BUFFERS:
        return Refusal(f"the kernel would read more than {MOST_BUFFERS} buffers")
    return None


def norm(x: T, w: T, b: T, y: T, z: T) -> T:
    return F.layer_norm(F.gelu(x + y) * z, (64,), w, b).sin()


def training(x: T, w: T, b: T, y: T, z: T) -> T:
    return norm(x, w, b, y, z).square().sum()


def inputs(grad: bool) -> list[T]:
    return [torch.randn(s).requires_grad_(grad) for s in ((32, 64), (64,), (64,), (32, 64), (32, 64))]


def scheduled(fn: Callable[..., Any], ctx: ScheduleContext) -> list[Scheduled]:
    return [schedule(gm, ctx=ctx) for gm in trace(fn, *inputs(fn is training))]


def reads_of(s: Scheduled) -> list[int]:
    return [len(g.reads) for g in s.groups if g.extern is None and len(g.members) > 1]


@pytest.mark.parametrize("ctx", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("fn", [norm, training])
def test_a_rule_in_the_table_limits_every_kernel(
    fn: Callable[..., Any], ctx: ScheduleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = scheduled(fn, ctx)
    assert max(n for s in before for n in reads_of(s)) > MOST_BUFFERS
    rule = Rule("few buffers", few_buffers)
    monkeypatch.setattr(common, "COMMON", replace(common.COMMON, nodes=(*common.COMMON.nodes, rule)))
    limited = scheduled(fn, ctx)
    assert all(n <= MOST_BUFFERS for s in limited for n in reads_of(s))
    assert sum(s.kernels for s in limited) > sum(s.kernels for s in before)
    reasons = {reason for s in limited for _, _, verdict, reason in s.decisions if verdict == "not fused"}
    assert f"the kernel would read more than {MOST_BUFFERS} buffers" in reasons


def merged_kernels() -> tuple[list[Group], list[str]]:
    """Merge the kernels of a program whose nodes are kernels of their own; also return the refusals."""
    (gm,) = trace(norm, *inputs(False))
    s = schedule(gm, ctx=GPU)
    reasons: list[str] = []
    fusion = Fusion(s.program, s.deps, resolve(), H200, lambda *decision: reasons.append(decision[-1]))
    reachability, groups = Reachability(), []
    for k, node in enumerate(s.program.nodes):
        groups.append(open_group(k, k, node, H200).with_needs(s.deps.before[k]))
        reachability.add(k, s.deps.before[k])
    return fuse.merge(fusion, groups, reachability), reasons


def test_a_rule_in_the_table_limits_merged_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel merges with one that it reads from only if no rule refuses all of the merged kernel."""
    (one,), _ = merged_kernels()
    assert len(one.reads) > MOST_BUFFERS
    assert len(one.members) == len(one.nodes) == len(one.mapped) > 1
    rule = Rule("few buffers", few_buffers)
    monkeypatch.setattr(common, "COMMON", replace(common.COMMON, nodes=(*common.COMMON.nodes, rule)))
    limited, reasons = merged_kernels()
    assert len(limited) > 1
    assert all(len(g.reads) <= MOST_BUFFERS for g in limited if len(g.members) > 1)
    assert f"the kernel would read more than {MOST_BUFFERS} buffers" in reasons


def programs(fn: Callable[..., Any], x: T, ctx: ScheduleContext) -> list[Any]:
    (gm,) = trace(fn, x)
    kernels = [step[0] for step in triton_run.steps_of(schedule(gm, ctx=ctx), ctx)]
    return [(k.grid, k.num_warps, sorted(k.constexprs.items())) for k in kernels]


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [(lambda x: x.sum(0), (2000, 100)), (lambda x: x.sum(), (40_000, 100)), (lambda x: x * 2, (2000, 100))],
    ids=["columns", "all", "flat"],
)
def test_another_number_of_multiprocessors_gives_another_schedule(
    fn: Callable[..., Any], sizes: tuple[int, int]
) -> None:
    x = torch.empty(sizes)
    small = ScheduleContext(replace(H200, sms=16))
    assert programs(fn, x, GPU) != programs(fn, x, small)


def test_fewer_registers_shorten_the_rows_of_a_program() -> None:
    x = torch.empty(64, 12000)
    small = ScheduleContext(replace(H200, registers=H200.registers // 2))
    assert programs(lambda x: torch.softmax(x, -1), x, GPU) != programs(lambda x: torch.softmax(x, -1), x, small)


def test_a_cpu_stores_no_more_in_scratch_than_its_cache_holds() -> None:
    def fn(x: T) -> T:
        y = x.sin()
        return y.cumsum(1) + y.flip(1)

    (gm,) = trace(fn, torch.empty(4, 100_000))
    large, small = (schedule(gm, ctx=ScheduleContext(Cpu(2, l2=n))) for n in (1 << 20, 1 << 15))
    assert large.kernels < small.kernels


def window_sums(x: T, w: T) -> tuple[T, T]:
    y = F.conv2d(x, w, padding=1, groups=32)
    return y, y.sum((0, 2, 3))


def test_one_program_does_not_read_the_windows_of_all_points() -> None:
    """A convolution of 486 channels-last points runs on the whole device, apart from the totals of its channels."""
    x = torch.randn(6, 64, 9, 9).to(memory_format=torch.channels_last)
    (gm,) = trace(window_sums, x, torch.randn(64, 2, 3, 3))
    turning = 1  # a kernel that transposes the weight
    assert schedule(gm, ctx=GPU).kernels == turning + 2


def test_windows_share_no_kernel_with_a_copy_into_another_layout() -> None:
    def fn(x: T, w: T) -> tuple[T, T]:
        return F.conv2d(x, w, padding=1, groups=16), x.contiguous(memory_format=torch.channels_last)

    for size, kernels in ((128, 2), (12, 1)):  # a launch takes longer than small copies in square tiles
        (gm,) = trace(fn, torch.empty(16, 16, size, size), torch.empty(16, 1, 3, 3), computes=False)
        assert schedule(gm, ctx=GPU).kernels == kernels
