"""FX graph -> loop program, in one pass: a node is lowered by its registered function or as a library call."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..aten.mutates import is_write_back
from ..aten.view import passes_storage_on
from ..compat import torch_api
from ..config.options import Config
from ..debug.trace import DecisionKind
from ..errors import AltError, Unsupported, internal_error
from ..ir import expr as ex
from ..ir import value as va
from ..ir.loops import Buffer, Constant, Extern, HostNumber, Output, Program, without_dead
from ..ir.value import Value
from ..runtime import checks
from . import extern, gpu, host_numbers, in_place, negative, results, sizes, unbacked_symbols
from .context import Ctx, cpu_beside_gpu, target_name
from .facts import device_of
from .materialize import materialize_if_shared
from .operators import (
    activations,
    batch_norm,
    depthwise,
    flex_attention,
    grid_sampler,
    indexing,
    normalization,
    padding_backward,
    pointwise,
    pooling,
    pooling_backward,
    quantized,
    random,
    reduction,
    scatter,
    search,
    view,
)
from .registry import SUPPORTED_DTYPES, FallBack, lowering_of
from .tensor import Tensor, as_view, expand, of_buffer

# Importing these modules fills the registry.
_OPERATOR_MODULES = (
    activations,
    batch_norm,
    depthwise,
    flex_attention,
    grid_sampler,
    indexing,
    normalization,
    padding_backward,
    pointwise,
    pooling,
    pooling_backward,
    quantized,
    random,
    reduction,
    scatter,
    search,
    view,
)

# Names that the generated host program defines itself.
RESERVED = frozenset(
    [
        "P",
        "S",
        "V",
        "E",
        "ws",
        "args",
        "bind",
        "call",
        "check_error",
        "check_input",
        "const",
        "empty_cpu",
        "empty_large",
        "ensure_strides",
        "layout",
        "library",
        "num_threads",
        "spaces",
        "spare",
        "len",
        "threads",
        "torch",
        "view",
        "max",
        "min",
        "DEVICE",
        "abs",
        "bits_of",
        "bool",
        "failed",
        "indexed_size",
        "float",
        "int",
        "math",
        "position",
        "round",
        "slice_begin",
        "sum",
        "L",
        "aligned",
        "at",
        "c_void_p",
        "elsewhere",
        "get_device",
        "getattr",
        "idle",
        "raw_stream",
        "thread",
        "IndexError",
        "empty_cuda",
        "flag",
        "kernels",
        "on_device",
        "retyped",
        "stream",
        "t",
        "tables",
    ]
) | frozenset(keyword.kwlist)
_RESERVED_STARTS = ("buf", "const", "kernel", "number", "op_", "parts", "segment")


def lower_graph(
    gm: torch.fx.GraphModule,
    cfg: Config,
    decision: Callable[[DecisionKind, str, str, str], None] = lambda *a: None,
    on_gpu: bool | None = None,
) -> tuple[Program, dict[str, object]]:
    """Return the loop program of a functional ATen graph, and the constants (tensors, submodules) that it names.

    `on_gpu`: generate kernels for a GPU; by default, if the graph has tensors on one. Raises Unsupported for an
    operator that neither a lowering nor a library call can express.
    """
    device = device_of(gm)
    ctx = Ctx(cfg=cfg, device=device, decision=decision, gpu=device.type == "cuda" if on_gpu is None else on_gpu)
    outputs: tuple[Output, ...] = ()
    ctx.returned.update(torch.utils._pytree.tree_leaves(gm.graph.output_node().args))
    _define_input_symbols(ctx, gm)
    for node in gm.graph.nodes:
        ctx.graph_node = node
        match node.op:
            case "placeholder":
                ctx.bind(node, _placeholder(ctx, node))
            case "get_attr":
                ctx.bind(node, _constant(ctx, gm, node))
            case "call_function":
                if node not in ctx.env:  # a padding may have been stored with its operand
                    ctx.bind(node, _lowered(ctx, node))
            case "output":
                outputs = results.outputs(ctx, node)
            case _:
                raise Unsupported(node, f"{node.op} is not part of a functional graph")
    program = Program(ctx.buffers, tuple(ctx.inputs), tuple(ctx.nodes), outputs, tuple(ctx.computed.values()))
    program = without_dead(program)
    return program, _named(program, ctx.constants)


def _named(p: Program, constants: dict[str, object]) -> dict[str, object]:
    """Return the constants but for graphs that no call takes any more."""
    calls = [(n.args, n.kwargs) for n in p.nodes if isinstance(n, Extern)]
    taken = {str(a) for a in torch.utils._pytree.tree_leaves((calls, p.outputs)) if isinstance(a, Constant)}
    return {n: c for n, c in constants.items() if n in taken or not isinstance(c, torch.fx.GraphModule)}


def _define_input_symbols(ctx: Ctx, gm: torch.fx.GraphModule) -> None:
    """Define the symbols that inputs give, before any input is lowered: its size may use a symbol of a later input."""
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            symbolic: list[Any] = [n for n in val.shape if isinstance(n, torch.SymInt)]
            ctx.defined.update(str(n.node.expr) for n in symbolic if n.node.expr.is_Symbol)
        if not isinstance(val, torch.SymInt) or val.node.maybe_as_int() is not None:
            continue
        e = val.node.expr
        if e.is_Symbol:
            ctx.defined.add(str(e))
            continue
        try:
            sizes.to_index(val, ctx.shape_memo)
        except Unsupported:  # backward graphs take such an expression as an input
            ctx.shape_memo[e] = ex.sym(f"_{node.name}", *sizes.bounds(e, val.node.shape_env))


def _placeholder(ctx: Ctx, node: torch.fx.Node) -> object:
    val = node.meta.get("val")
    if node.meta.get("opaque"):
        ctx.inputs.append(node.name)
        return Opaque(node.name)
    # the generated host program uses input names as variables
    name = f"{node.name}_" if node.name in RESERVED or node.name.startswith(_RESERVED_STARTS) else node.name
    if isinstance(val, torch.Tensor):
        b = Buffer(name, val.dtype, ctx.shape(val.shape), ctx.shape(val.stride()), val.device, "input", val.is_neg())
        ctx.buffers[name] = b
        ctx.inputs.append(name)
        ctx.defined.update(map(ex.show, b.sizes))
        return of_buffer(b)
    if isinstance(val, torch.SymInt):
        index = ctx.index(val)
        name = ex.show(index)
        bare = not isinstance(index, int) and len(index.syms) == 1 and name == next(iter(index.syms)).key
        ctx.inputs.append(name if bare else f"_{node.name}")
        ctx.defined.add(ctx.inputs[-1])
        return index
    if not isinstance(val, _PRINTABLE):  # an object that only library calls and the caller understand
        ctx.inputs.append(name)
        return Opaque(name)
    ctx.inputs.append(f"_{node.name}")
    ctx.defined.add(ctx.inputs[-1])
    return ctx.real(ctx.inputs[-1]) if isinstance(val, torch.SymFloat) else val


def _constant(ctx: Ctx, gm: torch.fx.GraphModule, node: torch.fx.Node) -> object:
    constant: object = gm
    for part in str(node.target).split("."):
        constant = getattr(constant, part)
    name = f"const_{node.name}"
    ctx.constants[name] = constant
    if not isinstance(constant, torch.Tensor):
        return Constant(name)
    if constant.dim() == 0 and constant.device.type == "cpu" and constant.dtype in SUPPORTED_DTYPES:
        with torch_api.real_tensors():
            return Tensor((), constant.dtype, va.const(constant.item(), constant.dtype))
    b = Buffer(name, constant.dtype, tuple(constant.shape), tuple(constant.stride()), constant.device, "const")
    ctx.buffers[name] = b
    return of_buffer(b)


class Opaque(str):
    """The name of an input that only library calls understand (a weight in a library's own layout, a mesh)."""


# Values that the host program spells as text.
_PRINTABLE = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.SymFloat, torch.SymBool)


