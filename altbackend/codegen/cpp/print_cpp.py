"""Print the kernel AST as OpenMP C++. Every decision is already in the AST."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.ops import OPS
from ...ir.value import Value
from ..lines import Lines
from ..polynomial import Spelling
from .ast import (
    CLOSE,
    PARALLEL,
    BlockRead,
    BlockRow,
    BlockWrite,
    Declare,
    Function,
    Let,
    Loop,
    Partial,
    Stmt,
    Store,
    Transpose,
    Update,
)
from .short_rows import SHORT

CTYPES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "alt::bfloat16",
    torch.float16: "alt::half",
    torch.float8_e4m3fn: "alt::float8_e4m3fn",
    torch.float8_e5m2: "alt::float8_e5m2",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
_CLAUSE = {
    "sum": "+",
    "prod": "*",
    "max": "alt_max",
    "min": "alt_min",
    "any": "alt_any",
    "all": "alt_all",
    "least": "min",  # of integers, for which the compiler has its own
    "most": "max",
}
_COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "alt::maximum({0}, {1})",
    "min": "alt::minimum({0}, {1})",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
    "xor": "{0} ^ {1}",
    "least": "({1} < {0} ? {1} : {0})",
    "most": "({1} > {0} ? {1} : {0})",
    "logaddexp": "alt::logaddexp({0}, {1})",
}
STACK_SCRATCH = 1 << 17  # bytes of scratch that a kernel may allocate on a thread's stack


class CppLines(Lines):
    """Lines of C++ with blocks in braces."""

    def __init__(self) -> None:
        super().__init__("  ")

    def open(self, text: str) -> None:
        """Open a block."""
        self.add(text + " {")
        self.depth += 1

    def close(self, tail: str = "") -> None:
        """Close the innermost block."""
        self.depth -= 1
        self.add("}" + tail)


def function(f: Function, identifier: str, threshold: int, torch_threads: bool = False) -> str:
    """Return the C++ text of one kernel.

    `threshold`: least work for which it uses several threads. `torch_threads`: these are torch's own, else OpenMP's.
    """
    w = CppLines()
    params = [
        f"{'' if p.written else 'const '}{CTYPES[p.dtype]}*{'' if p.shared else ' __restrict'} {p.name}"
        for p in f.params
    ]
    params += [f"const int64_t {s}" for s in f.symbols] + ["const int max_threads"]
    if f.checks:
        params.append("int64_t* error")
    w.open(f"static void {identifier}({', '.join(params)})")
    _threads(w, f, threshold)
    if f.template:
        _template(w, f.template, torch_threads)
        return "\n".join(w.body) + "\n"
    for p in f.partials:
        _partial_open(w, p)
    heap = _scratch_bytes(f) > STACK_SCRATCH
    open_parallel(w, torch_threads)
    _share(w, f, team(torch_threads))
    for d in f.scratch:
        _declare_scratch(w, d, heap)
    for p in f.partials:
        w.add(f"{CTYPES[p.dtype]}* const {p.name} = {p.name}_all + thread * {p.name}_pitch;")
    if f.flat is None:
        if f.rows == 1:
            w.add("(void)begin; (void)end;")
            w.add("const int64_t o = 0; (void)o;")
            w.open("if (thread == 0)")
        else:
            if f.short:
                _short(w, f)
            _init_counters(w, f)
            w.open("for (int64_t o = begin; o < end; ++o)")
        block(w, f.body)
        _advance_counters(w, f.row_counters)
        w.close()
        if f.short:
            w.close()
    else:
        block(w, f.body)
    w.close(");" if torch_threads else "")
    for p in f.partials:
        _partial_close(w, p)
    w.close()
    return "\n".join(w.body) + "\n"


def _template(w: CppLines, lines: tuple[str, ...], torch_threads: bool) -> None:
    """Print the lines of a template, and close the function."""
    for line in (*lines, "}"):
        if line == PARALLEL:
            open_parallel(w, torch_threads)
            w.add(f"const int team = {team(torch_threads)};")
        elif line == CLOSE:
            w.close(");" if torch_threads else "")
        else:
            w.depth -= line.startswith("}")
            w.add(line)
            w.depth += line.endswith("{")


def open_parallel(w: CppLines, torch_threads: bool) -> None:
    """Open the block that every thread runs, with its number `thread`."""
    if torch_threads:
        w.open("alt::on_threads(threads, [&](const int thread)")
    else:
        w.add("#pragma omp parallel num_threads(threads) if (threads > 1)")
        w.open("")
        w.add("const int thread = omp_get_thread_num();")


def team(torch_threads: bool) -> str:
    """Return the number of threads inside such a block."""
    return "threads" if torch_threads else "omp_get_num_threads()"


def _short(w: CppLines, f: Function) -> None:
    (size,) = (ex.size_of(s.var) for s in f.short if isinstance(s, Loop))
    w.open(f"if ({index(size)} < {SHORT})")
    w.add("#pragma omp simd")
    w.open("for (int64_t o = begin; o < end; ++o)")
    block(w, f.short)
    w.close()
    w.close(" else {")
    w.depth += 1


def _init_counters(w: CppLines, f: Function) -> None:
    """Print the first values of the row counters."""
    step: Index = 1
    for k, v in reversed(list(enumerate(f.row_counters))):
        quotient = "begin" if step == 1 else f"begin / ({index(step)})"
        first = quotient if k == 0 else f"{quotient} % {_SPELLING.operand(ex.size_of(v))}"
        w.add(f"int64_t {v.key} = begin < end ? {first} : 0;")  # without rows, a size may be 0
        step = ex.mul(step, ex.size_of(v))


def _advance_counters(w: CppLines, row_counters: tuple[Atom, ...]) -> None:
    for k, v in reversed(list(enumerate(row_counters))):
        if k == 0:
            w.add(f"++{v.key};")
        else:
            w.open(f"if (++{v.key} == {index(ex.size_of(v))})")
            w.add(f"{v.key} = 0;")
    for _ in row_counters[1:]:
        w.close()


def _threads(w: CppLines, f: Function, threshold: int) -> None:
    """Print the number of threads, decided here for kernels of static work and else in the call."""
    if f.rows == 1 and f.flat is None and not f.template:
        w.add("const int threads = 1; (void)max_threads;")
    elif isinstance(f.work, int):
        w.add(
            "const int threads = max_threads;" if f.work >= threshold else "const int threads = 1; (void)max_threads;"
        )
    else:
        w.add(f"const int threads = {index(f.work)} >= {threshold} ? max_threads : 1;")


def _share(w: CppLines, f: Function, threads: str) -> None:
    split = f"alt::share({index(f.rows)}, thread, {threads})"
    if f.flat is not None:
        split = f"alt::share_blocks({index(f.rows)}, 64, thread, {threads})"
    w.add(f"const alt::Share range = {split};")
    w.add("const int64_t begin = range.begin, end = range.end;")


def _scratch_bytes(f: Function) -> int:
    total = 0
    for d in f.scratch:
        if not isinstance(d.numel, int):
            return STACK_SCRATCH + 1
        total += d.numel * d.dtype.itemsize + 64
    return total


def _declare_scratch(w: CppLines, d: Declare, heap: bool) -> None:
    assert d.numel is not None
    t = CTYPES[d.dtype]
    if heap:
        w.add(f"alt::Heap<{t}> {d.name}_heap({index(d.numel)}); {t}* const {d.name} = {d.name}_heap.data;")
    else:
        w.add(f"alignas(64) {t} {d.name}[{index(d.numel)}];")


def _partial_open(w: CppLines, p: Partial) -> None:
    t = CTYPES[p.dtype]
    per_line = max(64 // p.dtype.itemsize, 1)
    w.add(f"const int64_t {p.name}_pitch = ({index(p.numel)} + {2 * per_line - 1}) / {per_line} * {per_line};")
    w.add(f"alt::Heap<{t}> {p.name}_heap(threads * {p.name}_pitch); {t}* const {p.name}_all = {p.name}_heap.data;")
    w.add(f"for (int64_t k = 0; k < threads * {p.name}_pitch; ++k) {p.name}_all[k] = {scalar(p.init)};")


def _partial_close(w: CppLines, p: Partial) -> None:
    for v in p.parallel:
        w.open(_for(v.key, "0", index(ex.size_of(v))))
    if not p.parallel:
        w.open("")  # several partials of one kernel each have their own total
    t = CTYPES[p.dtype]
    w.add(f"{t} total = {p.name}_all[{index(p.slot)}];")
    combined = _COMBINE[p.op].format("total", f"{p.name}_all[t * {p.name}_pitch + {index(p.slot)}]")
    w.add(f"for (int t = 1; t < threads; ++t) total = {combined};")
    w.add(f"{p.target}[{index(p.index)}] = total;")
    for _ in p.parallel or (None,):
        w.close()


def _for(v: str, begin: str, end: str) -> str:
    return f"for (int64_t {v} = {begin}; {v} < {end}; ++{v})"


def block(w: CppLines, body: tuple[Stmt, ...]) -> None:
    for s in body:
        _statement(w, s)


def _statement(w: CppLines, s: Stmt) -> None:
    match s:
        case Let():
            w.add(f"const {CTYPES[s.value.dtype]} {s.name} = {scalar(s.value)};")
        case Declare():
            init = "" if s.init is None else f" = {scalar(s.init)}"
            w.add(f"{CTYPES[s.dtype]} {s.name}{init or '{}'};")
        case Store():
            target = s.target if s.index is None else f"{s.target}[{index(s.index)}]"
            w.add(f"{_guarded(s.guards)}{target} = {scalar(s.value)};")
        case Update():
            target = s.target if s.index is None else f"{s.target}[{index(s.index)}]"
            w.add(f"{_guarded(s.guards)}{target} = {_COMBINE[s.op].format(target, scalar(s.value))};")
        case Loop():
            _loop(w, s)
        case BlockRow():
            w.add(f"{CTYPES[s.dtype]}* const {s.name} = {s.block} + {_row_in_block(s)} * {s.pitch};")
        case BlockRead():
            _block_read(w, s)
        case BlockWrite():
            _block_write(w, s)
        case Transpose():
            source, target = (f"{n} + {index(i)}" if i != 0 else n for n, i in ((s.source, s.first), (s.target, s.at)))
            sizes = ", ".join(map(index, (s.lines, s.count)))
            w.add(f"alt::transpose({source}, {index(s.stride)}, {target}, {index(s.pitch)}, {sizes});")


def _row_in_block(b: BlockRow) -> str:
    """Return the number of this row in its block; a thread's first block may begin with a later row."""
    return f"alt::min64(o % {b.period} % {b.rows}, o - begin)"


