"""The Python file that a debug folder shows of a CPU graph: memory layout, host program, C++ text, a main part."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...config.options import Config
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import Extern, Program

if TYPE_CHECKING:
    from .cpu_program import _Names, _Python


_RUNTIME = ("Workspaces", "check_error", "empty_cpu", "ensure_strides", "view")


def seldom(w: _Python) -> list[str]:
    """The functions of `runtime.host` that only some programs call, those that this one does."""
    return [name for name in ("check_input", "retyped") if any(f"{name}(" in line for line in w.body)]


def tuple_text(xs: Sequence[Index]) -> str:
    return "(" + ", ".join(map(ex.show, xs)) + ("," if len(xs) == 1 else "") + ")"


def file_text(
    p: Program,
    names: _Names,
    segments: list[list[int]],
    cfg: Config,
    w: _Python,
    source: str,
    imports: Sequence[str] = (),
) -> str:
    """The file; `imports` are of what the texts of numbers name."""
    blocks, windows = [], []
    taken: dict[str, list[str]] = {}
    for c, root in names.home.items():
        taken.setdefault(root, []).append(c)
    for b, (first, last) in names.arena.items():
        if b in names.home:
            continue
        buf = p.buffers[b]
        nbytes = ex.show(ex.mul(buf.extent, buf.dtype.itemsize))
        here = [b, *taken.get(b, ())]
        slots = ", ".join(str(names.slots[c]) for c in here)
        blocks.append(f"        (({slots},), {nbytes}, {first}, {last}),  # {', '.join(here)}")
    for v in names.windows:
        dtype = v.dtype or p.buffers[v.buffer].dtype
        fields = (
            f"{names.slots[v.buffer]}, {dtype}, {tuple_text(v.sizes)}, {tuple_text(v.strides)}, {ex.show(v.offset)}"
        )
        windows.append(f"        ({fields}),  # {v.buffer}")
    fixed = {names.slots[b]: b for b in names.slots if p.buffers[b].kind == "const"}
    fixed_text = ", ".join(f"{slot}: const[{b!r}]" for slot, b in fixed.items())
    others = f", {len(names.symbols) - names.laid}" if len(names.symbols) > names.laid else ""
    lines = [
        *imports,
        "import torch",
        f"from altbackend.runtime.host import {', '.join(sorted([*_RUNTIME, *seldom(w)]))}",
        "",
        "",
        f"def layout({', '.join(names.layout)}):",
        '    """Temporaries as (slots, bytes, first step, last step); windows on them for library calls."""',
        "    blocks = [",
        *blocks,
        "    ]",
        "    windows = [",
        *windows,
        "    ]",
        "    return blocks, windows",
        "",
        "",
        "def bind(library, const, num_threads):",
        f"    spaces = Workspaces(layout, {len(names.slots)}, {{{fixed_text}}}, {cfg.reuse_memory}, "
        f"{cfg.persistent_workspace}{others})",
        "    spaces.constants = const  # whose addresses the workspaces hold",
        *(f"    segment{n} = library.fn('segment{n}')" for n in range(len(segments))),
        *(f"    {k[3:]} = {v}" for k, v in w.targets.items() if k.startswith("fn ")),
        "",
        "    def call(args):",
        *w.body,
        "",
        "    return call",
        "",
        "",
        f"SOURCE = r'''\n{source}'''",
        "",
        "",
        'if __name__ == "__main__":',
        "    from altbackend.compile_pool.cpp import load",
        "",
        *_own_imports(p),
        f"    call = bind(load(SOURCE), {{{_own_calls(p)}}}, torch.get_num_threads)",
        f"    # inputs: {', '.join(describe(p, b) for b in p.inputs)}",
        *_main(p),
        "",
    ]
    return "\n".join(lines)


def describe(p: Program, b: str) -> str:
    if b not in p.buffers:
        return b
    buf = p.buffers[b]
    return f"{b} {str(buf.dtype).removeprefix('torch.')}{tuple_text(buf.sizes)}"


def _own_targets(p: Program) -> dict[str, str]:
    """Functions of `altbackend.runtime` that the program calls, and their modules."""
    targets = [n.target for n in p.nodes if isinstance(n, Extern) and isinstance(n.target, types.FunctionType)]
    return {t.__name__: t.__module__ for t in targets if t.__module__.startswith("altbackend.runtime.")}


def _own_imports(p: Program) -> list[str]:
    return [f"    from {module} import {name}" for name, module in _own_targets(p).items()]


def _own_calls(p: Program) -> str:
    return ", ".join(f"'op_{name}': {name}" for name in _own_targets(p))


def _main(p: Program) -> list[str]:
    """Random inputs of the right shapes, two timed calls."""
    if any(syms for b in p.inputs if b in p.buffers for syms in [ex.syms_of(p.buffers[b].extent)]) or any(
        buf.kind == "const" for buf in p.buffers.values()
    ):
        return ["    print('symbolic shapes or constants: call bind(...)(inputs) yourself')"]
    made = []
    for b in p.inputs:
        if b not in p.buffers:
            made.append("0")
            continue
        buf = p.buffers[b]
        fill = f"rand_strided({tuple_text(buf.sizes)}, {tuple_text(buf.strides)}, {buf.dtype})"
        made.append(fill)
    return [
        "    from altbackend.runtime.bench import rand_strided, time_calls",
        "",
        f"    print(time_calls(call, lambda: [{', '.join(made)}]))",
    ]