def _lowered(ctx: Ctx, node: torch.fx.Node) -> object:
    buffers_before = len(ctx.buffers)
    try:
        return materialize_if_shared(ctx, node, _call(ctx, node), buffers_before)
    except AltError:
        raise
    except Exception as cause:
        raise internal_error("lowering", node, cause) from cause


Arguments = tuple[tuple[Any, ...], Mapping[str, object]]  # lowered arguments of a call


def _call(ctx: Ctx, node: torch.fx.Node) -> object:
    args: tuple[Any, ...] = torch.fx.node.map_arg(node.args, lambda n: ctx.env[n])
    kwargs: Mapping[str, object] = torch.fx.node.map_arg(node.kwargs, lambda n: ctx.env[n])
    target = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return _scalar(ctx, node, args, kwargs)
    if is_write_back(node):
        args = (args[0], negative.value(args[1], node.args[1]))
        if _dtypes_ok(node) and not cpu_beside_gpu(ctx, node):
            return _copy_into(ctx, node, args[0], args[1])
        extern.call(ctx, node, args, dict(kwargs))
        return args[0]
    if target is torch.ops.aten.copy.default and _dtypes_ok(node):
        fake, source = node.meta["val"], negative.value(args[1], node.args[1])
        return Tensor(
            ctx.shape(fake.shape),
            fake.dtype,
            va.cast(expand(source, ctx.shape(fake.shape)).computed(source.dtype), fake.dtype),
        )
    call_args, call_kwargs = args, kwargs
    if not negative.is_negative(node):  # a node with the negative bit is a view of the content of memory
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: negative.value(ctx.env[n], n))
    if target in in_place.FUNCTIONAL:
        return _update(ctx, node, (call_args, call_kwargs), (args, kwargs))
    lowering = lowering_of(target)
    if lowering is not None and _dtypes_ok(node) and not _host_decides(ctx, node, (args, kwargs)):
        if (empty := _empty_result(ctx, node)) is not None:
            return empty
        try:
            result = gpu.expressible(ctx, lowering(ctx, *args, **kwargs))
            if not cpu_beside_gpu(ctx, node) or passes_storage_on(node) or _is_number(result):
                return result
        except FallBack as reason:
            ctx.decision(DecisionKind.LOWERING, node.name, "library call", str(reason))
        except TypeError as reason:
            if not any(isinstance(x, (Value, ex.Expr)) for x in torch.utils._pytree.tree_leaves((args, kwargs))):
                raise
            ctx.decision(
                DecisionKind.LOWERING, node.name, "library call", f"an argument is a symbolic number: {reason}"
            )
    return extern.call(ctx, node, call_args, dict(call_kwargs))


