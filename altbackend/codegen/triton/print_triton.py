"""Tile AST -> Triton. Spelling only: every decision is already in the AST."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import runtime
from ...compat import torch_api
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Buffer, Origin, Program, Reduction
from ...ir.ops import FLOAT8, LOW_PRECISION, OPS, triton_spelling
from ...ir.value import Value
from ...schedule.device import Target
from ...schedule.kernel import SCALAR, Kernel, Stage
from ...schedule.loop_mapping import MappedNode
from ...schedule.tiling.gpu.blocks import Blocks
from ..cpp.ast import Let, Param, name
from ..cpp.print_cpp import float_text
from . import tile
from .templates import matmul
from .tile_ast import (
    Accumulator,
    Comment,
    Fold,
    Mask,
    Points,
    Shape,
    TileFunction,
    TileLoop,
    TileStmt,
    TileStore,
    Total,
    parts_name,
)

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
POINTERS: dict[torch.dtype, str] = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*u8",
    torch.float8_e5m2: "*u8",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "largest({0}, {1})",
    "min": "smallest({0}, {1})",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
    "xor": "{0} ^ {1}",
    "logaddexp": "log_add_exp({0}, {1})",
}
_COMBINE_BOOL = {"max": "{0} | {1}", "min": "{0} & {1}"}
_COMBINERS = {"prod": "product", "max": "largest", "min": "smallest", "xor": "parity", "logaddexp": "log_add_exp"}
LABEL_OPS = 6  # operators that a kernel's name lists
# operators that take a plain number beside a tile
_WEAK = frozenset(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "where"))
_WEAK_TYPES = (torch.float32, torch.int32, torch.int64)


@dataclass(frozen=True)
class Workspace:
    """A buffer of partial results, written by a kernel and read by its `finish`."""

    name: str
    dtype: torch.dtype
    numel: Index


@dataclass(frozen=True)
class Finish:
    """A second kernel, and what its pointers are: names in `workspace` or `totals` of the first one."""

    kernel: TritonKernel
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class TritonKernel:
    """One kernel's source and all that a launch needs.

    Arguments in order: `params` and `workspace` (pointers), "error" (a pointer to one int32) where `checks`, `symbols`
    (int64), `constexprs`. `grid` has one entry, in terms of the symbols. The `finish` kernels run after it and write
    `totals`, which it does not take itself. `zeroed` names parameters that must hold zero before the launch. `scratch`:
    bytes of global memory that each program needs for itself, whose address follows the arguments of the signature.
    `label` is the name under which a profiler shows it: its form and operators. It does not tell kernels apart.
    """

    source: str
    params: tuple[Param, ...]
    symbols: tuple[str, ...]
    constexprs: dict[str, int]
    grid: tuple[Index, ...]
    num_warps: int
    num_stages: int
    workspace: tuple[Workspace, ...] = ()
    totals: tuple[Param, ...] = ()
    finish: tuple[Finish, ...] = ()
    zeroed: tuple[str, ...] = ()
    checks: bool = False
    scratch: int = 0
    label: str = "kernel"

    @property
    def signature(self) -> dict[str, str]:
        """Types of the arguments as `triton.compiler.ASTSource` takes them."""
        out = {p.name: POINTERS[p.dtype] for p in self.params}
        out |= {w.name: POINTERS[w.dtype] for w in self.workspace}
        out |= {"error": "*i32"} if self.checks else {}
        out |= dict.fromkeys(self.symbols, "i64")
        return out | dict.fromkeys(self.constexprs, "constexpr")


def emit(p: Program, k: Kernel, target: Target, blocks: Blocks | None = None) -> tuple[TritonKernel, tuple[str, ...]]:
    """The Triton kernel of a scheduled kernel, and the program buffers that its parameters stand for.

    `blocks`: instead of those of the rules. Raises Unsupported, with the reason, where tiles cannot express it.
    """
    f = tile.emit(p, k, target, blocks)
    outs = tuple(t.out for t in f.totals)
    labels = {b: f"result{n}" for n, b in enumerate(outs)}
    kernel = TritonKernel(
        source=source(f),
        params=f.params,
        symbols=f.symbols,
        constexprs=f.blocks.constexprs,
        grid=(f.blocks.programs,),
        num_warps=f.blocks.warps,
        num_stages=f.blocks.stages,
        workspace=tuple(Workspace(parts_name(t), t.dtype, ex.mul(f.blocks.programs, t.numel)) for t in f.totals),
        totals=tuple(Param(labels[b], p.buffers[b].dtype, True) for b in outs),
        finish=tuple(_finish(p, part, f, labels, target) for part in _by_size(f.totals)),
        checks=f.checks,
        scratch=matmul.scratch_bytes(k.matmul),
        label=label(f.blocks.form, k.origins),
    )
    return kernel, (*f.buffers, *outs)


def label(form: str, origins: tuple[Origin, ...]) -> str:
    """A name for a profiler: the form, and some of the operators."""
    ops = dict.fromkeys(re.sub(r"\W.*", "", o.target) for o in origins)
    return "_".join([form, *list(ops)[:LABEL_OPS]])


def _by_size(totals: tuple[Total, ...]) -> list[list[Total]]:
    """Totals of equally many results share their second kernel."""
    parts: dict[Index, list[Total]] = {}
    for t in totals:
        parts.setdefault(t.numel, []).append(t)
    return list(parts.values())


def _finish(p: Program, totals: list[Total], f: TileFunction, labels: dict[str, str], target: Target) -> Finish:
    """The kernel that adds up what the programs left: rows are results, a row's points are the programs."""
    count, numel = f.blocks.programs, totals[0].numel
    buffers, mapped = dict(p.buffers), []
    for t in totals:
        parts = parts_name(t)
        buffers[parts] = Buffer(parts, t.dtype, (count, numel), (numel, 1), p.buffers[t.out].device)
        row, point = ex.var("o", numel), ex.var("i0", count)
        value = va.load(parts, ex.add(ex.mul(ex.ix(point), numel), ex.ix(row)), t.dtype)
        index = ex.substitute(t.index, {t.slot: ex.ix(row)})
        node = Reduction(t.out, (row,), (point,), index, t.op, value, (Origin("", "totals_of_programs"),))
        mapped.append(MappedNode(node, "inner", row, (point,), frozenset((point,)), index, value))
    outs = frozenset(t.out for t in totals)
    k = Kernel(
        rows=numel,
        flat=False,
        stages=(Stage(mapped[0].inner, tuple(mapped)),),
        storage=dict.fromkeys(outs, SCALAR),
        stored=outs,
        scratch={},
        work=0,
        members=(),
        origins=(),
    )
    kernel, arguments = emit(Program(buffers, (), (), ()), k, target)
    return Finish(kernel, tuple(labels.get(b, b) for b in arguments))


