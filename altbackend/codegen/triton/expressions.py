"""Spell values and indices of the tile AST as Triton expressions."""

from __future__ import annotations

import math

import torch

from ...compat import torch_api
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import FLOAT8, LOW_PRECISION, OPS, triton_spelling
from ...ir.value import Value
from ...schedule.tiling.gpu.fast_math import FAST_MATH
from ..cpp.ast import name
from ..cpp.print_cpp import float_text
from ..polynomial import Spelling
from .tile_ast import Shape

TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float8_e4m3fn: "tl.uint8",  # their bits, which not every GPU converts itself
    torch.float8_e5m2: "tl.uint8",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "largest({0}, {1})",
    "min": "smallest({0}, {1})",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
    "xor": "{0} ^ {1}",
    "logaddexp": "log_add_exp({0}, {1})",
}
COMBINE_BOOL = {"max": "{0} | {1}", "min": "{0} & {1}"}
COMBINERS = {"prod": "product", "max": "largest", "min": "smallest", "xor": "parity", "logaddexp": "log_add_exp"}
# operators that take a plain number beside a tile
_WEAK = frozenset(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "where"))
_WEAK_TYPES = (torch.float32, torch.int32, torch.int64)


def shape_text(shape: Shape) -> str:
    """Return the shape as a Triton list."""
    return f"[{', '.join(shape)}]"


def combined(op: str, dtype: torch.dtype) -> str:
    """Return the template of `op` applied to two values of `dtype`."""
    return COMBINE_BOOL.get(op, COMBINE[op]) if dtype == torch.bool else COMBINE[op]


def address(target: str, position: Index, shape: Shape | None, run: int = 0) -> str:
    """Return the address of an element; `shape`: broadcast the index to it; `run`: see `contiguity.hidden_run`."""
    if shape:
        plain = isinstance(position, int) or not (
            ex.lookups(position) or any(v.key != "x" for v in ex.vars_of(position))
        )
        text = (
            f"tl.cast({index(position)}, tl.int64)" if plain else index(position)
        )  # the position of a loop may be a plain number
        text = f"tl.max_contiguous({text}, [{run}, 1])" if run else text
        return f"{target} + tl.broadcast_to({text}, {shape_text(shape)})"
    text = index(position)
    if run:
        return f"{target} + tl.max_contiguous({text}, [{run}, 1])"
    return target if position == 0 else f"{target} + {text}" if text.isalnum() else f"{target} + ({text})"


def number(v: Value) -> str:
    """Return a constant as a Python number."""
    assert v.op == "const"
    if v.dtype == torch.bool:
        return str(bool(v.attr))
    if v.dtype in FLOAT8:
        return str(torch_api.float8_code(float(v.attr), v.dtype))
    if not v.dtype.is_floating_point:
        return str(int(v.attr) % 256 if v.dtype == torch.uint8 else int(v.attr))
    x = float(v.attr)
    if math.isnan(x) or math.isinf(x):
        return f'float("{x}")'
    return repr(x) if v.dtype == torch.float64 else float_text(x)