def _block_read(w: CppLines, s: BlockRead) -> None:
    b = s.row
    source, at = s.source.attr
    w.open(f"if (o % {b.period} % {b.rows} == 0 || o == begin)")
    rest = f"alt::min64({b.rows} - o % {b.period} % {b.rows}, {b.period} - o % {b.period})"
    w.add(f"const int64_t count = alt::min64({rest}, end - o);")
    first, stride = _first_and_stride(at, b.var)
    n = index(ex.size_of(b.var))
    w.add(f"alt::transpose({source} + {first}, {stride}, {b.block}, {b.pitch}, {n}, count);")
    w.close()


def _block_write(w: CppLines, s: BlockWrite) -> None:
    b = s.row
    ends = f"o % {b.period} % {b.rows} == {b.rows - 1} || o % {b.period} == {b.period - 1} || o + 1 == end"
    w.open(f"if ({ends})")
    w.add(f"const int64_t last = {_row_in_block(b)};")
    first, stride = _first_and_stride(s.index, b.var)
    n = index(ex.size_of(b.var))
    w.add(f"alt::transpose({b.block}, {b.pitch}, {s.target} + {first} - last, {stride}, last + 1, {n});")
    w.close()


def _first_and_stride(at: Index, v: Atom) -> tuple[str, str]:
    """Return a position at v = 0, and its stride along v, in which it is linear."""
    stride = ex.coefficient(at, v)
    assert stride is not None
    return index(ex.substitute(at, {v: 0})), index(stride)


