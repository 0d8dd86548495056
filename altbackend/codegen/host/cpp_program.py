"""Print a launch plan for a CPU as C++: allocations, kernels, library calls. `cpu_program.py` prints it as Python.

What enters and leaves a program differs: see `cpp_library.py` for libraries and `cpp_graph.py` for compiled graphs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

import torch

from altbackend.lazy_dataclass import dataclass

from ...aten.name import is_foreign
from ...config.options import Config
from ...ir.loops import Buffer, Extern, Number, Program, View, names_in, unbacked_symbols, views
from ..lines import Lines
from .cpp_call import Calls, check_results, result_kinds, unbacked_numbers
from .cpp_numbers import CTYPES, Kind, translate
from .cpp_text import program_text
from .cpp_values import dtype_text, hoisted_views, ints, quoted
from .cuda_program import CudaLaunch
from .launch_plan import Launch, LaunchPlan, Step
from .python_text import may_be_large, provenance

# Results in oneDNN's own layout, which only library calls read.
OPAQUE_RESULTS = "mkldnn::_reorder_"


AnyStep = Step | CudaLaunch


class Edges(Protocol):
    """The inputs and results of a program, and the lines between its steps that its caller needs."""

    def inputs(self, state: Printer) -> None:
        """Print names for inputs and constants, the checks of inputs, and the sizes in them."""

    def before(self, state: Printer, s: AnyStep) -> None:
        """Print the lines that the caller needs before a step runs."""

    def drop_input(self, state: Printer, b: str) -> None:
        """Print the end of an input that no later step uses."""

    def output(self, state: Printer, k: int, o: object) -> str:
        """Print one result; return its kind: tensor, int, float, bool or none."""


@dataclass(frozen=True)
class PrintedHost:
    """A printed host program: its text, the declarations that it needs, the kinds of its results, and its launches."""

    planned: LaunchPlan
    text: str
    declarations: tuple[str, ...]
    outputs: tuple[str, ...]
    launches: int


def comment(text: str) -> str:
    """Return a text as a part of a C++ comment."""
    return text.replace("\\", "/").replace("\n", " ")


@dataclass
class Printer:
    """The state of printing one program.

    `used`: buffers that a step or the caller reads; other results of a call may be undefined.
    """

    planned: LaunchPlan
    edges: Edges
    used: frozenset[str]
    w: Lines = field(default_factory=lambda: Lines("  ", 1))
    types: dict[str, Kind] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)

    @property
    def program(self) -> Program:
        return self.planned.program

    @functools.cached_property
    def repeated(self) -> frozenset[View]:
        """The views of inputs that several calls take."""
        inputs = set(self.program.inputs)
        calls = [s for s in self.planned.steps if isinstance(s, Extern)]
        count = Counter(v for s in calls for v in dict.fromkeys(views(s)) if v.buffer in inputs)
        return frozenset(v for v, n in count.items() if n > 1)


def print_program(planned: LaunchPlan, cfg: Config, name: str, edges: Edges, pointers: bool = False) -> PrintedHost:
    """Print a planned program. Raise Unsupported, with the operator and its line, for a step that has no C++ form.

    `pointers`: the functions of segments belong to a loaded graph, see `cpp_text.program_text`.
    """
    state = Printer(planned, edges, planned.used)
    calls = Calls(planned, state.types)
    outputs = _body(state, calls)
    text = program_text(planned, name, state.w.body, cfg.reuse_memory, pointers)
    launches = sum(isinstance(s, Launch) for s in planned.steps)
    return PrintedHost(planned, text, tuple(calls.declarations()), outputs, launches)


def _body(state: Printer, calls: Calls) -> tuple[str, ...]:
    """Print the lines of one call; return the kinds of its results."""
    planned, w, p = state.planned, state.w, state.program
    state.edges.inputs(state)
    _prologue(state)
    drops = planned.drops()
    segment_of = {numbers[0]: (n, numbers) for n, numbers in enumerate(planned.segments)}
    for k, s in enumerate(planned.steps):
        if isinstance(s, Extern):
            state.edges.before(state, s)
            if library_call(state, calls, s):
                _enter_results(state, s)
            last: Sequence[int] = [k]
        elif k in segment_of:
            n, last = segment_of[k]
            for j in last:
                state.edges.before(state, planned.steps[j])
            _segment(state, n, last)
        else:
            continue
        for b in (b for j in last for b in drops.get(j, ())):
            if p.buffers[b].kind == "input":
                state.edges.drop_input(state, b)
            else:
                w.add(f"t_{b}.reset();")
    return tuple(state.edges.output(state, k, o) for k, o in enumerate(p.outputs))


# --- inputs and sizes ------------------------------------------------------------------------------------------------


def _prologue(state: Printer) -> None:
    p, w, locations = state.program, state.w, state.planned.locations
    unbacked = unbacked_symbols(p)
    bind_numbers(state, [n for n in p.numbers if not names_in(n.text) & unbacked])
    w.add(f"Lease ws(frame.pool, {{{', '.join(locations.layout)}}});")
    w.add("void** const P = ws->pointers.data();")
    w.add("int64_t* const S = ws->scalars.data();")
    w.add("const int max_threads = frame.threads;")
    w.add("(void)P; (void)S; (void)max_threads;")
    for k, s in enumerate(locations.symbols):
        if k >= locations.layout_symbols and s not in unbacked:
            w.add(f"S[{k}] = {s};")
    constants = [b for b, buffer in p.buffers.items() if buffer.kind == "const"]
    for b in (b for b in (*p.inputs, *constants) if b in locations.slots):
        w.add(f"P[{locations.slots[b]}] = data_of(t_{b}.get());")


def bind_numbers(state: Printer, numbers: Sequence[Number]) -> None:
    """Print the numbers that have no value yet."""
    for n in numbers:
        if n.name not in state.types:
            text, kind = translate(n.text, state.types)
            state.types[n.name] = kind
            state.w.add(f"const {CTYPES[kind]} {n.name} = {text};")


# --- steps -----------------------------------------------------------------------------------------------------------


def declare(state: Printer, b: str) -> None:
    """Print the declaration of a tensor, once."""
    if b not in state.declared:
        state.declared.add(b)
        state.w.add(f"Tensor t_{b};")


def allocate(state: Printer, b: str) -> None:
    """Print the allocation of a buffer that is a tensor of its own, once."""
    buffer = state.program.buffers[b]
    if b in state.declared:
        return
    declare(state, b)
    geometry = f"{ints(buffer.sizes)}, {ints(buffer.strides)}"
    new = f"{_empty(buffer)}{dtype_text(buffer.dtype)}, {geometry})"
    source = state.planned.locations.takes.get(b)
    text = new
    if source is not None:
        taken = f"view(t_{source}.get(), {geometry}, 0)"
        text = f"donated ? {taken} : {new}" if state.program.buffers[source].donated else taken
    state.w.add(f"t_{b} = {text};")
    set_pointer(state, b)


def _empty(buffer: Buffer) -> str:
    """Return the first part of the call that allocates a buffer."""
    if buffer.device.type != "cpu":
        return "empty_on_gpu(frame.device, "
    return "empty_large(" if may_be_large(buffer) else "empty("


def set_pointer(state: Printer, b: str) -> None:
    """Enter the address of a tensor into the table of pointers, if a kernel takes it."""
    if b in state.planned.locations.slots:
        state.w.add(f"P[{state.planned.locations.slots[b]}] = data_of(t_{b}.get());")


def _segment(state: Printer, n: int, numbers: Sequence[int]) -> None:
    """Print the call of one run of kernels, with the allocations before and the check after it."""
    launches = [s for k in numbers if isinstance(s := state.planned.steps[k], Launch)]
    for s in launches:
        for q, b in s.operands():
            if q.written and b in state.planned.locations.fresh:
                allocate(state, b)
    for s in launches:
        state.w.add(f"// {s.kernel}: {comment(provenance(s.origins))}")
    state.w.add(f"segment{n}(P, S, max_threads, ws->error);")
    checking = [s for s in launches if s.function.checks]
    if checking:
        lines = "; ".join(sorted({o.line for s in checking for o in s.origins if o.line})) or "an indexing operation"
        state.w.add(f"check_kernel(ws->error, {quoted(lines)});")


def library_call(state: Printer, calls: Calls, s: Extern) -> bool:
    """Print a call with the numbers that it gives; return whether it gives tensors that are still to be checked."""
    p, w = state.program, state.w
    in_place = s.out_variant is not None and bool(s.outs[0])
    kinds = result_kinds(s)
    for name, kind in kinds.items():
        if name not in state.types:
            state.types[name] = "float" if kind == "int" and _is_float_item(p, s, name) else kind
            w.add(f"{CTYPES[state.types[name]]} {name}{{}};")
    for o in s.outs:
        if o in p.buffers and not in_place:
            assert o is not None
            declare(state, o)
    if in_place:
        out = s.outs[0]
        assert out is not None
        if out in state.planned.locations.fresh:
            allocate(state, out)
    _hoist(state, calls, s)
    w.add(f"{{  // {s.target}: {comment(provenance(s.origins))}")
    w.depth += 1
    calls.print(w, s, s.out_variant if in_place else s.target)
    w.depth -= 1
    w.add("}")
    if in_place:
        return False
    for line in unbacked_numbers(s, state.types):
        w.add(line)
    _unbacked_symbols(state, s)
    return True


def _enter_results(state: Printer, s: Extern) -> None:
    """Print the checks of a call's results, and enter them into the table of pointers."""
    if not _is_opaque(s):
        check_results(state.w, state.planned, s, state.used, is_foreign(s.target))
    for o in s.outs:
        if o in state.program.buffers:
            assert o is not None
            set_pointer(state, o)