def scalar(v: Value, weak: bool = False) -> str:
    """Return a value as one expression. `weak`: a constant may be a plain number."""
    match v.op:
        case "name":
            return str(v.attr)
        case "const":
            return number(v) if weak and v.dtype in _WEAK_TYPES and not _is_minus_zero(v) else _constant(v)
        case "line_load":
            return _line_load(v)
        case "ordered_load":
            return _ordered_load(v)
        case "tile_load":
            return _load(v)
        case "tile_index":
            return f"tl.cast({index(v.attr)}, tl.int64)"
        case "tile_scalar":
            return index(v.attr)
        case "cast":
            return _cast(v)
        case "philox_quads":
            return f"philox_uniform_quads({scalar(v.args[0])}, tl.cast({index(v.attr)}, tl.int64))"
        case "wrapped":
            x = scalar(v.args[0])
            return f"tl.where({x} < 0, {x} + {_SPELLING.operand(v.attr)}, {x})"
        case "inside":
            x = scalar(v.args[0])
            return f"({x} >= 0) & ({x} < {_SPELLING.operand(v.attr)})"
        case "narrowed":  # numbers that are not positions become -1
            x, (_, high) = scalar(v.args[0]), ex.bounds(v.attr)
            return f"tl.cast(tl.where(({x} >= 0) & ({x} <= {high}), {x}, -1), tl.int32)"
        case "guarded":
            value, mask, other = v.args
            return f"tl.where({scalar(mask)}, {scalar(value)}, {scalar(other, value.op != 'const')})"
        case "broadcast":
            return f"tl.broadcast_to({scalar(v.args[0])}, {shape_text(v.attr)})"
        case "reshaped":
            return f"tl.reshape({scalar(v.args[0])}, {shape_text(v.attr)})"
        case "spread":
            return f"{scalar(v.args[0])}[None, :, None]"
        case "helper":
            return f"{v.attr}({', '.join(scalar(a) for a in v.args)})"
        case "reduced":
            return _reduced(v)
        case "halved":
            function, times = v.attr
            return f"{f'{function}(' * times}{scalar(v.args[0])}{')' * times}"
        case "exact_sum":
            return f"sum_exactly({scalar(v.args[0])}, {v.attr[0]}, {v.attr[1] > 1})"
        case "scanned":
            return _scanned(v)
        case "combined":
            return combined(v.attr, v.dtype).format(*(scalar(a) for a in v.args))
    if v.op.startswith(FAST_MATH):
        return (OPS[v.op.removeprefix(FAST_MATH)].triton_fast or "").format(*(scalar(a) for a in v.args))
    weak_constants = v.op in _WEAK and any(a.op != "const" for a in v.args[-2:])
    text = triton_spelling(v.op, v.args[0].dtype if v.op != "where" else v.dtype)
    return text.format(*(scalar(a, weak_constants) for a in v.args), T=TYPES[v.dtype], bits=v.dtype.itemsize * 8)


def _is_minus_zero(v: Value) -> bool:
    return v.dtype.is_floating_point and v.attr == 0 and math.copysign(1, v.attr) < 0


def _constant(v: Value) -> str:
    """Return a constant of exactly its dtype: for a plain number Triton would choose a dtype."""
    if _is_minus_zero(v):  # Triton turns every number that equals 0 into +0
        return f"(tl.full([], 0.0, {TYPES[v.dtype]}) * -1.0)"
    if v.dtype in LOW_PRECISION:
        return f"tl.cast({number(v)}, {TYPES[v.dtype]})"
    return f"tl.full([], {number(v)}, {TYPES[v.dtype]})"


def _load(v: Value) -> str:
    target, position, shape, policy, run = v.attr
    mask = " & ".join(a.attr for a in v.args)
    return _loaded(v.dtype, address(target, position, shape, run), mask, policy)


def _line_load(v: Value) -> str:
    target, position, shape, policy, run = v.attr
    (block,) = (n for n in shape if n != "1")
    mask = " & ".join(a.attr for a in v.args)
    line = f"tl.reshape({index(position)}, [{block}])"
    line = f"tl.max_contiguous({line}, [{run}])" if run else line
    text = _loaded(v.dtype, f"{target} + {line}", mask and f"tl.reshape({mask}, [{block}])", policy)
    return f"{text}[{', '.join('None' if n == '1' else ':' for n in shape)}]"


def _ordered_load(v: Value) -> str:
    target, position, shape, policy = v.attr
    mask = " & ".join(a.attr for a in v.args)
    place = f"{target} + {in_order(index(position), shape)}"
    return f"tl.reshape({_loaded(v.dtype, place, mask and in_order(mask, shape), policy)}, {shape_text(shape)})"


