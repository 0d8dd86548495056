"""Print the steps of a GPU's host program as C++.

Buffers are tensors of torch's caching allocator; the small ones that only kernels use share one (`small_buffers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...aten.name import is_foreign
from ...compat.stable_abi import shim_of
from ...errors import Unsupported
from ...ir.loops import Extern, Program, names_in, unbacked_symbols
from ..cpp import print_cpp
from . import cuda_program
from .cpp_call import Calls
from .cpp_program import Edges, PrintedHost, Printer, allocate, bind_numbers, comment, library_call, set_pointer
from .cpp_text import program_text
from .cpp_values import dtype_text, ints, quoted
from .cuda_program import CudaLaunch, CudaPlan
from .launch_plan import LaunchPlan
from .python_text import provenance
from .small_buffers import SmallBuffers, small_buffers

_SCRATCH = 2  # null pointers that end a kernel's arguments


def print_program(planned: CudaPlan, name: str, edges: Edges, pointers: bool = True) -> PrintedHost:
    """Print a program. Raise Unsupported, with the operator and its line, for a step that has no C++ form.

    `pointers`: as in `cpp_program.print_program`.
    """
    externs = tuple(s for s in planned.steps if isinstance(s, Extern))
    whole = LaunchPlan(planned.program, externs, planned.locations, [])
    state = Printer(whole, edges, used=frozenset(planned.used))
    calls = Calls(whole, state.types)
    if len({b.device for b in planned.program.buffers.values() if b.device.type == "cuda"}) != 1:
        raise Unsupported(None, "a program over several GPUs has no form in C++")
    outputs = _body(planned, state, calls)
    text = program_text(whole, name, state.w.body, reuse_memory=False, pointers=pointers)
    return PrintedHost(whole, text, tuple(calls.declarations()), outputs, len(planned.launches))


def plan_of(p: Program, steps: Sequence[cuda_program.Step]) -> CudaPlan:
    """Return the plan of a program in C++: calls write into a buffer where only that has a function in C."""

    def writes_out(s: Extern) -> bool:
        function, out = s.target, s.out_variant
        if out is None or not s.outs[0] or not isinstance(function, torch._ops.OpOverload):
            return False
        return shim_of(function, on_gpu=True) is None and shim_of(out, on_gpu=True) is not None

    return cuda_program.plan_of(p, steps, writes_out)


def checked_lines(planned: CudaPlan) -> str:
    """Return the user's lines that a kernel's check of positions may name."""
    source_lines = {o.line for s in planned.launches if s.kernel.checks for o in s.origins if o.line}
    return "; ".join(sorted(source_lines)) or "an indexing operation"


def _body(planned: CudaPlan, state: Printer, calls: Calls) -> tuple[str, ...]:
    p, w = planned.program, state.w
    if planned.flagged:
        w.add(f"check_flag(*frame.gpu, {quoted(checked_lines(planned))});")
    state.edges.inputs(state)
    small = small_buffers(planned)
    _prologue(planned, state)
    _share(planned, state, small)
    drops, number = cuda_program.last_uses(p, planned.steps), 0
    for k, s in enumerate(planned.steps):
        state.edges.before(state, s)
        if isinstance(s, CudaLaunch):
            _launch(planned, state, s, number)
            number += 1
        elif library_call(state, calls, s):
            _enter_results(planned, state, s)
        for b in drops.get(k, ()):
            if p.buffers[b].kind == "input":
                state.edges.drop_input(state, b)
            elif b in state.declared and b not in small.offsets:
                w.add(f"t_{b}.reset();")
    return tuple(state.edges.output(state, k, o) for k, o in enumerate(p.outputs))


def _prologue(planned: CudaPlan, state: Printer) -> None:
    p, w, locations = planned.program, state.w, planned.locations
    unbacked = unbacked_symbols(p)
    bind_numbers(state, [n for n in p.numbers if not names_in(n.text) & unbacked])
    flag = len(locations.slots)
    w.add(f"void* P[{flag + 1}] = {{}};")
    w.add(f"int64_t S[{len(locations.symbols) + 1}] = {{}};")
    w.add("void* none = nullptr;")
    w.add("(void)P; (void)S; (void)none;")
    if planned.flagged:
        w.add(f"P[{flag}] = frame.gpu->flag;")
    for k, s in enumerate(locations.symbols):
        if s not in unbacked:
            w.add(f"S[{k}] = {s};")
    for b in (b for b, buffer in p.buffers.items() if buffer.kind == "const"):
        set_pointer(state, b)
    for b in (b for b in p.inputs if b in locations.slots):
        if p.buffers[b].device.type == "cpu":
            _bring(state, b)
        elif b in planned.written:
            set_pointer(state, b)
        else:
            w.add(f"const Tensor near_{b} = aligned(t_{b}.get());")
            w.add(f"P[{locations.slots[b]}] = data_of(near_{b}.get() ? near_{b}.get() : t_{b}.get());")


def _share(planned: CudaPlan, state: Printer, small: SmallBuffers) -> None:
    """Print the allocation that small temporaries share, and their addresses in it."""
    if not small.offsets:
        return
    w = state.w
    w.add(f"const Tensor small = empty_on_gpu(frame.device, {dtype_text(torch.uint8)}, {{{small.nbytes}}}, {{1}});")
    w.add("char* const small_at = static_cast<char*>(data_of(small.get()));")
    for b, offset in small.offsets.items():
        state.declared.add(b)
        w.add(f"P[{planned.locations.slots[b]}] = small_at + {offset};  // {b}")


def _bring(state: Printer, b: str) -> None:
    """Print the copy of a CPU tensor that kernels read."""
    buffer = state.program.buffers[b]
    geometry = f"{dtype_text(buffer.dtype)}, {ints(buffer.sizes)}, {ints(buffer.strides)}"
    state.w.add(f"const Tensor there_{b} = brought(frame.device, t_{b}.get(), {geometry});")
    state.w.add(f"P[{state.planned.locations.slots[b]}] = data_of(there_{b}.get());")


def _launch(planned: CudaPlan, state: Printer, s: CudaLaunch, number: int) -> None:
    w, locations = state.w, planned.locations
    for b in s.all_buffers:
        if b not in locations.fresh or b in state.declared:
            continue
        allocate(state, b)
        if any(q.name in s.kernel.zeroed for q, c in zip(s.params, s.buffers, strict=True) if c == b):
            w.add(f"zero(t_{b}.get());")
    (grid,) = s.kernel.grid
    arguments = ", ".join(_arguments(planned, s))
    w.add(f"launch(frame, {number}, {print_cpp.index(grid)}, {{{arguments}}});  // {comment(provenance(s.origins))}")


def _arguments(planned: CudaPlan, s: CudaLaunch) -> Sequence[str]:
    """Return the addresses of a launch's arguments, in the order of `cuda_program`."""
    slots, symbols = planned.locations.slots, planned.locations.symbols
    pointers = [f"&P[{slots[b]}]" for b in s.buffers]
    pointers += [f"&P[{len(slots)}]"] if s.kernel.checks else []
    sizes = [f"&S[{symbols.index(x)}]" for x in s.kernel.symbols]
    scratch = [f"&P[{slots[s.scratch]}]"] if s.scratch else []
    return [*pointers, *sizes, *scratch, *["&none"] * _SCRATCH]


def _enter_results(planned: CudaPlan, state: Printer, s: Extern) -> None:
    """Print the checks of those results of a call that are used, and enter them into the table of pointers."""
    p, w, slots = planned.program, state.w, planned.locations.slots
    for o in s.outs:
        if o is None or o not in p.buffers or o not in planned.used:
            continue
        b = p.buffers[o]
        geometry, name = f"{ints(b.sizes)}, {ints(b.strides)}", quoted(str(s.target))
        if is_foreign(s.target):
            w.add(f"t_{o} = promised(std::move(t_{o}), {name}, {dtype_text(b.dtype)}, {geometry});")
        if b.device.type == "cpu":
            if o in slots:
                _bring(state, o)
            continue
        if (b.sizes or o in slots) and not s.aliases:  # a view must stay a view, at any address
            w.add(f"t_{o} = with_alignment(std::move(t_{o}), {name}, {geometry});")
        set_pointer(state, o)
