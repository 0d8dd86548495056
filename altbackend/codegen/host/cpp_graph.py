"""Print the host program of a graph under torch.compile as C++. It calls the kernels that the Python one calls.

Its inputs are guarded and its results go back to Python, so nothing but the calling convention differs from the Python
program. An error before the first effect on an input is not raised: Python runs the call again, and raises it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ...aten.name import is_foreign
from ...config.options import Config
from ...errors import Unsupported
from ...ir import expr as ex
from ...ir.loops import Extern, HostNumber, Program, View, names_in, symbols_of, views, writes
from ...lowering.graph import Opaque
from ...runtime import philox
from . import cpp_cuda
from .cpp_library import number
from .cpp_numbers import CTYPES
from .cpp_program import AnyStep, PrintedHost, Printer, print_program
from .cpp_values import dtype_text, ints, named, quoted, view_text
from .cuda_program import CudaLaunch, CudaPlan
from .launch_plan import Launch, LaunchPlan
from .take_over import donors

HEADERS = ("graph.h", "dispatcher.h", "numbers.h")


@dataclass(frozen=True)
class GraphHost:
    """A host program in C++. `steps`: runs of kernels and library calls.

    `inputs`: a letter each: "t" a tensor, "n" an integer, "-" not used.
    `constants`: names of the tensors that the program takes besides its inputs. `donated`: inputs whose memory it takes
    over.
    """

    text: str
    segments: int
    steps: int
    inputs: str
    constants: tuple[str, ...]
    outputs: tuple[str, ...]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Calling:
    """Facts about the calls of a graph. `any_strides`: inputs may have other strides than were traced.

    `drops`: the caller gives its inputs away, so that their memory is freed after their last use.
    """

    any_strides: bool
    drops: bool


def build(planned: LaunchPlan, cfg: Config, calling: Calling) -> GraphHost:
    """Print a host program. Raise Unsupported, with the operator and its line, for a step that has no C++ form."""
    edges = _edges(planned.program, calling, cfg)
    return _graph(print_program(planned, cfg, "graph", edges, pointers=True), edges, cfg)


def build_cuda(planned: CudaPlan, cfg: Config, calling: Calling) -> GraphHost:
    """Print a host program for a GPU. Raise Unsupported like `build`."""
    edges = _edges(planned.program, calling, cfg)
    return _graph(cpp_cuda.print_program(planned, "graph", edges), edges, cfg)


def _edges(p: Program, calling: Calling, cfg: Config) -> _GraphEdges:
    return _GraphEdges(_inputs(p), calling, cfg.size_asserts and not calling.any_strides)


def _graph(host: PrintedHost, edges: _GraphEdges, cfg: Config) -> GraphHost:
    p, segments, keep = host.planned.program, len(host.planned.segments), str(cfg.persistent_workspace).lower()
    lines = [
        *(f"#include <altbackend/aot/{h}>" for h in HEADERS),
        "",
        *host.declarations,
        "",
        "namespace alt::aot {",
        "",
        host.text,
        f"static const Graph the_graph{{graph_table, {segments}, {keep}}};",
        "}  // namespace alt::aot",
        "",
        "ALT_GRAPH(alt::aot::the_graph)",
        "",
    ]
    inputs = edges.given.letters
    calls = sum(isinstance(s, Extern) for s in host.planned.steps)
    # the kernels of a segment are one call on a CPU; on a GPU, each is a launch
    steps = calls + (segments or host.launches)
    donated = tuple(donors(p, host.planned.locations.takes))
    return GraphHost("\n".join(lines), segments, steps, inputs, _constants(p), host.outputs, donated)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a program by kind. `letters`: see `GraphHost.inputs`."""

    letters: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]


def _inputs(p: Program) -> _Inputs:
    others = [b for b in p.inputs if b not in p.buffers]
    opaque = _opaque_inputs(p) if others else set()
    used = set() if opaque.issuperset(others) else _used_names(p)
    kinds = ["t" if b in p.buffers or b in opaque else "n" if b in used else "-" for b in p.inputs]
    pairs = list(zip(p.inputs, kinds, strict=True))
    return _Inputs("".join(kinds), tuple(b for b, k in pairs if k == "t"), tuple(b for b, k in pairs if k == "n"))


def _opaque_inputs(p: Program) -> set[str]:
    """Return the inputs that calls take or the caller gets as they are. A call takes them as tensors, or is refused."""
    names: set[str] = {str(o) for o in p.outputs if isinstance(o, Opaque)}
    for s in (s for s in p.nodes if isinstance(s, Extern)):
        leaves = torch.utils._pytree.tree_leaves((s.args, dict(s.kwargs)))
        names.update(str(x) for x in leaves if isinstance(x, Opaque))
    return names


def _constants(p: Program) -> tuple[str, ...]:
    return tuple(b for b, buffer in p.buffers.items() if buffer.kind == "const")


def _texts(p: Program) -> list[str]:
    """Return all Python texts of a program."""
    calls = [s for s in p.nodes if isinstance(s, Extern)]
    leaves = torch.utils._pytree.tree_leaves((*((s.args, dict(s.kwargs)) for s in calls), p.outputs))
    texts = [n.text for n in p.numbers] + [str(x) for x in leaves if isinstance(x, HostNumber)]
    for s in calls:
        texts += [text for _, text in s.binds] + [condition for condition, _ in s.requires]
    return texts


