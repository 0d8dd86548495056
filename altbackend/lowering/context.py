"""The state of one lowering: the program under construction, and the rules that give values storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from altbackend.lazy_dataclass import dataclass

from ..config.options import Config
from ..debug.trace import DecisionKind
from ..errors import Unsupported
from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.loops import Buffer, Extern, HostNumber, Node, Number, Origin, Pointwise, View
from ..ir.value import Value
from ..runtime import checks
from ..runtime import ops as runtime_ops
from . import sizes as sz
from .facts import user_line
from .python_text import python_text
from .registry import SUPPORTED_DTYPES
from .tensor import Tensor, as_view, axes, of_buffer, permuted, points

Stored = tuple[Hashable, ...]  # what determines a stored value

MAX_ORIGINS = 24  # FX nodes that are named for one loop


@dataclass
class Ctx:
    """Everything that a lowering may read or append to.

    `env` maps lowered FX nodes to their values; `bind` adds to it. `stored` maps a value to the buffer that holds it,
    so that equal values share one. `reading` has, for each buffer, the nodes and the stored values that read it.
    `raising`: nodes whose values report errors of the data when they are computed.
    """

    cfg: Config
    device: torch.device = torch.device("cpu")
    gpu: bool = False
    buffers: dict[str, Buffer] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)  # symbols that have values at this point of the host program
    numbers: dict[Value, HostNumber] = field(default_factory=dict)
    computed: dict[str, Number] = field(default_factory=dict)  # by their text
    verified: set[str] = field(default_factory=set)  # conditions that the host program has checked so far
    pending: list[sympy.Basic] = field(default_factory=list)  # conditions that wait for a symbol
    constants: dict[str, object] = field(default_factory=dict)
    env: dict[torch.fx.Node, Any] = field(default_factory=dict)
    graph_node: torch.fx.Node | None = None
    shape_memo: dict[sympy.Expr, Index] = field(default_factory=dict)
    stored: dict[Stored, Tensor] = field(default_factory=dict)
    reading: dict[str, dict[torch.fx.Node | Stored, None]] = field(default_factory=dict)
    raising: dict[torch.fx.Node, None] = field(default_factory=dict)
    decision: Callable[[DecisionKind, str, str, str], None] = lambda *a: None
    expressible: set[Value] = field(default_factory=set)
    returned: Counter[object] = field(default_factory=Counter)  # per node, how many of the graph's results it is
    destination: View | None = None  # the memory that the node being lowered updates

    @property
    def node(self) -> torch.fx.Node:
        """The FX node that is lowered."""
        assert self.graph_node is not None, "a lowering runs for a node"
        return self.graph_node

    @property
    def result(self) -> torch.Tensor:
        """The traced result of the node, a fake tensor; the node has one result."""
        fake: torch.Tensor = self.node.meta["val"]
        return fake

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The traced results of a node that has several, fake tensors."""
        fakes: Sequence[torch.Tensor] = self.node.meta["val"]
        return fakes

    @property
    def result_sizes(self) -> tuple[Index, ...]:
        """The sizes of the node's one result."""
        return self.shape(self.result.shape)

    def traced(self, argument: int) -> torch.Tensor:
        """Return the traced value of the tensor argument at this position, a fake tensor."""
        source = self.node.args[argument]
        assert isinstance(source, torch.fx.Node)
        fake: torch.Tensor = source.meta["val"]
        return fake

    def index(self, x: object) -> Index:
        """Return an int or SymInt as an index expression, if necessary as a number that the host program computes."""
        return sz.to_index(x, self.shape_memo, self._host_symbol)

    def _host_symbol(self, e: sympy.Expr, shape_env: ShapeEnv | None) -> Index:
        """Return a symbol for an integer expression that the index algebra cannot express.

        Raises Unsupported if a symbol in it has no value.
        """
        missing = {str(s) for s in e.free_symbols} - self.defined
        if missing:
            raise Unsupported(f"size expression {e}", f"nothing gives {', '.join(sorted(missing))}")
        return ex.sym(self.number(python_text(e)), *sz.bounds(e, shape_env))

    def number(self, text: str) -> str:
        """Return the name of the number that the host program computes by `text`; equal texts share a name."""
        if text not in self.computed:
            name = f"number{len(self.computed)}"
            self.computed[text] = Number(name, text)
            self.defined.add(name)
        return self.computed[text].name

    def real(self, text: str) -> Value:
        """Return a float64 of the host program as a scalar that kernels take; library calls take the number itself."""
        name = text if text in self.defined else self.number(text)
        bits = ex.sym(self.number(f"bits_of({name})"), -ex.UNBOUNDED, ex.UNBOUNDED)
        value = va.apply("float64_of_bits", va.index(bits))
        self.numbers[value] = HostNumber(name)
        return value

    def shape(self, xs: Sequence[object]) -> tuple[Index, ...]:
        """Return sizes or strides, ints and SymInts, as index expressions."""
        return tuple(self.index(x) for x in xs)

    def origins(self) -> tuple[Origin, ...]:
        """Return the origins of the next loop: the node being lowered and the nodes inlined into it, in graph order."""
        inlined: dict[torch.fx.Node, None] = {}
        stack = [] if self.graph_node is None else [self.graph_node]
        while stack and len(inlined) < MAX_ORIGINS:
            n = stack.pop()
            if n in inlined or n.op != "call_function":
                continue
            inlined[n] = None
            stack.extend(m for m in n.all_input_nodes if self._is_inlined(m))
        return tuple(Origin(n.name, target_name(n.target), user_line(n)) for n in reversed(inlined))

    def _is_inlined(self, n: torch.fx.Node) -> bool:
        lowered = self.env.get(n)
        return isinstance(lowered, Tensor) and lowered.value.op not in ("load", "const")

    def new_buffer(
        self,
        dtype: torch.dtype,
        sizes: Sequence[Index],
        strides: Sequence[Index],
        device: torch.device | None = None,
        negative: bool = False,
    ) -> Buffer:
        """Add a temporary buffer to the program; `sizes` and `strides` in elements."""
        name = f"buf{len(self.buffers)}"
        b = Buffer(name, dtype, tuple(sizes), tuple(strides), device or self.device, negative=negative)
        self.buffers[name] = b
        return b

    def emit(self, node: Node) -> None:
        """Append a node to the program."""
        self.nodes.append(node)

    def require(self, text: str, message: str, as_index_error: bool = False) -> None:
        """Let the host program raise RuntimeError, or IndexError, with `message` unless the condition `text` holds."""
        check = checks.require_index if as_index_error else checks.require
        self.emit(Extern((None,), check, (HostNumber(text), message), origins=self.origins()))

    def realize(
        self,
        t: Tensor,
        like: torch.Tensor | None = None,
        *,
        fresh: bool = False,
        strides: tuple[Index, ...] | None = None,
    ) -> Tensor:
        """Return `t` as a load from a buffer; a value that is not in memory is stored.

        `like`: a fake tensor whose order of strides a new buffer takes. `fresh`: store `t` even if it is in memory.
        `strides`: those of a new buffer, in place of the order of `like`.
        """
        if not fresh and as_view(t) is not None:
            return t
        order = _row_major(t)
        key = _key(t, order)
        if not fresh and key in self.stored:
            return permuted(self.stored[key], [order.index(k) for k in range(len(order))])
        b = self.new_buffer(t.dtype, t.sizes, strides or self.strides_like(t.sizes, like))
        self.store(b, t)
        out = of_buffer(b)
        if not fresh:
            self.remember(key, t.value, permuted(out, order))
        return out

    def remember(self, key: Stored, value: Value, out: Tensor) -> Tensor:
        """Return `out`, from now on the result for `key`, until a buffer that `value` reads, or its own, is written."""
        self.stored[key] = out
        self._note_reads(key, (value, out.value))
        return out

    def store_region(self, b: Buffer, t: Tensor, dim: int, begin: Index) -> None:
        """Write `t` into the part of `b` that starts at `begin` along `dim`."""
        self.store(b, t, offset=ex.mul(b.strides[dim], begin))

    def store(self, b: Buffer, t: Tensor, offset: Index = 0, order: Sequence[int] | None = None) -> None:
        """Emit the loop that writes `t` into `b`, dimensions in `order` from slowest to fastest.

        Without `order`, they are in the memory order of `b`. A tensor without elements gets a loop without points, so
        that the buffer has a writer.
        """
        if b.dtype not in SUPPORTED_DTYPES:
            self._copy_by_call(b, t, offset)
            return
        if 0 in t.sizes:
            empty = ex.dim(0, 0)
            self.emit(Pointwise(b.name, (empty,), ex.ix(empty), va.const(0, b.dtype), self.origins()))
            return
        order = memory_order(b.strides, t.sizes) if order is None else order
        dims = tuple(ex.dim(k, t.sizes[old]) for k, old in enumerate(order))
        point: list[Index] = [0] * len(order)
        for new, old in enumerate(order):
            point[old] = ex.ix(dims[new])
        value = va.cast(t.at(point), b.dtype)
        index = ex.add(offset, *(ex.mul(s, i) for s, i in zip(b.strides, point, strict=True)))
        live = tuple(d for d in dims if ex.size_of(d) != 1)
        self.emit(Pointwise(b.name, live, index, value, self.origins()))

    def _copy_by_call(self, b: Buffer, t: Tensor, offset: Index) -> None:
        """Emit torch's copy, for a dtype that kernels do not have (complex).

        Raises Unsupported unless `t` is a view in memory.
        """
        v = as_view(t)
        if v is None or offset != 0 or v.sizes != b.sizes:
            raise Unsupported(self.graph_node, f"a computation on {b.dtype} outside library calls")
        self.emit(Extern((b.name,), runtime_ops.strided_copy, (v, b.strides), origins=self.origins()))

    def strides_like(self, sizes: Sequence[Index], like: torch.Tensor | None) -> tuple[Index, ...]:
        """Return dense strides in the order of the strides of the fake tensor `like`, row-major without one."""
        sizes = tuple(sizes)
        if like is None or len(like.shape) != len(sizes):
            return ex.strides_for(sizes)
        return dense_strides(memory_order(self.shape(like.stride()), sizes), sizes)

    def view_of(self, t: Tensor, like: torch.Tensor | None = None) -> View:
        """Return `t` as a strided view for a library call; a value that is none is stored first."""
        strides = self.shape(like.stride()) if like is not None and len(like.shape) == len(t.sizes) else None
        v = as_view(t, strides)
        if v is None:
            v = as_view(self.realize(t, like), strides)
        assert v is not None
        return v

    def bind(self, n: torch.fx.Node, lowered: object) -> None:
        """Enter the value of a lowered node."""
        self.env[n] = lowered
        self._note_reads(n, _values_in(lowered))
        if not self.gpu and any(va.may_raise(t.value) for t in tensors_in(lowered)):
            self.raising[n] = None

    def _note_reads(self, reader: torch.fx.Node | Stored, values: Iterable[Value]) -> None:
        for buffer in {b for v in values for b, _ in va.loads(v)}:
            self.reading.setdefault(buffer, {})[reader] = None

    def _is_needed(self, n: torch.fx.Node) -> bool:
        """Return whether a node that is still to be lowered, other than the present one, takes `n`."""
        return any(u is not self.graph_node and u not in self.env for u in n.users)

    def read_later(self, buffer: str) -> bool:
        """Return whether a node that is still to be lowered takes a value that reads `buffer`."""
        readers = [n for n in self.reading.get(buffer, ()) if isinstance(n, torch.fx.Node)]
        return any(self._is_needed(n) and any(_reads(v, buffer) for v in _values_in(self.env[n])) for n in readers)

    def before_write(self, buffer: str) -> None:
        """Store every inlined value that reads `buffer`, which the next node overwrites.

        If `buffer` is an input, store also the values that may raise an error: eager raises it before the write.
        """
        readers = list(self.reading.get(buffer, ()))
        for n in (k for k in readers if not isinstance(k, torch.fx.Node)):
            self.stored.pop(n, None)
        reading = [n for n in readers if isinstance(n, torch.fx.Node)]
        self._store_needed(reading, lambda v: _reads(v, buffer), fresh=True)
        if self.buffers[buffer].kind == "input":
            raising, self.raising = self.raising, {}
            self._store_needed(raising, va.may_raise, fresh=False)

    def _store_needed(self, nodes: Iterable[torch.fx.Node], concerned: Callable[[Value], bool], *, fresh: bool) -> None:
        """Store the values of `nodes` that are `concerned`, if a node that is still to be lowered takes them.

        `fresh`: in a buffer of their own, even if they are in memory. Kernels take a number that the host program has
        read from memory from there.
        """
        for n in nodes:
            if n.op == "placeholder" or not self._is_needed(n):
                continue  # an input is memory already
            lowered = self.env[n]
            if isinstance(lowered, Tensor) and concerned(lowered.value):
                self.bind(n, self.realize(lowered, n.meta.get("val"), fresh=fresh))
            elif isinstance(lowered, Value) and concerned(lowered):
                self.bind(n, self.real(str(self.numbers[lowered])))
            elif isinstance(lowered, (tuple, list)):
                chosen = (isinstance(t, Tensor) and concerned(t.value) for t in lowered)
                stored = (self.realize(t, fresh=fresh) if c else t for t, c in zip(lowered, chosen, strict=True))
                self.bind(n, type(lowered)(stored))


