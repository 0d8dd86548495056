"""Scalar values: the body of a loop as an interned tree.

Operators beside the table rows of `ir.ops`:
`const` (attr: Python number), `load` (attr: (buffer name, linear element index)), `index` (attr: Index, int64),
`cast` (one argument), `masked` (condition, value, other: loads under the value happen only where the condition
holds), `wrap_index` (attr: size; -size <= x < size becomes 0 <= x < size, anything else is an IndexError; a second
argument, a constant, is another code: see `INDEX_ERROR`) and `nonzero` (a divisor; zero raises as it does in torch).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any
from weakref import WeakValueDictionary

import torch

from . import expr as ex
from .expr import Atom, Index
from .ops import OPS, result_dtype

_values: WeakValueDictionary[Any, Value] = WeakValueDictionary()


class Value:
    """An immutable scalar expression; structurally equal values are the same object."""

    __slots__ = ("__weakref__", "_loads", "_text", "args", "attr", "depth", "dtype", "op", "syms", "vars")
    op: str
    args: tuple[Value, ...]
    dtype: torch.dtype
    attr: Any
    depth: int  # of the expression, constants and loads being 1
    vars: frozenset[Atom]
    syms: frozenset[Atom]
    _text: str | None
    _loads: tuple[tuple[str, Index], ...] | None

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.op, self.args, self.dtype, self.attr)

    def substitute(self, env: Mapping[Atom, Index]) -> Value:
        """This value with loop variables replaced."""
        return rewrite(self, env=env)


def _attr_key(op: str, attr: Any) -> Any:
    # 1, 1.0 and True are equal to a dict, as are 0.0 and -0.0; NaN equals nothing.
    return (type(attr), repr(attr)) if op == "const" else attr


def make(op: str, args: tuple[Value, ...], dtype: torch.dtype, attr: Any = None) -> Value:
    key = (op, args, dtype, _attr_key(op, attr))
    found = _values.get(key)
    if found is not None:
        return found
    self = Value()
    self.op, self.args, self.dtype, self.attr, self._text = op, args, dtype, attr, None
    self._loads = None
    self.depth = 1 + max((a.depth for a in args), default=0)
    self.vars = frozenset().union(*(a.vars for a in args))
    self.syms = frozenset().union(*(a.syms for a in args))
    index = attr[1] if op == "load" else attr if op in ("index", "wrap_index") else None
    if index is not None:
        self.vars |= ex.vars_of(index)
        self.syms |= ex.syms_of(index)
    _values[key] = self
    return self


def const(value: complex, dtype: torch.dtype) -> Value:
    """A number, converted to `dtype`'s kind of Python scalar."""
    if dtype == torch.bool:
        value = bool(value)
    elif dtype.is_floating_point:
        value = float(value)  # type: ignore[arg-type]
    elif not dtype.is_complex:
        value = int(value)  # type: ignore[call-overload]
    return make("const", (), dtype, value)


def load(buffer: str, index: Index, dtype: torch.dtype) -> Value:
    return make("load", (), dtype, (buffer, index))


def index(e: Index) -> Value:
    """An index expression as an int64 value."""
    return const(e, torch.int64) if isinstance(e, int) else make("index", (), torch.int64, e)


def cast(x: Value, dtype: torch.dtype) -> Value:
    if x.dtype == dtype:
        return x
    if x.op == "const" and not (x.dtype.is_floating_point and not dtype.is_floating_point):
        exact = dtype in (torch.float64, torch.float32) or (not dtype.is_floating_point and dtype != torch.bool)
        if exact and abs(x.attr) < 2**24 and (dtype.is_floating_point or abs(x.attr) < 128) and x.attr >= 0:
            held = _held(x)
            return make("cast", (x,), dtype) if held is None else const(held, dtype)
    return make("cast", (x,), dtype)


_PACKED = {torch.float32: "f", torch.float16: "e", torch.float64: "d"}


def _held(x: Value) -> float | None:
    """The number that a constant's dtype holds for it: 0.3 as float32 is 0.30000001192...; None where unsure."""
    number: float = x.attr
    if not x.dtype.is_floating_point or (number == int(number) and abs(number) < 256):
        return number
    code = _PACKED.get(x.dtype)
    return None if code is None or abs(number) >= 65504 else float(struct.unpack(code, struct.pack(code, number))[0])


def apply(op: str, *args: Value) -> Value:
    """A table operator on arguments of one dtype (`where`: after the condition)."""
    spec = OPS[op]
    if len(args) != spec.arity:
        raise TypeError(f"{op} takes {spec.arity} values, got {len(args)}")
    return make(op, args, result_dtype(spec, args[-1].dtype))


def where(cond: Value, a: Value, b: Value) -> Value:
    if cond.op == "const":
        return a if cond.attr else b
    return a if a is b else apply("where", cond, a, b)


