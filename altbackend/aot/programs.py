"""The programs of a library: the main one, and the one that computes everything which depends on weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from .. import fx_passes, pipeline
from ..codegen.host import cpp_cuda, cpp_library
from ..codegen.host.cpp_library import CppProgram, UserInputs
from ..compile_pool.cuda import Job
from ..compiled import load
from ..config.options import Config
from ..debug.trace import Trace
from ..errors import Unsupported
from ..ir.loops import Buffer, Constant
from .capture import Captured

Source = tuple[str, int]  # ("constant" | "input" | "folded", number)


@dataclass(frozen=True)
class Programs:
    """The printed programs of a library. `literals`: tensors in their texts, numbered after the weights."""

    main: CppProgram
    main_sources: tuple[Source, ...]
    fold: CppProgram | None
    fold_sources: tuple[Source, ...]
    literals: tuple[torch.Tensor, ...]
    device: torch.device = torch.device("cpu")
    jobs: Mapping[str, tuple[Job, ...]] = field(default_factory=dict)  # of a GPU's launches: "main", "fold"


def print_programs(captured: Captured, cfg: Config, trace: Trace) -> Programs:
    """Compile a captured graph to C++ text. Changes the graph. Raise Unsupported."""
    count = len(captured.weights)
    static = tuple(k for k, w in enumerate(captured.weights) if not w.written)
    gm = captured.graph
    fx_passes.before_joint(gm, cfg, trace)
    fx_passes.after_joint(gm, cfg, trace)
    scheduled, split = pipeline.schedule_graph(gm, cfg, trace, load.Job("inference", static))
    literals: list[torch.Tensor] = []
    fold, fold_sources = None, tuple[Source, ...]()
    graph_inputs = range(count + len(captured.inputs))
    sources: list[Source] = [_source(k, count) for k in (split.inputs if split else graph_inputs)]
    if split is not None:
        own = Trace(f"{trace.graph_name}_weights", cfg)
        inner, _ = pipeline.schedule_graph(split.prologue, cfg, own, load.Job("inference"))
        inner, more = _with_literals(inner, count + len(literals), literals)
        fold_sources = (*(("constant", k) for k in split.watched), *more)
        fold = _print(inner, cfg, "fold", UserInputs({}, {}))
        own.finish()
        sources += [("folded", k) for k in range(len(fold.outputs))]
    scheduled, more = _with_literals(scheduled, count + len(literals), literals)
    named = {
        b: (number, captured.inputs[number].name)
        for b, (kind, number) in zip(scheduled.program.inputs, sources, strict=False)
        if kind == "input"
    }
    user = UserInputs(named, captured.ranges, captured.conditions)
    main = _print(scheduled, cfg, "main_program", user)
    jobs = {"main": _jobs(scheduled, main), "fold": _jobs(scheduled, fold)}
    return Programs(main, (*sources, *more), fold, fold_sources, tuple(literals), scheduled.device, jobs)


def _source(k: int, weights: int) -> Source:
    return ("constant", k) if k < weights else ("input", k - weights)


def _jobs(s: pipeline.Scheduled, program: CppProgram | None) -> tuple[Job, ...]:
    return tuple(pipeline.job_of(s, kernel, aligned) for kernel, aligned in (program.on_gpu if program else ()))


def _print(s: pipeline.Scheduled, cfg: Config, name: str, user: UserInputs) -> CppProgram:
    if s.device.type == "cuda":
        program, steps = pipeline.cuda_steps(s, cfg, Trace(name, cfg))
        return cpp_library.build_cuda(cpp_cuda.plan_of(program, steps), name, user)
    return cpp_library.build(s.program, s.deps, pipeline.launches(s), cfg, name, user)


def _with_literals(
    s: pipeline.Scheduled, first: int, literals: list[torch.Tensor]
) -> tuple[pipeline.Scheduled, tuple[Source, ...]]:
    """Make the constants of a program inputs of it, numbered from `first` on; add their values to `literals`."""
    constants: Mapping[str, Any] = s.constants
    names = [b for b, buffer in s.program.buffers.items() if buffer.kind == "const"]
    literals += [constants[name].detach() for name in names]
    buffers: dict[str, Buffer] = {**s.program.buffers}
    for name in names:
        buffers[name] = replace(buffers[name], kind="input")
    _refuse_objects(s, names)
    program = replace(s.program, buffers=buffers, inputs=(*s.program.inputs, *names))
    return replace(s, program=program), tuple(("constant", first + k) for k in range(len(names)))


def _refuse_objects(s: pipeline.Scheduled, tensors: Sequence[str]) -> None:
    """Raise Unsupported for a constant that a call takes and that is no tensor, such as a graph."""
    for node in s.program.nodes:
        leaves = torch.utils._pytree.tree_leaves((getattr(node, "args", ()), dict(getattr(node, "kwargs", ()))))
        for x in leaves:
            if isinstance(x, Constant) and str(x) not in tensors:
                origin = node.origins[-1] if node.origins else None
                what = f"{origin.target} ({origin.line})" if origin is not None else str(x)
                raise Unsupported(what, f"it takes {type(s.constants[str(x)]).__name__}, which a library cannot hold")