# --- the text ----------------------------------------------------------------------------------------------------


class Lines:
    """Indented text of one function, and the helpers that it calls."""

    def __init__(self, f: TileFunction) -> None:
        self.f = f
        self.out: list[str] = []
        self.depth = 1

    def add(self, text: str) -> None:
        self.out.append("    " * self.depth + text)


def source(f: TileFunction, pointers: Sequence[str] = (), header: Sequence[str] = ()) -> str:
    """A module with the function `kernel`, complete but for triton itself.

    `pointers`: arguments in place of those of `f` and its symbols, which the lines of `header` then define.
    """
    w = Lines(f)
    w.add("program = tl.program_id(0)" + (".to(tl.int64)" if f.blocks.wide else ""))
    if any("programs" in s.step for s in f.body if isinstance(s, TileLoop)):
        w.add("programs = tl.num_programs(0)")
    for line in header:
        w.add(line)
    _block(w, f.body)
    arguments = [p.name for p in f.params] + [parts_name(t) for t in f.totals]
    arguments += ["error"] if f.checks else []
    arguments = list(pointers) or [*arguments, *f.symbols]
    arguments += [f"{c}: tl.constexpr" for c in f.blocks.constexprs]
    body = "\n".join(w.out)
    texts = [_HEADER, *_helpers(body), f"@triton.jit\ndef kernel({', '.join(arguments)}):\n{body}"]
    return "\n\n\n".join(texts) + "\n"


_HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice"


@functools.cache
def _library() -> dict[str, str]:
    """Text of every function of `runtime.tile_math`, which is not imported: triton need not be installed."""
    text = Path(runtime.__file__).with_name("tile_math.py").read_text(encoding="utf-8")
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    lines = text.splitlines()  # ast.get_source_segment splits the text anew for every function: 20 ms
    return {n.name: "\n".join(["@triton.jit", *lines[n.lineno - 1 : n.end_lineno]]) for n in functions}


def _helpers(body: str) -> list[str]:
    called: set[str] = set()
    pending = [body]
    while pending:
        names = set(re.findall(r"(?<![\w.])(\w+)\b", pending.pop())) & _library().keys() - called
        called |= names
        pending += [_library()[n] for n in names]
    return [text for name, text in _library().items() if name in called]


def _block(w: Lines, body: tuple[TileStmt, ...]) -> None:
    for k, s in enumerate(body):
        if isinstance(s, Comment) and (k + 1 == len(body) or isinstance(body[k + 1], Comment)):
            continue  # nothing of that member is computed here
        _statement(w, s)


