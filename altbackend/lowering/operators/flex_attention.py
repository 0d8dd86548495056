"""FlexAttention and its gradient: the arguments of torch's operators as one `Attention` call.

What this file does not know, such as an argument of another version of torch, runs as torch's own dense kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from altbackend.lazy_dataclass import dataclass

from ...compat import torch_api
from ...debug.trace import DecisionKind
from ...ir import expr as ex
from ...ir import value as va
from ...ir.attention import (
    BATCH,
    COLUMN,
    GRADIENT,
    HEAD,
    ROW,
    SCORE,
    WHOLE,
    Attention,
    Backward,
    Blocks,
    Gradient,
)
from ...ir.loops import Constant, Extern, View
from ...ir.ops import ATOMIC, LOW_PRECISION, OPS
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import LOWERINGS, FallBack
from ..scalar_graph import trees_of
from ..tensor import Tensor, full, of_buffer
from .indexing import IndexRule, position
from .reduction import drop_dims, reduce

LARGEST_HEAD = 256  # elements of a query, key or value of one head
_LN2 = 0.6931471805599453
# The entries of a block mask: sizes, blocks by rows, blocks by columns, an order of writes that is only a hint (in
# newer versions of torch), sizes of a block, and the graph.
_MASK_LENGTHS = (13, 17)
_BY_ROW, _BY_COLUMN = 2, 6
_PLAIN = frozenset(("const", "load", "index", "cast", "wrap_index", "name"))
_POSITIONS = tuple(Tensor((), torch.int32, x) for x in (BATCH, HEAD, ROW, COLUMN))


@dataclass(frozen=True)
class _Call:
    """The arguments that both operators share, lowered. `score`: the graph of the score function."""

    query: Tensor
    key: Tensor
    value: Tensor
    score: GraphModule
    mask: GraphModule
    block_mask: tuple[Any, ...]
    scale: float
    options: dict[str, object]
    captured: tuple[object, ...]
    mask_captured: tuple[object, ...]


def flex_attention(ctx: Ctx, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    """Lower the forward: its results are out, logsumexp and, by version, the largest score of each row."""
    if kwargs or len(args) != 9:
        raise FallBack("arguments that this version of torch is not known to have")
    query, key, value, score, mask, scale, options, captured, mask_captured = args
    call = _call(ctx, (query, key, value), (score, mask, scale, options, captured, mask_captured))
    form = _forward(ctx, call, _blocks(ctx, call, _BY_ROW))
    return _emit(ctx, form, call, ())


def flex_attention_backward(ctx: Ctx, *args: Any, **kwargs: object) -> tuple[object, ...]:
    """Lower the gradients of query, key, value and of the captured tensors."""
    if kwargs or len(args) != 14:
        raise FallBack("arguments that this version of torch is not known to have")
    if not ctx.gpu:
        raise FallBack("the gradient has no kernel on a CPU, where torch's own function has none either")
    query, key, value, out, logsumexp, gradient, by_logsumexp, score, joint, mask, scale, options, *captured = args
    call = _call(ctx, (query, key, value), (score, mask, scale, options, *captured))
    if gradient is None:
        raise FallBack("nothing needs the gradient of its result")
    joint_graph = _graph(ctx, joint)
    form = _forward(ctx, call, _blocks(ctx, call, _BY_ROW))
    score_gradient, captured_gradients = _joint(ctx, call, joint_graph)
    delta = _delta(ctx, out, gradient, by_logsumexp)
    sides = tuple(_view(ctx, t, k) for t, k in ((gradient, 5), (logsumexp, 4)))
    backward = Backward(
        sides[0],
        sides[1],
        ctx.view_of(delta),
        score_gradient,
        _blocks(ctx, call, _BY_COLUMN),
        tuple(g for g in captured_gradients if g is not None),
    )
    form = replace(form, backward=backward)
    added = tuple(g.out.buffer for g in backward.captured)
    gradients = _emit(ctx, form, call, added)
    return *gradients, _captured_results(ctx, captured_gradients)


LOWERINGS[torch.ops.higher_order.flex_attention] = flex_attention
LOWERINGS[torch.ops.higher_order.flex_attention_backward] = flex_attention_backward


# --- arguments -------------------------------------------------------------------------------------------------------


def _call(ctx: Ctx, tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> _Call:
    """Return the arguments, checked. Raises FallBack for any that the kernels do not take."""
    score, mask, scale, options, captured, mask_captured = rest
    if not all(isinstance(t, Tensor) and len(t.sizes) == 4 for t in tensors):
        raise FallBack("an operand that is no tensor of four dimensions")
    query, key, value = tensors
    if len({t.dtype for t in tensors}) != 1 or query.dtype not in LOW_PRECISION | {torch.float32}:
        raise FallBack(f"operands of {', '.join(sorted({str(t.dtype) for t in tensors}))}")
    if not isinstance(mask, tuple) or len(mask) not in _MASK_LENGTHS:
        raise FallBack("a block mask of another version of torch")
    if not isinstance(scale, (int, float)) or not isinstance(options, dict):
        raise FallBack("a scale or options that are not known while compiling")
    if options.get("BACKEND", "AUTO") == "FLASH":
        raise FallBack("the FLASH backend has other statistics")
    _check_sizes(query.sizes, key.sizes, value.sizes)
    score_graph, mask_graph = _graph(ctx, score), _graph(ctx, mask[-1])
    others = tuple(captured), tuple(mask_captured)
    return _Call(query, key, value, score_graph, mask_graph, mask, float(scale), options, *others)


def _graph(ctx: Ctx, x: object) -> GraphModule:
    gm = ctx.constants.get(x) if isinstance(x, Constant) else None
    if not isinstance(gm, GraphModule):
        raise FallBack("a function that was not traced")
    return gm


def _check_sizes(query: Sequence[ex.Index], key: Sequence[ex.Index], value: Sequence[ex.Index]) -> None:
    heads, key_heads, depths = query[1], key[1], (query[3], key[3], value[3])
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % max(key_heads, 1):
        raise FallBack("its numbers of heads are symbolic, or no multiples")
    if not all(isinstance(d, int) and 0 < d <= LARGEST_HEAD for d in depths) or depths[0] != depths[1]:
        raise FallBack("a head's size is symbolic, or larger than tiles can be")
    if key[:3] != value[:3] or key[0] not in (1, query[0]):
        raise FallBack("its operands have different batches")
    if any(ex.bounds(n)[0] < 1 for n in (query[0], query[2], key[2], *key[:2])):
        raise FallBack("a size may be 0")


def _view(ctx: Ctx, t: Tensor, argument: int) -> View:
    return ctx.view_of(t, ctx.traced(argument))


def _blocks(ctx: Ctx, call: _Call, first: int) -> tuple[Blocks, ...]:
    """Return the partial and full blocks of a mask; `first` is the position of the partial ones.

    No list means that all blocks are visited: one block of the size that torch takes for no block mask holds them all.
    """
    if all(isinstance(n, int) and n >= WHOLE for n in call.block_mask[-3:-1]):
        return ()
    out = []
    for k, masked in ((first, True), (first + 2, False)):
        counts, indices = call.block_mask[k : k + 2]
        if counts is None and indices is None and not masked:
            continue
        if not isinstance(counts, Tensor) or not isinstance(indices, Tensor):
            raise FallBack("a block mask without the blocks of its columns")
        integers = {counts.dtype, indices.dtype} <= {torch.int32, torch.int64}
        if not integers or len(counts.sizes) != 3 or counts.sizes != indices.sizes[:-1]:
            raise FallBack("a block mask of another form")
        for n, size in zip(counts.sizes[:2], call.query.sizes[:2], strict=True):
            if n not in (1, size):
                raise FallBack("a block mask for another number of batches or heads")
        out.append(Blocks(ctx.view_of(counts), ctx.view_of(indices), masked))
    return tuple(out)


def _inputs(captured: tuple[object, ...], *before: Tensor) -> list[object]:
    if any(not isinstance(x, (Tensor, int, ex.Expr)) or isinstance(x, bool) for x in captured):
        raise FallBack("a captured value that is neither a tensor nor an integer")
    return [*before, *captured]


def _scalar(x: object, dtype: torch.dtype) -> Value:
    """Return the one number of a score function's result, as memory would hold it, converted to `dtype`."""
    if (
        not isinstance(x, Tensor)
        or x.sizes
        or x.dtype == torch.float64
        or (dtype == torch.bool) != (x.dtype == torch.bool)
    ):
        raise FallBack("its score function does not return one number of a known kind")
    value = va.cast(x.rounded().value, dtype)
    for v in va.walk(value):
        if v.op.startswith("philox") or (v.op not in OPS and v.op not in _PLAIN):
            raise FallBack(f"its score function computes {v.op}")
    return value


