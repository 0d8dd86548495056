"""What a graph returns: in the layouts that were traced, and sharing memory as they did then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..compat import torch_api
from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import View
from ..ir.value import Value
from . import extern, negative
from .aliases import alias_root
from .context import Ctx
from .tensor import Tensor, as_view


def outputs(ctx: Ctx, node: torch.fx.Node) -> tuple[Any, ...]:
    """What the output node returns: views of buffers, numbers of the host, constants.

    Its meta holds the values that were traced, in `fakes`, and of those that share storage the name and the value of
    the node whose storage it is, in `roots`. `of_inputs`: per result that is made again of an input, when the graph has
    run, that input and the value as a view of it.
    """
    flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
    fakes = node.meta.get("fakes") or tuple(n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in flat)
    taken: dict[str, torch.fx.Node] = {}
    placed = {k: _in_input(ctx, base, fake) for k, (base, fake) in (node.meta.get("of_inputs") or {}).items()}
    flat = tuple(None if k in placed else n for k, n in enumerate(flat))
    together = placed | _together(ctx, flat, fakes, node.meta.get("roots") or (None,) * len(flat), taken)
    return tuple(
        together[k] if k in together else _output(ctx, n, fake, taken)
        for k, (n, fake) in enumerate(zip(flat, fakes, strict=True))
    )


def _in_input(ctx: Ctx, base: torch.fx.Node, fake: torch.Tensor) -> View:
    """Where a view of an input is, whatever place the input has in its storage."""
    v = as_view(ctx.env[base])
    assert v is not None
    offset = ex.add(v.offset, ctx.index(fake.storage_offset() - base.meta["val"].storage_offset()))
    return View(v.buffer, ctx.shape(fake.shape), ctx.shape(fake.stride()), offset)


def _together(
    ctx: Ctx, flat: Sequence[Any], fakes: Sequence[Any], roots: Sequence[Any], taken: dict[str, torch.fx.Node]
) -> dict[int, View]:
    """Results that were traced as views of one value but are not: it lies otherwise now, or no index says so.

    The value gets storage as it was traced, and they are views of this, at the places at which they were traced.
    """
    shared: dict[torch.fx.Node, list[int]] = {}
    for k, (n, traced) in enumerate(zip(flat, roots, strict=True)):
        if traced is None or not isinstance(n, torch.fx.Node) or (root := alias_root(n)).op != "call_function":
            continue
        if root.meta.get("root") == traced[0]:  # else a pass made the results otherwise
            shared.setdefault(root, []).append(k)
    found: dict[int, View] = {}
    for root, numbers in shared.items():
        held = ctx.env[root]
        if len(numbers) < 2 or _written_back(root) or not isinstance(held, Tensor):
            continue
        places = [_stands(ctx, flat[k], fakes[k]) for k in numbers]
        if all(strided for _, strided in places) and len({v.buffer for v, _ in places}) == 1:
            continue
        whole: torch.Tensor = roots[numbers[0]][1]
        own, strided = _stands(ctx, root, whole)
        if not strided or ctx.buffers[own.buffer].kind != "temp" or taken.get(own.buffer, root) is not root:
            own = _own_storage(ctx, root, held, ctx.shape(whole.stride()), 0)
        taken[own.buffer] = root
        for k in numbers:
            found[k] = negative.with_bits(ctx, _part(ctx, own, whole, fakes[k]), fakes[k])
    return found


def _part(ctx: Ctx, own: View, whole: torch.Tensor, fake: torch.Tensor) -> View:
    """The window on `own`, which lies as `whole` was traced, that a result is; it may read another dtype."""
    mine, theirs = whole.dtype.itemsize, fake.dtype.itemsize
    before = ex.mul(ex.sub(own.offset, ctx.index(whole.storage_offset())), mine)
    offset = ex.add(ex.floordiv(before, theirs), ctx.index(fake.storage_offset()))
    dtype = None if fake.dtype == whole.dtype else fake.dtype
    return View(own.buffer, ctx.shape(fake.shape), ctx.shape(fake.stride()), offset, dtype)


def _stands(ctx: Ctx, n: torch.fx.Node, fake: torch.Tensor) -> tuple[View, bool]:
    """Where a result is, and whether its strides there are those that were traced."""
    ctx.graph_node = n
    wanted = ctx.shape(fake.stride())
    v = as_view(ctx.realize(ctx.env[n], fake), wanted)
    assert v is not None
    return v, all(a == b or ex.bounds(s)[1] <= 1 for a, b, s in zip(v.strides, wanted, v.sizes, strict=True))


def _output(ctx: Ctx, n: Any, fake: Any, taken: dict[str, torch.fx.Node]) -> Any:
    if not isinstance(n, torch.fx.Node):
        return n
    held = ctx.env[n]
    ctx.graph_node = n
    if isinstance(held, Value) and held in ctx.numbers:
        return ctx.numbers[held]
    if isinstance(held, Value):
        raise Unsupported(n, "a result that is a float computed from sizes")
    if not isinstance(held, Tensor) or not isinstance(fake, torch.Tensor):
        return held
    v, strided = _stands(ctx, n, fake)
    root = alias_root(n)
    owner = taken.get(v.buffer)
    foreign = ctx.buffers[v.buffer].kind != "temp" and root.op == "call_function"
    if not strided and (same := _of_input(ctx, root, fake)) is not None:
        v = same
    elif foreign or (owner is not None and owner is not root) or not strided:
        offset = ctx.index(fake.storage_offset()) if _written_back(root) else 0
        v = _own_storage(ctx, n, held, ctx.shape(fake.stride()), offset)
    taken[v.buffer] = root
    v = negative.with_bit(ctx, v, fake)
    return View(v.buffer, v.sizes, v.strides, v.offset)


def _of_input(ctx: Ctx, root: torch.fx.Node, fake: torch.Tensor) -> View | None:
    """A result that was traced as a view of an input which the graph does not write, at the place that was traced.

    AOTAutograd makes such a result again from the input, by the strides and the place of what it is given.
    """
    whole = root.meta.get("val")
    if root.op != "placeholder" or not isinstance(whole, torch.Tensor):
        return None
    if torch_api.storage_of(whole) != torch_api.storage_of(fake) or whole.dtype != fake.dtype:
        return None
    if (whole.is_neg(), whole.is_conj()) != (fake.is_neg(), fake.is_conj()):
        return None
    v = as_view(ctx.env[root])
    if v is None or any(u.target is torch.ops.aten.copy_.default and u.args[0] is root for u in root.users):
        return None
    offset = ex.add(v.offset, ctx.index(fake.storage_offset() - whole.storage_offset()))
    return View(v.buffer, ctx.shape(fake.shape), ctx.shape(fake.stride()), offset)


def _written_back(n: torch.fx.Node) -> bool:
    """Whether a node's value is what an input holds afterwards, so that views of it may be views of that input."""
    return any(u.target is torch.ops.aten.copy_.default and u.args[1] is n for u in n.users)


def _own_storage(ctx: Ctx, n: torch.fx.Node, held: Tensor, wanted: tuple[Index, ...], offset: Index) -> View:
    """A result written into a buffer of its own with the strides that tracing saw, which its readers count on.

    With gaps and with points that share an element: these were one element when traced, so they are equal. `offset`:
    where it begins in the buffer. AOTAutograd cuts a view with symbolic sizes from a written input at that place.
    """
    if offset != 0:
        return extern.with_strides(ctx, held, wanted, offset)
    fake = n.meta["val"]
    dense = ctx.strides_like(held.sizes, fake)
    if all(a == b or s == 1 for a, b, s in zip(dense, wanted, held.sizes, strict=True)):
        v = as_view(ctx.realize(held, fake, fresh=True), wanted)
        assert v is not None
        return v
    return extern.with_strides(ctx, held, wanted)
