"""The host program for CUDA: a readable Python file that allocates, launches, calls libraries and returns.

Every buffer is a tensor of its own from torch's caching allocator, which knows streams and graph capture; it is
dropped after its last use, and its memory goes to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch

from ...ir import expr as ex
from ...ir.loops import Buffer, Extern, Origin, Program, View, late_symbols, reads, results_text, writes
from ..cpp.ast import Param
from ..triton.print_triton import TritonKernel
from .cpu_program import (
    _arg,
    _Names,
    _output,
    _provenance,
    _Python,
    _target_name,
    bind_late,
    bind_numbers,
    bind_sizes,
    is_foreign,
    number_imports,
    promise,
    promise_imports,
)
from .debug_file import describe, seldom, tuple_text


@dataclass(frozen=True)
class CudaLaunch:
    """One kernel on named buffers; `finish` steps follow it as launches of their own. `scratch`: "" or one more."""

    kernel: TritonKernel
    params: tuple[Param, ...]
    buffers: tuple[str, ...]
    origins: tuple[Origin, ...]
    scratch: str = ""

    @property
    def held(self) -> tuple[str, ...]:
        return (*self.buffers, self.scratch) if self.scratch else self.buffers


Step = CudaLaunch | Extern


@dataclass(frozen=True)
class CudaHost:
    """`launches`: per launch its kernel and the numbers of its pointers that are multiples of 16 bytes."""

    python: str
    launches: tuple[tuple[TritonKernel, tuple[int, ...]], ...]
    kernels: int
    library_calls: int


def launches(
    p: Program, kernel: TritonKernel, buffers: tuple[str, ...], origins: tuple[Origin, ...], number: int
) -> tuple[Program, list[CudaLaunch]]:
    """A kernel and its finishing kernels as launches; their partial results become buffers of the program."""
    held = dict(zip((q.name for q in (*kernel.params, *kernel.totals)), buffers, strict=True))
    device = p.buffers[buffers[0]].device
    added = {}
    for w in kernel.workspace:
        held[w.name] = f"parts{number}_{w.name}"
        added[held[w.name]] = Buffer(held[w.name], w.dtype, (w.numel,), (1,), device)
    scratch = f"scratch{number}" if kernel.scratch else ""
    if scratch:
        added[scratch] = Buffer(scratch, torch.uint8, (ex.mul(kernel.scratch, *kernel.grid),), (1,), device)
    if added:
        p = replace(p, buffers={**p.buffers, **added})
    params = (*kernel.params, *(Param(w.name, w.dtype, True) for w in kernel.workspace))
    out = [CudaLaunch(kernel, params, tuple(held[q.name] for q in params), origins, scratch)]
    for f in kernel.finish:
        names = tuple(held[a] for a in f.arguments)
        out.append(CudaLaunch(f.kernel, f.kernel.params, names, origins))
    return p, out


def build(p: Program, steps: Sequence[Step], any_strides: bool = False, checked: bool = False) -> CudaHost:
    """Print the host program. `any_strides`: inputs may have other strides than were traced; `checked`: look."""
    steps = [replace(s, out_variant=None) if isinstance(s, Extern) else s for s in steps]
    found = [s for s in steps if isinstance(s, CudaLaunch)]
    names = _names(p, steps)
    written = written_inputs(p, steps)
    unaligned = written.union(o for s in steps if isinstance(s, Extern) and s.aliases for o in s.outs if o)
    hints = tuple((s.kernel, aligned_pointers(s, unaligned)) for s in found)
    python = _python(p, steps, found, names, any_strides, checked and not any_strides)
    return CudaHost(python, hints, len(found), len(steps) - len(found))


def aligned_pointers(s: CudaLaunch, unaligned: Set[str]) -> tuple[int, ...]:
    """Numbers of a launch's pointers that are multiples of 16 bytes; buffers in `unaligned` may begin unaligned."""
    return tuple(k for k, b in enumerate(s.buffers) if b not in unaligned)


def unaligned_in(p: Program) -> set[str]:
    """The buffers that may begin unaligned, as far as they are known before there are launches."""
    written = {b for n in p.nodes for b in writes(n) if b in p.buffers and p.buffers[b].kind == "input"}
    return written.union(o for n in p.nodes if isinstance(n, Extern) and n.aliases for o in n.outs if o)