def in_order(tile: str, shape: Shape) -> str:
    """Return a tile of two axes as a tensor of one dimension, in the order of its rows."""
    return f"tl.reshape(tl.broadcast_to({tile}, {shape_text(shape)}), [{' * '.join(shape)}])"


def _loaded(dtype: torch.dtype, place: str, mask: str, policy: str) -> str:
    """Return a load of `dtype` at `place`: 0 where `mask`, if there is one, does not hold."""
    integer = not dtype.is_floating_point or dtype in FLOAT8
    zero = "False" if dtype == torch.bool else "0" if integer else "0.0"
    masked = f", mask={mask}, other={zero}" if mask else ""
    return f"tl.load({place}{masked}" + (f', eviction_policy="{policy}")' if policy else ")")


def _cast(v: Value) -> str:
    (x,) = v.args
    text = scalar(x)
    if x.dtype in FLOAT8:
        single = f"float_of_{str(x.dtype).removeprefix('torch.float8_')}({text})"
        return single if v.dtype == torch.float32 else _cast(va.cast(name(single, torch.float32), v.dtype))
    if v.dtype in FLOAT8:
        wide = text if x.dtype == torch.float32 else f"tl.cast({text}, tl.float32)"
        return f"float8_bits({wide}, {', '.join(map(str, _float8_format(v.dtype)))})"
    if x.dtype.is_floating_point and v.dtype in (torch.uint8, torch.int8, torch.int16):
        # like torch, through a wide integer of which the low bits remain
        text = f"tl.cast({text}, {'tl.int64' if v.dtype == torch.uint8 else 'tl.int32'})"
    elif torch.float32 not in (x.dtype, v.dtype) and LOW_PRECISION & {x.dtype, v.dtype}:
        text = f"tl.cast({text}, tl.float32)"  # like torch, which rounds a double twice
    return f"tl.cast({text}, {TYPES[v.dtype]})"


def _float8_format(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the mantissa bits to drop, the exponent bias, the code of numbers that are too large, and that of NaN."""
    if dtype == torch.float8_e5m2:
        return 21, 15, 0x7C, 0x7F
    return 20, 7, 0x7E if torch_api.float8_saturates() else 0x7F, 0x7F


def _reduced(v: Value) -> str:
    op, axis, rank = v.attr
    x = scalar(v.args[0])
    if op in ("any", "all") or (v.dtype == torch.bool and op in ("max", "min")):
        extreme = "max" if op in ("any", "max") else "min"
        text = f"tl.{extreme}(tl.cast({x}, tl.int32), {axis}, keep_dims={rank > 1})"
        return f"({text} != 0)"
    if op == "sum":
        return f"tl.sum({x}, {axis}, keep_dims={rank > 1})"
    return f"tl.reduce({x}, {axis}, {COMBINERS[op]}, keep_dims={rank > 1})"


def _scanned(v: Value) -> str:
    op, axis, exact, backwards = v.attr
    x, direction = scalar(v.args[0]), ", reverse=True" if backwards else ""
    if exact:
        return f"scan_exactly_backwards({x}, {axis})" if backwards else f"scan_exactly({x}, {axis})"
    if op == "sum" and v.dtype != torch.bool:
        return f"tl.cumsum({x}, {axis}{direction})"
    if v.dtype == torch.bool:
        return f"(tl.associative_scan(tl.cast({x}, tl.int32), {axis}, {COMBINERS[op]}{direction}) != 0)"
    return f"tl.associative_scan({x}, {axis}, {COMBINERS[op]}{direction})"


def index(e: Index) -> str:
    """Return an index as an expression."""
    return _SPELLING.index(e)


_SPELLING = Spelling(
    scalar,
    quotient=("({} // {})", "floor_divide({}, {})"),
    remainder=("({} % {})", "remainder({}, {})"),
    extremum="tl.{name}imum({}, {})",
    coefficient_first=False,
)
