"""Common blocks become the expected number of kernels; every pair that is not fused has a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.ir import expr as ex
from altbackend.ir.loops import Extern, Pointwise, Program, reads, show_program
from altbackend.schedule.device import H200, Cpu, ScheduleContext
from altbackend.schedule.fusion import fuse
from altbackend.schedule.fusion.group import Group
from altbackend.schedule.fusion.order import order, verified
from altbackend.schedule.fusion.rules import gpu as gpu_rules
from altbackend.schedule.kernel import Kernel, show_kernel
from altbackend.schedule.loop_mapping import Kind
from altbackend.schedule.rows import rows_are_neighbours
from test.graphs import Scheduled, schedule, trace

B, N = 32, 64


def r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def norm_chain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + torch.softmax(F.gelu(F.layer_norm(x, (N,), w, b)), -1)
    return x


def adam(*ts: torch.Tensor) -> list[torch.Tensor]:
    """One step over three tensors: parameter, gradient, first and second moment of each."""
    out = []
    for p, g, m, v in (ts[0:4], ts[4:8], ts[8:12]):
        m = m.lerp(g, 0.1)
        v = v * 0.999 + g * g * 0.001
        out += [p - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v]
    return out


Make = Callable[[], list[torch.Tensor]]
# name: (function, inputs, kernels, library calls)
FORWARD: dict[str, tuple[Callable[..., Any], Make, int, int]] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (N,), w, b), lambda: [r(B, N), r(N), r(N)], 1, 0),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: [r(B, N)], 1, 0),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), lambda: [r(B, N)], 1, 0),
    "norm chain": (norm_chain, lambda: [r(B, N), r(N), r(N)], 1, 0),
    "gelu, bias, residual": (lambda x, b, y: F.gelu(x + b) + y, lambda: [r(B, N), r(N), r(B, N)], 1, 0),
    "cross entropy": (F.cross_entropy, lambda: [r(B, N), torch.randint(0, N, (B,))], 2, 0),  # rows, then the mean
    "adam": (adam, lambda: [r(B, N).abs() for _ in range(12)], 3, 0),
    "two reductions of the same rows": (lambda x: [x.sum(1), x.amax(1)], lambda: [r(B, N)], 1, 0),
    "prologue and epilogue": (lambda x: (x.exp() * 2).sum(1).sqrt() + 1, lambda: [r(B, N)], 1, 0),
    "column sum": (lambda x: x.sum(0), lambda: [r(B, N)], 1, 0),
    "columns and rows": (lambda x: [x.sum(0), x.sum(1)], lambda: [r(B, N)], 1, 0),
    "transpose": (lambda x: x.t().contiguous() + 1, lambda: [r(B, N)], 1, 0),
    "variance and mean": (lambda x: torch.var_mean(x, 1), lambda: [r(B, N)], 1, 0),
    "group norm": (lambda x: F.group_norm(x, 2), lambda: [r(4, 8, 5, 5)], 1, 0),
    "linear, gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: [r(B, N), r(N, N), r(N)], 1, 1),
    "rows that depend on columns": (lambda x: x - x.sum(0), lambda: [r(B, N)], 2, 0),
}
# name: (function, inputs, kernels of the backward)
BACKWARD: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (N,), w, b), lambda: [r(B, N), r(N), r(N)], 1),
    "rms norm": (lambda x, w: F.rms_norm(x, (N,), w), lambda: [r(B, N), r(N)], 1),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: [r(B, N)], 1),
    "cross entropy": (
        lambda x: F.cross_entropy(x, torch.zeros(B, dtype=torch.int64)),
        lambda: [r(B, N)],
        1,
    ),
    "gelu": (F.gelu, lambda: [r(B, N)], 1),
}


@pytest.mark.parametrize("name", list(FORWARD))
def test_kernels_of_a_block(name: str) -> None:
    fn, make, kernels, calls = FORWARD[name]
    (gm,) = trace(fn, *make())
    got = schedule(gm)
    assert (got.kernels, got.calls) == (kernels, calls), describe(got)


@pytest.mark.parametrize("name", list(BACKWARD))
def test_kernels_of_a_backward(name: str) -> None:
    fn, make, kernels = BACKWARD[name]
    graphs = trace(fn, *(x.requires_grad_() for x in make()))
    got = schedule(graphs[-1])
    assert (got.kernels, got.calls) == (kernels, 0), describe(got)


def describe(s: Scheduled) -> str:
    kernels = "\n".join(show_kernel(k) for k in s.steps if isinstance(k, Kernel))
    no = "\n".join(f"{subject}: {reason}" for _, subject, verdict, reason in s.decisions if verdict == "not fused")
    return f"{show_program(s.program)}\n{kernels}\n{no}"


ALL = {name: (fn, make) for name, (fn, make, _, _) in FORWARD.items()}


@pytest.mark.parametrize("name", list(ALL))
def test_every_pair_that_shares_data_is_fused_or_has_a_reason(name: str) -> None:
    """Every pair of kernels that share a buffer has a recorded refusal."""
    fn, make = ALL[name]
    (gm,) = trace(fn, *make())
    s = schedule(gm)
    stated = {subject: reason for kind, subject, verdict, reason in s.decisions if verdict == "not fused"}
    assert all(reason for reason in stated.values())
    group_of = {k: g.number for g in s.groups for k in g.members}
    first = {g.number: min(g.members) for g in s.groups}
    for k, node in enumerate(s.program.nodes):
        if isinstance(node, Extern) or first[group_of[k]] != k:
            continue  # it joined a kernel
        for d in s.deps.before[k]:
            writer = s.program.nodes[d]
            if not isinstance(writer, Extern) and set(reads(node)) & {writer.out}:
                opened = s.program.nodes[first[group_of[d]]]
                subject = f"{node.out} with kernel of {opened.out}"
                assert subject in stated, f"{subject} has no reason"


def test_order_respects_dependencies() -> None:
    fn, make = ALL["norm chain"]
    (gm,) = trace(lambda *a: (norm_chain(*a) @ a[0].t()).sum(0) + fn(*a).sum(), *make())
    s = schedule(gm)
    done: set[int] = set()
    for g in s.groups:
        needs = {d for k in g.members for d in s.deps.before[k]} - set(g.members)
        assert needs <= done
        done |= set(g.members)
    assert done == set(range(len(s.program.nodes)))


def test_a_kernel_that_also_writes_a_late_result_runs_where_it_begins() -> None:
    def group(number: int, members: tuple[int, ...], *needs: int) -> Group:
        return Group(number, 1, members, (), needs=frozenset(needs))

    # 0 also holds a result of the graph (node 9); 2 and 4 need nothing, and would keep what they write for long
    groups = [group(0, (0, 9)), group(1, (1,), 0), group(2, (5,)), group(3, (2,), 1), group(4, (8,))]
    assert [g.number for g in order(groups)] == [0, 1, 3, 2, 4]
    # what waits for a late node runs as soon as that is done, before later beginnings
    groups = [group(0, (0, 6), 1), group(1, (4,)), group(2, (5,)), group(3, (1,))]
    assert [g.number for g in order(groups)] == [3, 1, 0, 2]


def test_totals_do_not_leave_behind_what_they_read() -> None:
    """Totals of columns read points of their kernel, which read the rows' totals: no kernel can hold both totals."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        rows = (x.reshape(9, 2, 48).permute(1, 0, 2) * y.view(2, 9, 48)).sum(2)
        z = (x.view(2, 9, 48) - rows.unsqueeze(2)) * y.view(2, 9, 48)
        return [z, z.sum((0, 1))]

    (gm,) = trace(fn, r(18, 48), r(18, 48))
    s = schedule(gm, ctx=ScheduleContext(H200))
    assert s.groups  # `fuse` verifies the order