def _statement(w: Lines, s: TileStmt) -> None:
    match s:
        case Let():
            w.add(f"{s.name} = {scalar(s.value)}")
        case Points():
            w.add(f"{s.name} = {_points(s, w.f.blocks.wide)}")
        case Mask():
            w.add(f"{s.name} = {s.var} < {index(s.size)}")
        case Accumulator():
            w.add(f"{s.name} = tl.full({_shape(s.shape)}, {number(s.init)}, {TYPES[s.dtype]})")
        case Fold():
            _fold(w, s)
        case TileStore():
            _store(w, s)
        case TileLoop():
            turns = f"{s.begin}, {index(s.end)}, {s.step}"
            how = f", num_stages={s.stages}" if s.stages > 1 else ", flatten=True" if s.joined else ""
            w.add(f"for {s.var} in " + (f"tl.range({turns}{how}):" if how else f"range({turns}):"))
            w.depth += 1
            _block(w, s.body)
            w.depth -= 1
        case matmul.Product() | matmul.Descriptors():
            for line in matmul.lines(s) if isinstance(s, matmul.Product) else matmul.descriptions(s):
                w.add(line)
        case Comment():
            w.add(f"# {s.text}")


def _points(s: Points, wide: bool) -> str:
    if s.block is None:
        return s.base
    around = [":" if k == s.axis else "None" for k in range(s.rank)]
    spread = f"[{', '.join(around)}]" if s.rank > 1 else ""
    span = f"tl.arange(0, {s.block})" + (".to(tl.int64)" if wide else "")
    text = span + spread
    return text if s.base == "0" else f"{s.base} + {text}"


def _fold(w: Lines, s: Fold) -> None:
    text = _combined(s.op, s.value.dtype).format(s.target, scalar(s.value))
    w.add(f"{s.target} = " + (f"tl.where({_and(s.masks)}, {text}, {s.target})" if s.masks else text))


def _combined(op: str, dtype: torch.dtype) -> str:
    return _COMBINE_BOOL.get(op, _COMBINE[op]) if dtype == torch.bool else _COMBINE[op]


def _and(masks: tuple[str, ...]) -> str:
    return " & ".join(masks)


def _store(w: Lines, s: TileStore) -> None:
    what = "store" if not s.op else f"atomic_{s.op}"
    mask = f", mask={_and(s.masks)}" if s.masks else ""
    relaxed = ', sem="relaxed"' if s.op else ""
    w.add(f"tl.{what}({_address(s.target, s.index, s.shape)}, {scalar(s.value)}{mask}{relaxed})")


def _address(target: str, at: Index, shape: Shape | None) -> str:
    if shape:
        plain = isinstance(at, int) or not (ex.lookups(at) or any(v.key != "x" for v in ex.vars_of(at)))
        text = f"tl.cast({index(at)}, tl.int64)" if plain else index(at)  # a loop's position may be a plain number
        return f"{target} + tl.broadcast_to({text}, {_shape(shape)})"
    text = index(at)
    return target if at == 0 else f"{target} + {text}" if text.isalnum() else f"{target} + ({text})"


def _shape(shape: Shape) -> str:
    return f"[{', '.join(shape)}]"


def number(v: Value) -> str:
    """A constant as a Python number."""
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
    """One expression; operands that are names are spelled as such. `weak`: a plain number will do."""
    match v.op:
        case "name":
            return str(v.attr)
        case "const":
            return number(v) if weak and v.dtype in _WEAK_TYPES and not _is_minus_zero(v) else _constant(v)
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
            return f"tl.where({x} < 0, {x} + {_paren(v.attr)}, {x})"
        case "inside":
            x = scalar(v.args[0])
            return f"({x} >= 0) & ({x} < {_paren(v.attr)})"
        case "narrowed":  # a number that is no position becomes -1
            x, (_, high) = scalar(v.args[0]), ex.bounds(v.attr)
            return f"tl.cast(tl.where(({x} >= 0) & ({x} <= {high}), {x}, -1), tl.int32)"
        case "guarded":
            value, mask, other = v.args
            return f"tl.where({scalar(mask)}, {scalar(value)}, {scalar(other, value.op != 'const')})"
        case "broadcast":
            return f"tl.broadcast_to({scalar(v.args[0])}, {_shape(v.attr)})"
        case "reshaped":
            return f"tl.reshape({scalar(v.args[0])}, {_shape(v.attr)})"
        case "spread":
            return f"{scalar(v.args[0])}[None, :, None]"
        case "helper":
            return f"{v.attr}({', '.join(scalar(a) for a in v.args)})"
        case "reduced":
            return _reduced(v)
        case "scanned":
            return _scanned(v)
        case "combined":
            return _combined(v.attr, v.dtype).format(*(scalar(a) for a in v.args))
    if v.op.startswith("fast_"):
        return (OPS[v.op[5:]].triton_fast or "").format(*(scalar(a) for a in v.args))
    weak_ones = v.op in _WEAK and any(a.op != "const" for a in v.args[-2:])
    text = triton_spelling(v.op, v.args[0].dtype if v.op != "where" else v.dtype)
    return text.format(*(scalar(a, weak_ones) for a in v.args), T=TYPES[v.dtype], bits=v.dtype.itemsize * 8)


