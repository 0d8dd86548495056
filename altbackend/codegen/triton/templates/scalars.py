"""Print scalar trees, such as a score function, into the body of a template: one line for each distinct value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import torch

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.attention import Extents, bounds, is_position, without_widening
from ....ir.expr import Index
from ....ir.loops import Buffer
from ....ir.ops import OPS
from ....ir.value import Value
from ....schedule.tiling.gpu.fast_math import FAST_MATH
from ...cpp.ast import Param, name
from ..expressions import index, scalar

Axes = frozenset[str]
_SMALL = 2**31 - 1


@dataclass
class Parameters:
    """The parameters of a kernel as they are found. `checks`: some position may be out of range."""

    buffers: Mapping[str, Buffer]
    written: frozenset[str]
    params: dict[str, Param] = field(default_factory=dict)
    symbols: set[str] = field(default_factory=set)
    checks: bool = False

    def of(self, buffer: str) -> str:
        """Return the parameter that stands for a buffer."""
        if buffer not in self.params:
            written = buffer in self.written
            label = f"{'out' if written else 'in'}{len(self.params)}"
            self.params[buffer] = Param(label, self.buffers[buffer].dtype, written)
        return self.params[buffer].name

    def text(self, e: Index) -> str:
        """Return an index without loop variables as an operand; its symbols become arguments."""
        self.symbols.update(a.key for a in ex.syms_of(e))
        shown = index(e)
        return shown if shown.isalnum() else f"({shown})"


@dataclass
class Level:
    """Lines of one loop level. `names`: the names that are defined on it."""

    names: frozenset[str]
    lines: list[str] = field(default_factory=list)
    bound: dict[Value, Value] = field(default_factory=dict)


@dataclass
class Scalars:
    """Binds values to names on the outermost of `levels` that has their operands.

    `axes`: for each free name the axes of its tile. `shape`: for each axis its block, in the order of the tile's axes.
    `extents`: sizes of the positions. `fast`: functions may have the error of a 16-bit rounding.
    """

    parameters: Parameters
    levels: list[Level]
    axes: dict[str, Axes]
    shape: dict[str, str]
    extents: Extents
    fast: bool = False
    count: int = 0

    def bind(self, v: Value) -> Value:
        """Return `v` as a name or constant."""
        if v.op in ("const", "name"):
            return v
        level = self._level(v)
        if v not in level.bound:
            level.bound[v] = self._define(level, v)
        return level.bound[v]

    def full(self, v: Value) -> str:
        """Return the text of `v` as a whole tile."""
        x = self.bind(v)
        text = scalar(x)
        return text if self.axes_of(x) == self.shape.keys() else f"tl.broadcast_to({text}, {self.shape_text()})"

    def position(self, e: Index, small: bool) -> tuple[str, list[Value], Axes]:
        """Return a position as text, the names that say whether it is in range, and its axes.

        `small`: it fits in 32 bits.
        """
        guards: list[Value] = []
        names: dict[Value, Value] = {}
        for x in ex.lookups(e):
            names[x], guard = self._lookup(x, small)
            guards += [guard] if guard is not None else []
        axes = frozenset[str]().union(*(self.axes_of(x) for x in (*names.values(), *guards)))
        return self.parameters.text(ex.substitute(e, {}, lambda x: names[x])), guards, axes

    def axes_of(self, v: Value) -> Axes:
        """Return the axes of a name; a constant has none."""
        return self.axes[v.attr] if v.op == "name" else frozenset()

    def shape_text(self, axes: Axes | None = None) -> str:
        """Return the shape of a tile that has `axes`, by default all."""
        sides = (block if axes is None or a in axes else "1" for a, block in self.shape.items())
        return f"[{', '.join(sides)}]"

    def _level(self, v: Value) -> Level:
        needed = {x.attr for x in va.walk(v) if x.op == "name"}
        names: set[str] = set()
        for level in self.levels:
            names |= level.names
            if needed <= names:
                return level
        raise AssertionError(f"{needed - names} of {v}")

    def _let(self, level: Level, text: str, dtype: torch.dtype, axes: Axes) -> Value:
        label = f"t{self.count}"
        self.count += 1
        level.lines.append(f"{label} = {text}")
        self.axes[label] = axes
        return name(label, dtype)

    def _define(self, level: Level, v: Value) -> Value:
        match v.op:
            case "load":
                return self._load(level, v)
            case "index":
                text, _, axes = self.position(v.attr, small=False)
                return self._let(level, f"tl.cast({text}, tl.int64)", v.dtype, axes)
            case "wrap_index":
                return self._lookup(v, small=False)[0]
        op = v.op
        if self.fast and op in OPS and v.dtype == torch.float32 and OPS[op].triton_fast:
            op = FAST_MATH + op
        args = tuple(self.bind(a) for a in v.args)
        axes = frozenset[str]().union(*(self.axes_of(a) for a in args))
        return self._let(level, scalar(va.make(op, args, v.dtype, v.attr)), v.dtype, axes)

    def _load(self, level: Level, v: Value) -> Value:
        buffer, e = v.attr
        text, guards, axes = self.position(e, _is_small(self.parameters.buffers[buffer].extent))
        mask = f", mask={' & '.join(g.attr for g in guards)}, other=0" if guards else ""
        return self._let(level, f"tl.load({self.parameters.of(buffer)} + {text}{mask})", v.dtype, axes)

    def _lookup(self, x: Value, small: bool) -> tuple[Value, Value | None]:
        """Return a position that is read from data. If it may be out of range, also return the name of its check."""
        level = self._level(x)
        if x.op != "wrap_index":
            return self._narrow(level, self.bind(x), small), None
        size, at = x.attr, without_widening(x.args[0])
        if is_position(at, size, self.extents):
            return self._narrow(level, self.bind(at), small), None
        position = self.bind(at if _is_small(size) else x.args[0])
        text, axes = scalar(position), self.axes_of(position)
        if x in level.bound:
            return self._narrow(level, level.bound[x], small), level.bound[_guard(x)]
        end = self.parameters.text(size)
        from_end = bounds(at, self.extents)[0] < 0 and not (len(x.args) > 1 and int(x.args[1].attr) & va.FROM_ZERO)
        wrapped = f"tl.where({text} < 0, {text} + {end}, {text})" if from_end else text
        wrapped_name = self._let(level, wrapped, position.dtype, axes)
        level.bound[x] = wrapped_name
        inside = self._let(level, f"({wrapped_name.attr} >= 0) & ({wrapped_name.attr} < {end})", torch.bool, axes)
        level.bound[_guard(x)] = inside
        self._check(level, inside, axes)
        return self._narrow(level, wrapped_name, small), inside

    def _narrow(self, level: Level, v: Value, small: bool) -> Value:
        kind = torch.int32 if small else torch.int64
        if v.dtype == kind or v.op == "const":
            return v
        key = va.cast(v, kind)
        if key not in level.bound:
            level.bound[key] = self._let(level, scalar(key), kind, self.axes_of(v))
        return level.bound[key]

    def _check(self, level: Level, inside: Value, axes: Axes) -> None:
        """Set the error flag where a position is out of range; the host program raises IndexError."""
        self.parameters.checks = True
        where = f"error + tl.full({self.shape_text(axes)}, 0, tl.int32)" if axes else "error"
        level.lines.append(f"tl.store({where}, 1, mask={inside.attr} == 0)")


def _guard(x: Value) -> Value:
    return va.make("inside", (x,), torch.bool)


def _is_small(size: Index) -> bool:
    return ex.bounds(size)[1] < _SMALL
