"""Print the host program of a CPU: a readable Python file that allocates, launches, calls libraries and returns."""

from __future__ import annotations

from collections.abc import Sequence

from altbackend.lazy_dataclass import dataclass

from ...aten.name import is_foreign
from ...config.options import Config
from ...ir.loops import Extern, Program, results_text, unbacked_symbols
from ...runtime.host import MOST_SPARE
from .debug_file import file_text
from .launch_plan import Launch, LaunchPlan, Locations, cpp_text, full_view
from .python_text import (
    HostLines,
    allocation_text,
    argument_view,
    bind_late,
    bind_numbers,
    bind_sizes,
    call_text,
    geometry_text,
    may_be_large,
    open_call,
    promise,
    provenance,
    return_line,
)


@dataclass(frozen=True)
class Host:
    """The texts of a host program, with the names of its C++ functions and the numbers of its steps."""

    cpp: str
    python: str
    segments: tuple[str, ...]
    kernels: int
    library_calls: int


def build(planned: LaunchPlan, cfg: Config, any_strides: bool = False) -> Host:
    """Print the host program and the translation unit of its kernels.

    `any_strides`: inputs may have other strides than were traced.
    """
    cpp = cpp_text(planned, cfg)
    python = file_text(planned, cfg, _body(planned, cfg, any_strides), cpp)
    launches = sum(isinstance(s, Launch) for s in planned.steps)
    segments = tuple(f"segment{k}" for k in range(len(planned.segments)))
    return Host(cpp, python, segments, launches, len(planned.steps) - launches)


def _body(planned: LaunchPlan, cfg: Config, any_strides: bool) -> HostLines:
    w, p, locations = HostLines(), planned.program, planned.locations
    _prologue(w, planned, any_strides, cfg.size_asserts)
    drops = planned.drops()
    segment_of = {numbers[0]: (n, numbers) for n, numbers in enumerate(planned.segments)}
    for k, s in enumerate(planned.steps):
        if isinstance(s, Extern):
            _extern(w, planned, s)
            last = [k]
        elif k in segment_of:
            n, last = segment_of[k]
            _segment(w, planned, n, last)
        else:
            continue
        for j in last:
            if j in drops:
                w.add(f"del {', '.join(drops[j])}")
    if locations.layout:
        w.add(f"spaces.give({', '.join(['ws', *locations.layout])})")
    elif cfg.persistent_workspace and _has_workspace(planned):
        w.add(f"if len(spare) < {MOST_SPARE}:")
        w.add("    spare.append(ws)")
    w.add(return_line(p))
    return w


def _has_workspace(planned: LaunchPlan) -> bool:
    """Return whether calls need memory besides their results and those of library calls."""
    locations = planned.locations
    return bool(planned.segments or locations.arena or locations.windows or locations.symbols or locations.slots)


def _prologue(w: HostLines, planned: LaunchPlan, any_strides: bool, checked: bool) -> None:
    p, locations = planned.program, planned.locations
    open_call(w, p, locations.takes)
    bind_sizes(w, p, any_strides, checked and not any_strides)
    bind_numbers(w, p)
    if not _has_workspace(planned):
        return
    if locations.layout:
        w.add(f"ws = spaces.take({', '.join(locations.layout)})")
    else:
        w.add("try:")
        w.add("    ws = spare.pop()")
        w.add("except IndexError:")
        w.add("    ws = spaces.make()")
    w.add("P, S, V, E = ws.pointers, ws.scalars, ws.views, ws.error_pointer")
    unbacked = unbacked_symbols(p)
    for k, s in enumerate(locations.symbols):
        if k >= locations.layout_symbols and s not in unbacked:
            w.add(f"S[{k}] = {s}")
    if planned.segments:
        w.add("threads = num_threads()")
    for b in p.inputs:
        if b in locations.slots:
            _set_pointer(w, locations, b)


def _set_pointer(w: HostLines, locations: Locations, b: str) -> None:
    w.add(f"P[{locations.slots[b]}] = {b}.data_ptr()")


def _allocate(w: HostLines, p: Program, locations: Locations, b: str) -> None:
    """Allocate a buffer that is a tensor of its own."""
    w.targets[b] = b
    function = "empty_large" if may_be_large(p.buffers[b]) else "empty_cpu"
    w.add(f"{b} = {allocation_text(p, locations, b, function)}")
    if b in locations.slots:
        _set_pointer(w, locations, b)


def _segment(w: HostLines, planned: LaunchPlan, n: int, numbers: Sequence[int]) -> None:
    """Print the call of one run of kernels, with the allocations before and the check after it."""
    launches = [s for k in numbers if isinstance(s := planned.steps[k], Launch)]
    for s in launches:
        for q, b in s.operands():
            if q.written and b in planned.locations.fresh and b not in w.targets:
                _allocate(w, planned.program, planned.locations, b)
    for s in launches:
        w.add(f"# {s.kernel}: {provenance(s.origins)}")
    w.add(f"segment{n}(P, S, threads, E)")
    checking = [s for s in launches if s.function.checks]
    if checking:
        w.add(f"check_error(ws.error, {sorted({o.line for s in checking for o in s.origins if o.line})!r})")


def _extern(w: HostLines, planned: LaunchPlan, s: Extern) -> None:
    p, locations = planned.program, planned.locations
    target = s.out_variant if s.out_variant is not None and s.outs[0] else s.target
    function, args = call_text(w, p, locations, target, s)
    if target is not s.target:
        out = s.outs[0]
        assert out is not None
        if out in locations.fresh and out not in w.targets:
            _allocate(w, p, locations, out)
        args.append(f"out={argument_view(p, locations, full_view(p, out))}")
        w.add(f"{function}({', '.join(args)})  # {provenance(s.origins)}")
        return
    w.add(f"{results_text(s)} = {function}({', '.join(args)})  # {provenance(s.origins)}")
    bind_late(w, p, locations, s)
    for o in s.outs:
        if o not in p.buffers or o not in planned.used:
            continue
        assert o is not None
        if is_foreign(s.target):
            w.add(promise(p, s.target, o))
        elif p.buffers[o].sizes and not s.aliases:  # a view has the traced strides, and must stay a view
            w.add(f"{o} = ensure_strides({o}, {geometry_text(p, o)})")
        if o in locations.slots:
            _set_pointer(w, locations, o)
