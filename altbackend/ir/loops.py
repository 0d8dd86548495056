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

import functools
import itertools
import keyword
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from . import expr as ex
from . import value as va
from .expr import Atom, Index
from .host_functions import FUNCTIONS
from .value import Value

REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "xor")
# The scalar operator that combines two results of a reduction.
COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "logical_or", "all": "logical_and"}
MOST_WRITTEN_OUT = 8  # terms of a reduction that a GPU computes as one value
SCANS = ("sum", "prod", "max", "min", "logaddexp")


@dataclass(frozen=True)
class Buffer:
    """Strided storage of one dtype; `sizes` and `strides` are in elements.

    `kind`: "input", "temp" or "const" (filled once and reused by every call). `negative`: the tensor has torch's
    negative bit, so library calls read the negative of the values in memory. `donated`: an input whose memory the
    program may take over after its last use, in calls that own it.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    device: torch.device = torch.device("cpu")
    kind: str = "temp"
    negative: bool = False
    donated: bool = False

    @property
    def numel(self) -> Index:
        return ex.prod(self.sizes)

    @property
    def extent(self) -> Index:
        """The number of elements from the first to the last, gaps included; 0 for an empty buffer."""
        if any(s == 0 for s in self.sizes):
            return 0
        last: Index = 1
        for n, s in zip(self.sizes, self.strides, strict=True):
            last = ex.add(last, (n - 1) * s if isinstance(n, int) and isinstance(s, int) else ex.mul(ex.sub(n, 1), s))
        return last


@dataclass(frozen=True)
class Origin:
    """The FX node from which a loop comes: its name, its operator and the user's source line."""

    node: str
    target: str
    line: str = ""


@dataclass(frozen=True)
class Pointwise:
    """A loop that stores `value` at `out[index]` for every point of `dims`."""

    out: str
    dims: tuple[Atom, ...]
    index: Index
    value: Value
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """A reduction of `value` over `rdims` at every point of the parallel dims `dims`.

    `value` has the dtype of the accumulator; `op` is one of REDUCTIONS.
    """

    out: str
    dims: tuple[Atom, ...]
    rdims: tuple[Atom, ...]
    index: Index
    op: str
    value: Value
    origins: tuple[Origin, ...] = ()


def written_out(op: str, value: Value, loops: Sequence[Atom]) -> Value:
    """Return the reduction `op` of `value` over loops of constant extents as one value: all its terms, combined."""
    points = itertools.product(*(range(ex.bounds(ex.size_of(v))[1]) for v in loops))
    terms = [value.substitute(dict(zip(loops, point, strict=True))) for point in points]
    return functools.reduce(lambda a, b: va.apply(COMBINE[op], a, b), terms)


@dataclass(frozen=True)
class Scan:
    """An inclusive scan along the single variable `rdims[0]`, which `index` contains; `op` is one of SCANS."""

    out: str
    dims: tuple[Atom, ...]
    rdims: tuple[Atom, ...]
    index: Index
    op: str
    value: Value
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Scatter:
    """A loop that combines `value` into `out[index]`, in loop order, where `index` depends on data.

    `mode`: "set", "add", "prod", "max" or "min". `out` is a dense buffer that an earlier node has filled; the loop
    reads and writes it. Each loop variable or data-dependent position in the index is multiplied by the stride of one
    dimension.
    """

    out: str
    dims: tuple[Atom, ...]
    index: Index
    value: Value
    mode: str
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class View:
    """A strided window on a buffer, as a library call takes it; `dtype` None means the buffer's own."""

    buffer: str
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index = 0
    dtype: torch.dtype | None = None


class Constant(str):
    """The name of a constant that is not a tensor, such as a graph that a call takes."""


class HostNumber(str):
    """A number of the host program, as Python text. Calls and the caller can take it; kernels cannot."""


