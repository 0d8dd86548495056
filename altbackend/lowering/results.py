"""The results of a graph: each has the strides that were traced and shares memory with the same results as traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..aten.mutates import is_write_back
from ..aten.view import storage_owner
from ..compat import torch_api
from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import Output, View
from ..ir.value import Value
from . import extern, negative
from .context import Ctx
from .facts import is_written
from .tensor import Tensor, as_view


def outputs(ctx: Ctx, node: torch.fx.Node) -> tuple[Output, ...]:
    """Return the results of the output node: views of buffers, numbers of the host program, constants.

    The output node's meta has the traced values in `fakes`. For results that share storage, `roots` has the name and
    the traced value of the node that owns it. `of_inputs` maps a result that AOTAutograd rebuilds from an input after
    the call to that input and the traced view.
    """
    flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
    fakes = node.meta.get("fakes") or tuple(n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in flat)
    taken: dict[str, torch.fx.Node] = {}
    rebuilt = {k: _in_input(ctx, base, fake) for k, (base, fake) in (node.meta.get("of_inputs") or {}).items()}
    flat = tuple(None if k in rebuilt else n for k, n in enumerate(flat))
    views = rebuilt | _shared_views(ctx, flat, fakes, node.meta.get("roots") or (None,) * len(flat), taken)
    return tuple(
        views[k] if k in views else _output(ctx, n, fake, taken)
        for k, (n, fake) in enumerate(zip(flat, fakes, strict=True))
    )


def _in_input(ctx: Ctx, base: torch.fx.Node, fake: torch.Tensor) -> View:
    """Return a view of an input; its offset is relative to the input, wherever that begins in its storage."""
    v = as_view(ctx.env[base])
    assert v is not None
    offset = ex.add(v.offset, ctx.index(fake.storage_offset() - base.meta["val"].storage_offset()))
    return View(v.buffer, ctx.shape(fake.shape), ctx.shape(fake.stride()), offset)


def _shared_views(
    ctx: Ctx, flat: Sequence[Any], fakes: Sequence[Any], roots: Sequence[Any], taken: dict[str, torch.fx.Node]
) -> dict[int, View]:
    """Return views for results that were traced as views of one value but are no longer.

    A pass may have changed the layout of the value, or no index map may express the view. The value is stored with the
    traced strides, and the results are views of it at the traced offsets.
    """
    shared: dict[torch.fx.Node, list[int]] = {}
    for k, (n, traced) in enumerate(zip(flat, roots, strict=True)):
        if traced is None or not isinstance(n, torch.fx.Node) or (root := storage_owner(n)).op != "call_function":
            continue
        if root.meta.get("root") == traced[0]:  # else a pass has computed the results from another value
            shared.setdefault(root, []).append(k)
    views: dict[int, View] = {}
    for root, numbers in shared.items():
        lowered = ctx.env[root]
        if len(numbers) < 2 or _written_back(root) or not isinstance(lowered, Tensor):
            continue
        stored = [_stored_view(ctx, flat[k], fakes[k]) for k in numbers]
        if all(strided for _, strided in stored) and len({v.buffer for v, _ in stored}) == 1:
            continue
        owner_fake: torch.Tensor = roots[numbers[0]][1]
        own, strided = _stored_view(ctx, root, owner_fake)
        if not strided or ctx.buffers[own.buffer].kind != "temp" or taken.get(own.buffer, root) is not root:
            own = _own_storage(ctx, root, lowered, ctx.shape(owner_fake.stride()), 0)
        taken[own.buffer] = root
        for k in numbers:
            views[k] = negative.with_bits(ctx, _subview(ctx, own, owner_fake, fakes[k]), fakes[k])
    return views


def _subview(ctx: Ctx, owner_view: View, owner_fake: torch.Tensor, fake: torch.Tensor) -> View:
    """Return the part of `owner_view` that the traced result `fake` is; its dtype may differ.

    `owner_fake`: the traced owner of the storage, whose strides `owner_view` has.
    """
    bytes_before = ex.mul(ex.sub(owner_view.offset, ctx.index(owner_fake.storage_offset())), owner_fake.dtype.itemsize)
    offset = ex.add(ex.floordiv(bytes_before, fake.dtype.itemsize), ctx.index(fake.storage_offset()))
    dtype = None if fake.dtype == owner_fake.dtype else fake.dtype
    return View(owner_view.buffer, ctx.shape(fake.shape), ctx.shape(fake.stride()), offset, dtype)


def _stored_view(ctx: Ctx, n: torch.fx.Node, fake: torch.Tensor) -> tuple[View, bool]:
    """Store a result and return its view, and whether the view has the traced strides."""
    ctx.graph_node = n
    traced_strides = ctx.shape(fake.stride())
    v = as_view(ctx.realize(ctx.env[n], fake), traced_strides)
    assert v is not None
    return v, all(a == b or ex.bounds(s)[1] <= 1 for a, b, s in zip(v.strides, traced_strides, v.sizes, strict=True))


def _output(ctx: Ctx, n: torch.fx.Node | Output, fake: object, taken: dict[str, torch.fx.Node]) -> Output:
    if not isinstance(n, torch.fx.Node):
        return n
    lowered = ctx.env[n]
    ctx.graph_node = n
    if isinstance(lowered, Value) and lowered in ctx.numbers:
        return ctx.numbers[lowered]
    if isinstance(lowered, Value):
        raise Unsupported(n, "a result that is a float computed from sizes")
    if not isinstance(lowered, Tensor) or not isinstance(fake, torch.Tensor):
        constant: Output = lowered
        return constant
    v, strided = _stored_view(ctx, n, fake)
    root = storage_owner(n)
    owner = taken.get(v.buffer)
    foreign = ctx.buffers[v.buffer].kind != "temp" and root.op == "call_function"
    if not strided and (input_view := _view_of_input(ctx, root, fake)) is not None:
        v = input_view
    elif foreign or (owner is not None and owner is not root) or not strided:
        offset = ctx.index(fake.storage_offset()) if _written_back(root) else 0
        v = _own_storage(ctx, n, lowered, ctx.shape(fake.stride()), offset)
    taken[v.buffer] = root
    v = negative.with_bit(ctx, v, fake)
    return View(v.buffer, v.sizes, v.strides, v.offset)


def _view_of_input(ctx: Ctx, root: torch.fx.Node, fake: torch.Tensor) -> View | None:
    """Return the traced view of an input that the graph does not write, or None if `fake` is no such view.

    AOTAutograd rebuilds such a result from the input, with the strides and offset of the returned view.
    """
    input_fake = root.meta.get("val")
    if root.op != "placeholder" or not isinstance(input_fake, torch.Tensor):
        return None
    if torch_api.storage_of(input_fake) != torch_api.storage_of(fake) or input_fake.dtype != fake.dtype:
        return None
    if (input_fake.is_neg(), input_fake.is_conj()) != (fake.is_neg(), fake.is_conj()):
        return None
    v = as_view(ctx.env[root])
    if v is None or is_written(root):
        return None
    offset = ex.add(v.offset, ctx.index(fake.storage_offset() - input_fake.storage_offset()))
    return View(v.buffer, ctx.shape(fake.shape), ctx.shape(fake.stride()), offset)


def _written_back(n: torch.fx.Node) -> bool:
    """Return whether the graph writes a node's value to an input; views of the value may then be views of the input."""
    return any(is_write_back(u) and u.args[1] is n for u in n.users)


def _own_storage(ctx: Ctx, n: torch.fx.Node, t: Tensor, strides: tuple[Index, ...], offset: Index) -> View:
    """Store a result in a buffer of its own with the traced strides, on which its readers rely, and return the view.

    The strides may leave gaps or let several points share an element; these were one element in the trace, so their
    values are equal. `offset`: the first element in the buffer. AOTAutograd takes a view with symbolic sizes of a
    written input at that offset.
    """
    if offset != 0:
        return extern.with_strides(ctx, t, strides, offset)
    fake = n.meta["val"]
    dense = ctx.strides_like(t.sizes, fake)
    if all(a == b or s == 1 for a, b, s in zip(dense, strides, t.sizes, strict=True)):
        v = as_view(ctx.realize(t, fake, fresh=True), strides)
        assert v is not None
        return v
    return extern.with_strides(ctx, t, strides)
