"""Print the tile AST as Triton source. Every decision is already in the AST."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from altbackend.lazy_dataclass import dataclass

from ... import runtime
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import Origin, Program
from ...schedule.tiling.gpu.tiled import FinishKernel, TiledKernel
from ..cpp.ast import Let, Param
from ..lines import Lines
from . import tile
from .expressions import TYPES, address, combined, in_order, index, number, scalar, shape_text
from .templates import matmul
from .tile_ast import (
    Accumulator,
    Comment,
    Fold,
    Mask,
    Points,
    TileFunction,
    TileLoop,
    TileStmt,
    TileStore,
)

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
LABEL_OPS = 6  # operators that a kernel's name lists


@dataclass(frozen=True)
class Workspace:
    """A buffer of partial results, which a kernel writes and its `finish` kernels read."""

    name: str
    dtype: torch.dtype
    numel: Index


@dataclass(frozen=True)
class Finish:
    """A second kernel; `arguments` names its pointers in `workspace` or `totals` of the first one."""

    kernel: TritonKernel
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class TritonKernel:
    """The source of a kernel and the data of its launch.

    The arguments come in this order:

    - `params` and `workspace`: pointers;
    - "error", if `checks`: a pointer to one int32;
    - `symbols`: int64;
    - `constexprs`.

    `grid` has one entry, in terms of the symbols. The `finish` kernels run afterwards and write `totals`, which the
    first kernel does not take. The parameters in `zeroed` must hold zero before the launch. Each program needs
    `scratch` bytes of global memory, whose address follows the other arguments. A profiler shows `label`, made of the
    form and the operators. Different kernels may share it.
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
        """Return the types of the arguments as `triton.compiler.ASTSource` takes them."""
        types = {p.name: POINTERS[p.dtype] for p in self.params}
        types |= {w.name: POINTERS[w.dtype] for w in self.workspace}
        types |= {"error": "*i32"} if self.checks else {}
        types |= dict.fromkeys(self.symbols, "i64")
        return types | dict.fromkeys(self.constexprs, "constexpr")


# a finished kernel, its Triton kernel, and the program buffers that the parameters stand for
Emitted = tuple[TiledKernel, TritonKernel, tuple[str, ...]]


def emit(p: Program, tiled: TiledKernel) -> tuple[TritonKernel, tuple[str, ...]]:
    """Return the Triton kernel of a finished kernel, and the program buffers that its parameters stand for.

    Raises Unsupported, with the reason, where tiles cannot express it.
    """
    f = tile.emit(p, tiled)
    partials = [t.partial for t in f.totals]
    outs = tuple(t.out for t in partials)
    labels = {b: f"result{n}" for n, b in enumerate(outs)}
    kernel = TritonKernel(
        source=source(f),
        params=f.params,
        symbols=f.symbols,
        constexprs=f.blocks.constexprs,
        grid=(f.blocks.programs,),
        num_warps=f.blocks.warps,
        num_stages=f.blocks.stages,
        workspace=tuple(Workspace(t.workspace, t.dtype, ex.mul(f.blocks.programs, t.numel)) for t in partials),
        totals=tuple(Param(labels[b], p.buffers[b].dtype, True) for b in outs),
        finish=tuple(_finish(second, labels) for second in tiled.finish),
        checks=f.checks,
        scratch=matmul.scratch_bytes(tiled.kernel.matmul),
        label=label(f.blocks.form.value, tiled.kernel.origins),
    )
    return kernel, (*f.buffers, *outs)


def _finish(second: FinishKernel, labels: dict[str, str]) -> Finish:
    kernel, buffers = emit(second.program, second.tiled)
    return Finish(kernel, tuple(labels.get(b, b) for b in buffers))


def label(form: str, origins: tuple[Origin, ...]) -> str:
    """Return a name for a profiler: the form, and some of the operators."""
    ops = dict.fromkeys(re.sub(r"\W.*", "", o.target) for o in origins)
    return "_".join([form, *list(ops)[:LABEL_OPS]])


# --- the text ----------------------------------------------------------------------------------------------------


class _TritonLines(Lines):
    """The body of one function. `wide`: positions have 64 bits."""

    def __init__(self, wide: bool) -> None:
        super().__init__(depth=1)
        self.wide = wide


def source(f: TileFunction, pointers: Sequence[str] = (), header: Sequence[str] = ()) -> str:
    """Return a module with the function `kernel`, which imports nothing but triton.

    `pointers`: arguments in place of those of `f` and its symbols, which the lines of `header` then define.
    """
    w = _TritonLines(f.blocks.wide)
    w.add("program = tl.program_id(0)" + (".to(tl.int64)" if f.blocks.wide else ""))
    if any("programs" in s.step for s in f.body if isinstance(s, TileLoop)):
        w.add("programs = tl.num_programs(0)")
    for line in header:
        w.add(line)
    _block(w, f.body)
    arguments = [p.name for p in f.params] + [t.partial.workspace for t in f.totals]
    arguments += ["error"] if f.checks else []
    arguments = list(pointers) or [*arguments, *f.symbols]
    arguments += [f"{c}: tl.constexpr" for c in f.blocks.constexprs]
    return _module(arguments, "\n".join(w.body))


