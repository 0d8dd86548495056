"""The launch plan and its printed form: a readable Python file that allocates, launches, calls and returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...config.options import Config
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import (
    Constant,
    Extern,
    HostNumber,
    Origin,
    Program,
    View,
    late_symbols,
    names_in,
    reads,
    results_text,
    views,
    writes,
)
from ...lowering.graph import Opaque
from ...schedule.deps import Deps
from ..cpp import print_cpp, translation_units
from ..cpp.ast import Function
from .debug_file import file_text, tuple_text


@dataclass(frozen=True)
class Launch:
    """One generated kernel on named buffers."""

    kernel: str
    function: Function
    buffers: tuple[str, ...]
    origins: tuple[Origin, ...]
    in_place: tuple[tuple[str, str], ...] = ()


Step = Launch | Extern


@dataclass(frozen=True)
class Host:
    """Everything that the printed program needs: C++ text, Python text, names of constants."""

    cpp: str
    python: str
    segments: tuple[str, ...]
    kernels: int
    library_calls: int


@dataclass
class _Names:
    """Where each buffer lives in the printed program.

    `symbols`: of the table that kernels read. The first `laid` of them decide the layout of temporaries; the others may
    differ in every call.
    """

    slots: dict[str, int]
    windows: dict[View, int]
    arena: dict[str, tuple[int, int]]
    home: dict[str, str]
    fresh: set[str]
    symbols: tuple[str, ...]
    laid: int = 0

    @property
    def layout(self) -> tuple[str, ...]:
        return self.symbols[: self.laid]


def build(p: Program, deps: Deps, steps: Sequence[Step], cfg: Config, any_strides: bool = False) -> Host:
    """Print the host program and the translation unit of its kernels. `any_strides`: inputs may have other strides."""
    names = _place(p, deps, steps, cfg)
    steps = [_unrestrict(s, names) for s in steps]
    segments = _segments(steps, {b.name for b in p.buffers.values() if b.kind == "temp"})
    text_cpp = _translation_unit(steps, segments, names, cfg)
    text_py = _python(p, deps, steps, segments, names, cfg, text_cpp, any_strides)
    launches = sum(isinstance(s, Launch) for s in steps)
    return Host(text_cpp, text_py, tuple(f"segment{k}" for k in range(len(segments))), launches, len(steps) - launches)


def _place(p: Program, deps: Deps, steps: Sequence[Step], cfg: Config) -> _Names:
    """Lifetimes; which temporaries share the arena, which are tensors of their own."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    fresh = {b for b in deps.escaping if p.buffers[b].kind == "temp"} | _sized_late(p, steps)
    slots: dict[str, int] = {}
    windows: dict[View, int] = {}
    under: dict[str, tuple[str, ...]] = {}
    symbols: set[str] = set()
    laid: set[str] = set()
    for k, s in enumerate(steps):
        touched = s.buffers if isinstance(s, Launch) else tuple(dict.fromkeys((*reads(s), *writes(s))))
        if isinstance(s, Extern):
            outs = [o for o in s.outs if o in p.buffers]
            if s.out_variant is None:
                fresh.update(outs)
            for o in outs:
                if s.aliases:
                    under[o] = s.aliases
        else:
            symbols.update(s.function.symbols)
            for b in s.buffers:
                slots.setdefault(b, len(slots))
        for b in touched:
            for each in (b, *_all_under(b, under)):
                first.setdefault(each, k)
                last[each] = k
    arena = {b: (first[b], last[b]) for b in first if b in p.buffers and p.buffers[b].kind == "temp" and b not in fresh}
    for b in arena:
        slots.setdefault(b, len(slots))
        laid.update(a.key for a in ex.syms_of(p.buffers[b].extent))
    for s in steps:
        if isinstance(s, Extern):
            for v in _extern_views(p, s):
                if v.buffer in arena:
                    windows.setdefault(v, len(windows))
                    laid.update(a.key for x in (*v.sizes, *v.strides, v.offset) for a in ex.syms_of(x))
    home = _share_storage(steps, arena, cfg.reuse_memory)
    return _Names(slots, windows, arena, home, fresh, (*sorted(laid), *sorted(symbols - laid)), len(laid))


