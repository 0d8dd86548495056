"""Matrix products that a generated kernel computes: the layout of their operands, and their tiles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...compat import torch_api
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Extern, Pointwise, Program, View
from ...ir.ops import LOW_PRECISION
from ...ir.value import Value
from ..loop_mapping import Refusal

LEAST = 16  # rows, columns and terms below which the tensor cores' tiles would be mostly empty
BARRIERS = 64  # bytes of shared memory besides the tiles
RESULTS = 32 << 10  # bytes through which a tile of results goes, part by part, to be stored in whole lines
_aten = torch.ops.aten
# for each operator the positions of the added term (or None), the left and the right operand among the arguments
_ARGUMENTS: dict[object, tuple[int | None, int, int]] = {
    _aten.mm.default: (None, 0, 1),
    _aten.bmm.default: (None, 0, 1),
    _aten.addmm.default: (0, 1, 2),
    _aten.baddbmm.default: (0, 1, 2),
}
PRODUCT = va.make("product", (), torch.float32)  # the float32 sums before the epilogue


@dataclass(frozen=True, order=True)
class Tiles:
    """Tiles of `rows` x `columns` results, `depth` terms of the sums at a time, loaded `stages` turns ahead.

    `band`: rows of tiles that run together, since they share columns in the L2 cache. `persistent`: one program for
    each multiprocessor, which computes several tiles. `descriptors`: the tensor memory unit reads the operands.
    Every program writes their descriptors once to global memory.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    band: int = 8
    persistent: bool = False
    descriptors: bool = False

    def __str__(self) -> str:
        loads = " persistent" * self.persistent + " descriptors" * self.descriptors
        return f"{self.rows}x{self.columns}x{self.depth}, {self.warps} warps, {self.stages} stages{loads}"


@dataclass(frozen=True)
class Operand:
    """A stack of matrices: element [b, i, j] is at `offset + b*strides[0] + i*strides[1] + j*strides[2]`."""

    buffer: str
    offset: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Matmul:
    """`out[b, i, j]` = `value`, where PRODUCT is the sum over k of `left[b, i, k] * right[b, k, j]`.

    `dtype`: of the operands. `dims`: loops over b, i and j, without those of extent 1. They are the variables of
    `index` (the position in `out`) and of `value` (of `out`'s dtype). `stored_columns`: the columns of the right
    operand in memory, of which the product has the first `columns`.
    """

    out: str
    dtype: torch.dtype
    batch: int
    rows: int
    columns: int
    stored_columns: int
    depth: int
    left: Operand
    right: Operand
    dims: tuple[Atom, ...]
    index: Index
    value: Value
    tiles: Tiles | None = None

    @property
    def vectors(self) -> str:
        """Return the reason why operands cannot be read 16 bytes at a time, or ""."""
        elements = 16 // self.dtype.itemsize
        for o in (self.left, self.right):
            if any(n % elements for n in (o.offset, *(s for s in o.strides if s != 1))):
                return f"{o.buffer} cannot be read 16 bytes at a time"
        return ""

    @property
    def flops(self) -> int:
        """Return the multiplications and additions of the product."""
        return 2 * self.batch * self.rows * self.columns * self.depth

    @property
    def points(self) -> int:
        """Return the number of results."""
        return self.batch * self.rows * self.columns


def is_matmul(node: Extern) -> bool:
    """Return whether a library call is a matrix product that a generated kernel could compute."""
    return node.target in _ARGUMENTS


def of_extern(p: Program, node: Extern) -> Matmul | Refusal:
    """Return the product that a library call computes, or a refusal where no generated kernel can."""
    term, *sides = _ARGUMENTS[node.target]
    views = [node.args[k] for k in sides]
    (out,) = node.outs
    if out is None or not all(isinstance(v, View) for v in views):
        return Refusal("an operand is not a plain tensor")
    b = p.buffers[out]
    (batch, rows, depth), (_, _, columns) = (_stacked(v.sizes) for v in views)
    added = None if term is None else node.args[term]
    names = [b.name, *(v.buffer for v in views)]
    if (refusal := _check(p, names, (batch, rows, depth, columns))) is not None:
        return refusal
    operands = [Operand(v.buffer, v.offset, _stacked(v.strides, 0)) for v in views]
    for v, o in zip(views, operands, strict=True):
        if (refusal := _check_layout(v, o)) is not None:
            return refusal
    dims = tuple(ex.dim(k, n) for k, n in enumerate((batch, rows, columns)))
    position = [ex.ix(d) for d in dims][-len(b.sizes) :]
    index = ex.add(*(ex.mul(s, i) for s, i in zip(b.strides, position, strict=True)))
    value = _value(p, node, added, position)
    if isinstance(value, Refusal):
        return value
    loops = tuple(d for d in dims if ex.size_of(d) != 1)
    left, right = operands
    dtype = p.buffers[left.buffer].dtype
    sizes = (batch, rows, columns, columns, depth)
    return Matmul(out, dtype, *sizes, left, right, loops, index, va.cast(value, b.dtype))


