"""Print the host program of a GPU: a readable Python file that allocates, launches, calls libraries and returns.

Every buffer is a tensor of its own from torch's caching allocator, which knows streams and graph capture. The program
drops a tensor after its last use, and the allocator reuses its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch

from altbackend.lazy_dataclass import dataclass

from ...aten.collective import is_start
from ...aten.name import is_foreign, operator_name, words
from ...ir import expr as ex
from ...ir.loops import Buffer, Extern, Origin, Program, View, reads, results_text, unbacked_symbols, writes
from ...runtime.cuda import ALIGNMENT
from ..cpp.ast import Param
from ..triton.print_triton import TritonKernel
from .debug_file import describe, optional_functions
from .launch_plan import Locations
from .python_text import (
    HostLines,
    allocation_text,
    bind_late,
    bind_numbers,
    bind_sizes,
    call_text,
    geometry_text,
    number_imports,
    open_call,
    owned_import,
    promise,
    promise_imports,
    provenance,
    return_line,
    tuple_text,
)
from .take_over import Uses, Writes, take_overs

_RUNTIME = (
    *("ErrorFlag", "Tables", "aligned", "empty_cuda", "ensure_strides"),
    *("get_device", "on_device", "raw_stream", "thread", "view"),
)
# Many other operators return their argument where nothing is to be done, and few schemas say so.
_RETURNS_NEW = words("mm addmm bmm baddbmm convolution convolution_backward")


@dataclass(frozen=True)
class CudaLaunch:
    """One kernel on named buffers. `scratch`: the buffer of its global scratch memory, or "".

    `in_place`: pairs of buffers that may share memory, see `Kernel`.
    """

    kernel: TritonKernel
    params: tuple[Param, ...]
    buffers: tuple[str, ...]
    origins: tuple[Origin, ...]
    scratch: str = ""
    in_place: tuple[tuple[str, str], ...] = ()

    @property
    def all_buffers(self) -> tuple[str, ...]:
        """Return the buffers of the launch, scratch memory included."""
        return (*self.buffers, self.scratch) if self.scratch else self.buffers


Step = CudaLaunch | Extern


@dataclass(frozen=True)
class CudaHost:
    """A printed host program. `launches`: each kernel with the numbers of its pointers that are multiples of 16."""

    python: str
    launches: tuple[tuple[TritonKernel, tuple[int, ...]], ...]
    kernels: int
    library_calls: int


def launches(
    p: Program,
    kernel: TritonKernel,
    buffers: tuple[str, ...],
    origins: tuple[Origin, ...],
    number: int,
    in_place: tuple[tuple[str, str], ...] = (),
) -> tuple[Program, list[CudaLaunch]]:
    """Return the launches of a kernel and its second kernels, and the program with their workspaces as buffers."""
    buffer_of = dict(zip((q.name for q in (*kernel.params, *kernel.totals)), buffers, strict=True))
    device = p.buffers[buffers[0]].device
    added = {}
    for w in kernel.workspace:
        buffer_of[w.name] = f"parts{number}_{w.name}"
        added[buffer_of[w.name]] = Buffer(buffer_of[w.name], w.dtype, (w.numel,), (1,), device)
    scratch = f"scratch{number}" if kernel.scratch else ""
    if scratch:
        added[scratch] = Buffer(scratch, torch.uint8, (ex.mul(kernel.scratch, *kernel.grid),), (1,), device)
    if added:
        p = replace(p, buffers={**p.buffers, **added})
    params = (*kernel.params, *(Param(w.name, w.dtype, True) for w in kernel.workspace))
    steps = [CudaLaunch(kernel, params, tuple(buffer_of[q.name] for q in params), origins, scratch, in_place)]
    for f in kernel.finish:
        names = tuple(buffer_of[a] for a in f.arguments)
        steps.append(CudaLaunch(f.kernel, f.kernel.params, names, origins))
    return p, steps


@dataclass(frozen=True)
class CudaPlan:
    """A program's steps, its launches, and the locations of its buffers. `flagged`: some kernel checks positions.

    `written`: inputs that a step writes. `viewed`: buffers of which results or arguments are views, so that these must
    be views of the caller's tensors. `used`: buffers that a step or the caller reads.
    """

    program: Program
    steps: Sequence[Step]
    launches: list[CudaLaunch]
    locations: Locations
    flagged: bool
    written: set[str]
    viewed: set[str]
    used: set[str]


def build(p: Program, steps: Sequence[Step], any_strides: bool = False, checked: bool = False) -> CudaHost:
    """Print the host program.

    `any_strides`: inputs may have other strides than were traced. `checked`: compare inputs with those traced.
    """
    planned = plan_of(p, steps)
    hints = aligned_launches(planned)
    python = _file(planned, _body(planned, any_strides, checked and not any_strides))
    return CudaHost(python, hints, len(planned.launches), len(steps) - len(planned.launches))


def aligned_launches(planned: CudaPlan) -> tuple[tuple[TritonKernel, tuple[int, ...]], ...]:
    """Return the kernel of each launch with the numbers of its pointers that are multiples of 16 bytes."""
    viewed = (o for s in planned.steps if isinstance(s, Extern) and s.aliases for o in s.outs if o)
    unaligned = planned.written.union(viewed)
    return tuple((s.kernel, aligned_pointers(s, unaligned)) for s in planned.launches)


def plan_of(p: Program, steps: Sequence[Step], writes_out: Callable[[Extern], bool] = lambda s: False) -> CudaPlan:
    """Return the plan of a host program, from which its printers read the facts about its steps.

    `writes_out`: whether a call with a variant that writes into a buffer takes that variant.
    """
    steps = [replace(s, out_variant=None) if isinstance(s, Extern) and not writes_out(s) else s for s in steps]
    launched = [s for s in steps if isinstance(s, CudaLaunch)]
    viewed = {o.buffer for o in p.outputs if isinstance(o, View)}
    viewed.update(b for s in steps if isinstance(s, Extern) for b in s.aliases)
    used = {o.buffer for o in p.outputs if isinstance(o, View)}
    used.update(b for s in steps for b in (s.buffers if isinstance(s, CudaLaunch) else reads(s)))
    flagged = any(s.kernel.checks for s in launched)
    return CudaPlan(p, steps, launched, _locate(p, steps), flagged, written_inputs(p, steps), viewed, used)


def aligned_pointers(s: CudaLaunch, unaligned: Set[str]) -> tuple[int, ...]:
    """Return the numbers of a launch's pointers that are multiples of 16 bytes: all but buffers in `unaligned`."""
    return tuple(k for k, b in enumerate(s.buffers) if b not in unaligned)