def tensors_in(lowered: object) -> list[Tensor]:
    """Return the tensors of a lowered value: a tensor, or a tuple or list of results."""
    parts = lowered if isinstance(lowered, (tuple, list)) else (lowered,)
    return [t for t in parts if isinstance(t, Tensor)]


def _values_in(lowered: object) -> list[Value]:
    """Return what a lowered value computes or reads: its tensors, or the number that a kernel finds in memory."""
    return [lowered] if isinstance(lowered, Value) else [t.value for t in tensors_in(lowered)]


def _row_major(t: Tensor) -> list[int]:
    """Return the dimensions of `t` from the slowest to the fastest in what it reads.

    The load that moves along most dimensions decides. A value and its transposes, which read the same elements by
    other dimensions, so have one form: `permuted` by this order they are equal.
    """
    variables = axes(t.sizes)
    strides: list[Index] = []
    for _, index in va.loads(t.value):
        coefficients = [ex.coefficient(index, a) for a in variables]
        steps = [0 if c is None or ex.vars_of(c) else c for c in coefficients]
        if sum(c != 0 for c in steps) > sum(c != 0 for c in strides):
            strides = steps
    return memory_order(strides, t.sizes) if strides else list(range(len(variables)))


def _key(t: Tensor, order: Sequence[int]) -> Stored:
    """Return what a stored value is found by: its elements and sizes, dimensions in `order`."""
    canonical = permuted(t, order)
    return (va.cast(canonical.value, t.dtype), canonical.sizes)


