"""Plan the calls of a CPU host program: lifetimes of buffers, shared storage, and runs of kernels."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace

from altbackend.lazy_dataclass import dataclass

from ...aten.collective import is_start
from ...config.options import Config
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import Extern, Origin, Program, View, reads, unbacked_symbols, views, writes
from ...schedule.deps import Deps
from ...schedule.horizontal_parts import HorizontalKernel
from ..cpp import print_cpp, print_horizontal, translation_units
from ..cpp.ast import Function, Param
from ..cpp.shared_kernels import NAME, Shared, share
from .take_over import Uses, Writes, take_overs


@dataclass(frozen=True)
class Launch:
    """One generated kernel on named buffers. `in_place`: pairs of buffers that may share storage.

    `points`: for a horizontal kernel the length of each part's range; `buffers` are then those of the first part, those
    of the second, and so on. `work`: that of all parts.
    """

    kernel: str
    function: Function
    buffers: tuple[str, ...]
    origins: tuple[Origin, ...]
    in_place: tuple[tuple[str, str], ...] = ()
    points: tuple[int, ...] = ()
    work: int = 0

    def operands(self) -> Iterator[tuple[Param, str]]:
        """Yield every buffer with the parameter that stands for it."""
        params = self.function.params * max(len(self.points), 1)
        return zip(params, self.buffers, strict=True)


def horizontal_launch(label: str, k: HorizontalKernel, function: Function, roles: Sequence[str]) -> Launch:
    """Return the launch of a horizontal kernel. `roles`: for each parameter of the function its role."""
    buffers = tuple(k.operands[role][n] for n in range(len(k.parts)) for role in roles)
    uses = Counter(b for n in range(len(k.parts)) for b in {names[n] for names in k.operands.values()})
    # the memory of a buffer that another part reads may not be written before that part is done
    in_place = tuple(pair for part in k.parts for pair in part.in_place if uses[pair[0]] == 1)
    work = sum(part.work for part in k.parts if isinstance(part.work, int))
    return Launch(label, replace(function, symbols=()), buffers, k.kernel.origins, in_place, k.points, work)


Step = Launch | Extern


@dataclass(frozen=True)
class Locations:
    """The location of each buffer in the printed program.

    `slots`: numbers in the table of pointers. `windows`: numbers of views on temporaries in the table of views.
    `arena`: first and last step of each temporary in the arena. `shares`: temporary -> the one whose storage it takes
    over. `fresh`: buffers that are tensors of their own. `symbols`: names in the table of sizes; the first
    `layout_symbols` of them decide the layout of the arena, the others may differ in every call. `takes`: buffer -> the
    one whose memory it takes over: a temporary, or a donated input in calls that own their donated inputs.
    """

    slots: dict[str, int]
    windows: dict[View, int]
    arena: dict[str, tuple[int, int]]
    shares: dict[str, str]
    fresh: set[str]
    symbols: tuple[str, ...]
    layout_symbols: int = 0
    takes: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> tuple[str, ...]:
        """Return the symbols that decide the layout of the arena."""
        return self.symbols[: self.layout_symbols]


@dataclass(frozen=True)
class LaunchPlan:
    """A program's steps with the locations of its buffers. `segments`: runs of kernels, each one call of the host."""

    program: Program
    steps: tuple[Step, ...]
    locations: Locations
    segments: list[list[int]]

    def drops(self) -> dict[int, list[str]]:
        """Return for each step the inputs and library results that no later step uses, to free their memory early."""
        p, last = self.program, dict[str, int]()
        for k, s in enumerate(self.steps):
            for b in _names(s):
                last[b] = k
        last |= {a: max(last[a], self._first_use(b)) for b, a in self.locations.takes.items()}
        outputs = {o.buffer for o in p.outputs if isinstance(o, View)}
        results = {o for s in self.steps if isinstance(s, Extern) and s.out_variant is None for o in s.outs}
        drops: dict[int, list[str]] = {}
        for b, k in last.items():
            if b in outputs or b not in p.buffers or p.buffers[b].kind == "const":
                continue
            if p.buffers[b].kind == "input" or b in results:
                drops.setdefault(k, []).append(b)
        return drops

    @functools.cached_property
    def used(self) -> frozenset[str]:
        """The buffers that a step or the caller reads; other results of a call may be undefined."""
        out = {o.buffer for o in self.program.outputs if isinstance(o, View)}
        for s in self.steps:
            out.update(s.buffers if isinstance(s, Launch) else reads(s))
        return frozenset(out)

    def _first_use(self, b: str) -> int:
        return next(k for k, s in enumerate(self.steps) if b in _names(s))