def shared_bytes(m: Matmul, tiles: Tiles) -> int:
    """Return the bytes of a program's shared memory: operand tiles of all stages and, where turns overlap, results."""
    loads = tiles.stages * (tiles.rows + tiles.columns) * tiles.depth
    results = tiles.rows * tiles.columns if tiles.persistent and tiles.descriptors else 0
    return loads * m.dtype.itemsize + min(results * m.dtype.itemsize, RESULTS) + BARRIERS


def fits(p: Program, written: Collection[str], m: Matmul, tiles: Tiles, shared: int) -> bool:
    """Return whether the product runs in `tiles` where programs have `shared` bytes of shared memory.

    Descriptors need one matrix, vectors, and addresses that are multiples of 16. The host copies inputs at other
    addresses, except those that a node writes.
    """
    if shared_bytes(m, tiles) > shared:
        return False
    if not tiles.descriptors:
        return True
    sides = (m.left, m.right)
    unaligned = any(p.buffers[o.buffer].kind == "input" and o.buffer in written for o in sides)
    return m.batch == 1 and not m.vectors and not unaligned and all(s > 0 for o in sides for s in o.strides[1:])


def node_of(m: Matmul, origin: Extern) -> Pointwise:
    """Return the product as a pointwise node, so that the rules for pointwise loops apply to it."""
    return Pointwise(m.out, m.dims, m.index, m.value, origin.origins)


def with_columns(m: Matmul, columns: int) -> Matmul:
    """Return the product with its first `columns` columns only."""
    *others, last = m.dims
    fewer = ex.resized(last, columns)
    env = {last: ex.ix(fewer)}
    return replace(
        m,
        columns=columns,
        dims=(*others, fewer),
        index=ex.substitute(m.index, env),
        value=m.value.substitute(env),
    )


def _stacked(values: Sequence[Index], missing: int = 1) -> tuple[Any, Any, Any]:
    return (missing, *values) if len(values) == 2 else tuple(values)  # type: ignore[return-value]


def _check(p: Program, names: list[str], sizes: tuple[Index, ...]) -> Refusal | None:
    """Refuse symbolic sizes, short sides, and dtypes without a tensor core form."""
    symbolic = [n for n in sizes if not isinstance(n, int)]
    if symbolic or any(ex.syms_of(p.buffers[b].extent) for b in names):
        return Refusal("its sizes are symbolic")
    if any(isinstance(n, int) and n < LEAST for n in sizes[1:]):
        return Refusal(f"a side is shorter than {LEAST}")
    dtypes = {p.buffers[b].dtype for b in names}
    if len(dtypes) != 1 or not dtypes <= LOW_PRECISION | {torch.float32}:
        return Refusal(f"no tensor core form for {', '.join(sorted(map(str, dtypes)))}")
    if torch.float32 in dtypes and not torch_api.allows_tf32():
        return Refusal("float32 products must be exact: torch.set_float32_matmul_precision allows TF32")
    return None


def _check_layout(v: View, o: Operand) -> Refusal | None:
    """Refuse operands whose elements tiles cannot address."""
    if v.dtype is not None:
        return Refusal(f"{o.buffer} is read as another dtype")
    if not all(isinstance(n, int) for n in (o.offset, *o.strides)):
        return Refusal(f"the strides of {o.buffer} are symbolic")
    if 1 not in o.strides[1:]:
        return Refusal(f"{o.buffer} has neither contiguous rows nor contiguous columns")
    # a tile may end up to 256 rows behind the last one: nothing is read there, but positions are computed
    extent = sum((n + 256) * s for n, s in zip(_stacked(v.sizes), o.strides, strict=True))
    return Refusal(f"positions in {o.buffer} need 64 bits") if extent + o.offset >= 2**31 else None


def tiles_of(m: Matmul) -> tuple[Tiles, int, int]:
    """Return the tiles of a product, and their number along the rows and along the columns."""
    assert m.tiles is not None
    return m.tiles, -(-m.rows // m.tiles.rows), -(-m.columns // m.tiles.columns)


def _value(p: Program, node: Extern, added: object, position: list[Index]) -> Value | Refusal:
    """Return alpha * product + beta * term in float32: like the library, the kernel rounds once."""
    factors = dict(node.kwargs)
    alpha, beta = factors.pop("alpha", 1), factors.pop("beta", 1)
    if factors or not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        return Refusal(f"arguments {', '.join(map(str, dict(node.kwargs)))}")
    product = PRODUCT if alpha == 1 else va.apply("mul", PRODUCT, va.const(alpha, torch.float32))
    if added is None or beta == 0:
        return product
    if not isinstance(added, View) or added.dtype is not None:
        return Refusal("the added term is not a plain tensor")
    broadcast = position[len(position) - len(added.sizes) :]
    axes = zip(added.sizes, added.strides, broadcast, strict=True)
    index = ex.add(added.offset, *(ex.mul(s, i) for n, s, i in axes if n != 1))
    term = va.cast(va.load(added.buffer, index, p.buffers[added.buffer].dtype), torch.float32)
    if beta != 1:
        term = va.apply("mul", term, va.const(beta, torch.float32))
    return va.apply("add", product, term)
