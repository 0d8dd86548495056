"""Python text that the host programs of CPUs and GPUs share: sizes, numbers, arguments, results and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...aten.name import is_foreign
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import Buffer, Constant, Extern, HostNumber, Origin, Program, View, names_in, unbacked_symbols
from ...lowering.graph import Opaque
from ...runtime.huge_pages import LEAST_BYTES
from ..lines import Lines
from .launch_plan import Locations
from .take_over import donors
from .torch_functions import function_text, overload_text

LONGEST_PROVENANCE = 160  # characters of the comment on a step


class HostLines(Lines):
    """The body of the host program's `call`.

    `targets`: names that are defined, buffers and (after "fn ") called functions, with their texts. `defined`: symbols
    that calls have defined, and numbers.
    """

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.targets: dict[str, str] = {}
        self.defined: set[str] = set()


def tuple_text(xs: Sequence[Index]) -> str:
    """Return indices as a Python tuple."""
    return "(" + ", ".join(map(ex.show, xs)) + ("," if len(xs) == 1 else "") + ")"


def geometry_text(p: Program, b: str) -> str:
    """Return the sizes and strides of a buffer as two Python tuples."""
    buffer = p.buffers[b]
    return f"{tuple_text(buffer.sizes)}, {tuple_text(buffer.strides)}"


def provenance(origins: Sequence[Origin]) -> str:
    """Return the graph nodes and the user's lines from which a step comes, as a comment."""
    nodes = ", ".join(dict.fromkeys(o.node for o in origins))
    lines = list(dict.fromkeys(o.line for o in origins if o.line))
    shown = nodes if len(nodes) < LONGEST_PROVENANCE else nodes[: LONGEST_PROVENANCE - 3] + "..."
    shown += f" | {lines[0]}" if lines else ""
    return shown + (f" ... {lines[-1]}" if len(lines) > 1 else "")


def may_be_large(buffer: Buffer) -> bool:
    """Return whether a buffer is large enough for huge pages; one whose size only a call knows may be."""
    nbytes = ex.mul(buffer.extent, buffer.dtype.itemsize)
    return not isinstance(nbytes, int) or nbytes >= LEAST_BYTES


def allocation_text(p: Program, locations: Locations, b: str, allocate: str) -> str:
    """Return the text of a new tensor for a buffer, in memory that it takes over if the call owns that."""
    geometry = geometry_text(p, b)
    new = f"{allocate}({geometry}, {p.buffers[b].dtype})"
    source = locations.takes.get(b)
    if source is None:
        return new
    if p.buffers[source].donated:
        return f"view({source}, {geometry}, 0) if own else {new}"
    return source if geometry == geometry_text(p, source) else f"view({source}, {geometry}, 0)"


def owned_import(p: Program, takes: Mapping[str, str]) -> list[str]:
    """Return the import that asks whether a call owns its donated inputs."""
    return ["from altbackend.runtime.donated import owned"] if donors(p, takes) else []


# --- sizes and numbers -----------------------------------------------------------------------------------------------


def open_call(w: HostLines, p: Program, takes: Mapping[str, str]) -> None:
    """Print names for the inputs, and drop the caller's list. `takes`: see `Locations`."""
    if donors(p, takes):
        w.add(f"own = owned(args, ({', '.join(map(str, donors(p, takes)))},))")
    if p.inputs:
        w.add(f"{', '.join(p.inputs)}{',' if len(p.inputs) == 1 else ''} = args")
    w.add("args.clear()")


def bind_sizes(w: HostLines, p: Program, any_strides: bool, checked: bool = False) -> None:
    """Print names for the symbolic sizes of inputs.

    `any_strides`: inputs may have other strides than were traced, and are copied then. `checked`: compare dtype, sizes
    and strides of inputs with those that were traced first.
    """
    names = set(p.inputs)
    tensors = [b for b in p.inputs if b in p.buffers]
    for b in tensors:
        for axis, n in enumerate(p.buffers[b].sizes):
            text = ex.show(n)
            if not isinstance(n, int) and len(n.syms) == 1 and text == next(iter(n.syms)).key and text not in names:
                names.add(text)
                w.add(f"{text} = {b}.size({axis})")
    for b in tensors if checked else ():
        w.add(f"check_input({b}, {b!r}, {p.buffers[b].dtype}, {geometry_text(p, b)})")
    for b in tensors if any_strides else ():
        if p.buffers[b].sizes:
            w.add(f"{b} = ensure_strides({b}, {geometry_text(p, b)})")


def bind_numbers(w: HostLines, p: Program) -> list[str]:
    """Print each number of the program whose operands are defined by now, once; return their names."""
    unbacked = unbacked_symbols(p) if p.numbers else frozenset()
    new = []
    for n in p.numbers:  # a number may need an earlier one
        if n.name not in w.defined and not names_in(n.text) & unbacked - w.defined:
            w.add(f"{n.name} = {n.text}")
            w.defined.add(n.name)
            new.append(n.name)
    return new


