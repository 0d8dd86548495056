"""Print the Python file of a CPU graph: memory layout, host program, C++ text, and a main part that runs it."""

from __future__ import annotations

import types

from ...config.options import Config
from ...ir import expr as ex
from ...ir.loops import Extern, Program
from .launch_plan import LaunchPlan, Locations
from .python_text import HostLines, geometry_text, number_imports, owned_import, promise_imports, tuple_text

_RUNTIME = ("Workspaces", "check_error", "empty_cpu", "ensure_strides", "view")
_OPTIONAL = ("check_input", "empty_large", "retyped")


def optional_functions(w: HostLines) -> list[str]:
    """Return the functions of `runtime.host` that only some programs call, and this one does."""
    return [name for name in _OPTIONAL if any(f"{name}(" in line for line in w.body)]


def file_text(planned: LaunchPlan, cfg: Config, w: HostLines, source: str) -> str:
    """Return the Python file of a CPU graph. `source`: the C++ text, `w`: the lines of the host program."""
    p, locations = planned.program, planned.locations
    fixed = {locations.slots[b]: b for b in locations.slots if p.buffers[b].kind == "const"}
    fixed_text = ", ".join(f"{slot}: const[{b!r}]" for slot, b in fixed.items())
    call_symbols = len(locations.symbols) - locations.layout_symbols
    options = f"{cfg.reuse_memory}, {cfg.persistent_workspace}" + (f", {call_symbols}" if call_symbols else "")
    lines = [
        *number_imports(p),
        *promise_imports(p),
        *owned_import(p, locations.takes),
        "import torch",
        f"from altbackend.runtime.host import {', '.join(sorted([*_RUNTIME, *optional_functions(w)]))}",
        "",
        "",
        f"def layout({', '.join(locations.layout)}):",
        '    """Temporaries as (slots, bytes, first step, last step); windows on them for library calls."""',
        "    blocks = [",
        *_blocks(p, locations),
        "    ]",
        "    windows = [",
        *_windows(p, locations),
        "    ]",
        "    return blocks, windows",
        "",
        "",
        "def bind(library, const, num_threads):",
        f"    spaces = Workspaces(layout, {len(locations.slots)}, {{{fixed_text}}}, {options})",
        "    spaces.constants = const  # the workspaces hold their addresses",
        "    spare = spaces.spare",
        *(f"    segment{n} = library.fn('segment{n}')" for n in range(len(planned.segments))),
        *(f"    {k[3:]} = {v}" for k, v in w.targets.items() if k.startswith("fn ")),
        "",
        "    def call(args):",
        *w.body,
        "",
        "    call.release = spaces.release  # for a program in C++ that takes over",
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


def _blocks(p: Program, locations: Locations) -> list[str]:
    """Return a line for each block of the arena, with the temporaries that share it."""
    sharing: dict[str, list[str]] = {}
    for b, root in locations.shares.items():
        sharing.setdefault(root, []).append(b)
    lines = []
    for b, (first, last) in locations.arena.items():
        if b in locations.shares:
            continue
        buffer = p.buffers[b]
        nbytes = ex.show(ex.mul(buffer.extent, buffer.dtype.itemsize))
        names = [b, *sharing.get(b, ())]
        slots = ", ".join(str(locations.slots[c]) for c in names)
        lines.append(f"        (({slots},), {nbytes}, {first}, {last}),  # {', '.join(names)}")
    return lines


def _windows(p: Program, locations: Locations) -> list[str]:
    """Return a line for each view on a temporary that a library call takes."""
    lines = []
    for v in locations.windows:
        dtype = v.dtype or p.buffers[v.buffer].dtype
        geometry = f"{tuple_text(v.sizes)}, {tuple_text(v.strides)}, {ex.show(v.offset)}"
        lines.append(f"        ({locations.slots[v.buffer]}, {dtype}, {geometry}),  # {v.buffer}")
    return lines


def describe(p: Program, b: str) -> str:
    """Return an input's name, dtype and sizes."""
    if b not in p.buffers:
        return b
    buffer = p.buffers[b]
    return f"{b} {str(buffer.dtype).removeprefix('torch.')}{tuple_text(buffer.sizes)}"


def _own_targets(p: Program) -> dict[str, str]:
    """Return the functions of `altbackend.runtime` that the program calls, with their modules."""
    targets = [n.target for n in p.nodes if isinstance(n, Extern) and isinstance(n.target, types.FunctionType)]
    return {t.__name__: t.__module__ for t in targets if t.__module__.startswith("altbackend.runtime.")}


def _own_imports(p: Program) -> list[str]:
    return [f"    from {module} import {name}" for name, module in _own_targets(p).items()]


def _own_calls(p: Program) -> str:
    return ", ".join(f"'op_{name}': {name}" for name in _own_targets(p))


def _main(p: Program) -> list[str]:
    """Return lines that make two timed calls with random inputs of the traced shapes."""
    symbolic = any(ex.syms_of(p.buffers[b].extent) for b in p.inputs if b in p.buffers)
    if symbolic or any(buffer.kind == "const" for buffer in p.buffers.values()):
        return ["    print('symbolic shapes or constants: call bind(...)(inputs) yourself')"]
    inputs = [f"rand_strided({geometry_text(p, b)}, {p.buffers[b].dtype})" if b in p.buffers else "0" for b in p.inputs]
    return [
        "    from altbackend.runtime.bench import rand_strided, time_calls",
        "",
        f"    print(time_calls(call, lambda: [{', '.join(inputs)}]))",
    ]
