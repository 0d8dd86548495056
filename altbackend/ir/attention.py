"""Attention with a score function of the user's: the target of a call that code generation turns into kernels.

For each batch `b`, head `h`, row `q_idx` of the queries and column `kv_idx` of the keys:

    scores  = scale * query[b, h, q_idx] . key[b, h', kv_idx]        h' = h // (heads / key heads)
    final   = score(scores, b, h, q_idx, kv_idx)   where mask(b, h, q_idx, kv_idx), else -inf
    out     = softmax(final over kv_idx) @ value

`score`, `mask` and the gradients are scalar trees over the names below; their loads read captured tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import ClassVar

import torch

from altbackend.lazy_dataclass import dataclass

from . import expr as ex
from . import value as va
from .expr import Index
from .loops import View
from .value import Value

WHOLE = 1 << 30  # rows or columns of the one block of a call without a block mask
SCORE = va.make("name", (), torch.float32, "score")
BATCH, HEAD, ROW, COLUMN = (va.make("name", (), torch.int32, n) for n in ("b", "h", "q_idx", "kv_idx"))
GRADIENT = va.make("name", (), torch.float32, "grad")  # of the loss by the final score


@dataclass(frozen=True)
class Blocks:
    """The blocks that tiles visit, for each block of the other side.

    `counts[b, h, block]` says how many of `indices[b, h, block, :]` are visited. `masked`: `mask` applies in them.
    """

    counts: View
    indices: View
    masked: bool


@dataclass(frozen=True)
class Gradient:
    """A captured tensor's gradient: `value` is added at position `index` of the buffer `out` for every score."""

    out: View
    index: Index
    value: Value


@dataclass(frozen=True)
class Backward:
    """The operands and functions of a gradient, besides those of its forward.

    `logsumexp` (of base 2) and `delta`, the gradient that each row's softmax subtracts, have one float32 for each row.
    `score` is the gradient by the scores before `score_mod`. `blocks`: for each block of keys, the blocks of queries.
    """

    gradient: View
    logsumexp: View
    delta: View
    score: Value
    blocks: tuple[Blocks, ...]
    captured: tuple[Gradient, ...] = ()


@dataclass(frozen=True, eq=False)
class Attention:
    """One call, as the target of an `Extern` whose arguments are all views that it reads.

    `query` is `[B, H, L, D]`, `key` `[B or 1, H', S, D]`, `value` `[B or 1, H', S, E]`; `out` has a buffer for each
    result, None for one that nothing reads. The forward's results are out, logsumexp and the largest score of every
    row; the backward's are the gradients of query, key and value. `block_sizes`: rows and columns of a block.
    Without `blocks`, all keys are visited. `options`: tiles that the user chose, by name.
    """

    query: View
    key: View
    value: View
    out: tuple[str | None, ...]
    score: Value
    mask: Value
    scale: float
    blocks: tuple[Blocks, ...]
    block_sizes: tuple[int, int]
    backward: Backward | None = None
    options: dict[str, int] = field(default_factory=dict)
    __name__ = "attention"
    tags: ClassVar[tuple[str, ...]] = ()  # like those of an operator without effects

    def __str__(self) -> str:
        """Return the text of the call's functions on one line."""
        parts = [f"score={self.score}", f"mask={self.mask}", f"scale={self.scale}"]
        if self.backward is not None:
            parts.append(f"by_score={self.backward.score}")
        return f"attention<{', '.join(parts)}>"

    @property
    def trees(self) -> tuple[Value, ...]:
        """Return all scalar trees of the call."""
        b = self.backward
        return (self.score, self.mask, *((b.score, *(g.value for g in b.captured)) if b is not None else ()))

    @property
    def symbols(self) -> frozenset[str]:
        """Return the symbols of the scalar trees."""
        return frozenset(a.key for tree in self.trees for v in va.walk(tree) for a in (v.syms | _sizes(v)))


def _sizes(v: Value) -> frozenset[ex.Atom]:
    return ex.syms_of(v.attr) if v.op == "wrap_index" else frozenset()


def names(root: Value) -> Iterator[Value]:
    """Yield the names that a tree reads."""
    return (v for v in va.walk(root) if v.op == "name")


# --- ranges of positions ---------------------------------------------------------------------------------------------

Extents = Mapping[str, Index]
_ANY = (-math.inf, math.inf)


def extents(form: Attention) -> dict[str, Index]:
    """Return for each position's name how many values it has."""
    batches, heads, rows = form.query.sizes[:3]
    return {"b": batches, "h": heads, "q_idx": rows, "kv_idx": form.key.sizes[2]}


def bounds(v: Value, of: Extents) -> tuple[float, float]:
    """Return the least and the largest number that an integer value can be."""
    if v.dtype.is_floating_point or v.dtype == torch.bool:
        return _ANY
    match v.op:
        case "const":
            return v.attr, v.attr
        case "name" if v.attr in of:
            return 0, ex.bounds(of[v.attr])[1] - 1
        case "cast":
            interval = bounds(v.args[0], of)
        case "add" | "sub" | "minimum" | "maximum":
            (a, b), (c, d) = (bounds(x, of) for x in v.args)
            sums = {"add": (a + c, b + d), "sub": (a - d, b - c)}
            interval = ({"minimum": (min(a, c), min(b, d)), "maximum": (max(a, c), max(b, d))} | sums)[v.op]
        case _:
            return _ANY
    limits = torch.iinfo(v.dtype)
    return interval if limits.min <= interval[0] and interval[1] <= limits.max else _ANY


def is_position(at: Value, size: Index, of: Extents) -> bool:
    """Return whether an integer is a position in a dimension of `size`, whatever the data."""
    low, high = bounds(at, of)
    if low < 0:
        return False
    if high < ex.bounds(size)[0]:
        return True
    extent = of.get(at.attr) if at.op == "name" else None
    return extent is not None and (extent == size or ex.known_nonnegative(ex.sub(size, extent)))


def without_widening(v: Value) -> Value:
    """Return the integer of 32 bits that `v` widens to 64, or `v`."""
    return v.args[0] if v.op == "cast" and v.args[0].dtype == torch.int32 else v
