"""Runs scheduled graphs through the Triton code generator: kernels interpreted, library calls by torch."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.util import Finalize
from typing import Any
from unittest.mock import patch

import torch

from altbackend.codegen.triton import attention, horizontal, print_triton
from altbackend.codegen.triton.print_triton import TritonKernel
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.ir import interp
from altbackend.ir.attention import Attention
from altbackend.ir.loops import Extern, Program
from altbackend.ir.ops import FLOAT8
from altbackend.lowering.subgraphs import called
from altbackend.runtime.control_flow import unboxed
from altbackend.schedule import horizontal_fusion
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.products import epilogue
from altbackend.schedule.tiling.gpu.tiled import TiledHorizontal, pairs_in_one_pass, tile_kernel, tile_steps
from test import cuda_host, triton_worker
from test.graphs import Scheduled, backend, schedule

TARGET = ScheduleContext(H200)
Step = Any  # an Extern, or (TritonKernel, names of its buffers, pairs of buffers that may share memory)


@cache
def _worker(interpret: bool) -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with patch.dict(os.environ, TRITON_INTERPRET=str(int(interpret))):  # read when triton is imported
        pool.submit(triton_worker.start, interpret).result()
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    # a child of multiprocessing runs no atexit functions, and before it ends it waits for its own children
    Finalize(None, pool.shutdown, kwargs={"cancel_futures": True}, exitpriority=10)
    return pool


_compiling: dict[tuple[str, int], Future[int]] = {}


def compile_later(kernel: TritonKernel, capabilities: Sequence[int]) -> None:
    """Start building machine code; `compile_errors` waits for it."""
    for k in (kernel, *(f.kernel for f in kernel.finish)):
        for c in capabilities:
            if (k.source, c) not in _compiling:
                job = (k.source, k.signature, k.constexprs, k.num_warps, k.num_stages, c)
                _compiling[k.source, c] = _worker(False).submit(triton_worker.compile_cubin, *job)


def memory_of(kernel: TritonKernel, capability: int) -> tuple[int, int]:
    """Bytes of shared and of global memory that the machine code wants for each program."""
    job = (kernel.source, kernel.signature, kernel.constexprs, kernel.num_warps, kernel.num_stages, capability)
    held: tuple[int, int] = _worker(False).submit(triton_worker.memory, *job).result()
    return held


def access_axes(kernel: TritonKernel, capability: int) -> set[int]:
    """The tile axes along which neighbouring threads of the machine code access memory."""
    job = (kernel.source, kernel.signature, kernel.constexprs, kernel.num_warps, kernel.num_stages, capability)
    axes: set[int] = _worker(False).submit(triton_worker.access_axes, *job).result()
    return axes


def compile_errors() -> list[str]:
    """One text for every kernel that did not compile, of all that were started."""
    done = dict(_compiling)
    _compiling.clear()
    return [f"sm_{c}: {e}\n{source}" for (source, c), f in done.items() if (e := f.exception()) is not None]


def steps_of(s: Scheduled, ctx: ScheduleContext = TARGET) -> list[Step]:
    """Return the library calls and printed kernels of a scheduled graph."""
    steps: list[Step] = []

    def decide(*decision: str) -> None:
        s.decisions.append(decision)  # type: ignore[arg-type]

    launches = horizontal_fusion.fuse_horizontally(s.program, s.deps, s.steps, decide)
    for step, kernels in tile_steps(s.program, s.deps, launches, ctx, decide):
        if isinstance(step, Extern) and isinstance(step.target, Attention):
            steps += [(*printed, ()) for printed in attention.emit(s.program, step.target, ctx)]
        elif isinstance(step, Extern):
            steps.append(step)
        elif isinstance(kernels, TiledHorizontal):
            steps.append((*horizontal.emit(kernels), ()))
        else:
            steps += [(*print_triton.emit(s.program, k), pairs_in_one_pass(k)) for k in kernels]
    return steps


def emit(p: Program, k: Kernel, ctx: ScheduleContext = TARGET) -> tuple[TritonKernel, tuple[str, ...]]:
    """Return the Triton kernel of a scheduled kernel and the buffers of its parameters."""
    return print_triton.emit(p, tile_kernel(p, k, ctx))


def run(p: Program, steps: Sequence[Step], inputs: Sequence[Any], constants: dict[str, Any]) -> list[Any]:
    """Outputs of the program; inputs that it mutates are mutated. Raises IndexError where a kernel finds one."""
    symbols = {n: x for n, x in zip(p.inputs, inputs, strict=True) if not isinstance(x, torch.Tensor)}
    state = interp.State(p, symbols)
    for name, x in [*zip(p.inputs, inputs, strict=True), *((n, x) for n, x in constants.items() if n in p.buffers)]:
        if isinstance(x, torch.Tensor):
            extent = state.size(p.buffers[name].extent)
            state.flat[name] = x.detach().as_strided((extent,), (1,), x.storage_offset())
    for step in steps:
        if isinstance(step, Extern):
            interp._run_extern(step, state)
        else:
            kernel, buffers, *_ = step
            _launch(kernel, buffers, state)
    return [interp._output(o, state) for o in p.outputs]


def _launch(kernel: TritonKernel, buffers: Sequence[str], state: interp.State) -> None:
    held = dict(zip((q.name for q in (*kernel.params, *kernel.totals)), buffers, strict=True))
    for b in held.values():
        if b not in state.flat:  # what no kernel writes must not look right by chance
            flat = state.allocate(b)
            flat.fill_(float("nan") if flat.is_floating_point() else 77)
    memory = {n: state.flat[b] for n, b in held.items()}
    memory |= {w.name: torch.empty(state.size(w.numel), dtype=w.dtype).fill_(77) for w in kernel.workspace}
    names = [*(q.name for q in kernel.params), *(w.name for w in kernel.workspace)]
    _call(kernel, names, memory, state)
    for f in kernel.finish:
        _call(f.kernel, f.arguments, memory, state)


def _call(kernel: TritonKernel, names: Sequence[str], memory: dict[str, torch.Tensor], state: interp.State) -> None:
    pointers = [memory[n] for n in names]
    error = torch.zeros(1, dtype=torch.int32)
    pointers += [error] if kernel.checks else []
    (grid,) = (state.size(g) for g in kernel.grid)
    launch(kernel, pointers, [state.symbols[s] for s in kernel.symbols], grid)
    if error.item():
        raise IndexError("index out of range")


def launch(kernel: TritonKernel, pointers: list[torch.Tensor], symbols: list[int], grid: int) -> None:
    """One launch of a kernel, interpreted: flat tensors in the order of its parameters."""
    pointers = [t.view(torch.uint8) if t.dtype in FLOAT8 else t for t in pointers]  # so kernels take them
    before = [triton_worker.pack(t) for t in pointers]
    job = (kernel.source, before, symbols, kernel.constexprs, grid)
    try:
        after = _worker(True).submit(triton_worker.launch, *job).result(timeout=100)
    except BrokenProcessPool as cause:  # it has read or written where nothing is
        _worker.cache_clear()
        raise RuntimeError(f"the interpreter ended in a kernel:\n{kernel.source}") from cause
    for t, b, a in zip(pointers, before, after, strict=True):
        if (a[0] != b[0]).any():  # what is only read keeps its version, which autograd watches
            t.copy_(triton_worker.unpack(a))


def compiled(
    fn: Callable[..., Any],
    *,
    dynamic: bool = False,
    cfg: Config | None = None,
    capabilities: Sequence[int] = (90,),
    seen: list[Step] | None = None,
    ctx: ScheduleContext = TARGET,
    choose: epilogue.Choose | None = None,
    host: bool = False,
) -> Callable[..., Any]:
    """`fn` through the Triton path. `seen` collects the steps of its graphs. `host`: the printed host program runs."""

    def lower(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        s = schedule(gm, cfg or resolve(), ctx, choose)
        for name, inner in called(s.program, s.constants).items():
            s.constants[name] = unboxed(lower(inner))
        steps = steps_of(s, ctx)
        if seen is not None:
            seen.extend(steps)
        for step in steps:
            if not isinstance(step, Extern):
                compile_later(step[0], capabilities)

        if host and s.program.buffers:
            return cuda_host.build(s, steps, launch)[1]

        def call(args: list[Any]) -> list[Any]:
            xs = list(args)
            args.clear()
            return run(s.program, steps, xs, s.constants)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    numerics = (cfg or resolve()).numerics
    return torch.compile(fn, backend=backend(lower, numerics), dynamic=dynamic, fullgraph=True)