def module(arguments: Sequence[str], lines: Sequence[str]) -> str:
    """Return a module with a function `kernel` of these lines, which are not indented yet."""
    return _module(arguments, "\n".join(f"    {line}" for line in lines))


def _module(arguments: Sequence[str], body: str) -> str:
    texts = [_HEADER, *_helpers(body), f"@triton.jit\ndef kernel({', '.join(arguments)}):\n{body}"]
    return "\n\n\n".join(texts) + "\n"


_HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice"


@functools.cache
def _library() -> dict[str, str]:
    """Return the text of every function of `runtime.tile_math`; the module needs triton and is not imported."""
    text = Path(runtime.__file__).with_name("tile_math.py").read_text(encoding="utf-8")
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    lines = text.splitlines()  # ast.get_source_segment splits the text anew for every function: 20 ms
    return {n.name: "\n".join(["@triton.jit", *lines[n.lineno - 1 : n.end_lineno]]) for n in functions}


def _helpers(body: str) -> list[str]:
    """Return the text of all helpers that a kernel's text calls, also through other helpers."""
    called: set[str] = set()
    pending = [body]
    while pending:
        names = set(re.findall(r"(?<![\w.])(\w+)\b", pending.pop())) & _library().keys() - called
        called |= names
        pending += [_library()[n] for n in names]
    return [text for name, text in _library().items() if name in called]


def _block(w: _TritonLines, body: tuple[TileStmt, ...]) -> None:
    for k, s in enumerate(body):
        if isinstance(s, Comment) and (k + 1 == len(body) or isinstance(body[k + 1], Comment)):
            continue  # no statement of that node follows
        _statement(w, s)


def _statement(w: _TritonLines, s: TileStmt) -> None:
    match s:
        case Let():
            w.add(f"{s.name} = {scalar(s.value)}")
        case Points():
            w.add(f"{s.name} = {_points(s, w.wide)}")
        case Mask():
            w.add(f"{s.name} = {s.var} < {index(s.size)}")
        case Accumulator():
            w.add(f"{s.name} = tl.full({shape_text(s.shape)}, {number(s.init)}, {TYPES[s.dtype]})")
        case Fold():
            _fold(w, s)
        case TileStore():
            _store(w, s)
        case TileLoop():
            turns = f"{s.begin}, {index(s.end)}, {s.step}"
            option = f", num_stages={s.stages}" if s.stages > 1 else ", flatten=True" if s.joined else ""
            w.add(f"for {s.var} in " + (f"tl.range({turns}{option}):" if option else f"range({turns}):"))
            with w.indented():
                _block(w, s.body)
        case matmul.Product() | matmul.Descriptors():
            for line in matmul.lines(s) if isinstance(s, matmul.Product) else matmul.descriptor_lines(s):
                w.add(line)
        case Comment():
            w.add(f"# {s.text}")


def _points(s: Points, wide: bool) -> str:
    if s.block is None:
        return s.base
    axes = [":" if k == s.axis else "None" for k in range(s.rank)]
    subscript = f"[{', '.join(axes)}]" if s.rank > 1 else ""
    text = f"tl.arange(0, {s.block})" + (".to(tl.int64)" if wide else "") + subscript
    return text if s.base == "0" else f"{s.base} + {text}"


def _fold(w: _TritonLines, s: Fold) -> None:
    if s.lost:
        term = f"tl.where({_and(s.masks)}, {scalar(s.value)}, 0.0)" if s.masks else scalar(s.value)
        w.add(f"{s.target}, {s.lost} = add_exactly({s.target}, {s.lost}, {term})")
        return
    text = combined(s.op, s.value.dtype).format(s.target, scalar(s.value))
    w.add(f"{s.target} = " + (f"tl.where({_and(s.masks)}, {text}, {s.target})" if s.masks else text))


def _and(masks: tuple[str, ...]) -> str:
    return " & ".join(masks)


def _store(w: _TritonLines, s: TileStore) -> None:
    if s.ordered and s.shape is not None:
        mask = f", mask={in_order(_and(s.masks), s.shape)}" if s.masks else ""
        w.add(f"tl.store({s.target} + {in_order(index(s.index), s.shape)}, {in_order(scalar(s.value), s.shape)}{mask})")
        return
    function = "store" if not s.op else f"atomic_{s.op}"
    mask = f", mask={_and(s.masks)}" if s.masks else ""
    relaxed = ', sem="relaxed"' if s.op else ""
    w.add(f"tl.{function}({address(s.target, s.index, s.shape, s.run)}, {scalar(s.value)}{mask}{relaxed})")