def _names(s: Step) -> tuple[str, ...]:
    return s.buffers if isinstance(s, Launch) else (*reads(s), *writes(s))


def plan(p: Program, deps: Deps, steps: Sequence[Step], cfg: Config) -> LaunchPlan:
    """Return the launch plan of a program's kernels and library calls."""
    locations = _locate(p, deps, steps, cfg)
    steps = [_without_restrict(s, locations) for s in steps]
    temporaries = {b.name for b in p.buffers.values() if b.kind == "temp"}
    return LaunchPlan(p, tuple(steps), locations, _segments(steps, temporaries))


def full_view(p: Program, b: str) -> View:
    """Return a buffer as a view of all its elements."""
    buffer = p.buffers[b]
    return View(b, buffer.sizes, buffer.strides)


# --- locations -------------------------------------------------------------------------------------------------------


def _locate(p: Program, deps: Deps, steps: Sequence[Step], cfg: Config) -> Locations:
    """Return which temporaries share the arena, which are tensors of their own, and all slots."""
    uses = Uses()
    fresh = {b for b in deps.escaping if p.buffers[b].kind == "temp"} | _sized_in_call(p, steps)
    slots: dict[str, int] = {}
    symbols: set[str] = set()
    for k, s in enumerate(steps):
        if isinstance(s, Extern):
            outs = [o for o in s.outs if o in p.buffers]
            if s.out_variant is None:
                fresh.update(outs)
            if is_start(s.target):  # it reads its operands after the call returns, and keeps only tensors alive
                fresh.update(b for b in reads(s) if b in p.buffers and p.buffers[b].kind == "temp")
            uses.aliased.update(dict.fromkeys(outs, s.aliases) if s.aliases else {})
            uses.add(k, tuple(dict.fromkeys((*reads(s), *writes(s)))))
        else:
            symbols.update(s.function.symbols)
            for b in s.buffers:
                slots.setdefault(b, len(slots))
            uses.add(k, s.buffers)
    takes = take_overs(p, [_writes_of(s, p) for s in steps], uses, in_place_only=False)
    fresh.update(takes)
    temporary = [b for b in uses.first if b in p.buffers and p.buffers[b].kind == "temp" and b not in fresh]
    arena = {b: (uses.first[b], uses.last[b]) for b in temporary}
    layout: set[str] = set()
    for b in arena:
        slots.setdefault(b, len(slots))
        layout.update(a.key for a in ex.syms_of(p.buffers[b].extent))
    windows: dict[View, int] = {}
    for v in (v for s in steps if isinstance(s, Extern) for v in _call_views(p, s) if v.buffer in arena):
        windows.setdefault(v, len(windows))
        layout.update(a.key for x in (*v.sizes, *v.strides, v.offset) for a in ex.syms_of(x))
    shares = _share_storage(steps, arena, cfg.reuse_memory)
    return Locations(
        slots, windows, arena, shares, fresh, (*sorted(layout), *sorted(symbols - layout)), len(layout), takes
    )


def _writes_of(s: Step, p: Program) -> Writes:
    """Return the temporaries that the host allocates for a step."""
    if isinstance(s, Launch):
        allocated = tuple(dict.fromkeys(b for q, b in s.operands() if q.written and p.buffers[b].kind == "temp"))
        return Writes(allocated, s.in_place)
    return Writes((s.outs[0],) if s.out_variant is not None and s.outs[0] else ())


def _call_views(p: Program, s: Extern) -> list[View]:
    return views(s) + ([full_view(p, o) for o in s.outs if o] if s.out_variant is not None else [])


def _sized_in_call(p: Program, steps: Sequence[Step]) -> set[str]:
    """Return temporaries that cannot be in the arena: a call decides their size, and the arena exists before it."""
    unbacked = unbacked_symbols(p)
    if not unbacked:
        return set()

    def depends(*xs: Index) -> bool:
        return any(a.key in unbacked for x in xs for a in ex.syms_of(x))

    sized = {b for b, buffer in p.buffers.items() if buffer.kind == "temp" and depends(buffer.extent)}
    viewed = [v for s in steps if isinstance(s, Extern) for v in views(s)]
    return sized | {v.buffer for v in viewed if p.buffers[v.buffer].kind == "temp" and depends(*v.sizes, v.offset)}