def _guarded(guards: tuple[Value, ...]) -> str:
    return f"if ({' && '.join(map(scalar, guards))}) " if guards else ""


def _tile(w: CppLines, s: Loop) -> None:
    """Print two forms of a tile: with constant bounds, which the compiler unrolls, and with those of a last tile."""
    limited = {q.var: q for q in (s, *_limited(s.body))}.values()
    w.open("")  # loops in a row may have one variable
    for q in limited:
        w.add(f"const int64_t {q.var.key}_end = alt::min64({index(ex.size_of(q.var))}, {index(q.limit or 0)});")
    w.open(f"if ({' && '.join(f'{q.var.key}_end == {index(ex.size_of(q.var))}' for q in limited)})")
    _loop(w, _with_ends(s, False))
    w.close(" else {")
    w.depth += 1
    _loop(w, _with_ends(s, True))
    w.close()
    w.close()


def _limited(body: tuple[Stmt, ...]) -> list[Loop]:
    return [x for q in body if isinstance(q, Loop) for x in ([q] if q.limit is not None else []) + _limited(q.body)]


def _with_ends(s: Stmt, own: bool) -> Stmt:
    """Return a loop nest without limits. `own`: loops end with this tile, else with a full tile."""
    if not isinstance(s, Loop):
        return s
    end = f"{s.var.key}_end" if own and s.limit is not None else s.end
    return replace(s, end=end, limit=None, body=tuple(_with_ends(q, own) for q in s.body))


def _loop(w: CppLines, s: Stmt) -> None:
    assert isinstance(s, Loop)
    if s.limit is not None:
        _tile(w, s)
        return
    v = s.var.key
    end = s.end or index(ex.size_of(s.var))
    if s.vector:
        first = f"{v}_first"
        w.open(f"for (int64_t vector = {s.begin}; vector < {end}; vector += {s.vector})")
        w.add(f"const int64_t {first} = alt::min64(vector, {end} - {s.vector});")
        w.add("#pragma omp simd")
        w.open(_for(v, first, f"{first} + {s.vector}"))
    elif s.step > 1:
        w.open(f"for (int64_t block = {s.begin}; block < {end}; block += {s.step})")
        w.add(f"const int64_t block_end = alt::min64(block + {s.step}, {end});")
    else:
        if s.simd:
            clauses = "".join(f" reduction({_CLAUSE[op]}: {n})" for op, n in s.sums)
            w.add(f"#pragma omp simd{clauses}")
        w.open(_for(v, s.begin, end))
    if s.scalar:
        w.add('asm volatile("");')
    block(w, s.body)
    w.close()
    if s.vector:
        w.close()


