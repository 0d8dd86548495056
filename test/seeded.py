"""Random operators through the middle of the pipeline: the pass that gives them seeds, then schedule and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from altbackend import fx_passes
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.ir import interp
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.graphs import Scheduled, backend, schedule, trace

GPU = ScheduleContext(H200)


def prepared(gm: torch.fx.GraphModule, trace_: Trace) -> torch.fx.GraphModule:
    return fx_passes.post_grad(gm, trace_.cfg, trace_)


def decisions(fn: Callable[..., Any], *inputs: Any) -> dict[str, tuple[str, str]]:
    """Return what became of a function's random operators: node -> (verdict, reason)."""
    (gm,) = trace(fn, *inputs)
    seen = Trace("random", resolve())
    prepared(gm, seen)
    return {d.subject: (d.verdict, d.reason) for d in seen.decisions if d.kind == "random"}


def scheduled(fn: Callable[..., Any], *inputs: Any, ctx: ScheduleContext | None = None) -> list[Scheduled]:
    """The graphs of a function, of its backward too if inputs need it."""
    seen = Trace("random", resolve())
    return [schedule(prepared(gm, seen), seen.cfg, ctx) for gm in trace(fn, *inputs)]


def interpreted(
    fn: Callable[..., Any], *, kernels: bool, dynamic: bool = False, seen: list[Any] | None = None
) -> Callable[..., Any]:
    """`fn` by the interpreter of the loop IR, or its Triton `kernels` by Triton's. `seen` collects their steps."""

    def lower(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        cfg = resolve()
        s = schedule(prepared(gm, Trace("random", cfg)), cfg, GPU)
        steps = triton_run.steps_of(s, GPU) if kernels else []
        if seen is not None:
            seen.extend(steps)
        for step in steps:
            if isinstance(step, tuple):
                triton_run.compile_later(step[0], (90,))

        def call(args: list[Any]) -> list[Any]:
            xs = list(args)
            args.clear()
            return triton_run.run(s.program, steps, xs, s.constants) if kernels else interp.run(s.program, xs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return torch.compile(fn, backend=backend(lower), dynamic=dynamic, fullgraph=True)