def bind_late(w: HostLines, p: Program, locations: Locations, s: Extern) -> None:
    """Print the sizes that a call defines, the checks on them, and their entries in the kernels' table of sizes."""
    for symbol, text in s.binds:
        w.add(f"{symbol} = {text}")
    for condition, message in s.requires:
        values = ", ".join(f"{name!r}: {name}" for name in sorted(names_in(condition)))
        w.add(f"if not ({condition}):")
        w.add(f"    failed({message!r}, {{{values}}})")
    w.defined.update(s.defines)
    for symbol in (*s.defines, *bind_numbers(w, p)) if s.defines else ():
        if symbol in locations.symbols:
            w.add(f"S[{locations.symbols.index(symbol)}] = {symbol}")


_NUMBER_IMPORTS = [
    "import math",
    "from altbackend.runtime.checks import bits_of, failed, indexed_size, position, slice_begin",
]


def number_imports(p: Program) -> list[str]:
    """Return the imports that the texts of numbers and checks need."""
    calls = [s for s in p.nodes if isinstance(s, Extern)]
    used = bool(p.numbers) or any(s.requires or _has_host_number((s.args, s.kwargs)) for s in calls)
    return _NUMBER_IMPORTS if used or _has_host_number(p.outputs) else []


def _has_host_number(x: object) -> bool:
    if isinstance(x, (tuple, list)):
        return any(map(_has_host_number, x))
    return isinstance(x, HostNumber)


# --- results of custom operators -------------------------------------------------------------------------------------


def promise(p: Program, target: object, o: str) -> str:
    """Return the check of such a call's result: it compares three attributes at run time."""
    return f"{o} = promised({o}, {str(target)!r}, {p.buffers[o].dtype}, {geometry_text(p, o)})"


def promise_imports(p: Program) -> list[str]:
    """Return the import of the check of results, if a call needs it."""
    needed = any(isinstance(n, Extern) and is_foreign(n.target) for n in p.nodes)
    return ["from altbackend.runtime.promises import promised"] * needed


# --- calls and results -----------------------------------------------------------------------------------------------


def call_text(w: HostLines, p: Program, locations: Locations, target: object, s: Extern) -> tuple[str, list[str]]:
    """Return the name of a library function and the texts of its arguments."""
    args = [_argument(p, locations, a) for a in s.args]
    return _target_name(w, target), args + [f"{k}={_argument(p, locations, v)}" for k, v in s.kwargs]


def _target_name(w: HostLines, target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        text, name = function_text(target), target._schema.name.split("::")[1]
        label = f"op_{name}" if target._overloadname == "default" else f"op_{name}_{target._overloadname}"
    else:
        label = f"op_{getattr(target, '__name__', type(target).__name__)}"
        text = f"const[{label!r}]"
    w.targets.setdefault(f"fn {label}", text)
    return label


def _argument(p: Program, locations: Locations, x: object) -> str:
    match x:
        case View():
            return argument_view(p, locations, x)
        case Opaque() | HostNumber():
            return str(x)
        case Constant():
            return f"const[{str(x)!r}]"
        case ex.Expr():
            return ex.show(x)
        case tuple() | list():
            inner = ", ".join(_argument(p, locations, y) for y in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
        case float() if x != x or x in (float("inf"), float("-inf")):
            return f'float("{x}")'
        case torch.device() if x.type == "cuda" and {x} == _gpus(p):
            return 'torch.device("cuda", DEVICE)'
        case torch.device():
            return f"torch.device({str(x)!r})"
        case torch._ops.OpOverload():  # an argument of a higher-order operator
            return overload_text(x)
        case torch._ops.HigherOrderOperator():
            return f"torch.ops.higher_order.{x._name}"
        case _:
            return repr(x)


def _gpus(p: Program) -> set[torch.device]:
    return {b.device for b in p.buffers.values() if b.device.type == "cuda"}


def argument_view(p: Program, locations: Locations, v: View) -> str:
    """Return the text of a tensor argument; strides of dimensions of size 1 may differ from the buffer's."""
    if v in locations.windows:
        return f"V[{locations.windows[v]}]"
    b = p.buffers[v.buffer]
    same = all(s == t or n == 1 for n, s, t in zip(v.sizes, v.strides, b.strides, strict=False))
    return _view_text(p, v, v.sizes == b.sizes and same and v.offset == 0)


def return_line(p: Program) -> str:
    """Return the last line of the host program."""
    outs = ", ".join(_output(p, o) for o in p.outputs)
    return f"return ({outs}{',' if len(p.outputs) == 1 else ''})"


def _output(p: Program, o: object) -> str:
    if isinstance(o, Constant):
        return f"const[{str(o)!r}]"
    if isinstance(o, (Opaque, HostNumber)):
        return str(o)
    if not isinstance(o, View):
        return ex.show(o) if isinstance(o, ex.Expr) else repr(o)
    b = p.buffers[o.buffer]
    return _view_text(p, o, o.sizes == b.sizes and o.strides == b.strides and o.offset == 0)


def _view_text(p: Program, v: View, is_buffer: bool) -> str:
    """Return the text of a view. `is_buffer`: it has the buffer's sizes, strides and offset."""
    b = p.buffers[v.buffer]
    tensor = f"const[{v.buffer!r}]" if b.kind == "const" else v.buffer
    if v.dtype not in (None, b.dtype):
        return f"retyped({tensor}, {v.dtype}, {tuple_text(v.sizes)}, {tuple_text(v.strides)}, {ex.show(v.offset)})"
    if is_buffer:
        return tensor
    return f"view({tensor}, {tuple_text(v.sizes)}, {tuple_text(v.strides)}, {ex.show(v.offset)})"