def _names(p: Program, steps: Sequence[Step]) -> _Names:
    slots: dict[str, int] = {}
    symbols: set[str] = set()
    for s in steps:
        if isinstance(s, CudaLaunch):
            symbols.update(s.kernel.symbols)
            for b in s.held:
                slots.setdefault(b, len(slots))
    used = {o.buffer for o in p.outputs if isinstance(o, View)}
    used.update(b for s in steps for b in (s.buffers if isinstance(s, CudaLaunch) else reads(s)))
    temporary = {b for b, buf in p.buffers.items() if buf.kind == "temp"}
    return _Names(slots, {}, {}, {b: b for b in sorted(used)}, temporary, tuple(sorted(symbols)))


def written_inputs(p: Program, steps: Sequence[Step]) -> set[str]:
    """Inputs that any step writes: they cannot be copied to an aligned place, so nothing is promised of them."""
    written: set[str] = set()
    for s in steps:
        if isinstance(s, CudaLaunch):
            written.update(b for q, b in zip(s.params, s.buffers, strict=True) if q.written)
        else:
            written.update(writes(s))
    return {b for b in written if b in p.buffers and p.buffers[b].kind == "input"}


def _last_uses(p: Program, steps: Sequence[Step]) -> dict[int, list[str]]:
    """Per step the buffers that nothing needs after it; storage shared with a library result lives on."""
    last: dict[str, int] = {}
    for k, s in enumerate(steps):
        for b in s.held if isinstance(s, CudaLaunch) else (*reads(s), *writes(s)):
            last[b] = k
    kept = {o.buffer for o in p.outputs if isinstance(o, View)}
    out: dict[int, list[str]] = {}
    for b, k in last.items():
        if b in p.buffers and b not in kept and p.buffers[b].kind != "const":
            out.setdefault(k, []).append(b)
    return out


def _python(
    p: Program,
    steps: Sequence[Step],
    found: list[CudaLaunch],
    names: _Names,
    any_strides: bool,
    checked: bool,
) -> str:
    w = _Python()
    checks = [o.line for s in found if s.kernel.checks for o in s.origins if o.line]
    flagged = any(s.kernel.checks for s in found)
    device = next(b.device for b in p.buffers.values() if b.device.type == "cuda")
    views = {o.buffer for o in p.outputs if isinstance(o, View)}
    views.update(b for s in steps if isinstance(s, Extern) for b in s.aliases)
    _prologue(w, p, names, _Inputs(written_inputs(p, steps), views, any_strides, checked), flagged)
    last = _last_uses(p, steps)
    number = 0
    for k, s in enumerate(steps):
        if isinstance(s, CudaLaunch):
            _launch(w, p, names, s, number)
            number += 1
        else:
            _extern(w, p, names, s)
        if k in last:
            w.add(f"del {', '.join(last[k])}")
    w.add("tables.give(t)")
    outs = ", ".join(_output(p, o) for o in p.outputs)
    w.add(f"return ({outs}{',' if len(p.outputs) == 1 else ''})")
    return _file(p, names, found, w, device.index or 0, sorted(set(checks)), flagged)


@dataclass(frozen=True)
class _Inputs:
    """Those that are written, and those of which views are made or returned, which must be views of what is given."""

    written: set[str]
    viewed: set[str]
    any_strides: bool
    checked: bool


def _prologue(w: _Python, p: Program, names: _Names, inputs: _Inputs, flagged: bool) -> None:
    if p.inputs:
        w.add(f"{', '.join(p.inputs)}{',' if len(p.inputs) == 1 else ''} = args")
    w.add("args.clear()")
    if flagged:
        w.add("flag.check()")
    bind_sizes(w, p, inputs.any_strides, inputs.checked)
    bind_numbers(w, p)
    w.add("t = tables.take()")
    w.add("P, S, L, stream = t.pointers, t.sizes, t.launches, current_stream(DEVICE)")
    late = late_symbols(p)
    for k, s in enumerate(names.symbols):
        if s not in late:
            w.add(f"S[{k}] = {s}")
    for b in p.inputs:
        if b not in names.slots:
            continue
        if p.buffers[b].device.type == "cpu":
            _bring(w, p, names, b)
            continue
        near = f"{b}_near" if b in inputs.viewed else b
        if b not in inputs.written:
            w.add(f"{near} = aligned({b})")
        w.add(f"P[{names.slots[b]}] = {near if b not in inputs.written else b}.data_ptr()")


def _bring(w: _Python, p: Program, names: _Names, b: str) -> None:
    """A CPU tensor that kernels read, often a number in a tensor, gets a copy on the device."""
    buf = p.buffers[b]
    w.add(f"{b}_there = empty_cuda({tuple_text(buf.sizes)}, {tuple_text(buf.strides)}, {buf.dtype}).copy_({b}, True)")
    w.add(f"P[{names.slots[b]}] = {b}_there.data_ptr()")


