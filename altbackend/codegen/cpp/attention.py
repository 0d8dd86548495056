"""Attention on a CPU: an online softmax over tiles of scores, which never all exist at once.

Keys and values are first copied as float32 tiles, so that the products of all queries read them in order. Then every
thread computes tiles of queries. `runtime/include/altbackend/attention.h` has the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.attention import COLUMN, Attention, Blocks, extents, is_position, without_widening
from ...ir.expr import Index
from ...ir.loops import Program, View
from ...ir.value import Value
from .ast import CLOSE, PARALLEL, Function, Param, name
from .print_cpp import CTYPES, index, literal, scalar

ROWS, COLUMNS = 32, 64  # sides of a tile of scores, which attention.h has too
WIDTH = 32  # elements of a value are padded to multiples of it
PACKED = 1 << 24  # floats of keys and values that are copied at a time, but for those of one head
_LN2 = 0.6931471805599453


@dataclass
class _Kernel:
    """The parameters and symbols of one kernel as they are found. `checks`: some position may be out of range."""

    program: Program
    form: Attention
    params: dict[str, Param] = field(default_factory=dict)
    symbols: set[str] = field(default_factory=set)
    checks: bool = False
    count: int = 0

    def of(self, buffer: str) -> str:
        """Return the parameter that stands for a buffer."""
        if buffer not in self.params:
            written = buffer in self.form.out
            label = f"{'out' if written else 'in'}{len(self.params)}"
            self.params[buffer] = Param(label, self.program.buffers[buffer].dtype, written)
        return self.params[buffer].name

    def text(self, e: Index) -> str:
        """Return an index without loop variables as an operand; its symbols become arguments."""
        self.symbols.update(a.key for a in ex.syms_of(e))
        return f"({index(e)})"

    def element(self, v: View, *at: str) -> str:
        """Return the element of a view at a position, one for each of its first dimensions."""
        terms = [self.text(v.offset)] if v.offset != 0 else []
        for position, n, stride in zip(at, v.sizes, v.strides, strict=False):
            if n != 1 and stride != 0:
                terms.append(f"{position} * {self.text(stride)}")
        return f"{self.of(v.buffer)}[{' + '.join(terms) or '0'}]"


@dataclass
class _Level:
    names: frozenset[str]
    lines: list[str] = field(default_factory=list)
    bound: dict[Value, Value] = field(default_factory=dict)


@dataclass
class _Scalars:
    """Binds values to variables on the outermost of `levels` that has their operands."""

    kernel: _Kernel
    levels: Sequence[_Level]

    def bind(self, v: Value) -> Value:
        """Return `v` as a name or constant."""
        if v.op in ("const", "name"):
            return v
        level = self._level(v)
        if v not in level.bound:
            resolved = self._resolved(v)
            label = name(f"t{self.kernel.count}", v.dtype)
            self.kernel.count += 1
            level.lines.append(f"const {CTYPES[v.dtype]} {label.attr} = {scalar(resolved)};")
            level.bound[v] = label
        return level.bound[v]

    def _level(self, v: Value) -> _Level:
        needed = {x.attr for x in va.walk(v) if x.op == "name"}
        names: set[str] = set()
        for level in self.levels:
            names |= level.names
            if needed <= names:
                return level
        raise AssertionError(f"{needed - names} of {v}")

    def _resolved(self, v: Value) -> Value:
        match v.op:
            case "load":
                return va.load(self.kernel.of(v.attr[0]), self._index(v.attr[1]), v.dtype)
            case "index" | "wrap_index":
                if v.op == "wrap_index":
                    self.kernel.checks = True
                return va.make(v.op, tuple(map(self.bind, v.args)), v.dtype, self._index(v.attr))
        return va.make(v.op, tuple(map(self.bind, v.args)), v.dtype, v.attr)

    def _index(self, e: Index) -> Index:
        self.kernel.symbols.update(a.key for a in ex.syms_of(e))
        if not ex.lookups(e):
            return e
        return ex.substitute(e, {}, self._position)

    def _position(self, x: Value) -> Value:
        """Return a position that is read from data, checked unless it is in range whatever the data."""
        if x.op == "wrap_index":
            at = without_widening(x.args[0])
            if is_position(at, x.attr, extents(self.kernel.form)):
                # vectors need to see that the position counts with the loop
                return name("column", torch.int64) if at is COLUMN else self.bind(x.args[0])
        return self.bind(x)


def emit(p: Program, form: Attention) -> tuple[Function, tuple[str, ...]]:
    """Return the function of a call, and the buffers that its parameters stand for."""
    k = _Kernel(p, form)
    lines = _text(k)
    work = ex.mul(*form.query.sizes[:3], form.key.sizes[2])
    k.symbols.update(a.key for a in ex.syms_of(work))
    function = Function(
        params=tuple(k.params.values()),
        symbols=tuple(sorted(k.symbols)),
        rows=0,
        flat=None,
        scratch=(),
        body=(),
        partials=(),
        work=work,
        checks=k.checks,
        template=tuple(lines),
    )
    return function, tuple(k.params)


# --- the text --------------------------------------------------------------------------------------------------------


def _text(k: _Kernel) -> list[str]:
    """Return the statements of the function, between its threads' declaration and its end."""
    query, key, value = k.form.query, k.form.key, k.form.value
    depth, width = query.sizes[3], value.sizes[3]
    assert isinstance(width, int)
    padded = -(-width // WIDTH) * WIDTH
    batches = "1" if key.sizes[0] == query.sizes[0] else k.text(query.sizes[0])
    return [
        f"constexpr int64_t M = {ROWS}, N = {COLUMNS}, D = {depth}, E = {width}, EP = {padded};",
        f"const int64_t L = {k.text(query.sizes[2])}, S = {k.text(key.sizes[2])}, heads = {k.text(key.sizes[1])};",
        f"const int64_t group = {k.text(query.sizes[1])} / heads, repeats = group * {batches};",
        f"const int64_t pairs = {k.text(key.sizes[0])} * heads, panels = (S + N - 1) / N;",
        f"const int64_t pair_floats = panels * N * (D + EP), fit = {PACKED} / pair_floats;",
        "const int64_t chunk = alt::max64(alt::min64(fit, pairs), 1);",
        *_tiles_of(k),
        "alt::Heap<float> packed(chunk * pair_floats);",
        "for (int64_t first = 0; first < pairs; first += chunk) {",
        "const int64_t count = alt::min64(chunk, pairs - first);",
        PARALLEL,
        "for (int64_t turn = thread; turn < count * panels; turn += team) {",
        *_pack(k),
        "}",
        CLOSE,
        PARALLEL,
        "alt::Heap<float> memory(M * (D + N + EP));",
        "float* const query = memory.data; float* const scores = query + M * D; float* const sums = scores + M * N;",
        "float top[M], total[M];",
        "for (int64_t turn = thread; turn < count * repeats * tiles; turn += team) {",
        *_tile(k),
        "}",
        CLOSE,
        "}",
    ]


def _tiles_of(k: _Kernel) -> list[str]:
    """Return the numbers of blocks and tiles of queries; a tile lies in one block."""
    rows, columns = k.form.block_sizes
    return [
        f"const int64_t row_block = alt::min64({rows}, L), column_block = alt::min64({columns}, S);",
        "const int64_t parts = (row_block + M - 1) / M, tiles = (L + row_block - 1) / row_block * parts;",
    ]


def _pack(k: _Kernel) -> list[str]:
    """Return the copy of one tile of keys, transposed, and of values; positions behind the last are 0."""
    key = k.element(k.form.key, "b", "h", "n", "d")
    value = k.element(k.form.value, "b", "h", "n", "e")
    return [
        "const int64_t pair = turn / panels, panel = turn % panels, begin = panel * N, end = alt::min64(begin + N, S);",
        "const int64_t b = (first + pair) / heads, h = (first + pair) % heads;",
        "(void)b; (void)h;",
        "float* const keys = packed.data + pair * pair_floats + begin * D;",
        "float* const values = packed.data + pair * pair_floats + panels * N * D + begin * EP;",
        "for (int64_t n = begin; n < begin + N; ++n) {",
        f"for (int64_t d = 0; d < D; ++d) keys[d * N + n - begin] = n < end ? alt::cast<float>({key}) : 0.0f;",
        "for (int64_t e = 0; e < EP; ++e) "
        f"values[(n - begin) * EP + e] = n < end && e < E ? alt::cast<float>({value}) : 0.0f;",
        "}",
    ]


def _tile(k: _Kernel) -> list[str]:
    """Return the work on one tile of queries."""
    tile = _Level(frozenset(("b", "h")))
    lists = k.form.blocks or (None,)
    loops = [line for blocks in lists for line in _visit(k, blocks, _row_body(k, tile, blocks))]
    query = k.element(k.form.query, "b", "h", "(begin + m)", "d")
    return [
        "const int64_t pair = turn / (repeats * tiles), rest = turn % (repeats * tiles);",
        "const int64_t repeat = rest / tiles, block = rest % tiles / parts;",
        "const int64_t begin = block * row_block + rest % parts * M;",
        "const int64_t end = alt::min64(alt::min64(begin + M, (block + 1) * row_block), L), rows = end - begin;",
        "if (rows <= 0) continue;",
        "const int32_t b = int32_t((first + pair) / heads + repeat / group);",
        "const int32_t h = int32_t((first + pair) % heads * group + repeat % group);",
        "const float* const all_keys = packed.data + pair * pair_floats;",
        "const float* const all_values = all_keys + panels * N * D;",
        "(void)b; (void)h; (void)column_block;",
        *tile.lines,
        "for (int64_t m = 0; m < M; ++m) {",
        "top[m] = -__builtin_inff(); total[m] = 0.0f;",
        f"for (int64_t d = 0; d < D; ++d) query[m * D + d] = m < rows ? alt::cast<float>({query}) : 0.0f;",
        "for (int64_t e = 0; e < EP; ++e) sums[m * EP + e] = 0.0f;",
        "}",
        *loops,
        *_store(k),
    ]


def _visit(k: _Kernel, blocks: Blocks | None, body: list[str]) -> list[str]:
    """Return the loop over the columns of the listed blocks, or over all."""
    loop = ["for (int64_t panel = low / N; panel * N < high; ++panel) {", *body, "}"]
    if blocks is None:
        return ["{", "const int64_t low = 0, high = S;", *loop, "}"]
    counts, indices = blocks.counts, blocks.indices
    count = k.element(counts, "b", "h", "block")
    is_listed = f"block < {k.text(counts.sizes[2])}"
    listed = k.element(indices, "b", "h", "block", "visit")
    last = "(S + column_block - 1) / column_block - 1"
    return [
        f"const int64_t visits{int(blocks.masked)} = {is_listed} ? alt::min64(int64_t({count}), "
        f"{k.text(indices.sizes[3])}) : 0;",
        f"for (int64_t visit = 0; visit < visits{int(blocks.masked)}; ++visit) {{",
        f"const int64_t column = alt::min64(alt::max64(int64_t({listed}), 0), {last});",
        "const int64_t low = column * column_block, high = alt::min64(low + column_block, S);",
        *loop,
        "}",
    ]


def _row_body(k: _Kernel, tile: _Level, blocks: Blocks | None) -> list[str]:
    """Return the work on one tile of scores: its product, its final scores, and the sums of the values."""
    row, column = _Level(frozenset(("q_idx",))), _Level(frozenset(("kv_idx", "score")))
    scalars = _Scalars(k, (tile, row, column))
    checked = k.checks
    k.checks = False
    final = scalar(scalars.bind(k.form.score))
    everywhere = k.form.mask.op == "const" and bool(k.form.mask.attr)
    if (blocks is None or blocks.masked) and not everywhere:
        final = f"{scalar(scalars.bind(k.form.mask))} ? {final} : -__builtin_inff()"
    vectors = not k.checks
    k.checks |= checked
    simd = ["#pragma omp simd reduction(max : highest)"] if vectors else []
    return [
        "const int64_t from = alt::max64(low - panel * N, 0), to = alt::min64(high - panel * N, N);",
        "alt::attention::product<false>(query, D, all_keys + panel * N * D, scores, N, D);",
        "for (int64_t m = 0; m < rows; ++m) {",
        "const int32_t q_idx = int32_t(begin + m); (void)q_idx;",
        "float* const line = scores + m * N;",
        *row.lines,
        "float highest = top[m];",
        *simd,
        "for (int64_t n = from; n < to; ++n) {",
        "const int64_t column = panel * N + n; const int32_t kv_idx = int32_t(column); (void)kv_idx;",
        f"const float score = line[n] * {literal(k.form.scale, torch.float32)}; (void)score;",
        *column.lines,
        f"const float final = {final};",
        "line[n] = final;",
        "highest = final > highest ? final : highest;",
        "}",
        "const float base = highest == -__builtin_inff() ? 0.0f : highest;",
        "const float kept = alt::exp(top[m] - base);",
        "float sum = 0.0f;",
        "#pragma omp simd reduction(+ : sum)",
        "for (int64_t n = from; n < to; ++n) {",
        "const float weight = alt::exp(line[n] - base);",
        "line[n] = weight;",
        "sum += weight;",
        "}",
        "for (int64_t n = 0; n < from; ++n) line[n] = 0.0f;",
        "for (int64_t n = to; n < N; ++n) line[n] = 0.0f;",
        "total[m] = total[m] * kept + sum;",
        "top[m] = highest;",
        "if (kept != 1.0f)",
        "  for (int64_t e = 0; e < EP; ++e) sums[m * EP + e] *= kept;",
        "}",
        "alt::attention::product<true>(scores, N, all_values + panel * N * EP, sums, EP, N);",
    ]


def _store(k: _Kernel) -> list[str]:
    """Return the stores of the results; a row without scores has 0, and a logsumexp of -inf."""
    lines = ["for (int64_t m = 0; m < rows; ++m) {", "const float divisor = total[m] == 0.0f ? 1.0f : total[m];"]
    out, *statistics = k.form.out
    if out is not None:
        b = k.program.buffers[out]
        place = k.element(View(out, b.sizes, b.strides), "b", "h", "(begin + m)", "e")
        lines.append(
            f"for (int64_t e = 0; e < E; ++e) {place} = alt::cast<{CTYPES[b.dtype]}>(sums[m * EP + e] / divisor);"
        )
    lse = "(top[m] == __builtin_inff() ? top[m] : top[m] + alt::log(total[m]))"
    for buffer, number in zip(statistics, (lse, "top[m]"), strict=False):
        if buffer is not None:
            b = k.program.buffers[buffer]
            place = k.element(View(buffer, b.sizes, b.strides), "b", "h", "(begin + m)")
            lines.append(f"{place} = {number} / {literal(_LN2, torch.float32)};")
    return [*lines, "(void)divisor;", "}"]