def literal(number: float, dtype: torch.dtype) -> str:
    """Return a constant that the compiler reads back exactly."""
    t = CTYPES[dtype]
    if dtype == torch.bool:
        return "true" if number else "false"
    if dtype.is_floating_point:
        x = float(number)
        suffix = "f" if dtype != torch.float64 else ""
        if math.isnan(x):
            text = f'__builtin_nan{suffix}("")'
        elif math.isinf(x):
            text = ("-" if x < 0 else "") + f"__builtin_inf{suffix}()"
        else:
            text = (float_text(x) if dtype != torch.float64 else repr(x)) + suffix
        return text if dtype in (torch.float32, torch.float64) else f"alt::cast<{t}>({text})"
    x = int(number)
    if x == -(2**63):
        return "INT64_MIN"
    return f"{t}({x}{'LL' if abs(x) > 2**31 - 1 else ''})"


def float_text(x: float) -> str:
    """Return the shortest decimal of the nearest float32."""
    nearest = _float32(x)
    for precision in range(6, 18):
        text = f"{nearest:.{precision}g}"
        if _float32(float(text)) == nearest:
            break
    return text if any(c in text for c in ".en") else text + ".0"


def _float32(x: float) -> float:
    """Return the nearest float32 as a Python float; numbers that are too large become infinite."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
    return rounded


def scalar(v: Value) -> str:
    """Return a value as one C++ expression."""
    match v.op:
        case "name":
            return str(v.attr)
        case "const":
            return literal(v.attr, v.dtype)
        case "load":
            element = f"{v.attr[0]}[{index(v.attr[1])}]"
            return f"alt::truth({element})" if v.dtype == torch.bool else element
        case "index":
            return f"int64_t({index(v.attr)})"
        case "cast":
            return f"alt::cast<{CTYPES[v.dtype]}>({scalar(v.args[0])})"
        case "masked":
            cond, value, other = (scalar(a) for a in v.args)
            return f"({cond} ? {value} : {other})"
        case "wrap_index":
            code = int(v.args[1].attr) if len(v.args) > 1 else va.INDEX_ERROR
            name = "index_from_zero" if code & va.FROM_ZERO else "wrap_index"
            errors = "" if code == va.INDEX_ERROR else f", {code & ~va.FROM_ZERO}"
            return f"alt::{name}({scalar(v.args[0])}, {index(v.attr)}, error{errors})"
        case "clamp_index":
            from_zero = len(v.args) > 1 and int(v.args[1].attr) & va.FROM_ZERO
            return f"alt::clamp_index{'_from_zero' if from_zero else ''}({scalar(v.args[0])}, {index(v.attr)})"
        case "check_range":
            code = int(v.args[2].attr) if len(v.args) > 2 else va.INDEX_ERROR
            first = "0" if code & va.FROM_ZERO else f"-({index(v.attr)})"
            ends = ", ".join(scalar(a) for a in v.args[:2])
            return f"alt::check_range({ends}, {first}, {index(v.attr)}, error, {code & ~va.FROM_ZERO})"
        case "row_total":
            op, row, count = v.attr
            return f"alt::row_{op}({row}, {index(count)})"
        case "nonzero":
            return f"alt::nonzero({scalar(v.args[0])}, error)"
        case "divisor_scale" | "divide_by" | "or_zero" | "blend":
            return f"alt::{v.op}({', '.join(scalar(a) for a in v.args)})"
        case _:
            text = OPS[v.op].cpp.format(*(scalar(a) for a in v.args), T=CTYPES[v.dtype])
            narrow = v.dtype in (torch.int8, torch.uint8, torch.int16, torch.bool) and text.startswith(("(", "-"))
            return f"{CTYPES[v.dtype]}({text})" if narrow else text


def index(e: Index) -> str:
    """Return an index as an expression of 64-bit integers."""
    return _SPELLING.index(e)


def _number(n: int) -> str:
    return str(n) if abs(n) < 2**31 else f"{n}LL"


_SPELLING = Spelling(
    scalar,
    quotient=("({} / {})", "alt::floor_div({}, {})"),
    remainder=("({} % {})", "alt::floor_mod({}, {})"),
    extremum="alt::{name}64({}, {})",
    number=_number,
)