def _used_names(p: Program) -> set[str]:
    """Return the names of numbers that the program uses."""
    names = {name for text in _texts(p) for name in names_in(text)}
    names.update(*(symbols_of(p, n) for n in p.nodes))
    indices = [x for b in p.buffers.values() for x in (*b.sizes, *b.strides)]
    for o in p.outputs:
        indices += (*o.sizes, *o.strides, o.offset) if isinstance(o, View) else [o] if isinstance(o, ex.Expr) else ()
    return names.union(a.key for x in indices for a in ex.syms_of(x))


@dataclass(frozen=True)
class _GraphEdges:
    """The edges of a compiled graph (`cpp_program.Edges`). `checked`: compare inputs with those that were traced."""

    given: _Inputs
    calling: Calling
    checked: bool

    def inputs(self, state: Printer) -> None:
        p, w = state.program, state.w
        w.add("auto& own = static_cast<GraphFrame&>(frame);")
        w.add("(void)own;")
        tensors = self.given.tensors
        for k, b in enumerate(tensors):
            if self.calling.any_strides and b in p.buffers and p.buffers[b].sizes:
                w.add(f"const Borrowed g_{b}{{frame.in[{k}]}};")
            else:
                w.add(f"const Borrowed t_{b}{{frame.in[{k}]}};")
        for k, b in enumerate(_constants(p)):
            w.add(f"const Borrowed t_{b}{{own.fixed[{k}]}};")
        self._numbers(state)
        for b in (b for b in tensors if b in p.buffers):
            geometry = f"{ints(p.buffers[b].sizes)}, {ints(p.buffers[b].strides)}"
            if self.calling.any_strides and p.buffers[b].sizes:
                w.add(f'const Tensor t_{b} = with_strides(share(g_{b}.get()), "an input", {geometry});')
            elif self.checked:
                w.add(f"check_traced(t_{b}.get(), {quoted(b)}, {dtype_text(p.buffers[b].dtype)}, {geometry});")

    def _numbers(self, state: Printer) -> None:
        """Print names for the numbers among the inputs, and for the sizes of tensors."""
        p, w = state.program, state.w
        for k, b in enumerate(self.given.numbers):
            _require_integer(p, b)
            if b not in state.types:
                state.types[b] = "int"
                w.add(f"const int64_t {b} = own.given[{k}];")
        if donors(p, state.planned.locations.takes):
            w.add(f"const bool donated = own.given[{len(self.given.numbers)}] != 0;")
        for b in (b for b in p.inputs if b in p.buffers):
            for axis, n in enumerate(p.buffers[b].sizes):
                text = ex.show(n)
                if isinstance(n, int) or len(n.syms) != 1 or text != next(iter(n.syms)).key or text in state.types:
                    continue
                state.types[text] = "int"
                name = f"g_{b}" if self.calling.any_strides else f"t_{b}"
                w.add(f"const int64_t {text} = size_of({name}.get(), {axis});")

    def before(self, state: Printer, s: AnyStep) -> None:
        """Print that the call cannot be repeated, before a step that changes more than intermediates."""
        if isinstance(s, Extern) and is_foreign(s.target):
            raise Unsupported(named(s), "a custom operator, whose errors may be of any type of Python's")
        p, takes = state.program, state.planned.locations.takes
        if effect_of(p, s):
            state.w.add("own.repeatable = false;")
        elif any(p.buffers[takes[b]].donated for b in written_by(s) if b in takes):
            state.w.add("if (donated) own.repeatable = false;")

    def drop_input(self, state: Printer, b: str) -> None:
        if self.calling.drops and not self.calling.any_strides:
            state.w.add(f"own.drop({self.given.tensors.index(b)});")

    def output(self, state: Printer, k: int, o: object) -> str:
        w = state.w
        if o is None:
            return "none"
        if isinstance(o, View):
            w.add(f"frame.out[{k}] = {view_text(state.planned, o) or f'shared_or_none(t_{o.buffer}.get())'};")
            return "tensor"
        if isinstance(o, Opaque):
            w.add(f"frame.out[{k}] = shared_or_none(t_{o}.get());")
            return "tensor"
        text, kind = number(state, o)
        field = "real" if kind == "float" else "integer"
        w.add(f"own.numbers[{k}].{field} = {CTYPES[kind]}({text});")
        return kind


def written_by(s: AnyStep) -> Sequence[str]:
    """Return the buffers that a step writes."""
    if isinstance(s, Extern):
        return writes(s)
    if isinstance(s, Launch):
        return [b for q, b in s.operands() if q.written]
    return [b for q, b in zip(s.params, s.buffers, strict=True) if q.written]


def effect_of(p: Program, s: AnyStep) -> bool:
    """Return whether a step changes an input or the random state, or may do more than its schema says."""

    def is_given(b: str) -> bool:
        return b in p.buffers and p.buffers[b].kind != "temp"

    if isinstance(s, Launch):
        return any(q.written and is_given(b) for q, b in s.operands())
    if isinstance(s, CudaLaunch):
        return any(q.written and is_given(b) for q, b in zip(s.params, s.buffers, strict=True))
    if not isinstance(s.target, torch._ops.OpOverload):
        return s.target is philox.philox_seeds or any(is_given(b) for b in writes(s))
    draws = torch.Tag.nondeterministic_seeded in s.target.tags
    writes_given = s.target._schema.is_mutable and any(is_given(v.buffer) for v in views(s))
    return draws or writes_given or any(is_given(b) for b in writes(s))


def _require_integer(p: Program, name: str) -> None:
    """Raise Unsupported for an input that may be a float: it is no size of the traced program, and a text names it."""
    if name.startswith("_") and any(name in names_in(text) for text in _texts(p)):
        raise Unsupported(name, "an input that is a number of unknown type")
