"""Library calls: an operator without a lowering runs as ATen's own kernel on buffers in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..aten.name import operator_of
from ..aten.view import declares_alias
from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import Buffer, Constant, Extern, HostNumber, View
from ..ir.value import Value
from ..runtime import control_flow
from ..runtime import ops as runtime_ops
from . import negative, unbacked_symbols
from .context import Ctx, cpu_beside_gpu
from .facts import in_an_input
from .registry import SUPPORTED_DTYPES
from .subgraphs import operands_in_results
from .tensor import Tensor, as_view, of_buffer, points, same_strides

# Operators whose out-variant computes directly into the buffer that it is given.
_OUT: dict[object, torch._ops.OpOverload | None] = {
    operator_of(f"{n}.default"): operator_of(f"{n}.out") for n in ("mm", "bmm", "addmm", "baddbmm", "_int_mm")
}
_SCALAR = operator_of("scalar_tensor.default")
_AS_STRIDED_SCATTER = operator_of("as_strided_scatter.default")
_REPLACED = {_AS_STRIDED_SCATTER: runtime_ops.as_strided_scatter, **control_flow.FUNCTIONS}
_FUNCTIONALISED = torch.ops.higher_order.auto_functionalized_v2
# Operators whose result does not depend on the strides of their arguments.
_ANY_STRIDES = frozenset(_OUT)

# Arguments that the host program spells as text.
_HAS_TEXT = (
    *(int, float, complex, str, bytes, slice, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch._ops.OpOverload, torch._ops.HigherOrderOperator, torch.SymFloat, torch.SymBool),
)


def call(ctx: Ctx, node: torch.fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Emit the library call of an FX node and return its results as tensors over new buffers.

    Raises Unsupported for an argument that the host program cannot compute.
    """
    target = node.target
    if target is _AS_STRIDED_SCATTER:
        args = _offset_from_tensor(ctx, node, *args, **kwargs)
        kwargs = {}
    exact = target not in _ANY_STRIDES
    sources = {id(a): n for a, n in _tensor_args(args, kwargs, node)}

    def leaf(x: object) -> object:
        if isinstance(x, Tensor):
            if not x.sizes and x.value.op == "const" and cpu_beside_gpu(ctx, node):
                return _number_on_cpu(ctx, x)
            source = sources.get(id(x))
            fake = source.meta.get("val") if source is not None else None
            v = argument_view(ctx, x, fake, exact)
            return negative.with_bit(ctx, v, fake) if isinstance(fake, torch.Tensor) else v
        if isinstance(x, (torch.SymInt, ex.Expr)):
            return ctx.index(x)
        if isinstance(x, Value) and x in ctx.numbers:
            return ctx.numbers[x]
        if isinstance(x, Value):
            raise Unsupported(node, "a library call on a float computed from sizes")
        if not isinstance(x, _HAS_TEXT):  # an object that only the operator understands
            name = f"const_{node.name}_{len(ctx.constants)}"
            ctx.constants[name] = x
            return Constant(name)
        return x

    converted = tuple(_map(a, leaf) for a in args)
    named = tuple((k, _map(v, leaf)) for k, v in kwargs.items())
    mutated = _mutated(target, converted, named)
    for name in mutated:
        ctx.before_write(name)
    val = node.meta.get("val")
    results = _Results(ctx, node, unbacked_symbols.of_call(ctx, node))
    # an operator with subgraphs is replaced in the argument form that all versions of torch share
    in_shared_form = target in control_flow.FUNCTIONS and not kwargs
    runs = target if target in control_flow.FUNCTIONS and not in_shared_form else _REPLACED.get(target, target)
    lowered = _map(val, results.add)
    aliases = operands_in_results(ctx, converted) if in_shared_form else _aliased(target, converted, named)
    results.symbols.bind(results.outs)
    ctx.emit(
        Extern(
            outs=tuple(results.outs),
            target=runs,
            args=converted,
            kwargs=named,
            multi=isinstance(val, (tuple, list)),
            lists=_lists(val) if isinstance(val, (tuple, list)) else (),
            out_variant=_OUT.get(target),
            mutates=mutated,
            aliases=aliases,
            defines=tuple(dict.fromkeys([*results.defines, *results.symbols.names()])),
            binds=tuple(results.symbols.binds),
            requires=tuple(results.symbols.requires),
            origins=ctx.origins(),
        )
    )
    views = aliases and not in_shared_form and not mutated
    if (
        views
        and in_an_input(node, written=True)
        and any(ctx.buffers[b].kind == "input" for b in _alias_closure(ctx, aliases))
    ):
        lowered = _map(lowered, lambda t: _copied(ctx, t))
    return tuple(lowered) if isinstance(val, list) else lowered