def unaligned_in(p: Program) -> set[str]:
    """Return the buffers that may begin at any address, as far as the nodes tell before there are launches."""
    written = {b for n in p.nodes for b in writes(n) if b in p.buffers and p.buffers[b].kind == "input"}
    return written.union(o for n in p.nodes if isinstance(n, Extern) and n.aliases for o in n.outs if o)


def _locate(p: Program, steps: Sequence[Step]) -> Locations:
    """Return the slots of pointers and sizes; every temporary is a tensor of its own."""
    slots: dict[str, int] = {}
    symbols: set[str] = set()
    uses = Uses()
    for k, s in enumerate(steps):
        if isinstance(s, CudaLaunch):
            symbols.update(s.kernel.symbols)
            for b in s.all_buffers:
                slots.setdefault(b, len(slots))
            uses.add(k, s.all_buffers)
        else:
            uses.aliased.update({o: s.aliases for o in s.outs if o} if s.aliases else {})
            uses.add(k, (*reads(s), *writes(s)))
    temporary = {b for b, buffer in p.buffers.items() if buffer.kind == "temp"}
    in_place = [Writes((), s.in_place if isinstance(s, CudaLaunch) else ()) for s in steps]
    # the allocator gives dead memory to later buffers
    takes = take_overs(p, in_place, uses, in_place_only=True, own=_own_tensors(p, steps))
    return Locations(slots, {}, {}, {}, temporary, tuple(sorted(symbols)), takes=takes)


def _own_tensors(p: Program, steps: Sequence[Step]) -> set[str]:
    """Return the temporaries whose memory no other tensor refers to after their last use.

    These are results of kernels, and of library calls that always return new tensors. Operands of a collective are left
    out, because it reads them after its call.
    """
    own: set[str] = set()
    for s in steps:
        if isinstance(s, CudaLaunch):
            own.update(b for q, b in zip(s.params, s.buffers, strict=True) if q.written)
        elif operator_name(s.target) in _RETURNS_NEW:
            own.update(o for o in s.outs if o)
    referenced = {o.buffer for o in p.outputs if isinstance(o, View)}
    for s in steps:
        if isinstance(s, Extern):
            referenced.update((*s.aliases, *(reads(s) if is_start(s.target) else ())))
    return {b for b in own - referenced if b in p.buffers and p.buffers[b].kind == "temp"}