def _sized_late(p: Program, steps: Sequence[Step]) -> set[str]:
    """Temporaries that cannot be in the arena, which is laid out before the call: their sizes, or those of views."""
    late = late_symbols(p)
    if not late:
        return set()

    def depends(*xs: Index) -> bool:
        return any(a.key in late for x in xs for a in ex.syms_of(x))

    found = {b for b, buf in p.buffers.items() if buf.kind == "temp" and depends(buf.extent)}
    seen = [v for s in steps if isinstance(s, Extern) for v in views(s)]
    return found | {v.buffer for v in seen if p.buffers[v.buffer].kind == "temp" and depends(*v.sizes, v.offset)}


def bind_numbers(w: _Python, p: Program) -> list[str]:
    """Compute the numbers of the program whose sources are known by now, each once; gives their names."""
    late = late_symbols(p) if p.numbers else frozenset()
    ready = []
    for n in p.numbers:  # one may need another before it
        if n.name not in w.known and not names_in(n.text) & late - w.known:
            w.add(f"{n.name} = {n.text}")
            w.known.add(n.name)
            ready.append(n.name)
    return ready


def bind_late(w: _Python, p: Program, names: _Names, s: Extern) -> None:
    """The sizes that a call has decided, what must hold of them, and all under their names in the kernels' table."""
    for symbol, text in s.binds:
        w.add(f"{symbol} = {text}")
    for condition, message in s.requires:
        values = ", ".join(f"{name!r}: {name}" for name in sorted(names_in(condition)))
        w.add(f"if not ({condition}):")
        w.add(f"    failed({message!r}, {{{values}}})")
    w.known.update(s.defines)
    for symbol in (*s.defines, *bind_numbers(w, p)) if s.defines else ():
        if symbol in names.symbols:
            w.add(f"S[{names.symbols.index(symbol)}] = {symbol}")


def number_imports(p: Program) -> list[str]:
    """Imports of what the texts of numbers and checks name."""
    calls = [s for s in p.nodes if isinstance(s, Extern)]
    if (
        not p.numbers
        and not any(s.requires for s in calls)
        and not any(_host_numbers((s.args, s.kwargs)) for s in calls)
    ):
        return _host_numbers(p.outputs) * _NUMBER_IMPORTS
    return _NUMBER_IMPORTS


_NUMBER_IMPORTS = [
    "import math",
    "from altbackend.runtime.checks import bits_of, failed, indexed_size, position, slice_begin",
]