def _reads(v: Value, buffer: str) -> bool:
    return any(b == buffer for b, _ in va.loads(v))


def dense_strides(order: Sequence[int], sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Return the strides of a dense tensor whose dimensions have `order`, from the slowest to the fastest."""
    out: list[Index] = [0] * len(sizes)
    step: Index = 1
    for k in reversed(order):
        out[k] = step
        step = ex.mul(step, ex.maximum(sizes[k], 1))
    return tuple(out)


def memory_order(strides: Sequence[Index], sizes: Sequence[Index]) -> list[int]:
    """Return dimension numbers from the slowest to the fastest in memory; equal strides keep their order.

    A negative stride, of an operand that is read backwards, is as fast as the positive one.
    """

    def key(k: int) -> tuple[int, int]:
        if sizes[k] == 1:
            return (0, 0)
        stride = strides[k]
        return (1, -abs(stride if isinstance(stride, int) else _estimate(stride)))

    movable = [k for k in range(len(sizes)) if sizes[k] != 1]
    ordered = sorted(movable, key=key)
    it = iter(ordered)
    return [k if sizes[k] == 1 else next(it) for k in range(len(sizes))]


def _estimate(e: Index) -> int:
    """Return a number to order strides by: every symbol is taken as 97, a value that static sizes rarely have.

    A symbol whose range leaves 97 out takes the nearest number of the range: outside it a divisor may be 0.
    """
    ranges = {s: ex.bounds(ex.ix(s)) for s in ex.syms_of(e)}
    number = ex.substitute(e, {s: min(max(lo, 97), hi) for s, (lo, hi) in ranges.items()})
    assert isinstance(number, int)
    return number


def cpu_beside_gpu(ctx: Ctx, n: torch.fx.Node) -> bool:
    """Return whether the results of a node are CPU tensors in a graph whose kernels run on a GPU."""
    val = n.meta.get("val")
    tensors = [v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, torch.Tensor)]
    return ctx.device.type == "cuda" and bool(tensors) and all(v.device.type == "cpu" for v in tensors)


def target_name(target: object) -> str:
    """Return the name of a call's target, with its overload."""
    return target if isinstance(target, str) else getattr(target, "__name__", None) or str(target)


__all__ = ["Ctx", "Tensor", "axes", "memory_order", "points", "target_name", "user_line"]