def written_inputs(p: Program, steps: Sequence[Step]) -> set[str]:
    """Return the inputs that a step writes: they are not copied to aligned memory, and kernels assume no alignment."""
    written: set[str] = set()
    for s in steps:
        if isinstance(s, CudaLaunch):
            written.update(b for q, b in zip(s.params, s.buffers, strict=True) if q.written)
        else:
            written.update(writes(s))
    return {b for b in written if b in p.buffers and p.buffers[b].kind == "input"}


def last_uses(p: Program, steps: Sequence[Step]) -> dict[int, list[str]]:
    """Return for each step the buffers that no later step needs; storage shared with a library result lives on."""
    last: dict[str, int] = {}
    for k, s in enumerate(steps):
        for b in s.all_buffers if isinstance(s, CudaLaunch) else (*reads(s), *writes(s)):
            last[b] = k
    outputs = {o.buffer for o in p.outputs if isinstance(o, View)}
    drops: dict[int, list[str]] = {}
    for b, k in last.items():
        if b in p.buffers and b not in outputs and p.buffers[b].kind != "const":
            drops.setdefault(k, []).append(b)
    return drops


# --- the lines of a call ---------------------------------------------------------------------------------------------


def _body(planned: CudaPlan, any_strides: bool, checked: bool) -> HostLines:
    w, p = HostLines(), planned.program
    _prologue(w, planned, any_strides, checked)
    last = last_uses(p, planned.steps)
    number = 0
    for k, s in enumerate(planned.steps):
        if isinstance(s, CudaLaunch):
            _launch(w, planned, s, number)
            number += 1
        else:
            _extern(w, planned, s)
        if k in last:
            w.add(f"del {', '.join(last[k])}")
    if planned.launches:
        w.add("idle.append(t)")
    w.add(return_line(p))
    return w


def _prologue(w: HostLines, planned: CudaPlan, any_strides: bool, checked: bool) -> None:
    p, locations = planned.program, planned.locations
    w.add("if get_device() != DEVICE or not getattr(thread, 'bound', False):")
    w.add("    return elsewhere(args)")
    open_call(w, p, locations.takes)
    if planned.flagged:
        w.add("flag.check()")
    bind_sizes(w, p, any_strides, checked)
    bind_numbers(w, p)
    if not planned.launches:
        return
    w.add("try:")
    w.add("    t = idle.pop()")
    w.add("except IndexError:")
    w.add("    t = tables.make()")
    sizes = ("S, ", "t.sizes, ") if locations.symbols else ("", "")
    w.add(f"P, {sizes[0]}L, stream = t.pointers, {sizes[1]}t.launches, c_void_p(raw_stream(DEVICE))")
    unbacked = unbacked_symbols(p)
    for k, s in enumerate(locations.symbols):
        if s not in unbacked:
            w.add(f"S[{k}] = {s}")
    for b in (b for b in p.inputs if b in locations.slots):
        if p.buffers[b].device.type == "cpu":
            _copy_to_gpu(w, planned, b)
            continue
        if b in planned.written:
            w.add(f"P[{locations.slots[b]}] = {b}.data_ptr()")
            continue
        near = f"{b}_near" if b in planned.viewed else b
        w.add(f"at = {b}.data_ptr()")
        w.add(f"if at % {ALIGNMENT}:")
        w.add(f"    {near} = aligned({b})")
        w.add(f"    at = {near}.data_ptr()")
        w.add(f"P[{locations.slots[b]}] = at")


def _copy_to_gpu(w: HostLines, planned: CudaPlan, b: str) -> None:
    """Print the copy of a CPU tensor that kernels read, often a single number."""
    allocation = f"empty_cuda({geometry_text(planned.program, b)}, {planned.program.buffers[b].dtype})"
    w.add(f"{b}_there = {allocation}.copy_({b}, True)")
    w.add(f"P[{planned.locations.slots[b]}] = {b}_there.data_ptr()")


def _launch(w: HostLines, planned: CudaPlan, s: CudaLaunch, number: int) -> None:
    p, locations = planned.program, planned.locations
    for b in s.all_buffers:
        if b in locations.fresh and b not in w.targets:
            w.targets[b] = b
            w.add(f"{b} = {allocation_text(p, locations, b, 'empty_cuda')}")
            w.add(f"P[{locations.slots[b]}] = {b}.data_ptr()")
            if any(q.name in s.kernel.zeroed for q, c in zip(s.params, s.buffers, strict=True) if c == b):
                w.add(f"{b}.zero_()")
    (grid,) = s.kernel.grid
    w.add(f"kernel{number}({ex.show(grid)}, stream, L[{number}])  # {provenance(s.origins)}")