def _hoist(state: Printer, calls: Calls, s: Extern) -> None:
    """Print the views of inputs that this call takes first and later calls take again."""
    for v, text in hoisted_views(state.planned, s, state.repeated - set(calls.view_handles)).items():
        name = f"h{len(calls.view_handles)}"
        calls.view_handles[v] = f"{name}.get()"
        state.w.add(f"const Tensor {name} = {text};")


def _unbacked_symbols(state: Printer, s: Extern) -> None:
    """Print the numbers that follow from those a call gives, and enter the sizes into the table of kernels."""
    if not s.defines:
        return
    defined = set(state.types)
    new = [n for n in state.program.numbers if n.name not in defined]
    ready: list[Number] = []
    for n in new:
        if names_in(n.text) <= defined:
            ready.append(n)
            defined.add(n.name)
    bind_numbers(state, ready)
    symbols = state.planned.locations.symbols
    for name in (*s.defines, *(n.name for n in ready)):
        if name in symbols:
            state.w.add(f"S[{symbols.index(name)}] = {name};")


def _is_float_item(p: Program, s: Extern, name: str) -> bool:
    source = s.args[0] if s.args else None
    is_item = s.target is torch.ops.aten._local_scalar_dense.default and s.outs[0] == name
    return is_item and isinstance(source, View) and (source.dtype or p.buffers[source.buffer].dtype).is_floating_point


def _is_opaque(s: Extern) -> bool:
    return isinstance(s.target, torch._ops.OpOverload) and s.target._schema.name.startswith(OPAQUE_RESULTS)