def _share_storage(steps: Sequence[Step], arena: dict[str, tuple[int, int]], reuse: bool) -> dict[str, str]:
    """Return temporaries that take over the storage of another one, with that one's name.

    One kernel is the last to read the old temporary and writes the new one. Extends the lifetime of the shared storage
    in `arena`.
    """
    shares: dict[str, str] = {}
    for k, s in enumerate(steps):
        for a, b in s.in_place if isinstance(s, Launch) and reuse else ():
            if a not in arena or b not in arena or arena[b][0] != k or b in shares:
                continue
            root = shares.get(a, a)
            if arena[a][1] == k and arena[root][1] == k:
                shares[b] = root
                arena[root] = (arena[root][0], max(arena[root][1], arena[b][1]))
    return shares


def _without_restrict(s: Step, locations: Locations) -> Step:
    """Return the step without the promise to the compiler that arguments are disjoint, where they share storage."""
    if not isinstance(s, Launch):
        return s
    roots = [locations.takes.get(b, locations.shares.get(b, b)) for b in s.buffers]
    count = len(s.function.params)
    parts = [roots[k : k + count] for k in range(0, len(roots), count)]
    if all(len(set(part)) == count for part in parts):
        return s
    shared = [any(part.count(part[k]) > 1 for part in parts) for k in range(count)]
    params = tuple(replace(q, shared=x) for q, x in zip(s.function.params, shared, strict=True))
    return replace(s, function=replace(s.function, params=params))


# --- segments and C++ ------------------------------------------------------------------------------------------------


def _segments(steps: Sequence[Step], temporaries: Collection[str]) -> list[list[int]]:
    """Return runs of consecutive kernels; each run is one call from the host."""
    segments: list[list[int]] = []
    checking = False
    for k, s in enumerate(steps):
        if not isinstance(s, Launch):
            continue
        # the host raises the errors of checking kernels before another kernel writes an input
        separate = checking and any(q.written and b not in temporaries for q, b in s.operands())
        if segments and k and isinstance(steps[k - 1], Launch) and not separate:
            segments[-1].append(k)
            checking |= s.function.checks
        else:
            segments.append([k])
            checking = s.function.checks
    return segments


def cpp_text(plan: LaunchPlan, cfg: Config, namespace: str = "") -> str:
    """Return the C++ text of all kernels, equal ones once, and of the functions that call each segment's kernels.

    `namespace`: that of the program in an ahead-of-time library; "" for a library that the Python program loads.
    """
    slots, symbols = plan.locations.slots, plan.locations.symbols
    printed = _printed(plan, cfg, torch_threads=bool(namespace))
    labels: dict[str, str] = {}
    calls: dict[int, str] = {}
    for k, (s, kernel) in printed.items():
        label = labels.setdefault(kernel.text, f"kernel{len(labels)}")
        if s.points:
            is_parallel = s.work >= cfg.parallel_threshold
            calls[k] = print_horizontal.call(label, k, s.points, [slots[b] for b in s.buffers], is_parallel)
            continue
        args = [f"({'' if q.written else 'const '}{print_cpp.CTYPES[q.dtype]}*)p[{slots[b]}]" for q, b in s.operands()]
        args += [f"s[{symbols.index(x)}]" for x in s.function.symbols] + [*kernel.sizes, "threads"]
        if s.function.checks:
            args.append("error")
        calls[k] = f"  {label}({', '.join(args)});"
    head = "" if namespace else 'extern "C" __attribute__((visibility("default")))\n'
    segments = [_segment_text(head, n, [calls[k] for k in segment]) for n, segment in enumerate(plan.segments)]
    kernels = [text.replace(f"static void {NAME}(", f"static void {label}(", 1) for text, label in labels.items()]
    return translation_units.unit(kernels, segments, namespace)


def _printed(plan: LaunchPlan, cfg: Config, torch_threads: bool) -> dict[int, tuple[Launch, Shared]]:
    """Return the kernels of a plan by the number of their step, each with its function."""
    texts: dict[int, tuple[Launch, str]] = {}
    for k, s in enumerate(plan.steps):
        if isinstance(s, Launch) and s.points:
            texts[k] = s, print_horizontal.function(s.function, NAME, torch_threads)
        elif isinstance(s, Launch):
            texts[k] = s, print_cpp.function(s.function, NAME, cfg.parallel_threshold, torch_threads)
    functions = share([text for s, text in texts.values() if not s.points and not s.function.template])
    return {k: (s, functions.get(text) or Shared(text)) for k, (s, text) in texts.items()}


def segment_head(number: int) -> str:
    """Return the head of the C++ function that runs a segment."""
    return f"void segment{number}(void** p, const int64_t* s, int threads, int64_t* error)"


def _segment_text(linkage: str, number: int, calls: Sequence[str]) -> str:
    lines = [
        f"{linkage}{segment_head(number)} {{",
        "  (void)s; (void)threads; (void)error;",
        *calls,
        "}\n",
    ]
    return "\n".join(lines)