@dataclass(frozen=True)
class Number:
    """A number that the host program computes once all names in `text`, a Python expression, have values.

    Kernels take integers only, as symbols. A float64 is passed to a kernel as the integer of its bits.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Extern:
    """A library call `target(*args, **kwargs)`; leaves of the argument trees are View, Index or plain constants.

    `outs`: the buffer name of each result, None for an unused result; a list of tensors is flattened.
    `lists`: (position in `outs`, length) of each such list, unless all results are one list.
    `out_variant`: the overload of the operator that writes into a buffer that is passed as `out=`.
    `defines`: symbols that the call gives. A symbol in `outs` is a result of the call, a number. The others are in
    `binds`: (symbol, Python expression over the names of the results).
    `requires`: (condition, message) that kernels and later calls rely on; the host program raises RuntimeError with the
    message if the condition is false.
    `mutates`: buffers that the call writes through arguments.
    `aliases`: buffers with which the results may share storage.
    """

    outs: tuple[str | None, ...]
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, object], ...] = ()
    multi: bool = False
    lists: tuple[tuple[int, int], ...] = ()
    out_variant: torch._ops.OpOverload | None = None
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
    """A straight-line program of nodes over named buffers.

    `inputs` are buffer names in graph order; an input that is a number is the name of its symbol.
    """

    buffers: dict[str, Buffer]
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    numbers: tuple[Number, ...] = ()


def loop_vars(node: Loop) -> tuple[Atom, ...]:
    """Return all loop variables of a node, parallel dims first."""
    return node.dims if isinstance(node, (Pointwise, Scatter)) else node.dims + node.rdims


def reads(node: Node) -> tuple[str, ...]:
    """Return the names of the buffers that a node reads, each once, in the order of first use."""
    if isinstance(node, Extern):
        names = [v.buffer for v in views(node)]
    else:
        names = [b for b, _ in va.loads(node.value)]
        names += [v.attr[0] for e in ex.lookups(node.index) for v in va.walk(e) if v.op == "load"]
        if isinstance(node, Scatter):
            names.append(node.out)
    return tuple(dict.fromkeys(names))


def results_text(node: Extern) -> str:
    """Return the results of a call as the left side of an assignment in Python."""
    labels = [o or "_" for o in node.outs]
    parts: list[str] = []
    done = 0
    for begin, count in node.lists:
        parts += [*labels[done:begin], "[" + ", ".join(labels[begin : begin + count]) + "]"]
        done = begin + count
    parts += labels[done:]
    return ", ".join(parts) + ("," if node.multi and len(parts) == 1 else "")


def writes(node: Node) -> tuple[str, ...]:
    """Return the names of the buffers that a node writes."""
    if isinstance(node, Extern):
        return tuple(o for o in node.outs if o and o not in node.defines) + node.mutates
    return (node.out,)


def symbols_of(p: Program, node: Node) -> frozenset[str]:
    """Return the symbols that must have values before a node runs: those of its loops, its indices and its buffers.

    The operands of a number are included with the number.
    """
    names = {a.key for name in (*reads(node), *writes(node)) for a in ex.syms_of(p.buffers[name].extent)}
    if isinstance(node, Extern):
        _argument_symbols((node.args, node.kwargs, tuple(HostNumber(text) for text, _ in node.requires)), names)
        names |= getattr(node.target, "symbols", frozenset())
        return frozenset(_with_sources(p, names)) - set(node.defines)
    syms = (ex.syms_of(node.index), node.value.syms, *(ex.syms_of(ex.size_of(v)) for v in loop_vars(node)))
    return frozenset(_with_sources(p, names.union(a.key for s in syms for a in s)))


_WORDS = frozenset([*FUNCTIONS, *keyword.kwlist, *"abs bool float int math max min round sum torch".split()])  # noqa: SIM905


def names_in(text: str) -> set[str]:
    """Return the names of numbers in a Python expression; attributes, keywords and functions are left out."""
    return set(re.findall(r"(?<![\w.])[^\W\d]\w*", text)) - _WORDS


def _with_sources(p: Program, names: set[str]) -> set[str]:
    """Add to `names` the operands of the numbers among them; `p.numbers` lists an operand before its users."""
    for number in reversed(p.numbers):
        if number.name in names:
            names |= names_in(number.text)
    return names


def _argument_symbols(x: object, names: set[str]) -> None:
    if isinstance(x, ex.Expr):
        names.update(a.key for a in x.syms)
    elif isinstance(x, HostNumber):
        names |= names_in(x)
    elif isinstance(x, View):
        _argument_symbols((x.sizes, x.strides, x.offset), names)
    elif isinstance(x, (tuple, list)):
        for y in x:
            _argument_symbols(y, names)


def unbacked_symbols(p: Program) -> frozenset[str]:
    """Return the symbols that calls give, not inputs, and the numbers that are computed from them."""
    unbacked = {s for node in p.nodes if isinstance(node, Extern) for s in node.defines}
    for number in p.numbers if unbacked else ():
        if not unbacked.isdisjoint(names_in(number.text)):
            unbacked.add(number.name)
    return frozenset(unbacked)


def without_dead(p: Program) -> Program:
    """Return `p` without the loops whose results no node and no output reads."""
    needed = {o.buffer for o in p.outputs if isinstance(o, View)}
    needed.update(b.name for b in p.buffers.values() if b.kind != "temp")
    live_nodes: list[Node] = []
    for node in reversed(p.nodes):
        if isinstance(node, Extern) or needed.intersection(writes(node)):
            live_nodes.append(node)
            needed.update(reads(node))
    return _without_unused_numbers(replace(p, nodes=tuple(reversed(live_nodes))))


def _without_unused_numbers(p: Program) -> Program:
    if not p.numbers:
        return p
    used = {a.key for b in p.buffers.values() for x in (*b.sizes, *b.strides) for a in ex.syms_of(x)}
    _argument_symbols(p.outputs, used)
    used = _with_sources(p, used).union(*(symbols_of(p, node) for node in p.nodes))
    return replace(p, numbers=tuple(n for n in p.numbers if n.name in used))


def views(node: Extern) -> list[View]:
    """Return every View in the argument trees of a call."""
    result: list[View] = []

    def visit(x: object) -> None:
        if isinstance(x, View):
            result.append(x)
        elif isinstance(x, (tuple, list)):
            for y in x:
                visit(y)
        elif isinstance(x, dict):
            for y in x.values():
                visit(y)

    visit(node.args)
    visit(node.kwargs)
    return result


def show_dims(dims: tuple[Atom, ...]) -> str:
    """Return loop variables as `name:extent` pairs."""
    return ", ".join(f"{d.key}:{ex.show(ex.size_of(d))}" for d in dims)


def show_view(v: View) -> str:
    """Return a view as `buffer[(sizes) : (strides) + offset]`."""
    sizes = ", ".join(map(ex.show, v.sizes))
    strides = ", ".join(map(ex.show, v.strides))
    offset = f" + {ex.show(v.offset)}" if v.offset != 0 else ""
    return f"{v.buffer}[({sizes}) : ({strides}){offset}]"


def _show_arg(x: object) -> str:
    if isinstance(x, View):
        return show_view(x)
    if isinstance(x, (tuple, list)):
        return "[" + ", ".join(map(_show_arg, x)) + "]"
    return str(x)


def show_node(node: Node) -> str:
    """Return the text of one node."""
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
    """Return the text of a program; equal programs have equal text."""
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
