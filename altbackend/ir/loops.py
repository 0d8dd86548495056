"""The loop IR: a straight-line program of coarse nodes over named buffers.

    Buffer      strided storage of one dtype; names are unique in a program
    Pointwise   out[index] = value                      for every point of dims
    Reduction   out[index] = reduce(op, value, rdims)   for every point of dims
    Scan        out[index] = value scanned along rdims[0] (inclusive)
    Scatter     out[index] (op)= value, index data-dependent, out updated in place
    Extern      a library call on buffer views

All nodes are frozen. Indices are linear element positions in the buffer (`ir.expr`), bodies are `ir.value` trees.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import expr as ex
from . import value as va
from .expr import Atom, Index
from .host_functions import FUNCTIONS
from .value import Value

REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "xor")
SCANS = ("sum", "prod", "max", "min", "logaddexp")


@dataclass(frozen=True)
class Buffer:
    """`sizes` and `strides` in elements; `kind`: "input", "temp" or "const" (filled once, kept).

    `negative`: the tensor has torch's negative bit, so library calls read the negative of what is in memory.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    device: torch.device = torch.device("cpu")
    kind: str = "temp"
    negative: bool = False

    @property
    def numel(self) -> Index:
        return ex.prod(self.sizes)

    @property
    def extent(self) -> Index:
        """Number of elements between the first and one past the last, 0 when empty."""
        if any(s == 0 for s in self.sizes):
            return 0
        return ex.add(1, *(ex.mul(ex.sub(n, 1), s) for n, s in zip(self.sizes, self.strides, strict=True)))


@dataclass(frozen=True)
class Origin:
    """The FX node that a loop comes from: name, operator, the user's source line."""

    node: str
    target: str
    line: str = ""


@dataclass(frozen=True)
class Pointwise:
    out: str
    dims: tuple[Atom, ...]
    index: Index
    value: Value
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """`dims` are kept, `rdims` reduced; `value` has the accumulation dtype."""

    out: str
    dims: tuple[Atom, ...]
    rdims: tuple[Atom, ...]
    index: Index
    op: str
    value: Value
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Scan:
    """Inclusive scan along the single variable `rdims[0]`; `index` includes it."""

    out: str
    dims: tuple[Atom, ...]
    rdims: tuple[Atom, ...]
    index: Index
    op: str
    value: Value
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Scatter:
    """`mode`: "set", "add", "prod", "max", "min", applied in loop order.

    `out` is a dense buffer of this lowering, already filled; it is read and written. A loop variable stands in the
    index as a plain multiple of the stride of one dimension, a data-dependent index likewise.
    """

    out: str
    dims: tuple[Atom, ...]
    index: Index
    value: Value
    mode: str
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class View:
    """A strided window on a buffer, as a library call sees it; `dtype` None = the buffer's own."""

    buffer: str
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index = 0
    dtype: torch.dtype | None = None


class Constant(str):
    """The name of a constant that is no tensor (a graph that a call takes)."""


class HostNumber(str):
    """A number that only the host program has, as Python text: other calls and the caller may take it."""