def test_a_kernel_that_reads_what_a_later_one_writes_is_an_error() -> None:
    (gm,) = trace(lambda x: (x.sum(1) + 1).cumsum(0), r(40, 50))
    s = schedule(gm)
    assert verified(list(s.groups), s.deps)
    with pytest.raises(AssertionError, match="would run before"):
        verified(list(reversed(s.groups)), s.deps)


def test_options_limit_fusion() -> None:
    fn, make = ALL["norm chain"]
    (gm,) = trace(fn, *make())
    loops = sum(not isinstance(n, Extern) for n in schedule(gm).program.nodes)
    assert schedule(gm, resolve(None, {"fuse": False})).kernels == loops
    few = schedule(gm, resolve(None, {"max_fused_nodes": 4}))
    assert max(len(g.members) for g in few.groups) == 4
    assert any("max_fused_nodes=4" in reason for _, _, _, reason in few.decisions)


def test_what_stays_on_chip_is_not_stored() -> None:
    """A norm chain keeps every intermediate in the row: inputs are read and the result is written, nothing else."""
    fn, make = ALL["norm chain"]
    (gm,) = trace(fn, *make())
    s = schedule(gm)
    (k,) = s.steps
    assert isinstance(k, Kernel)
    (out,) = s.program.outputs
    assert k.stored == {out.buffer}