def _update(ctx: Ctx, node: torch.fx.Node, call: Arguments, arguments: Arguments) -> object:
    """Lower a call that writes its first argument in place: in kernels, else as a library call.

    `call`: the arguments as they are in memory. `arguments`: their values, without negative bits.
    """
    plain = not negative.is_negative(node) and not cpu_beside_gpu(ctx, node)
    if plain and _dtypes_ok(node) and not _host_decides(ctx, node, arguments):
        try:
            written = in_place.lower(ctx, node, arguments[0], arguments[1], _copy_into)
            if written is not None:
                return written
        except FallBack as reason:
            ctx.decision(DecisionKind.LOWERING, node.name, "library call", str(reason))
    return extern.call(ctx, node, call[0], dict(call[1]))


def _is_number(result: object) -> bool:
    return isinstance(result, Tensor) and not result.sizes and result.value.op == "const"


def _host_decides(ctx: Ctx, node: torch.fx.Node, tree: object) -> bool:
    """Return whether the size of the result depends on data, or an argument is a number of the host program."""
    host_number = any(isinstance(x, HostNumber) for x in torch.utils._pytree.tree_leaves(tree))
    if host_number or node.meta.get("unbacked_bindings"):
        ctx.decision(DecisionKind.LOWERING, node.name, "library call", "its size or an argument depends on data")
        return True
    return False


# Operators that check sizes and positions even if their result has no elements, and may raise.
_REFUSES_EMPTY = frozenset(
    f"{name}.{overload}"
    for name, overloads in {
        **dict.fromkeys(("index_put", "index_add", "index_copy", "index_reduce", "scatter_add"), ("default",)),
        **dict.fromkeys(("amax", "amin", "argmax", "argmin"), ("default",)),
        **dict.fromkeys(("max", "min"), ("dim",)),
        "index": ("Tensor",),
        "scatter": ("src", "value", "reduce", "value_reduce"),
        "scatter_reduce": ("two",),
    }.items()
    for overload in overloads
)


def _empty_result(ctx: Ctx, node: torch.fx.Node) -> Tensor | None:
    """Return the result if it has no elements, so that nothing is computed; else None."""
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor) or cpu_beside_gpu(ctx, node) or target_name(node.target) in _REFUSES_EMPTY:
        return None
    sizes = ctx.shape(fake.shape)
    return Tensor(sizes, fake.dtype, va.const(0, fake.dtype)) if 0 in sizes else None


