"""From a torch function to the compiler's intermediate forms, through the backend's own tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func

from altbackend import decomp
from altbackend.backend import split_joint
from altbackend.compat import aot_autograd
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import statistics
from altbackend.fx_passes.graph import drop_dead
from altbackend.ir.loops import Extern, Program
from altbackend.ir.verify import verify
from altbackend.lowering.graph import lower_graph
from altbackend.schedule import deps as dependencies
from altbackend.schedule import horizontal_fusion, horizontal_split, kernel
from altbackend.schedule.concatenations import share_concatenations
from altbackend.schedule.deps import Deps
from altbackend.schedule.device import H200, Cpu, Gpu, ScheduleContext
from altbackend.schedule.fusion import fuse
from altbackend.schedule.fusion.group import Group
from altbackend.schedule.nested_concatenations import nest_concatenations
from altbackend.schedule.products import epilogue
from altbackend.schedule.scan_terms import separate_terms
from altbackend.schedule.short_reductions import write_out_short_reductions
from altbackend.schedule.split_and_fuse import split_and_fuse

GraphCompiler = Callable[[torch.fx.GraphModule], Callable[..., Any]]


def backend(compile_graph: GraphCompiler, numerics: str = "fast") -> Callable[..., Any]:
    """A Dynamo backend that traces as ours does and gives every functional graph to `compile_graph`."""

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return compile_graph(gm)

    def compile_(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        build = aot_autograd.aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            inference_compiler=keep,
            decompositions=decomp.table(numerics),
            partition_fn=divide,
            keep_inference_input_mutations=True,
        )
        with aot_autograd.functorch_settings(), aot_autograd.undecomposed(decomp.taken_apart(numerics)):
            return build(gm, example_inputs)

    return compile_


def divide(
    joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    cfg = resolve(options={"strict": True})
    trace = Trace("joint", cfg)
    statistics.expose(joint)
    drop_dead(joint.graph)
    return split_joint(joint, inputs, kwargs, cfg, trace)


def trace(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, computes: bool = True
) -> list[torch.fx.GraphModule]:
    """The functional graphs of one call: the forward or inference graph, then the backward's if inputs need it.

    Without `computes` results are only as large as they should be: a product may take a CPU minutes.
    """
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        graphs.append(gm)
        return make_boxed_func(gm.forward if computes else lambda *_: _uncomputed(gm))

    out = torch.compile(fn, backend=backend(keep), dynamic=dynamic, fullgraph=True)(*inputs)
    live = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if getattr(o, "requires_grad", False)]
    if live:
        torch.autograd.backward(live, [torch.ones_like(o) for o in live])
    return graphs


def _uncomputed(gm: torch.fx.GraphModule) -> list[Any]:
    """Results of a graph of known sizes, with whatever is in memory."""
    found = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in gm.graph.output_node().args[0]]
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in found
    ]


@dataclass(frozen=True)
class Scheduled:
    """A lowered graph and its kernels; `steps` in launch order, library calls among them."""

    program: Program
    deps: Deps
    groups: list[Group]
    steps: list[Any]
    decisions: list[tuple[str, str, str, str]]
    constants: dict[str, Any]

    @property
    def kernels(self) -> int:
        return sum(not isinstance(s, Extern) for s in self.steps)

    @property
    def calls(self) -> int:
        return len(self.steps) - self.kernels


def schedule(
    gm: torch.fx.GraphModule,
    cfg: Config | None = None,
    ctx: ScheduleContext | None = None,
    choose: epilogue.Choose | None = None,
) -> Scheduled:
    """The middle of the pipeline: lower, verify, fuse, place. `choose`: tiles for matrix products with epilogues."""
    cfg, device = cfg or resolve(), ctx.device if ctx is not None else Cpu(2)
    gm.graph.eliminate_dead_code()
    decisions: list[tuple[str, str, str, str]] = []
    program, constants = lower_graph(gm, cfg, lambda *a: decisions.append(a), isinstance(device, Gpu))
    program = verify(share_concatenations(verify(nest_concatenations(verify(program)))))
    if isinstance(device, Gpu):
        program = verify(write_out_short_reductions(program, device))
        program, deps, groups = split_and_fuse(program, cfg, device, lambda *a: decisions.append(a))
    else:  # tests of CPU kernels see reductions whole
        program = separate_terms(program, device)
        deps = dependencies.analyse(program)
        groups = fuse.fuse(program, deps, cfg, device, lambda *a: decisions.append(a))
    verify(program)
    if choose is not None:
        groups = epilogue.attach(program, deps, groups, lambda *a: decisions.append(a), choose)
    limits = horizontal_fusion.GPU if isinstance(device, Gpu) else horizontal_fusion.CPU
    groups = horizontal_split.split_mixed(
        program, deps, groups, lambda g: kernel.build(program, deps, g, device), limits
    )
    steps = [g.extern or kernel.build(program, deps, g, device) for g in groups]
    return Scheduled(program, deps, groups, steps, decisions, constants)


def around_pass(
    name: str, fn: Callable[..., Any], inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[Program, Program]:
    """Return the program of a function on a GPU before and after the pass over programs that is called `name` here."""
    seen: list[Program] = []
    original = globals()[name]

    def run(p: Program) -> Program:
        seen.extend((p, original(p)))
        return seen[-1]

    monkeypatch.setattr(f"test.graphs.{name}", run)
    schedule(trace(fn, *inputs)[0], ctx=ScheduleContext(H200))
    return seen[0], seen[1]