def masked(cond: Value, value: Value, other: Value) -> Value:
    """`value` where `cond`, else `other`; memory under `value` is touched only where `cond` holds."""
    if cond.op == "const":
        return value if cond.attr else other
    return make("masked", (cond, value, other), value.dtype)


INDEX_ERROR, RUNTIME_ERROR, FROM_ZERO = 1, 3, 4  # what eager raises; added: negative values are out of range too


def wrap_index(x: Value, size: Index, code: int = INDEX_ERROR) -> Index:
    """A data-dependent index into a dimension of `size`, negative values counted from the end unless `code` says no."""
    if x.op == "const" and isinstance(size, int) and (0 if code & FROM_ZERO else -size) <= x.attr < size:
        return int(x.attr) % size
    if x.op == "index" and ex.known_nonnegative(x.attr) and ex.known_less(x.attr, size):
        e: Index = x.attr
        return e
    more = () if code == INDEX_ERROR else (const(code, torch.int64),)
    checked = make("wrap_index", (cast(x, torch.int64), *more), torch.int64, size)
    return ex.lookup(checked, 0, max(ex.bounds(size)[1] - 1, 0))


def compare_index(op: str, a: Index, b: Index) -> Value:
    """`a < b` or `a >= b` on index expressions, folded where the ranges decide."""
    if op == "lt" and ex.known_less(a, b):
        return const(True, torch.bool)
    if op == "lt" and ex.known_nonnegative(ex.sub(a, b)):
        return const(False, torch.bool)
    if op == "ge" and ex.known_nonnegative(ex.sub(a, b)):
        return const(True, torch.bool)
    if op == "ge" and ex.known_less(a, b):
        return const(False, torch.bool)
    return apply(op, index(a), index(b))


def conjunction(*conds: Value) -> Value:
    out: Value | None = None
    for c in conds:
        if c.op == "const":
            if not c.attr:
                return c
            continue
        out = c if out is None else apply("logical_and", out, c)
    return const(True, torch.bool) if out is None else out


def rewrite(
    root: Value,
    *,
    env: Mapping[Atom, Index] | None = None,
    on_load: Callable[[Value], Value | None] | None = None,
    memo: dict[Value, Value] | None = None,
) -> Value:
    """Rebuild with variables replaced and loads mapped; `on_load` sees the load after substitution."""
    memo = {} if memo is None else memo
    env = env or {}

    def visit(v: Value) -> Value:
        done = memo.get(v)
        if done is not None:
            return done
        if not on_load and env.keys().isdisjoint(v.vars) and env.keys().isdisjoint(v.syms):
            memo[v] = v
            return v
        args = tuple(visit(a) for a in v.args)
        attr = v.attr
        if v.op == "load":
            attr = (attr[0], ex.substitute(attr[1], env, visit))
        elif v.op in ("index", "wrap_index"):
            attr = ex.substitute(attr, env, visit)
        if v.op == "index" and isinstance(attr, int):
            out = const(attr, torch.int64)
        else:
            out = v if args == v.args and attr is v.attr else make(v.op, args, v.dtype, attr)
        if v.op == "load" and on_load and (mapped := on_load(out)) is not None:
            out = mapped
        memo[v] = out
        return out

    return visit(root)


def walk(root: Value) -> Iterator[Value]:
    """Every distinct value below and including `root`, arguments before users (lookups included)."""
    seen: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(root, False)]
    while stack:
        v, ready = stack.pop()
        if ready:
            yield v
            continue
        if v in seen:
            continue
        seen.add(v)
        stack.append((v, True))
        below = list(v.args)
        if v.op == "load":
            below += ex.lookups(v.attr[1])
        elif v.op in ("index", "wrap_index"):
            below += ex.lookups(v.attr)
        stack.extend((x, False) for x in reversed(below))


def loads(root: Value) -> tuple[tuple[str, Index], ...]:
    """(buffer, index) of every load, each once."""
    if root._loads is None:
        root._loads = tuple(v.attr for v in walk(root) if v.op == "load")
    return root._loads


def flops(root: Value, varying: Set[ex.Atom] = frozenset()) -> int:
    """Cost of one evaluation, in float additions; only of what depends on every variable in `varying`."""
    return sum(OPS[v.op].flops for v in walk(root) if v.op in OPS and varying <= v.vars)


def show(v: Value) -> str:
    """Stable one-line text."""
    if v._text is None:
        if v.op == "const":
            v._text = repr(v.attr)
        elif v.op == "load":
            v._text = f"{v.attr[0]}[{ex.show(v.attr[1])}]"
        elif v.op == "index":
            v._text = f"index({ex.show(v.attr)})"
        elif v.op == "wrap_index":
            v._text = f"wrap({show(v.args[0])}, {ex.show(v.attr)})"
        elif v.op == "cast":
            v._text = f"{str(v.dtype).removeprefix('torch.')}({show(v.args[0])})"
        else:
            v._text = f"{v.op}({', '.join(show(a) for a in v.args)})"
    return v._text