def _allocate(w: _Python, p: Program, names: _Names, b: str) -> None:
    w.targets[b] = b
    buf = p.buffers[b]
    w.add(f"{b} = empty_cuda({tuple_text(buf.sizes)}, {tuple_text(buf.strides)}, {buf.dtype})")
    w.add(f"P[{names.slots[b]}] = {b}.data_ptr()")


def _launch(w: _Python, p: Program, names: _Names, s: CudaLaunch, number: int) -> None:
    for b in s.held:
        if b in names.fresh and b not in w.targets:
            _allocate(w, p, names, b)
            if any(q.name in s.kernel.zeroed for q, c in zip(s.params, s.buffers, strict=True) if c == b):
                w.add(f"{b}.zero_()")
    (grid,) = s.kernel.grid
    w.add(f"kernel{number}({ex.show(grid)}, stream, L[{number}])  # {_provenance(s.origins)}")


def _extern(w: _Python, p: Program, names: _Names, s: Extern) -> None:
    fn = _target_name(w, s.target)
    args = [_arg(p, names, a) for a in s.args] + [f"{k}={_arg(p, names, v)}" for k, v in s.kwargs]
    w.add(f"{results_text(s)} = {fn}({', '.join(args)})  # {_provenance(s.origins)}")
    bind_late(w, p, names, s)
    for o in s.outs:
        if o not in p.buffers or o not in names.home:  # a result that nobody uses may be None
            continue
        assert o is not None
        w.targets[o] = o
        b = p.buffers[o]
        if is_foreign(s.target):
            w.add(promise(p, s.target, o))
        if b.device.type == "cpu":
            if o in names.slots:
                _bring(w, p, names, o)
            continue
        if (b.sizes or o in names.slots) and not s.aliases:  # a view must stay one, wherever it begins
            w.add(f"{o} = ensure_strides({o}, {tuple_text(b.sizes)}, {tuple_text(b.strides)})")
        if o in names.slots:
            w.add(f"P[{names.slots[o]}] = {o}.data_ptr()")


def _arguments(s: CudaLaunch, names: _Names, flag: int) -> str:
    out = [("p", names.slots[b]) for b in s.buffers]
    out += [("p", flag)] if s.kernel.checks else []
    out += [("s", names.symbols.index(x)) for x in s.kernel.symbols]
    out += [("p", names.slots[s.scratch])] if s.scratch else []
    return repr(tuple(out))


def _file(
    p: Program, names: _Names, found: list[CudaLaunch], w: _Python, device: int, checks: list[str], flagged: bool
) -> str:
    flag = len(names.slots)
    fixed = {names.slots[b]: f"const[{b!r}]" for b in names.slots if p.buffers[b].kind == "const"}
    fixed |= {flag: "flag"} if flagged else {}
    fixed_text = ", ".join(f"{slot}: {text}" for slot, text in fixed.items())
    functions = list(dict.fromkeys(s.kernel.source for s in found))
    sources = [f"SOURCE{n} = r'''\n{text}'''\n" for n, text in enumerate(functions)]
    which = [functions.index(s.kernel.source) for s in found]
    lines = [
        *number_imports(p),
        "import torch",
        "from altbackend.runtime.cuda import ErrorFlag, Tables, aligned, empty_cuda, ensure_strides, on_device, view",
        "from altbackend.runtime.cuda import stream as current_stream",
        *(f"from altbackend.runtime.host import {name}" for name in seldom(w)),
        *promise_imports(p),
        "",
        f"DEVICE = {device}",
        "",
        "",
        "def bind(kernels, const):",
        '    """`kernels`: one launch function per launch, in order; `const`: constants by name."""',
        *([f"    flag = ErrorFlag({checks!r})"] if flagged else []),
        "    launches = [",
        *(f"        {_arguments(s, names, flag)},  # SOURCE{n}" for s, n in zip(found, which, strict=True)),
        "    ]",
        f"    tables = Tables({flag + 1}, {len(names.symbols)}, launches, {{{fixed_text}}})",
        *([f"    {', '.join(f'kernel{n}' for n in range(len(found)))}, = kernels"] if found else []),
        *(f"    {k[3:]} = {v}" for k, v in w.targets.items() if k.startswith("fn ")),
        "",
        "    def call(args):",
        *w.body,
        "",
        *(["    call.check = flag.check"] if flagged else []),
        "    return on_device(call, DEVICE)",
        "",
        "",
        *sources,
        f"# inputs: {', '.join(describe(p, b) for b in p.inputs)}",
        "",
    ]
    return "\n".join(lines)