def test_a_cycle_through_a_library_call_is_refused() -> None:
    """x -> exp -> matmul -> add(exp): the second use cannot join the first one's kernel."""
    (gm,) = trace(lambda x: (x.exp() @ x) + x.exp().sum(1), r(N, N))
    s = schedule(gm)
    assert s.calls == 1
    kinds = [isinstance(step, Extern) for step in s.steps]
    assert kinds.index(True) not in (0, len(kinds) - 1)


def test_disjoint_writers_of_a_concatenation_are_not_ordered() -> None:
    (gm,) = trace(lambda x: torch.cat([x * 2, x.exp()], 1), r(4, 6))
    s = schedule(gm)
    writers = [k for k, n in enumerate(s.program.nodes) if isinstance(n, Pointwise)]
    assert len(writers) == 2
    assert all(not s.deps.before[k] for k in writers)


def test_the_program_is_left_as_it_was() -> None:
    (gm,) = trace(norm_chain, r(B, N), r(N), r(N))
    first, second = schedule(gm), schedule(gm)
    assert isinstance(first.program, Program)
    assert show_program(first.program) == show_program(second.program)
    assert [g.members for g in first.groups] == [g.members for g in second.groups]


def test_on_a_gpu_the_gradient_of_computed_labels_is_computed_again() -> None:
    """Work on numbers of a row (the label, whether it is ignored) does not count as work of its elements."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.float(), torch.arange(B) % 20)

    graphs = trace(loss, r(B, N).bfloat16().requires_grad_())
    s = schedule(graphs[-1], ctx=ScheduleContext(H200))
    large = {b.name for b in s.program.buffers.values() if b.kind != "input" and b.numel == B * N}
    assert large == {s.program.outputs[0].buffer}, describe(s)


def test_a_kernel_of_a_gpu_has_no_more_operators_than_triton_builds_in_time() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for k in range(500):
            x = x * 1.01 + float(k)
        return x

    (gm,) = trace(fn, r(64))
    gpu, cpu = (schedule(gm, ctx=ScheduleContext(d)) for d in (H200, Cpu(1)))
    groups = fuse.fuse(gpu.program, gpu.deps, resolve(), H200, lambda *a: None)
    assert sum(g.operators for g in groups) >= 1000
    assert max(g.operators for g in groups) <= gpu_rules.MOST_OPERATORS
    assert len(cpu.steps) < len(gpu.steps) < 10


def test_means_over_points_and_over_channels_share_the_rows_of_images() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean((2, 3)), x.amax(1)

    def rows(images: int) -> set[object]:
        (gm,) = trace(f, r(images, 8, 24, 24))
        return {g.rows for g in schedule(gm).groups}

    assert rows(32) == {32}
    assert rows(4) == {32}  # four images are too few rows: parts of images


def test_totals_of_long_columns_are_a_kernel_of_their_own() -> None:
    """A persistent program would take one column at a time, each element from a sector of its own."""

    def fn(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        y = g - x.exp() * g.sum(1, keepdim=True)
        return [y, y.sum((0, 2))]

    inputs = torch.empty(112, 1744, 64), torch.empty(112, 1744, 64)
    kernels = [k for k in schedule(trace(fn, *inputs)[0], ctx=ScheduleContext(H200)).steps if isinstance(k, Kernel)]
    for k in kernels:
        assert not ({q.kind for q in k.nodes} >= {Kind.CROSS_ROW, Kind.POINT} and rows_are_neighbours(k.nodes))


def test_points_are_not_stored_in_runs_of_two_channels() -> None:
    """Rows of sums over a part of the points would cut the channels of the image in two."""

    def fn(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        y = g * x.relu()
        return [y.sum((0, 2, 3)), y.contiguous(memory_format=torch.channels_last)]

    x = torch.empty(61, 192, 14, 196).to(memory_format=torch.channels_last)
    scheduled = schedule(trace(fn, x, torch.empty(1, 192, 14, 196))[0], ctx=ScheduleContext(H200))
    for k in (k for k in scheduled.steps if isinstance(k, Kernel)):
        for q in k.nodes:
            sizes = [ex.size_of(v) for v in q.inner if ex.coefficient(q.index, v) == 1]
            runs = [n for n in sizes if isinstance(n, int)]
            assert q.kind is not Kind.POINT or not runs or max(runs) >= 8