@dataclass(frozen=True)
class Number:
    """A number that the host program computes as soon as the names in `text`, a Python expression, have values.

    Kernels take integers only, as symbols; an integer that is the bits of a float64 is one too.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Extern:
    """`target(*args, **kwargs)`; leaves of the argument trees are View, Index, or plain constants.

    `outs`: buffer name per tensor result (None: a result that nobody uses); those of a list of tensors side by side.
    `lists`: where such a list begins among them and how long it is, unless all results are one list.
    `out_variant`: the operator's form that writes into the planned buffer.
    `defines`: symbols that are known once the call returned. One that is in `outs` is a result itself (a number),
    the others are in `binds`: (symbol, Python expression of the results' names). `requires`: (condition, message) of
    what kernels and later calls count on; the host program raises RuntimeError where one does not hold.
    `mutates`: buffers written through arguments. `aliases`: buffers that the results may share storage with.
    """

    outs: tuple[str | None, ...]
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    multi: bool = False
    lists: tuple[tuple[int, int], ...] = ()
    out_variant: Any = None
    mutates: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    binds: tuple[tuple[str, str], ...] = ()
    requires: tuple[tuple[str, str], ...] = ()
    origins: tuple[Origin, ...] = ()


Loop = Pointwise | Reduction | Scan | Scatter
Node = Pointwise | Reduction | Scan | Scatter | Extern
Output = View | Index | HostNumber | float | bool | None


@dataclass(frozen=True)
class Program:
    """Inputs are buffers in graph order; an input that is a number is given as the name of its symbol."""

    buffers: dict[str, Buffer]
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    numbers: tuple[Number, ...] = ()


def loop_vars(node: Loop) -> tuple[Atom, ...]:
    return node.dims if isinstance(node, (Pointwise, Scatter)) else node.dims + node.rdims


def reads(node: Node) -> tuple[str, ...]:
    """Names of buffers read, each once, in first-use order."""
    if isinstance(node, Extern):
        names = [v.buffer for v in views(node)]
    else:
        names = [b for b, _ in va.loads(node.value)]
        names += [v.attr[0] for e in ex.lookups(node.index) for v in va.walk(e) if v.op == "load"]
        if isinstance(node, Scatter):
            names.append(node.out)
    return tuple(dict.fromkeys(names))


def results_text(node: Extern) -> str:
    """The results as the left side of an assignment in Python."""
    labels = [o or "_" for o in node.outs]
    parts: list[str] = []
    done = 0
    for begin, count in node.lists:
        parts += [*labels[done:begin], "[" + ", ".join(labels[begin : begin + count]) + "]"]
        done = begin + count
    parts += labels[done:]
    return ", ".join(parts) + ("," if node.multi and len(parts) == 1 else "")


def writes(node: Node) -> tuple[str, ...]:
    if isinstance(node, Extern):
        return tuple(o for o in node.outs if o and o not in node.defines) + node.mutates
    return (node.out,)


def symbols_of(p: Program, node: Node) -> frozenset[str]:
    """Symbols that must be known before the node runs: of its loops, its indices, and the buffers that it touches.

    With a number goes what it is computed from.
    """
    found = {a.key for name in (*reads(node), *writes(node)) for a in ex.syms_of(p.buffers[name].extent)}
    if isinstance(node, Extern):
        _argument_symbols((node.args, node.kwargs, tuple(HostNumber(text) for text, _ in node.requires)), found)
        return frozenset(_with_sources(p, found)) - set(node.defines)
    syms = (ex.syms_of(node.index), node.value.syms, *(ex.syms_of(v.args[1]) for v in loop_vars(node)))
    return frozenset(_with_sources(p, found.union(a.key for s in syms for a in s)))


_WORDS = frozenset([*FUNCTIONS, *keyword.kwlist, *"abs bool float int math max min round sum torch".split()])  # noqa: SIM905


def names_in(text: str) -> set[str]:
    """The names of numbers in a Python expression: no attributes, and no words of the language or functions."""
    return set(re.findall(r"(?<![\w.])[^\W\d]\w*", text)) - _WORDS


def _with_sources(p: Program, names: set[str]) -> set[str]:
    """`names` and, of the numbers among them, those in their texts; a number's sources stand before it."""
    for number in reversed(p.numbers):
        if number.name in names:
            names |= names_in(number.text)
    return names


def _argument_symbols(x: Any, found: set[str]) -> None:
    if isinstance(x, ex.Expr):
        found.update(a.key for a in x.syms)
    elif isinstance(x, HostNumber):
        found |= names_in(x)
    elif isinstance(x, View):
        _argument_symbols((x.sizes, x.strides, x.offset), found)
    elif isinstance(x, (tuple, list)):
        for y in x:
            _argument_symbols(y, found)


def late_symbols(p: Program) -> frozenset[str]:
    """Symbols that no input gives."""
    late = {s for node in p.nodes if isinstance(node, Extern) for s in node.defines}
    for number in p.numbers if late else ():
        if not late.isdisjoint(names_in(number.text)):
            late.add(number.name)
    return frozenset(late)


def without_dead(p: Program) -> Program:
    """`p` without the loops whose results nobody reads: what a later store fills whole, for one."""
    needed = {o.buffer for o in p.outputs if isinstance(o, View)}
    needed.update(b.name for b in p.buffers.values() if b.kind != "temp")
    kept: list[Node] = []
    for node in reversed(p.nodes):
        if isinstance(node, Extern) or needed.intersection(writes(node)):
            kept.append(node)
            needed.update(reads(node))
    return _without_unused_numbers(replace(p, nodes=tuple(reversed(kept))))


def _without_unused_numbers(p: Program) -> Program:
    if not p.numbers:
        return p
    used = {a.key for b in p.buffers.values() for x in (*b.sizes, *b.strides) for a in ex.syms_of(x)}
    _argument_symbols(p.outputs, used)
    used = _with_sources(p, used).union(*(symbols_of(p, node) for node in p.nodes))
    return replace(p, numbers=tuple(n for n in p.numbers if n.name in used))


def views(node: Extern) -> list[View]:
    """Every View in the argument trees."""
    found: list[View] = []

    def visit(x: Any) -> None:
        if isinstance(x, View):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            for y in x:
                visit(y)
        elif isinstance(x, dict):
            for y in x.values():
                visit(y)

    visit(node.args)
    visit(node.kwargs)
    return found


def show_dims(dims: tuple[Atom, ...]) -> str:
    return ", ".join(f"{d.args[0]}:{ex.show(d.args[1])}" for d in dims)


def show_view(v: View) -> str:
    sizes = ", ".join(map(ex.show, v.sizes))
    strides = ", ".join(map(ex.show, v.strides))
    offset = f" + {ex.show(v.offset)}" if v.offset != 0 else ""
    return f"{v.buffer}[({sizes}) : ({strides}){offset}]"


def _show_arg(x: Any) -> str:
    if isinstance(x, View):
        return show_view(x)
    if isinstance(x, (tuple, list)):
        return "[" + ", ".join(map(_show_arg, x)) + "]"
    return str(x)


def show_node(node: Node) -> str:
    match node:
        case Pointwise():
            return f"{node.out}[{ex.show(node.index)}] = {node.value}  for {show_dims(node.dims)}"
        case Reduction():
            return (
                f"{node.out}[{ex.show(node.index)}] = {node.op}({node.value}, over {show_dims(node.rdims)})"
                f"  for {show_dims(node.dims)}"
            )
        case Scan():
            return (
                f"{node.out}[{ex.show(node.index)}] = scan_{node.op}({node.value}, along {show_dims(node.rdims)})"
                f"  for {show_dims(node.dims)}"
            )
        case Scatter():
            return f"{node.out}[{ex.show(node.index)}] {node.mode}= {node.value}  for {show_dims(node.dims)}"
        case Extern():
            outs = ", ".join(o or "_" for o in node.outs)
            args = ", ".join([*map(_show_arg, node.args), *(f"{k}={_show_arg(v)}" for k, v in node.kwargs)])
            return f"{outs} = call {node.target}({args})"


def show_program(p: Program) -> str:
    """The printed form of the IR; stable for equal programs."""
    lines = []
    for name in p.inputs:
        b = p.buffers.get(name)
        lines.append(f"input {name}" if b is None else _show_buffer("input", b))
    for node in p.nodes:
        lines += [_show_buffer("buffer", p.buffers[o]) for o in writes(node) if p.buffers[o].kind == "temp"]
        lines.append("  " + show_node(node))
        if node.origins:
            lines.append("    # " + "; ".join(f"{o.node} = {o.target}" for o in node.origins))
    outs = ", ".join(show_view(o) if isinstance(o, View) else str(o) for o in p.outputs)
    lines.append(f"return {outs}")
    return "\n".join(lines) + "\n"


def _show_buffer(word: str, b: Buffer) -> str:
    sizes = ", ".join(map(ex.show, b.sizes))
    strides = ", ".join(map(ex.show, b.strides))
    return f"{word} {b.name}: {str(b.dtype).removeprefix('torch.')}[{sizes}] : ({strides})"