def _extern(w: HostLines, planned: CudaPlan, s: Extern) -> None:
    p, locations = planned.program, planned.locations
    function, args = call_text(w, p, locations, s.target, s)
    w.add(f"{results_text(s)} = {function}({', '.join(args)})  # {provenance(s.origins)}")
    bind_late(w, p, locations, s)
    for o in s.outs:
        if o not in p.buffers or o not in planned.used:  # an unused result may be None
            continue
        assert o is not None
        w.targets[o] = o
        b = p.buffers[o]
        if is_foreign(s.target):
            w.add(promise(p, s.target, o))
        if b.device.type == "cpu":
            if o in locations.slots:
                _copy_to_gpu(w, planned, o)
            continue
        if (b.sizes or o in locations.slots) and not s.aliases:  # a view must stay a view, at any address
            _check_geometry(w, planned, s, o)
        if o in locations.slots:
            w.add(f"P[{locations.slots[o]}] = {o}.data_ptr()")


def _check_geometry(w: HostLines, planned: CudaPlan, s: Extern, o: str) -> None:
    """Print the check that a library result has the traced strides, without a function call where it most often has."""
    p = planned.program
    sizes, strides = tuple_text(p.buffers[o].sizes), tuple_text(p.buffers[o].strides)
    line = f"{o} = ensure_strides({o}, {sizes}, {strides})"
    if operator_name(s.target) not in _RETURNS_NEW:  # others may return a zero tensor without memory
        w.add(line)
        return
    conditions = [f"{o}.stride() != {strides}", f"{o}.shape != {sizes}"]
    if o in planned.locations.slots:
        conditions.append(f"{o}.data_ptr() % {ALIGNMENT}")
    w.add(f"if {' or '.join(conditions)}:")
    w.add(f"    {line}")


# --- the file --------------------------------------------------------------------------------------------------------


def _arguments(s: CudaLaunch, locations: Locations, flag: int) -> str:
    """Return where a launch finds its arguments: ("p", slot of a pointer) or ("s", slot of a size)."""
    arguments = [("p", locations.slots[b]) for b in s.buffers]
    arguments += [("p", flag)] if s.kernel.checks else []
    arguments += [("s", locations.symbols.index(x)) for x in s.kernel.symbols]
    arguments += [("p", locations.slots[s.scratch])] if s.scratch else []
    return repr(tuple(arguments))


def _file(planned: CudaPlan, w: HostLines) -> str:
    p, locations, launched = planned.program, planned.locations, planned.launches
    flag = len(locations.slots)
    checks = sorted({o.line for s in launched if s.kernel.checks for o in s.origins if o.line})
    fixed = {locations.slots[b]: f"const[{b!r}]" for b in locations.slots if p.buffers[b].kind == "const"}
    fixed |= {flag: "flag"} if planned.flagged else {}
    fixed_text = ", ".join(f"{slot}: {text}" for slot, text in fixed.items())
    functions = list(dict.fromkeys(s.kernel.source for s in launched))
    sources = [f"SOURCE{n} = r'''\n{text}'''\n" for n, text in enumerate(functions)]
    numbers = [functions.index(s.kernel.source) for s in launched]
    arguments = [_arguments(s, locations, flag) for s in launched]
    lines = [
        *number_imports(p),
        "import torch",
        "from ctypes import c_void_p",
        f"from altbackend.runtime.cuda import {', '.join(_RUNTIME)}",
        *(f"from altbackend.runtime.host import {name}" for name in optional_functions(w)),
        *promise_imports(p),
        *owned_import(p, locations.takes),
        "",
        "",
        "def bind(kernels, const, DEVICE):",
        '    """`kernels`: one launch function per launch, in order; `const`: constants by name; `DEVICE`: the GPU."""',
        *([f"    flag = ErrorFlag({checks!r})"] if planned.flagged else []),
        "    launches = [",
        *(f"        {text},  # SOURCE{n}" for text, n in zip(arguments, numbers, strict=True)),
        "    ]",
        f"    tables = Tables({flag + 1}, {len(locations.symbols)}, launches, {{{fixed_text}}})",
        "    idle = tables.idle",
        *([f"    {', '.join(f'kernel{n}' for n in range(len(launched)))}, = kernels"] if launched else []),
        *(f"    {k[3:]} = {v}" for k, v in w.targets.items() if k.startswith("fn ")),
        "",
        "    def call(args):",
        *w.body,
        "",
        *(["    call.check = flag.check"] if planned.flagged else []),
        "    elsewhere = on_device(call, DEVICE)",
        "    return call",
        "",
        "",
        *sources,
        f"# inputs: {', '.join(describe(p, b) for b in p.inputs)}",
        "",
    ]
    return "\n".join(lines)