# --- the calls -------------------------------------------------------------------------------------------------------


def _forward(ctx: Ctx, call: _Call, blocks: tuple[Blocks, ...]) -> Attention:
    captured = tuple(_in_memory(ctx, x) for x in call.captured)
    mask_captured = tuple(_in_memory(ctx, x) for x in call.mask_captured)
    score = trees_of(ctx, call.score, _inputs(captured, Tensor((), torch.float32, SCORE), *_POSITIONS), {})
    mask = trees_of(ctx, call.mask, _inputs(mask_captured, *_POSITIONS), {})
    sizes = call.block_mask[-3:-1]
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        raise FallBack("a block of symbolic size")
    options = {k: int(v) for k, v in call.options.items() if isinstance(v, int)}
    return Attention(
        _view(ctx, call.query, 0),
        _view(ctx, call.key, 1),
        _view(ctx, call.value, 2),
        (),
        _scalar(score[0], torch.float32),
        _scalar(mask[0], torch.bool),
        call.scale,
        blocks,
        sizes,
        None,
        options,
    )


def _in_memory(ctx: Ctx, x: object) -> object:
    """Return a captured tensor in memory, where the kernels read it."""
    return ctx.realize(x) if isinstance(x, Tensor) and x.value.op != "const" else x


def _emit(ctx: Ctx, form: Attention, call: _Call, mutated: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Emit the call and return its results, each over a buffer of its own."""
    fakes = [f for f in ctx.results if isinstance(f, torch.Tensor)]
    read = {u.args[1] for u in ctx.node.users if u.target is operator.getitem and u.users}
    buffers = [ctx.new_buffer(f.dtype, ctx.shape(f.shape), ctx.shape(f.stride())) for f in fakes]
    wanted = tuple(b.name if k in read else None for k, b in enumerate(buffers))
    form = replace(form, out=wanted)
    views = [form.query, form.key, form.value, *_views_of(form)]
    captured = dict.fromkeys(b for tree in form.trees for b, _ in va.loads(tree))
    whole = [View(b, ctx.buffers[b].sizes, ctx.buffers[b].strides) for b in captured]
    integers = [x for x in (*call.captured, *call.mask_captured) if isinstance(x, ex.Expr)]
    ctx.emit(
        Extern(
            wanted,
            form,
            (*views, *whole, *integers),
            multi=True,
            mutates=mutated,
            origins=ctx.origins(),
        )
    )
    reason = f"{len(form.blocks)} lists of blocks, {sum(va.flops(t) for t in form.trees)} operations for each score"
    ctx.decision(DecisionKind.LOWERING, ctx.node.name, "kernel", reason)
    return tuple(map(of_buffer, buffers))


def _views_of(form: Attention) -> list[View]:
    b = form.backward
    lists = [*form.blocks, *(b.blocks if b is not None else ())]
    views = [v for x in lists for v in (x.counts, x.indices)]
    return views if b is None else [*views, b.gradient, b.logsumexp, b.delta]


# --- gradients -------------------------------------------------------------------------------------------------------


def _delta(ctx: Ctx, out: Tensor, gradient: Tensor, by_logsumexp: Tensor | None) -> Tensor:
    """Return sum(out * gradient) of each row in float32, less the gradient of the row's logsumexp of base 2.

    The kernels subtract it from products of the gradient, which tensor cores round to TF32. Rounded alike, the errors
    of both cancel: emulated over 635 keys, gradients were off by 5.7e-4 of their norm, now 4.5e-4 (eager 3.8e-4).
    """
    factor = gradient.computed(torch.float32)
    if gradient.dtype == torch.float32 and torch_api.allows_tf32():
        factor = s.unary("to_tf32", factor)
    product = s.mul(out.computed(torch.float32), factor)
    rows = reduce(ctx, "sum", Tensor(out.sizes, torch.float32, product), (3,), torch.float32, torch.float32)
    total = drop_dims(rows, (3,), keepdim=False)
    if by_logsumexp is not None:
        value = s.sub(total.value, s.mul(by_logsumexp.computed(torch.float32), 1 / _LN2))
        total = Tensor(total.sizes, torch.float32, value)
    return ctx.realize(total)


def _joint(ctx: Ctx, call: _Call, joint: GraphModule) -> tuple[Value, list[Gradient | None]]:
    """Return the gradient by the scores, and for each captured value that of the tensor, or None."""
    captured = tuple(_in_memory(ctx, x) for x in call.captured)
    inputs = _inputs(captured, Tensor((), torch.float32, SCORE), *_POSITIONS, Tensor((), torch.float32, GRADIENT))
    scatters = dict.fromkeys(_scatters(), _scatter)
    by_score, *others = trees_of(ctx, joint, inputs, scatters)
    used = {
        u.args[1]
        for part in ctx.node.users
        if part.target is operator.getitem and part.args[1] == 3
        for u in part.users
        if u.target is operator.getitem and u.users
    }
    score = va.const(0.0, torch.float32) if by_score is None else _scalar(by_score, torch.float32)
    gradients: list[Gradient | None] = []
    for k, g in enumerate(others[4:]):
        if k not in used:
            gradients.append(None)
        elif isinstance(g, _Scattered):
            gradients.append(_gradient(ctx, g))
        else:
            raise FallBack("the gradient of a captured tensor that is not read by indices")
    return score, gradients


@dataclass(frozen=True)
class _Scattered:
    """A tensor of zeros of `sizes`, to which `value` is added at `index`."""

    sizes: tuple[ex.Index, ...]
    index: ex.Index
    value: Value
    dtype: torch.dtype


def _scatters() -> list[object]:
    packet = getattr(torch.ops.flex_lib, "zeros_and_scatter", None)
    return [] if packet is None else [packet.default]


def _scatter(inner: Ctx, shape: Sequence[int | torch.SymInt], indices: Sequence[object], values: Tensor) -> _Scattered:
    sizes = inner.shape(shape)
    points = [i for i in indices if isinstance(i, Tensor) and not i.sizes]
    if not len(points) == len(indices) == len(sizes) or values.sizes:
        raise FallBack("the gradient of a captured tensor that is read by slices")
    rule = IndexRule(from_end=True)
    at = [position(inner, i, (), n, rule) for i, n in zip(points, sizes, strict=True)]
    return _Scattered(sizes, ex.flatten(sizes, at), va.cast(values.value, torch.float32), values.dtype)


def _gradient(ctx: Ctx, g: _Scattered) -> Gradient:
    """Return a gradient that kernels add to a buffer of zeros in float32, also for 16-bit tensors."""
    if not ctx.gpu or torch.float32 not in ATOMIC["add"]:
        raise FallBack("gradients of captured tensors need atomic additions")
    if ctx.cfg.deterministic or torch.are_deterministic_algorithms_enabled():
        raise FallBack("the order of atomic additions varies from run to run")
    b = ctx.new_buffer(torch.float32, g.sizes, ex.strides_for(g.sizes))
    ctx.store(b, full(g.sizes, 0.0, torch.float32))
    return Gradient(View(b.name, b.sizes, b.strides), g.index, g.value)


def _captured_results(ctx: Ctx, gradients: list[Gradient | None]) -> tuple[Tensor | None, ...]:
    fakes: Any = ctx.results[3]
    out: list[Tensor | None] = []
    for g, fake in zip(gradients, fakes, strict=True):
        if g is None:
            out.append(None)
            continue
        summed = of_buffer(ctx.buffers[g.out.buffer])
        out.append(Tensor(summed.sizes, fake.dtype, va.cast(summed.value, fake.dtype)))
    return tuple(out)
