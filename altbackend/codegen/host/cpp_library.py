"""Print a program of an ahead-of-time library: every input of the caller is checked, weights belong to the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from altbackend.lazy_dataclass import dataclass

from ...config.options import Config
from ...errors import Unsupported
from ...ir import expr as ex
from ...ir.loops import HostNumber, Program, View, names_in
from ...lowering.graph import Opaque
from ...schedule.deps import Deps
from ..cpp import print_cpp
from ..triton.print_triton import TritonKernel
from . import cpp_cuda, cpp_inputs, cuda_program
from .cpp_numbers import CTYPES, Kind, translate
from .cpp_program import AnyStep, Printer, print_program
from .cpp_values import quoted, view_text
from .cuda_program import CudaPlan
from .launch_plan import Step, cpp_text, plan


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
    on_gpu: tuple[tuple[TritonKernel, tuple[int, ...]], ...] = ()  # each launch, with its aligned pointers


def build(p: Program, deps: Deps, steps: Sequence[Step], cfg: Config, name: str, user: UserInputs) -> CppProgram:
    """Print a program. Raise Unsupported, with the operator and its line, for a step that has no C++ form."""
    host = print_program(plan(p, deps, steps, cfg), cfg, name, _LibraryEdges(user))
    kernels = cpp_text(host.planned, cfg, f"alt::aot::{name}")
    calls = len(host.planned.steps) - host.launches
    has_kernels = bool(host.planned.segments)
    return CppProgram(kernels, host.text, host.declarations, host.outputs, host.launches, calls, has_kernels)


def build_cuda(planned: CudaPlan, name: str, user: UserInputs) -> CppProgram:
    """Print a program for a GPU. Raise Unsupported like `build`."""
    host = cpp_cuda.print_program(planned, name, _LibraryEdges(user), pointers=False)
    calls = len(planned.steps) - host.launches
    hints = cuda_program.aligned_launches(planned)
    return CppProgram("", host.text, host.declarations, host.outputs, host.launches, calls, False, hints)


@dataclass(frozen=True)
class _LibraryEdges:
    """The edges of a library's program (`cpp_program.Edges`)."""

    user: UserInputs

    def inputs(self, state: Printer) -> None:
        p, w = state.program, state.w
        if fixed := [name for name, b in p.buffers.items() if b.kind == "const"]:
            raise Unsupported(", ".join(fixed), "a constant that is no input of the program")
        for k, b in enumerate(p.inputs):
            if b in p.buffers and p.buffers[b].negative:
                raise Unsupported(b, "an input with torch's negative bit in an ahead-of-time library")
            w.add(f"const Borrowed t_{b}{{frame.in[{k}]}};")
        for symbol in cpp_inputs.bind(p, w, self.user.named, self.user.ranges):
            state.types[symbol] = "int"
        for condition in self.user.conditions:
            if names_in(condition) <= set(state.types):
                w.add(f"check_condition({translate(condition, state.types)[0]}, {quoted(condition)});")

    def before(self, state: Printer, s: AnyStep) -> None:
        pass  # an error ends the call, whatever has run

    def drop_input(self, state: Printer, b: str) -> None:
        pass  # inputs belong to the container

    def output(self, state: Printer, k: int, o: object) -> str:
        """Print one result; return its kind. Numbers become tensors of one element."""
        w, out = state.w, f"frame.out[{k}]"
        if o is None:
            return "none"
        if isinstance(o, View):
            w.add(f"{out} = {self._view(state, o)};")
            return "tensor"
        if isinstance(o, Opaque):
            w.add(f"{out} = share(t_{o}.get());")
            return "tensor"
        text, kind = number(state, o)
        w.add(f"{out} = scalar({CTYPES[kind]}({text}));")
        return kind

    def _view(self, state: Printer, v: View) -> str:
        """Return the text of a result; one that is a weight is a copy, since weights belong to the container."""
        text = view_text(state.planned, v) or f"share(t_{v.buffer}.get())"
        is_weight = v.buffer in state.program.inputs and v.buffer not in self.user.named
        return f"clone({text}.get())" if is_weight else text


def number(state: Printer, o: object) -> tuple[str, Kind]:
    """Return a result that is a number as C++, with its kind. Raise Unsupported for another result."""
    if isinstance(o, HostNumber):
        return translate(str(o), state.types)
    if isinstance(o, (bool, float)):
        return translate(f"float('{o}')" if isinstance(o, float) else repr(o), {})
    if isinstance(o, (int, ex.Expr)):
        return print_cpp.index(o), "int"
    raise Unsupported(o, f"a result of type {type(o).__name__} has no C++ form")