def _alias_closure(ctx: Ctx, names: tuple[str, ...]) -> set[str]:
    """Return the named buffers and all buffers of which they are views."""
    aliases_of = {o: n.aliases for n in ctx.nodes if isinstance(n, Extern) for o in n.outs if o}
    closure: set[str] = set()
    stack = [*names]
    while stack:
        b = stack.pop()
        if b not in closure:
            closure.add(b)
            stack.extend(aliases_of.get(b, ()))
    return closure


def _copied(ctx: Ctx, t: object) -> object:
    """Return a copy of a view that a call has made of an input which the graph writes.

    The view has another buffer name than the input, so dependences would not order a read of it before the write.
    """
    if not isinstance(t, Tensor) or t.dtype not in SUPPORTED_DTYPES:  # no kernel reads such a dtype
        return t
    v = as_view(t)
    assert v is not None
    viewed = ctx.buffers[v.buffer]
    b = ctx.new_buffer(t.dtype, v.sizes, v.strides, viewed.device)
    ctx.emit(Extern((b.name,), runtime_ops.strided_copy, (v, v.strides), origins=ctx.origins()))
    return negative.negated(of_buffer(b)) if viewed.negative else of_buffer(b)


def window(ctx: Ctx, source: View, part: View, dtype: torch.dtype) -> Tensor:
    """Emit a call that takes the view `part`, whose offset counts from the first element of `source`.

    The call raises an error if the view reaches beyond the storage of `source`.
    """
    b = ctx.new_buffer(dtype, part.sizes, part.strides)
    args = (source, part.sizes, part.strides, part.offset)
    ctx.emit(Extern((b.name,), runtime_ops.as_strided, args, aliases=(source.buffer,), origins=ctx.origins()))
    return of_buffer(b)


def _offset_from_tensor(
    ctx: Ctx, node: torch.fx.Node, x: Tensor, src: Tensor, size: object, stride: object, storage_offset: object = None
) -> tuple[object, ...]:
    """Return the arguments of `runtime.ops.as_strided_scatter`, with the offset from the first element of the tensor.

    No guard fixes the position of an input in its storage, so the offset of an input stays as it is.
    """
    base = node.args[0]
    assert isinstance(base, torch.fx.Node)
    if storage_offset is None or in_an_input(base):
        return x, src, size, stride, storage_offset, True
    return x, src, size, stride, ex.sub(ctx.index(storage_offset), ctx.index(base.meta["val"].storage_offset())), False


class _Results:
    """The results of one call as they are added: their buffer names, and the symbols that they define."""

    def __init__(self, ctx: Ctx, node: torch.fx.Node, symbols: unbacked_symbols.CallSymbols) -> None:
        self.ctx = ctx
        self.node = node
        self.symbols = symbols
        self.outs: list[str | None] = []
        self.defines: list[str] = []

    def add(self, r: object) -> object:
        """Return a result as a tensor over a new buffer or as a number of the host program; others unchanged."""
        ctx = self.ctx
        if isinstance(r, torch.Tensor):
            b = ctx.new_buffer(
                r.dtype, ctx.shape(r.shape), ctx.shape(r.stride()), r.device, r.is_neg() and not r.is_complex()
            )
            self.outs.append(b.name)
            return of_buffer(b)
        name = self.symbols.numbers.get(len(self.outs))
        if isinstance(r, torch.SymInt):
            self.outs.append(name)
            return ctx.index(r)
        if isinstance(r, (torch.SymFloat, torch.SymBool)):
            self.outs.append(name or f"number_{self.node.name}_{len(self.outs)}")
            ctx.defined.add(str(self.outs[-1]))
            self.defines.append(str(self.outs[-1]))
            return HostNumber(str(self.outs[-1]))
        self.outs.append(name)
        return r


def _lists(results: tuple[object, ...] | list[object]) -> tuple[tuple[int, int], ...]:
    """Return (position, length) of each list among the results; positions count flattened results."""
    result: list[tuple[int, int]] = []
    begin = 0
    for r in results:
        count = len(r) if isinstance(r, (tuple, list)) else 1
        if isinstance(r, (tuple, list)):
            result.append((begin, count))
        begin += count
    return tuple(result)


def _number_on_cpu(ctx: Ctx, t: Tensor) -> View:
    b = ctx.new_buffer(t.dtype, (), (), torch.device("cpu"))
    ctx.emit(Extern((b.name,), _SCALAR, (t.value.attr,), (("dtype", t.dtype),), origins=ctx.origins()))
    return View(b.name, (), ())


def argument_view(ctx: Ctx, t: Tensor, fake: torch.Tensor | None, exact: bool) -> View:
    """Return `t` as a view for a library call.

    `exact`: with the strides of the traced `fake`, because the strides of the results may depend on them.
    """
    v = ctx.view_of(t, fake)
    if fake is None or not exact or len(fake.shape) != len(t.sizes):
        return v
    traced_strides = ctx.shape(fake.stride())
    if same_strides(v.strides, traced_strides, t.sizes):
        return v
    expanded = any(step == 0 and size != 1 for step, size in zip(traced_strides, t.sizes, strict=True))
    if ctx.cfg.numerics == "eager" or expanded or _is_not_dense(traced_strides, t.sizes):
        return with_strides(ctx, t, traced_strides)
    fresh = ctx.realize(t, fake, fresh=True)
    out = as_view(fresh, traced_strides)
    assert out is not None
    return out


