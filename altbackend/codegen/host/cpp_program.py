"""Print the launch plan of a CPU program as C++ for an ahead-of-time library; `cpu_program.py` prints it as Python."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...config.options import Config
from ...errors import Unsupported
from ...ir import expr as ex
from ...ir.loops import Extern, HostNumber, Number, Program, View, names_in, reads, unbacked_symbols
from ...lowering.graph import Opaque
from ...schedule.deps import Deps
from ..cpp import print_cpp
from ..lines import Lines
from . import cpp_inputs
from .cpp_call import Calls, late_numbers, result_kinds, settle
from .cpp_numbers import CTYPES, Kind, translate
from .cpp_text import program_text
from .cpp_values import dtype_text, ints, quoted, view_text
from .launch_plan import Launch, LaunchPlan, Step, cpp_text, plan
from .python_text import is_foreign, provenance

# Results in oneDNN's own layout, which only library calls read.
OPAQUE_RESULTS = "mkldnn::_reorder_"


@dataclass(frozen=True)
class UserInputs:
    """The inputs of a program that the caller of the library gives: input -> (number, name), and ranges of symbols.

    `conditions`: conditions on sizes, as Python text, that tracing has assumed.
    """

    named: Mapping[str, tuple[int, str]]
    ranges: Mapping[str, tuple[int, int]]
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class CppProgram:
    """The texts of a program: `kernels` is a translation unit of its own; `host` defines the table `<name>_table`."""

    kernels: str
    host: str
    declarations: tuple[str, ...]
    outputs: tuple[str, ...]  # the kind of each result: tensor, int, float, bool or none
    launches: int
    library_calls: int
    has_kernels: bool


def _comment(text: str) -> str:
    return text.replace("\\", "/").replace("\n", " ")


@dataclass
class _Printer:
    """The state of printing one program."""

    planned: LaunchPlan
    name: str
    user: UserInputs
    w: Lines = field(default_factory=lambda: Lines("  ", 1))
    types: dict[str, Kind] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)

    @property
    def program(self) -> Program:
        return self.planned.program

    @functools.cached_property
    def used(self) -> frozenset[str]:
        """The buffers that a step or the caller reads; other results of a call may be undefined."""
        out = {o.buffer for o in self.program.outputs if isinstance(o, View)}
        for s in self.planned.steps:
            out.update(s.buffers if isinstance(s, Launch) else reads(s))
        return frozenset(out)


def build(p: Program, deps: Deps, steps: Sequence[Step], cfg: Config, name: str, user: UserInputs) -> CppProgram:
    """Print a program. Raise Unsupported, with the operator and its line, for a step that has no C++ form."""
    planned = plan(p, deps, steps, cfg)
    state = _Printer(planned, name, user)
    calls = Calls(planned, state.types)
    outputs = _body(state, calls)
    launches = sum(isinstance(s, Launch) for s in planned.steps)
    kernels = cpp_text(planned, cfg, f"alt::aot::{name}")
    host = program_text(planned, name, state.w.body, cfg.reuse_memory)
    count = len(planned.steps) - launches
    return CppProgram(kernels, host, tuple(calls.declarations()), outputs, launches, count, bool(planned.segments))


def _body(state: _Printer, calls: Calls) -> tuple[str, ...]:
    """Print the lines of one call; return the kinds of its results."""
    planned, w, p = state.planned, state.w, state.program
    _inputs(state)
    _prologue(state)
    drops = planned.drops()
    segment_of = {numbers[0]: (n, numbers) for n, numbers in enumerate(planned.segments)}
    for k, s in enumerate(planned.steps):
        if isinstance(s, Extern):
            _extern(state, calls, s)
            last: Sequence[int] = [k]
        elif k in segment_of:
            n, last = segment_of[k]
            _segment(state, n, last)
        else:
            continue
        for b in (b for j in last for b in drops.get(j, ()) if p.buffers[b].kind != "input"):
            w.add(f"t_{b}.reset();")
    return tuple(_output(state, k, o) for k, o in enumerate(p.outputs))


# --- inputs and sizes ------------------------------------------------------------------------------------------------


def _inputs(state: _Printer) -> None:
    """Print names for the inputs, the checks of those that a caller gives, and the sizes in them."""
    p, w = state.program, state.w
    for k, b in enumerate(p.inputs):
        if b in p.buffers and p.buffers[b].negative:
            raise Unsupported(b, "an input with torch's negative bit in an ahead-of-time library")
        w.add(f"const Borrowed t_{b}{{frame.in[{k}]}};")
    for symbol in cpp_inputs.bind(p, w, state.user.named, state.user.ranges):
        state.types[symbol] = "int"
    for condition in state.user.conditions:
        if names_in(condition) <= set(state.types):
            w.add(f"check_condition({translate(condition, state.types)[0]}, {quoted(condition)});")


def _prologue(state: _Printer) -> None:
    p, w, locations = state.program, state.w, state.planned.locations
    unbacked = unbacked_symbols(p)
    _numbers(state, [n for n in p.numbers if not names_in(n.text) & unbacked])
    w.add(f"Lease ws(frame.pool, {{{', '.join(locations.layout)}}});")
    w.add("void** const P = ws->pointers.data();")
    w.add("int64_t* const S = ws->scalars.data();")
    w.add("const int max_threads = threads();")
    w.add("(void)P; (void)S; (void)max_threads;")
    for k, s in enumerate(locations.symbols):
        if k >= locations.layout_symbols and s not in unbacked:
            w.add(f"S[{k}] = {s};")
    if fixed := [name for name, b in p.buffers.items() if b.kind == "const"]:
        raise Unsupported(", ".join(fixed), "a constant that is no input of the program")
    for b in (b for b in p.inputs if b in locations.slots):
        w.add(f"P[{locations.slots[b]}] = data_of(t_{b}.get());")


def _numbers(state: _Printer, numbers: Sequence[Number]) -> None:
    for n in numbers:
        if n.name not in state.types:
            text, kind = translate(n.text, state.types)
            state.types[n.name] = kind
            state.w.add(f"const {CTYPES[kind]} {n.name} = {text};")


# --- steps -----------------------------------------------------------------------------------------------------------


def _declare(state: _Printer, b: str) -> None:
    if b not in state.declared:
        state.declared.add(b)
        state.w.add(f"Tensor t_{b};")


def _allocate(state: _Printer, b: str) -> None:
    """Allocate a buffer that is a tensor of its own."""
    buffer = state.program.buffers[b]
    if b in state.declared:
        return
    _declare(state, b)
    state.w.add(f"t_{b} = empty({dtype_text(buffer.dtype)}, {ints(buffer.sizes)}, {ints(buffer.strides)});")
    _set_pointer(state, b)


def _set_pointer(state: _Printer, b: str) -> None:
    if b in state.planned.locations.slots:
        state.w.add(f"P[{state.planned.locations.slots[b]}] = data_of(t_{b}.get());")


def _segment(state: _Printer, n: int, numbers: Sequence[int]) -> None:
    """Print the call of one run of kernels, with the allocations before and the check after it."""
    launches = [s for k in numbers if isinstance(s := state.planned.steps[k], Launch)]
    for s in launches:
        for q, b in s.operands():
            if q.written and b in state.planned.locations.fresh:
                _allocate(state, b)
    for s in launches:
        state.w.add(f"// {s.kernel}: {_comment(provenance(s.origins))}")
    state.w.add(f"segment{n}(P, S, max_threads, ws->error);")
    checking = [s for s in launches if s.function.checks]
    if checking:
        lines = "; ".join(sorted({o.line for s in checking for o in s.origins if o.line})) or "an indexing operation"
        state.w.add(f"check_kernel(ws->error, {quoted(lines)});")


def _extern(state: _Printer, calls: Calls, s: Extern) -> None:
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
            _declare(state, o)
    w.add(f"{{  // {s.target}: {_comment(provenance(s.origins))}")
    w.depth += 1
    if in_place:
        out = s.outs[0]
        assert out is not None
        if out in state.planned.locations.fresh:
            w.depth -= 1
            w.body.pop()
            _allocate(state, out)
            w.add(f"{{  // {s.target}: {_comment(provenance(s.origins))}")
            w.depth += 1
        calls.print(w, s, s.out_variant)
    else:
        calls.print(w, s, s.target)
    w.depth -= 1
    w.add("}")
    if in_place:
        return
    for line in late_numbers(s, state.types):
        w.add(line)
    _late_symbols(state, s)
    if not _is_opaque(s):
        settle(w, state.planned, s, state.used, is_foreign(s.target))
    for o in s.outs:
        if o in p.buffers:
            assert o is not None
            _set_pointer(state, o)


def _late_symbols(state: _Printer, s: Extern) -> None:
    """Print the numbers that follow from those a call gives, and enter the sizes into the table of kernels."""
    if not s.defines:
        return
    known = set(state.types)
    new = [n for n in state.program.numbers if n.name not in known]
    ready: list[Number] = []
    for n in new:
        if names_in(n.text) <= known:
            ready.append(n)
            known.add(n.name)
    _numbers(state, ready)
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


# --- results ---------------------------------------------------------------------------------------------------------


def _output(state: _Printer, k: int, o: Any) -> str:
    """Print one result; return its kind. Numbers become tensors of one element."""
    w, out = state.w, f"frame.out[{k}]"
    if o is None:
        return "none"
    if isinstance(o, View):
        w.add(f"{out} = {_output_view(state, o)};")
        return "tensor"
    if isinstance(o, Opaque):
        w.add(f"{out} = share(t_{o}.get());")
        return "tensor"
    if isinstance(o, HostNumber):
        text, kind = translate(str(o), state.types)
    elif isinstance(o, (bool, float)):
        text, kind = translate(f"float('{o}')" if isinstance(o, float) else repr(o), {})
    elif isinstance(o, (int, ex.Expr)):
        text, kind = print_cpp.index(o), "int"
    else:
        raise Unsupported(o, f"a result of type {type(o).__name__} in an ahead-of-time library")
    w.add(f"{out} = scalar({CTYPES[kind]}({text}));")
    return kind


def _output_view(state: _Printer, v: View) -> str:
    """Return the text of a result; one that is a weight is a copy, since weights belong to the container."""
    made = view_text(state.planned, v) or f"share(t_{v.buffer}.get())"
    is_weight = v.buffer in state.program.inputs and v.buffer not in state.user.named
    return f"clone({made}.get())" if is_weight else made