def _host_numbers(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return any(map(_host_numbers, x))
    return isinstance(x, HostNumber)


def _share_storage(steps: Sequence[Step], arena: dict[str, tuple[int, int]], reuse: bool) -> dict[str, str]:
    """Temporary -> the one whose storage it takes over, where a kernel reads the last of one and makes the other."""
    home: dict[str, str] = {}
    for k, s in enumerate(steps):
        for a, b in s.in_place if isinstance(s, Launch) and reuse else ():
            if a not in arena or b not in arena or arena[b][0] != k or b in home:
                continue
            root = home.get(a, a)
            if arena[a][1] == k and arena[root][1] == k:
                home[b] = root
                arena[root] = (arena[root][0], max(arena[root][1], arena[b][1]))
    return home


def _unrestrict(s: Step, names: _Names) -> Step:
    """A kernel whose arguments share storage must not promise the compiler that they do not."""
    if not isinstance(s, Launch):
        return s
    roots = [names.home.get(b, b) for b in s.buffers]
    if len(set(roots)) == len(roots):
        return s
    params = tuple(replace(q, shared=roots.count(r) > 1) for q, r in zip(s.function.params, roots, strict=True))
    return replace(s, function=replace(s.function, params=params))


def _all_under(b: str, under: dict[str, tuple[str, ...]]) -> list[str]:
    out: list[str] = []
    for a in under.get(b, ()):
        out += [a, *_all_under(a, under)]
    return out


def whole(p: Program, b: str) -> View:
    buf = p.buffers[b]
    return View(b, buf.sizes, buf.strides)


def _extern_views(p: Program, s: Extern) -> list[View]:
    return views(s) + ([whole(p, o) for o in s.outs if o] if s.out_variant is not None else [])


def _segments(steps: Sequence[Step], temporary: Collection[str]) -> list[list[int]]:
    """Runs of consecutive kernels; each run is one call from the host."""
    out: list[list[int]] = []
    checking = False
    for k, s in enumerate(steps):
        if isinstance(s, Launch):
            # what a kernel has met is raised before an input is written
            apart = checking and any(
                q.written and b not in temporary for q, b in zip(s.function.params, s.buffers, strict=True)
            )
            if out and k and isinstance(steps[k - 1], Launch) and not apart:
                out[-1].append(k)
                checking |= s.function.checks
            else:
                out.append([k])
                checking = s.function.checks
    return out


def _translation_unit(steps: Sequence[Step], segments: list[list[int]], names: _Names, cfg: Config) -> str:
    """Kernels with equal text are printed once."""
    known: dict[str, str] = {}
    kernels: list[str] = []
    calls: dict[int, str] = {}
    for k, s in enumerate(steps):
        if not isinstance(s, Launch):
            continue
        text = print_cpp.function(s.function, "@", cfg.parallel_threshold)
        label = known.get(text)
        if label is None:
            label = known[text] = f"kernel{len(known)}"
            kernels.append(text.replace("static void @(", f"static void {label}(", 1))
        args = [
            f"({'' if q.written else 'const '}{print_cpp.CTYPES[q.dtype]}*)p[{names.slots[b]}]"
            for q, b in zip(s.function.params, s.buffers, strict=True)
        ]
        args += [f"s[{names.symbols.index(x)}]" for x in s.function.symbols] + ["threads"]
        if s.function.checks:
            args.append("error")
        calls[k] = f"  {label}({', '.join(args)});"
    printed = []
    for n, segment in enumerate(segments):
        head = f'extern "C" __attribute__((visibility("default")))\nvoid segment{n}'
        lines = [
            f"{head}(void** p, const int64_t* s, int threads, int64_t* error) {{",
            "  (void)s; (void)threads; (void)error;",
            *(calls[k] for k in segment),
            "}\n",
        ]
        printed.append("\n".join(lines))
    return translation_units.unit(kernels, printed)


class _Python:
    def __init__(self) -> None:
        self.body: list[str] = []
        self.targets: dict[str, str] = {}
        self.known: set[str] = set()  # symbols that calls have given, and numbers

    def add(self, line: str) -> None:
        self.body.append("        " + line)


def _python(
    p: Program,
    deps: Deps,
    steps: Sequence[Step],
    segments: list[list[int]],
    names: _Names,
    cfg: Config,
    source: str,
    any_strides: bool,
) -> str:
    w = _Python()
    _prologue(w, p, names, any_strides, cfg.size_asserts)
    live = _Liveness(p, deps, steps)
    segment_of = {ks[0]: (n, ks) for n, ks in enumerate(segments)}
    covered = {k for ks in segments for k in ks[1:]}
    for k, s in enumerate(steps):
        if isinstance(s, Extern):
            _extern(w, p, names, s)
            live.drop(w, k)
            continue
        if k in covered:
            continue
        n, ks = segment_of[k]
        _allocate(w, p, names, [steps[j] for j in ks])
        for j in ks:
            launch = steps[j]
            assert isinstance(launch, Launch)
            w.add(f"# {launch.kernel}: {_provenance(launch.origins)}")
        w.add(f"segment{n}(P, S, threads, E)")
        if lines := _checked_lines([steps[j] for j in ks]):
            w.add(f"check_error(ws.error, {lines[0]!r})")
        for j in ks:
            live.drop(w, j)
    w.add(f"spaces.give({', '.join(['ws', *names.layout])})")
    outs = ", ".join(_output(p, o) for o in p.outputs)
    w.add(f"return ({outs}{',' if len(p.outputs) == 1 else ''})")
    return file_text(p, names, segments, cfg, w, source, [*number_imports(p), *promise_imports(p)])


def _checked_lines(steps: Sequence[Step]) -> list[list[str]]:
    """The user's lines of the kernels that check, as a list of one; [] where none does."""
    checking = [s for s in steps if isinstance(s, Launch) and s.function.checks]
    return [sorted({o.line for s in checking for o in s.origins if o.line})] if checking else []


class _Liveness:
    """Prints `del` after the last use of inputs and of library results, so that their memory goes early."""

    def __init__(self, p: Program, deps: Deps, steps: Sequence[Step]) -> None:
        last: dict[str, int] = {}
        for k, s in enumerate(steps):
            used = s.buffers if isinstance(s, Launch) else (*reads(s), *writes(s))
            for b in used:
                last[b] = k
        kept = {o.buffer for o in p.outputs if isinstance(o, View)}
        returned = {o for s in steps if isinstance(s, Extern) and s.out_variant is None for o in s.outs}
        self.at: dict[int, list[str]] = {}
        for b, k in last.items():
            if b in kept or b not in p.buffers or p.buffers[b].kind == "const":
                continue
            if p.buffers[b].kind == "input" or b in returned:
                self.at.setdefault(k, []).append(b)

    def drop(self, w: _Python, k: int) -> None:
        if k in self.at:
            w.add(f"del {', '.join(self.at[k])}")


def bind_sizes(w: _Python, p: Program, any_strides: bool, checked: bool = False) -> None:
    """Names for the symbolic sizes that inputs carry; inputs in the traced strides where the caller's may be others.

    `checked`: what is known of inputs is looked at first.
    """
    bound = set(p.inputs)
    for b in p.inputs:
        if b not in p.buffers:
            continue
        for axis, n in enumerate(p.buffers[b].sizes):
            text = ex.show(n)
            if not isinstance(n, int) and len(n.syms) == 1 and text == next(iter(n.syms)).key and text not in bound:
                bound.add(text)
                w.add(f"{text} = {b}.size({axis})")
    for b in p.inputs if checked else ():
        if b in p.buffers:
            buf = p.buffers[b]
            w.add(f"check_input({b}, {b!r}, {buf.dtype}, {tuple_text(buf.sizes)}, {tuple_text(buf.strides)})")
    for b in p.inputs if any_strides else ():
        if b in p.buffers and p.buffers[b].sizes:
            w.add(f"{b} = ensure_strides({b}, {tuple_text(p.buffers[b].sizes)}, {tuple_text(p.buffers[b].strides)})")


def _prologue(w: _Python, p: Program, names: _Names, any_strides: bool, checked: bool) -> None:
    if p.inputs:
        w.add(f"{', '.join(p.inputs)}{',' if len(p.inputs) == 1 else ''} = args")
    w.add("args.clear()")
    bind_sizes(w, p, any_strides, checked and not any_strides)
    bind_numbers(w, p)
    w.add(f"ws = spaces.take({', '.join(names.layout)})")
    w.add("P, S, V, E = ws.pointers, ws.scalars, ws.views, ws.error_pointer")
    late = late_symbols(p)
    for k, s in enumerate(names.symbols):
        if k >= names.laid and s not in late:
            w.add(f"S[{k}] = {s}")
    w.add("threads = num_threads()")
    for b in p.inputs:
        if b in names.slots:
            w.add(f"P[{names.slots[b]}] = {b}.data_ptr()")


def _allocate(w: _Python, p: Program, names: _Names, launches: Sequence[Step]) -> None:
    for s in launches:
        assert isinstance(s, Launch)
        for q, b in zip(s.function.params, s.buffers, strict=True):
            if q.written and b in names.fresh and b not in w.targets:
                w.targets[b] = b
                buf = p.buffers[b]
                w.add(f"{b} = empty_cpu({tuple_text(buf.sizes)}, {tuple_text(buf.strides)}, {buf.dtype})")
                w.add(f"P[{names.slots[b]}] = {b}.data_ptr()")


def _extern(w: _Python, p: Program, names: _Names, s: Extern) -> None:
    target = s.out_variant if s.out_variant is not None and s.outs[0] else s.target
    fn = _target_name(w, target)
    args = [_arg(p, names, a) for a in s.args] + [f"{k}={_arg(p, names, v)}" for k, v in s.kwargs]
    if target is not s.target:
        out = s.outs[0]
        assert out is not None
        if out in names.fresh and out not in w.targets:
            w.targets[out] = out
            b = p.buffers[out]
            w.add(f"{out} = empty_cpu({tuple_text(b.sizes)}, {tuple_text(b.strides)}, {b.dtype})")
            if out in names.slots:
                w.add(f"P[{names.slots[out]}] = {out}.data_ptr()")
        w.add(f"{fn}({', '.join([*args, f'out={_arg(p, names, whole(p, out))}'])})  # {_provenance(s.origins)}")
        return
    w.add(f"{results_text(s)} = {fn}({', '.join(args)})  # {_provenance(s.origins)}")
    bind_late(w, p, names, s)
    for o in s.outs:
        if o in p.buffers:
            b = p.buffers[o]
            if is_foreign(s.target):
                w.add(promise(p, s.target, o))
            elif b.sizes and not s.aliases:  # a view has the strides that were traced, and must stay one
                w.add(f"{o} = ensure_strides({o}, {tuple_text(b.sizes)}, {tuple_text(b.strides)})")
            if o in names.slots:
                w.add(f"P[{names.slots[o]}] = {o}.data_ptr()")


_OWN_OPERATORS = ("aten", "prims", "mkldnn", "mkl", "quantized", "_c10d_functional", "c10d_functional")


def is_foreign(target: Any) -> bool:
    """Whether a call runs an operator that is not torch's own, whose fake kernel nobody has compared with it."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _OWN_OPERATORS


def promise(p: Program, target: Any, o: str) -> str:
    """The check of a result of such a call; a comparison of three attributes at run time."""
    b = p.buffers[o]
    facts = f"{str(target)!r}, {b.dtype}, {tuple_text(b.sizes)}, {tuple_text(b.strides)}"
    return f"{o} = promised({o}, {facts})"


def promise_imports(p: Program) -> list[str]:
    """The import of what checks results, if a call needs that."""
    needed = any(isinstance(n, Extern) and is_foreign(n.target) for n in p.nodes)
    return ["from altbackend.runtime.promises import promised"] * needed


def _target_name(w: _Python, target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        text, name = _overload_text(target), target._schema.name.split("::")[1]
        label = f"op_{name}" if target._overloadname == "default" else f"op_{name}_{target._overloadname}"
    else:
        label = f"op_{getattr(target, '__name__', type(target).__name__)}"
        text = f"const[{label!r}]"
    w.targets.setdefault(f"fn {label}", text)
    return label


def _overload_text(op: torch._ops.OpOverload) -> str:
    namespace, name = op._schema.name.split("::")
    return f"torch.ops.{namespace}.{name}.{op._overloadname}"


def _arg(p: Program, names: _Names, x: Any) -> str:
    if isinstance(x, View):
        if x in names.windows:
            return f"V[{names.windows[x]}]"
        b = p.buffers[x.buffer]
        held = f"const[{x.buffer!r}]" if b.kind == "const" else x.buffer
        if x.dtype not in (None, b.dtype):
            return _retyped(held, x)
        same = all(s == t or n == 1 for n, s, t in zip(x.sizes, x.strides, b.strides, strict=False))
        if x.sizes == b.sizes and same and x.offset == 0:
            return held
        return f"view({held}, {tuple_text(x.sizes)}, {tuple_text(x.strides)}, {ex.show(x.offset)})"
    if isinstance(x, (Opaque, HostNumber)):
        return str(x)
    if isinstance(x, Constant):
        return f"const[{str(x)!r}]"
    if isinstance(x, ex.Expr):
        return ex.show(x)
    if isinstance(x, (tuple, list)):
        inner = ", ".join(_arg(p, names, y) for y in x)
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
    if isinstance(x, float) and (x != x or x in (float("inf"), float("-inf"))):
        return f'float("{x}")'
    if isinstance(x, torch.device):
        return f"torch.device({str(x)!r})"
    if isinstance(x, torch._ops.OpOverload):  # an operator handed to a higher-order one
        return _overload_text(x)
    if isinstance(x, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{x._name}"
    return repr(x)


def _output(p: Program, o: Any) -> str:
    if isinstance(o, Constant):
        return f"const[{str(o)!r}]"
    if isinstance(o, (Opaque, HostNumber)):
        return str(o)
    if not isinstance(o, View):
        return ex.show(o) if isinstance(o, ex.Expr) else repr(o)
    b = p.buffers[o.buffer]
    held = f"const[{o.buffer!r}]" if b.kind == "const" else o.buffer
    if o.dtype not in (None, b.dtype):
        return _retyped(held, o)
    if o.sizes == b.sizes and o.strides == b.strides and o.offset == 0:
        return held
    return f"view({held}, {tuple_text(o.sizes)}, {tuple_text(o.strides)}, {ex.show(o.offset)})"


def _retyped(held: str, v: View) -> str:
    return f"retyped({held}, {v.dtype}, {tuple_text(v.sizes)}, {tuple_text(v.strides)}, {ex.show(v.offset)})"


def _provenance(origins: Sequence[Origin]) -> str:
    ops = ", ".join(dict.fromkeys(o.node for o in origins))
    lines = list(dict.fromkeys(o.line for o in origins if o.line))
    shown = (ops if len(ops) < 160 else ops[:157] + "...") + (f" | {lines[0]}" if lines else "")
    return shown + (f" ... {lines[-1]}" if len(lines) > 1 else "")