def with_strides(ctx: Ctx, t: Tensor, strides: tuple[Index, ...], offset: Index = 0) -> View:
    """Store `t` with `strides` and return the view; eager's loops, and so the last bits of results, depend on strides.

    Strides may leave gaps. They may let several points share an element; these were one element in the trace, so their
    values are equal. `offset`: the number of free elements before the first. The gap behind the last row is allocated
    too, since a library may load whole vectors.
    """
    stored_sizes = tuple(1 if step == 0 else size for size, step in zip(t.sizes, strides, strict=True))
    loose = _is_not_dense(strides, stored_sizes)
    if offset == 0 and not loose:
        b = strided = ctx.new_buffer(t.dtype, stored_sizes, strides)
    else:
        extent = ex.add(1, offset, *(ex.mul(ex.sub(n, 1), step) for n, step in zip(stored_sizes, strides, strict=True)))
        if loose:
            whole = (ex.mul(n, step) for n, step in zip(stored_sizes, strides, strict=True))
            extent = functools.reduce(ex.maximum, (ex.add(offset, span) for span in whole), extent)
        b = ctx.new_buffer(t.dtype, (ex.maximum(extent, 0),), (1,))
        strided = Buffer(b.name, b.dtype, stored_sizes, strides, b.device)
    ctx.store(strided, Tensor(stored_sizes, t.dtype, t.at(points(stored_sizes))), offset=offset)
    return View(b.name, t.sizes, strides, offset)


def _is_not_dense(strides: tuple[Index, ...], sizes: tuple[Index, ...]) -> bool:
    """Return whether static strides leave gaps or let points share an element; False for symbolic ones."""
    static_pairs = [
        (step, n) for step, n in zip(strides, sizes, strict=True) if isinstance(step, int) and isinstance(n, int)
    ]
    if len(static_pairs) < len(sizes) or any(n == 0 for _, n in static_pairs):
        return False
    expected = 1
    for step, n in sorted(pair for pair in static_pairs if pair[1] != 1):
        if step != expected:
            return True
        expected *= n
    return False


def _tensor_args(args: object, kwargs: Mapping[str, object], node: torch.fx.Node) -> list[tuple[Tensor, torch.fx.Node]]:
    """Return pairs of a lowered tensor and its FX node, over both argument trees."""
    pairs: list[tuple[Tensor, torch.fx.Node]] = []

    def visit(x: object, n: Any) -> None:
        if isinstance(n, torch.fx.Node):
            if isinstance(x, Tensor):
                pairs.append((x, n))
        elif isinstance(x, (tuple, list)):
            for a, b in zip(x, n, strict=False):
                visit(a, b)

    visit(args, node.args)
    for k, v in kwargs.items():
        visit(v, node.kwargs[k])
    return pairs


def _map(x: object, leaf: Callable[[object], object]) -> Any:
    if isinstance(x, tuple):
        return tuple(_map(y, leaf) for y in x)
    if isinstance(x, list):
        return [_map(y, leaf) for y in x]
    return {k: _map(v, leaf) for k, v in x.items()} if isinstance(x, dict) else leaf(x)


def _schema_args(
    target: object, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]
) -> list[tuple[torch._C.Argument, object]]:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    named = dict(kwargs)
    return [(a, args[k] if k < len(args) else named.get(a.name)) for k, a in enumerate(schema.arguments)]


def _buffers(x: object) -> list[str]:
    if isinstance(x, View):
        return [x.buffer]
    return [b for y in x for b in _buffers(y)] if isinstance(x, (tuple, list)) else []


def _mutated(target: object, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]) -> tuple[str, ...]:
    if target is _FUNCTIONALISED:  # it copies all its bases but those that re-inplacing has chosen
        named = dict(kwargs)
        copied = named.get("_only_clone_these_bases")
        bases = named.get("_all_bases")
        if not isinstance(copied, (tuple, list)) or not isinstance(bases, (tuple, list)):
            return ()
        return tuple(_buffers([b for k, b in enumerate(bases) if k not in copied]))
    return tuple(
        b for a, x in _schema_args(target, args, kwargs) if a.alias_info and a.alias_info.is_write for b in _buffers(x)
    )


def _aliased(target: object, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]) -> tuple[str, ...]:
    """Return the buffers with which the results may share storage, by the alias annotations of the schema."""
    if not declares_alias(target):
        return ()
    return tuple(b for a, x in _schema_args(target, args, kwargs) if a.alias_info for b in _buffers(x))