def _is_minus_zero(v: Value) -> bool:
    return v.dtype.is_floating_point and v.attr == 0 and math.copysign(1, v.attr) < 0


def _constant(v: Value) -> str:
    """A constant of just the dtype: a plain number would take the dtype that Triton finds fitting."""
    if _is_minus_zero(v):  # of a number that equals 0 Triton makes +0
        return f"(tl.full([], 0.0, {TYPES[v.dtype]}) * -1.0)"
    if v.dtype in LOW_PRECISION:
        return f"tl.cast({number(v)}, {TYPES[v.dtype]})"
    return f"tl.full([], {number(v)}, {TYPES[v.dtype]})"


def _load(v: Value) -> str:
    target, at, shape, policy = v.attr
    text = f"tl.load({_address(target, at, shape)}"
    if v.args:
        whole = not v.dtype.is_floating_point or v.dtype in FLOAT8
        zero = "False" if v.dtype == torch.bool else "0" if whole else "0.0"
        text += f", mask={_and(tuple(a.attr for a in v.args))}, other={zero}"
    if policy:
        text += f', eviction_policy="{policy}"'
    return text + ")"


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
        # as torch: to a wide integer first, whose low bits remain
        text = f"tl.cast({text}, {'tl.int64' if v.dtype == torch.uint8 else 'tl.int32'})"
    elif torch.float32 not in (x.dtype, v.dtype) and LOW_PRECISION & {x.dtype, v.dtype}:
        text = f"tl.cast({text}, tl.float32)"  # so does torch: a double is rounded twice
    return f"tl.cast({text}, {TYPES[v.dtype]})"


def _float8_format(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Bits of a float32's mantissa that go, the exponent's bias, the code of too large numbers, the code of NaN."""
    if dtype == torch.float8_e5m2:
        return 21, 15, 0x7C, 0x7F
    return 20, 7, 0x7E if torch_api.float8_saturates() else 0x7F, 0x7F


def _reduced(v: Value) -> str:
    op, axis, rank = v.attr
    x = scalar(v.args[0])
    if op in ("any", "all") or (v.dtype == torch.bool and op in ("max", "min")):
        most = "max" if op in ("any", "max") else "min"
        text = f"tl.{most}(tl.cast({x}, tl.int32), {axis}, keep_dims={rank > 1})"
        return f"({text} != 0)"
    if op == "sum":
        return f"tl.sum({x}, {axis}, keep_dims={rank > 1})"
    return f"tl.reduce({x}, {axis}, {_COMBINERS[op]}, keep_dims={rank > 1})"


def _scanned(v: Value) -> str:
    op, axis = v.attr
    x = scalar(v.args[0])
    if v.dtype == torch.bool:
        return f"(tl.associative_scan(tl.cast({x}, tl.int32), {axis}, {_COMBINERS[op]}) != 0)"
    return f"tl.cumsum({x}, {axis})" if op == "sum" else f"tl.associative_scan({x}, {axis}, {_COMBINERS[op]})"


def index(e: Index) -> str:
    """An index expression."""
    if isinstance(e, int):
        return str(e)
    parts: list[str] = []
    for m, c in e.terms:
        factors = [_atom(a) for a in m]
        if c not in (1, -1):
            factors.append(str(abs(c)))
        parts.append(f"{'-' if c < 0 else '+'} {' * '.join(factors)}")
    if e.const:
        parts.append(f"{'-' if e.const < 0 else '+'} {abs(e.const)}")
    text = " ".join(parts)
    return text[2:] if text.startswith("+ ") else "-" + text[2:]


def _atom(a: Atom) -> str:
    match a.kind:
        case "var" | "sym":
            return a.key
        case "lookup":
            return scalar(a.args[0])
    x, y = (_paren(b) for b in a.args)
    plain = ex.known_nonnegative(a.args[0])
    match a.kind:
        case "floordiv":
            return f"({x} // {y})" if plain else f"floor_divide({x}, {y})"
        case "mod":
            return f"({x} % {y})" if plain else f"remainder({x}, {y})"
        case _:
            return f"tl.{a.kind}imum({x}, {y})"


def _paren(e: Index) -> str:
    text = index(e)
    return text if text.isalnum() else f"({text})"
