"""python -m benchmarks.saved: what a training step keeps for its backward, and the peak of its memory, without a GPU.

Traces a case, splits its joint graph by torch's min-cut partitioner and by ours, schedules both halves for a GPU and
follows the lifetimes of the buffers. Results and gradients count; the allocator's rounding and a library's workspaces
do not. Traced on the CPU's dispatch, so that a few operators differ from a GPU's (attention).
"""

from __future__ import annotations

import argparse
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from altbackend import decomp, fx_passes, partition
from altbackend.compat import aot_autograd, torch_api
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes.graph import snapshot
from altbackend.ir.loops import Extern, Program, View, reads, writes
from altbackend.lowering.graph import lower_graph
from altbackend.schedule import device
from altbackend.schedule.fusion.group import Group, ignore
from altbackend.schedule.split_and_fuse import split_and_fuse
from benchmarks import subject
from benchmarks.cases import SUITES, choose
from benchmarks.cases.case import Case, Preset
from benchmarks.records import Request


@dataclass(frozen=True)
class Joint:
    """A joint graph as AOTAutograd gives it to the partitioner."""

    graph: GraphModule
    forward_results: int
    static: tuple[int, ...]


@dataclass(frozen=True)
class Figures:
    """Of one split. Bytes but for `seconds` (of splitting), `kernels` and `calls` (of both halves).

    `moved`: what kernels of ours read and write, without what stays in registers.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    moved: int
    kernels: int
    calls: int
    seconds: float


class _Captured(Exception):
    """Ends a compilation once its joint graph is known."""


def capture(case: Case, preset: Preset) -> list[Joint]:
    """The joint graph of a training step in bfloat16, by autocast where the case has it; the first of several."""
    found: list[Joint] = []

    def stop(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        found.append(Joint(joint, kwargs["num_fwd_outputs"], tuple(kwargs["static_lifetime_input_indices"] or ())))
        raise _Captured

    def backend(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        fx_passes.pre_grad(gm, resolve())
        build = aot_autograd.aot_autograd(
            fw_compiler=lambda gm, _: gm,
            bw_compiler=lambda gm, _: gm,
            inference_compiler=lambda gm, _: gm,
            decompositions=decomp.table(),
            partition_fn=stop,
            keep_inference_input_mutations=True,
        )
        with aot_autograd.functorch_settings():
            return build(gm, inputs)

    request = Request(case.name, "alt", "training", preset, "cpu", "bfloat16")
    made = subject._subject(case, subject.build(case, preset, request), request, lambda m: _compile(m, backend))
    try:
        made.run()  # ends before anything is computed
    except Exception:
        if not found:
            raise
    return found


def _compile(module: torch.nn.Module, backend: Any) -> Callable[..., Any]:
    return torch.compile(module, backend=backend)


def by_torch(j: Joint) -> tuple[GraphModule, GraphModule]:
    halves: tuple[GraphModule, GraphModule] = aot_autograd.joint_partition()(
        j.graph, [], num_fwd_outputs=j.forward_results, static_lifetime_input_indices=list(j.static)
    )
    return halves


def by_ours(j: Joint) -> tuple[GraphModule, GraphModule]:
    return partition.split(j.graph, j.forward_results)


def figures(j: Joint, divide: Callable[[Joint], tuple[GraphModule, GraphModule]], cfg: Config) -> Figures:
    """Of a split of a copy of the joint graph."""
    own = Joint(GraphModule(j.graph, snapshot(j.graph.graph)()), j.forward_results, j.static)
    trace = Trace("joint", cfg)
    _statistics_of_a_gpu(own.graph)
    random = ("dropout", "checkpointed random")  # eager's numbers, so that both partitioners see the same graph
    without = random if divide is by_ours else ("normalisations", *random)
    fx_passes.joint(own.graph, cfg, trace, "gpu", without)
    _statistics_of_a_gpu(own.graph)
    with torch_api.without_gc():  # as in a compilation
        start = time.perf_counter()
        forward, backward = divide(own)
        seconds = time.perf_counter() - start
    inputs = {n.name for n in forward.graph.nodes if n.op == "placeholder"}
    saved = partition.saved_bytes(forward, j.forward_results)
    resident = sum(_bytes_of(n) for n in forward.graph.nodes if n.op == "placeholder")
    first, second = (_schedule(gm, cfg) for gm in (forward, backward))
    groups = [g for _, kernels in (first, second) for g in kernels]
    return Figures(
        saved,
        resident + _peak(*first, inputs),
        resident + _peak(*second, inputs),
        sum(_moved(*half) for half in (first, second)),
        sum(g.extern is None for g in groups),
        sum(g.extern is not None for g in groups),
        seconds,
    )


def _statistics_of_a_gpu(gm: GraphModule) -> None:
    """A GPU gives a batch normalisation's statistics in float32, where a CPU rounds them to the input's dtype."""
    for n in gm.graph.nodes:
        if n.target is torch.ops.aten._native_batch_norm_legit_functional.default:
            out, *rest = n.meta["val"]
            n.meta["val"] = (out, *(x.float() for x in rest))
        elif n.target is operator.getitem and n.args[1] in (1, 2) and isinstance(n.meta["val"], torch.Tensor):
            n.meta["val"] = n.args[0].meta["val"][n.args[1]]


def _bytes_of(n: Node) -> int:
    val = n.meta.get("val")
    return val.numel() * val.dtype.itemsize if isinstance(val, torch.Tensor) else 0


def _schedule(gm: GraphModule, cfg: Config) -> tuple[Program, list[Group]]:
    gm = fx_passes.finish(fx_passes.post_grad(gm, cfg, Trace("half", cfg)), cfg)
    p, _ = lower_graph(gm, cfg, on_gpu=True)
    machine = device.H200
    fused = split_and_fuse(p, cfg, machine, ignore)
    return fused.program, fused.groups


def _touched(p: Program, g: Group) -> tuple[set[str], set[str]]:
    nodes = [p.nodes[k] for k in g.members]
    read, written = ({b for n in nodes for b in f(n) if b in p.buffers} for f in (reads, writes))
    return read, written


def _in_memory(p: Program, groups: list[Group]) -> dict[str, list[int]]:
    """Per buffer the steps that touch it; not those that one kernel alone knows."""
    steps: dict[str, list[int]] = {}
    for k, g in enumerate(groups):
        for b in set().union(*_touched(p, g)):
            steps.setdefault(b, []).append(k)
    results = {o.buffer for o in p.outputs if isinstance(o, View)}
    return {
        b: at
        for b, at in steps.items()
        if len(at) > 1 or b in results or p.buffers[b].kind != "temp" or groups[at[0]].extern is not None
    }


def _size(p: Program, b: str) -> int:
    n = p.buffers[b].numel
    return n * p.buffers[b].dtype.itemsize if isinstance(n, int) else 0


def _peak(p: Program, groups: list[Group], resident: set[str]) -> int:
    """Most bytes at once beyond those of the buffers in `resident`."""
    peak, _ = _live_at_peak(p, groups, resident)
    return peak


def _live_at_peak(p: Program, groups: list[Group], resident: set[str]) -> tuple[int, dict[str, int]]:
    """Most bytes at once, and the bytes of each buffer that is alive then."""
    steps = _in_memory(p, groups)
    results = {o.buffer for o in p.outputs if isinstance(o, View)}
    spans = {}
    for b, at in steps.items():
        if b not in resident and p.buffers[b].kind != "const":
            first = 0 if p.buffers[b].kind == "input" else at[0]
            spans[b] = (first, len(groups) if b in results else at[-1])
    changes = [0] * (len(groups) + 2)
    for b, (first, last) in spans.items():
        changes[first] += _size(p, b)
        changes[last + 1] -= _size(p, b)
    live = list(itertools.accumulate(changes))
    step = max(range(len(live)), key=live.__getitem__)
    return live[step], {b: _size(p, b) for b, (first, last) in spans.items() if first <= step <= last}


def _moved(p: Program, groups: list[Group]) -> int:
    steps = _in_memory(p, groups)
    kernels = [g for g in groups if not isinstance(g.extern, Extern)]
    return sum(_size(p, b) for g in kernels for side in _touched(p, g) for b in side if b in steps)


def row(name: str, f: Figures) -> str:
    sizes = (f"{x / 1e9:8.2f}" for x in (f.saved, f.forward_peak, f.backward_peak, f.moved))
    return f"{name:24}{' '.join(sizes)} {f.kernels:8} {f.calls:6} {f.seconds:8.2f}"


def compared(found: Sequence[tuple[str, Figures, Figures]]) -> list[str]:
    """Return lines with our saved bytes, peaks and moved bytes over those of torch's partitioner, and the means."""

    def ratios(theirs: Figures, ours: Figures) -> tuple[float, float, float, float]:
        peaks = [max(f.forward_peak, f.backward_peak) for f in (ours, theirs)]
        return ours.saved / theirs.saved, peaks[0] / peaks[1], ours.moved / theirs.moved, ours.seconds / theirs.seconds

    rows = [(name, ratios(theirs, ours)) for name, theirs, ours in found]
    columns = zip(*(values for _, values in rows), strict=True)
    mean = tuple(statistics.geometric_mean(column) for column in columns)
    head = f"{'ours / torch':24}{'saved':>8} {'peak':>8} {'moved':>8} {'seconds':>8}"
    return [head, *(f"{name:24}" + " ".join(f"{x:8.3f}" for x in r) for name, r in [*rows, ("geometric mean", mean)])]


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.saved")
    p.add_argument("cases", nargs="*")
    p.add_argument("--suite", choices=sorted(SUITES), default="models")
    p.add_argument("--preset", choices=["tiny", "cpu", "gpu"], default="gpu")
    args = p.parse_args()
    cfg = resolve()
    print(
        f"{'GB':24}{'saved':>8} {'fw peak':>8} {'bw peak':>8} {'moved':>8} {'kernels':>8} {'calls':>6} {'seconds':>8}"
    )
    found: list[tuple[str, Figures, Figures]] = []
    for case in choose(args.suite, args.cases):
        torch._dynamo.reset()
        for joint in capture(case, args.preset):
            theirs, ours = (figures(joint, divide, cfg) for divide in (by_torch, by_ours))
            print(row(f"{case.name} torch", theirs), row(f"{case.name} ours", ours), sep="\n", flush=True)
            found.append((case.name, theirs, ours))
    print("\n".join(compared(found)))
    return 0


__all__ = ["Figures", "Joint", "by_ours", "by_torch", "capture", "figures"]

if __name__ == "__main__":
    raise SystemExit(main())
