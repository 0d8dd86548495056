"""Scalar values: the body of a loop as an interned tree.

Operators that are not rows of `ir.ops`:
    const       attr: a Python number
    load        attr: (buffer name, linear element index)
    index       attr: an Index; the value is an int64
    cast        one argument
    masked      (condition, value, other); loads inside the value happen only if the condition holds
    wrap_index  attr: size; maps -size <= x < size to 0 <= x < size and raises IndexError for any other x; an optional
                second argument, a constant, selects another error or range: see `INDEX_ERROR`
    nonzero     a divisor; zero raises as it does in torch
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any
from weakref import WeakValueDictionary

import torch

from . import expr as ex
from .expr import Atom, Index
from .ops import OPS, result_dtype

CHECKS = frozenset({"nonzero", "wrap_index"})  # scalars that report an error

_values: WeakValueDictionary[object, Value] = WeakValueDictionary()
_NONE: frozenset[Atom] = frozenset()


class Value:
    """An immutable scalar expression; structurally equal values are the same object."""

    __slots__ = (
        "__weakref__",
        "_flops",
        "_loads",
        "_raises",
        "_text",
        "args",
        "attr",
        "depth",
        "dtype",
        "op",
        "syms",
        "vars",
    )
    op: str
    args: tuple[Value, ...]
    dtype: torch.dtype
    attr: Any
    depth: int  # height of the tree; constants and loads have depth 1
    vars: frozenset[Atom]
    syms: frozenset[Atom]
    _text: str | None
    _loads: tuple[tuple[str, Index], ...] | None
    _flops: int | None
    _raises: bool | None

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> tuple[object, ...]:
        return make, (self.op, self.args, self.dtype, self.attr)

    def substitute(self, env: Mapping[Atom, Index]) -> Value:
        """Return this value with loop variables replaced."""
        return rewrite(self, env=env)


def _attr_key(op: str, attr: object) -> object:
    # As dict keys 1, 1.0 and True are equal, as are 0.0 and -0.0, and NaN equals nothing.
    return (type(attr), repr(attr)) if op == "const" else attr


def make(op: str, args: tuple[Value, ...], dtype: torch.dtype, attr: Any = None) -> Value:
    key = (op, args, dtype, _attr_key(op, attr))
    interned = _values.get(key)
    if interned is not None:
        return interned
    value = Value()
    value.op, value.args, value.dtype, value.attr, value._text = op, args, dtype, attr, None
    value._loads = None
    value._flops = None
    value._raises = None
    value.depth = 1 + max((a.depth for a in args), default=0)
    value.vars, value.syms = _free_of(args)
    index = attr[1] if op == "load" else attr if op in ("index", "wrap_index") else None
    if index is not None:
        value.vars |= ex.vars_of(index)
        value.syms |= ex.syms_of(index)
    _values[key] = value
    return value


def _free_of(args: Sequence[Value]) -> tuple[frozenset[Atom], frozenset[Atom]]:
    """Return the variables and the symbols of several values; mostly, one set is that of a value."""
    variables, symbols = _NONE, _NONE
    for a in args:
        if not a.vars <= variables:
            variables = variables | a.vars if variables else a.vars
        if not a.syms <= symbols:
            symbols = symbols | a.syms if symbols else a.syms
    return variables, symbols


def const(value: complex, dtype: torch.dtype) -> Value:
    """Return a constant: `value` converted to the Python type that `dtype` stands for."""
    if dtype == torch.bool:
        return make("const", (), dtype, bool(value))
    if dtype.is_complex:
        return make("const", (), dtype, value)
    assert not isinstance(value, complex), f"{value} is no {dtype}"
    return make("const", (), dtype, float(value) if dtype.is_floating_point else int(value))


def load(buffer: str, index: Index, dtype: torch.dtype) -> Value:
    """Return the element of `buffer` at the linear position `index`."""
    return make("load", (), dtype, (buffer, index))


def index(e: Index) -> Value:
    """Return an index expression as an int64 value."""
    return const(e, torch.int64) if isinstance(e, int) else make("index", (), torch.int64, e)


# float dtypes with all values of another one
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def cast(x: Value, dtype: torch.dtype) -> Value:
    """Return `x` converted to `dtype`; constants are folded if the result is the same in every language.

    A value that was widened from `dtype` is returned as it was before.
    """
    if x.dtype == dtype:
        return x
    if before_widening(x).dtype == dtype:
        return x.args[0]
    if x.op == "const" and not (x.dtype.is_floating_point and not dtype.is_floating_point):
        exact = dtype in (torch.float64, torch.float32) or (not dtype.is_floating_point and dtype != torch.bool)
        if exact and abs(x.attr) < 2**24 and (dtype.is_floating_point or abs(x.attr) < 128) and x.attr >= 0:
            rounded = _rounded(x)
            return make("cast", (x,), dtype) if rounded is None else const(rounded, dtype)
    return make("cast", (x,), dtype)


def before_widening(x: Value) -> Value:
    """Return the value that `x` converts to a wider dtype without rounding; `x` itself if it is no such conversion."""
    if x.op == "cast" and x.dtype in _WIDER.get(x.args[0].dtype, ()):
        return x.args[0]
    return x


_PACKED = {torch.float32: "f", torch.float16: "e", torch.float64: "d"}


def _rounded(x: Value) -> float | None:
    """Return a constant rounded to its own dtype (0.3 as float32 is 0.30000001192...), or None if that is unknown."""
    number: float = x.attr
    if not x.dtype.is_floating_point or (number == int(number) and abs(number) < 256):
        return number
    code = _PACKED.get(x.dtype)
    return None if code is None or abs(number) >= 65504 else float(struct.unpack(code, struct.pack(code, number))[0])


def apply(op: str, *args: Value) -> Value:
    """Return a row of `ir.ops` applied to arguments of one dtype (for `where`: all but the condition).

    Raises TypeError for a wrong number of arguments.
    """
    spec = OPS[op]
    if len(args) != spec.arity:
        raise TypeError(f"{op} takes {spec.arity} values, got {len(args)}")
    return make(op, args, result_dtype(spec, args[-1].dtype))


def where(cond: Value, a: Value, b: Value) -> Value:
    """Return `a` if `cond` holds, else `b`."""
    if cond.op == "const":
        return a if cond.attr else b
    return a if a is b else apply("where", cond, a, b)


def identity(op: str, dtype: torch.dtype) -> Value:
    """Return the identity element of `op`."""
    if op in ("sum", "any", "xor"):
        return const(0, dtype)
    if op in ("prod", "all"):
        return const(1, dtype)
    if dtype == torch.bool:
        return const(op == "min", dtype)
    if dtype.is_floating_point:  # max, min, logaddexp
        return const(math.inf if op == "min" else -math.inf, dtype)
    limits = torch.iinfo(dtype)
    return const(limits.max if op == "min" else limits.min, dtype)


def masked(cond: Value, value: Value, other: Value) -> Value:
    """Return `value` if `cond` holds, else `other`; the loads of `value` happen only if `cond` holds."""
    if cond.op == "const":
        return value if cond.attr else other
    return make("masked", (cond, value, other), value.dtype)


# The error that eager raises; FROM_ZERO is added if negative positions are out of range too.
INDEX_ERROR, RUNTIME_ERROR, FROM_ZERO = 1, 3, 4


def wrap_index(x: Value, size: Index, code: int = INDEX_ERROR) -> Index:
    """Return a data-dependent index into a dimension of `size`.

    Negative values count from the end unless `code` contains FROM_ZERO. `code` selects the error for other values.
    """
    if x.op == "const" and isinstance(size, int) and (0 if code & FROM_ZERO else -size) <= x.attr < size:
        return int(x.attr) % size
    if x.op == "index" and ex.known_nonnegative(x.attr) and ex.known_less(x.attr, size):
        e: Index = x.attr
        return e
    extra_args = () if code == INDEX_ERROR else (const(code, torch.int64),)
    checked = make("wrap_index", (cast(x, torch.int64), *extra_args), torch.int64, size)
    return ex.lookup(checked, 0, max(ex.bounds(size)[1] - 1, 0))


def compare_index(op: str, a: Index, b: Index) -> Value:
    """Return `a < b` (op "lt") or `a >= b` ("ge") of two index expressions, folded if the ranges decide."""
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
    """Return the logical and of the conditions, true for none."""
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
    """Return `root` with variables replaced by `env` and loads replaced by `on_load`.

    `on_load` takes a load whose index is already rewritten and returns its replacement, or None to leave it.
    """
    memo = {} if memo is None else memo
    env = env or {}

    def visit(v: Value) -> Value:
        rewritten = memo.get(v)
        if rewritten is not None:
            return rewritten
        if not on_load and env.keys().isdisjoint(v.vars) and env.keys().isdisjoint(v.syms):
            memo[v] = v
            return v
        args = tuple([visit(a) for a in v.args])
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
    """Yield every distinct value of the tree, arguments before users, values inside lookups included."""
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
        below = operands(v)
        if not below:
            yield v
            continue
        stack.append((v, True))
        stack += [(x, False) for x in reversed(below)]


def operands(v: Value) -> tuple[Value, ...]:
    """Return the arguments of a value, and the values inside its lookups."""
    if v.op == "load":
        return (*v.args, *ex.lookups(v.attr[1]))
    if v.op in ("index", "wrap_index"):
        return (*v.args, *ex.lookups(v.attr))
    return v.args


def loads(root: Value) -> tuple[tuple[str, Index], ...]:
    """Return (buffer, index) of every load, each once."""
    if root._loads is None:
        distinct_loads: dict[tuple[str, Index], None] = {}
        for v in operands(root):
            distinct_loads.update(dict.fromkeys(loads(v)))
        if root.op == "load":
            distinct_loads[root.attr] = None
        root._loads = tuple(distinct_loads)
    return root._loads


def may_raise(root: Value) -> bool:
    """Return whether an evaluation may report an error: a position out of range, or a division of integers by zero."""
    if root._raises is None:
        root._raises = root.op in CHECKS or any(map(may_raise, operands(root)))
    return root._raises


def flops(root: Value, varying: Set[ex.Atom] = frozenset()) -> int:
    """Return the cost of one evaluation, in float additions, of the operators that depend on all of `varying`."""
    if not varying and root._flops is not None:
        return root._flops
    count = sum(OPS[v.op].flops for v in walk(root) if v.op in OPS and varying <= v.vars)
    if not varying:
        root._flops = count
    return count


def show(v: Value) -> str:
    """Return the text of a value on one line; equal values have equal text."""
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