def _dtypes_ok(node: torch.fx.Node) -> bool:
    vals = [n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")]
    flat = [v for val in vals for v in (val if isinstance(val, (tuple, list)) else (val,))]
    return all(v.dtype in SUPPORTED_DTYPES and v.layout == torch.strided for v in flat if isinstance(v, torch.Tensor))


def _scalar(ctx: Ctx, node: torch.fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> object:
    """Lower a call whose result is not a tensor: arithmetic on numbers, or a check."""
    val = node.meta.get("val")
    if node.target is torch.ops.aten._local_scalar_dense.default:
        return _item(ctx, node, args[0])
    if isinstance(val, (float, bool)):
        return val
    if unbacked_symbols.own_symbol(ctx, node) is not None:
        return extern.call(ctx, node, args, kwargs)
    if isinstance(val, (int, torch.SymInt)):
        return host_numbers.integer(ctx, node, args)
    if isinstance(val, (torch.SymBool, torch.SymFloat)):
        if (number := host_numbers.constant(val)) is not None:
            return number
        of_kind = host_numbers.real if isinstance(val, torch.SymFloat) else host_numbers.text
        return of_kind(ctx, node, args)
    if node.target is torch.ops.aten._assert_scalar.default:
        _assert_scalar(ctx, node, *args)
        return None
    if target_name(node.target) in _TRACED_CHECKS:
        return None
    return extern.call(ctx, node, args, dict(kwargs))


# Checks without code. The host program checks a number when the call that gives it returns (`unbacked_symbols`), and
# guards check tensors.
_TRACED_CHECKS = frozenset(
    ["sym_constrain_range.default", "sym_constrain_range_for_size.default", "_assert_tensor_metadata.default"]
)


def _assert_scalar(ctx: Ctx, node: torch.fx.Node, holds: object, message: str = "") -> None:
    """Emit a check of numbers, in order with other calls that have effects, unless an earlier check implies it."""
    text = host_numbers.operand(ctx, node, holds)
    if holds is not True and not unbacked_symbols.is_verified(ctx, node.args[0]):
        ctx.emit(Extern((None,), checks.require, (HostNumber(text), message), origins=ctx.origins()))


def _item(ctx: Ctx, node: torch.fx.Node, x: Tensor) -> object:
    """Return the number in a tensor of one element: an index expression for an integer, else a scalar for kernels."""
    number = extern.call(ctx, node, (x,), {})
    if not isinstance(number, HostNumber) or x.dtype == torch.bool:
        return number
    value = va.cast(x.at([0] * len(x.sizes)), torch.float64)
    ctx.numbers[value] = number
    return value


def _copy_into(ctx: Ctx, node: torch.fx.Node, into: Tensor, source: Tensor) -> Tensor:
    """Emit the write-back of a mutated input, in place in the caller's storage."""
    v = as_view(into)
    if v is None:
        raise Unsupported(node, "writes to a tensor that is not a view of an input")
    b = ctx.buffers[v.buffer]
    value = Tensor(into.sizes, into.dtype, va.cast(expand(source, into.sizes).computed(source.dtype), into.dtype))
    unchanged = (source.sizes, source.dtype, as_view(source)) == (into.sizes, into.dtype, None)
    plain = value
    value = negated = negative.value(plain, node.args[0])
    source_view = as_view(value)
    if source_view is not None and source_view == v:
        return into
    if _overlaps(value, v.buffer) or (not ctx.gpu and va.may_raise(value.value)):  # eager writes nothing after an error
        value = ctx.realize(value, fresh=True)
        computed = node.args[1]
        if isinstance(computed, torch.fx.Node) and unchanged and negated is plain:
            ctx.bind(computed, value)  # later readers take it from there, too
    ctx.before_write(v.buffer)
    ctx.store(Buffer(b.name, b.dtype, v.sizes, v.strides, b.device), value, offset=v.offset)
    return into


def _overlaps(value: Tensor, buffer: str) -> bool:
    """Return whether `value` reads `buffer`, so that a loop that writes it could read elements it has replaced."""
    return any(b == buffer for b, _ in va.loads(value.value))
