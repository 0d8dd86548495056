"""Print a library call as C++: a function of torch's stable ABI where there is one, else the dispatcher."""

from __future__ import annotations

import types
from collections.abc import Callable, MutableMapping, Set
from dataclasses import field

import torch

from altbackend.lazy_dataclass import dataclass

from ...compat.stable_abi import Shim, argument_type, shim_of
from ...errors import Unsupported
from ...ir.loops import Extern, HostNumber, View, views
from ...runtime import checks, philox
from ...runtime import ops as runtime_ops
from ..lines import Lines
from .cpp_numbers import CTYPES, Kind, translate
from .cpp_values import Values, dtype_text, int64, ints, named, quoted
from .launch_plan import LaunchPlan, full_view

Given = list[tuple[torch._C.Argument, object]]  # each argument of a schema with its value


_ITEM = torch.ops.aten._local_scalar_dense.default
_ITEM_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}


@dataclass
class Calls:
    """The library calls of a program: the functions that they need, and the types of the numbers that they give.

    `view_handles`: the handles of views of inputs that several calls read.
    """

    planned: LaunchPlan
    types: MutableMapping[str, Kind]
    shims: dict[str, Shim] = field(default_factory=dict)
    view_handles: dict[View, str] = field(default_factory=dict)

    def declarations(self) -> list[str]:
        """Return the declarations of the called functions, in a fixed order."""
        return [self.shims[name].declaration for name in sorted(self.shims)]

    def print(self, w: Lines, s: Extern, target: object) -> None:
        """Print the call with its results in variables that are declared before. Raise Unsupported with its name."""
        values = Values(self.planned, w, self.types, s, self.view_handles)
        if target is _ITEM:
            self._item(w, values, s)
        elif isinstance(target, torch._ops.OpOverload):
            self._operator(w, values, s, target)
        elif isinstance(target, types.FunctionType) and target in _OWN:
            _OWN[target](w, values, s)
        else:
            raise values.refuse(f"`{getattr(target, '__name__', target)}`, which runs Python,")

    def _operator(self, w: Lines, values: Values, s: Extern, op: torch._ops.OpOverload) -> None:
        given = _arguments(self.planned, s, op)
        devices = devices_of(self.planned, s)
        shim = shim_of(op, on_gpu="cuda" in devices) if len(devices) < 2 else None
        if shim is not None and not any(_changes_type(self.planned, s, a, x) for a, x in given):
            self.shims[shim.name] = shim
            self._shim(w, values, s, shim, given)
        else:
            _dispatched(w, values, s, op, given, self.types)

    def _shim(self, w: Lines, values: Values, s: Extern, shim: Shim, given: Given) -> None:
        first = [x for x in given if x[0].is_out]
        ordered = [*first, *(x for x in given if not x[0].is_out)]
        parameters = [text for a, x in ordered for text in values.parameters(x, argument_type(a))]
        results = [] if first else [f"t_{o}.out()" if o else None for o in s.outs]
        unused = [r if r is not None else values.local("Tensor @;") + ".out()" for r in results]
        w.add(f"check({shim.name}({', '.join([*parameters, *unused])}), {quoted(s.target._schema.name)});")

    def _item(self, w: Lines, values: Values, s: Extern) -> None:
        (source,) = s.args
        name = s.outs[0]
        dtype = source.dtype or self.planned.program.buffers[source.buffer].dtype
        if dtype not in _ITEM_TYPES:
            raise values.refuse(f"the number of a tensor of {dtype}")
        read = str(dtype).removeprefix("torch.")
        if name is not None:
            kind: Kind = "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"
            self.types[name] = kind
            w.add(f"{name} = item<{_ITEM_TYPES[dtype]}>({values.handle(source)}, aoti_torch_item_{read});")


def _changes_type(planned: LaunchPlan, s: Extern, argument: torch._C.Argument, x: object) -> bool:
    """Return whether a function of the stable ABI, whose numbers are all doubles, would see another number.

    An integer beside tensors of integers decides the dtype of a result.
    """
    if isinstance(x, complex):
        return True
    if not argument_type(argument).endswith(("number", "number]")) or x is None or isinstance(x, float):
        return False
    buffers = planned.program.buffers
    dtypes = [v.dtype or buffers[v.buffer].dtype for v in views(s)]
    exact = isinstance(x, int) and abs(x) <= 2**53
    return not exact or not all(d.is_floating_point or d.is_complex for d in dtypes)


def devices_of(planned: LaunchPlan, s: Extern) -> set[str]:
    """Return the types of devices on which a call's tensors lie."""
    buffers = planned.program.buffers
    names = [*(v.buffer for v in views(s)), *(o for o in s.outs if o in buffers and o is not None)]
    return {buffers[b].device.type for b in names}


def result_kinds(s: Extern) -> dict[str, Kind]:
    """Return the numbers that a call gives, with their types as far as the operator's schema says them."""
    kinds: dict[str, Kind] = dict.fromkeys(s.defines, "int")
    if isinstance(s.target, torch._ops.OpOverload) and s.target is not _ITEM and not s.lists:
        for o, r in zip(s.outs, s.target._schema.returns, strict=False):
            if o in kinds and argument_type(r) in ("float", "bool"):
                kinds[o] = "float" if argument_type(r) == "float" else "bool"
    return kinds


def _arguments(planned: LaunchPlan, s: Extern, op: torch._ops.OpOverload) -> Given:
    """Return every argument of the schema with its value, defaults included, in order."""
    named_values, pairs = dict(s.kwargs), Given()
    position = 0
    for a in op._schema.arguments:
        if a.is_out and op is s.out_variant:
            assert s.outs[0] is not None
            pairs.append((a, full_view(planned.program, s.outs[0])))
        elif a.name in named_values:
            pairs.append((a, named_values[a.name]))
        elif not a.kwarg_only and position < len(s.args):
            pairs.append((a, s.args[position]))
            position += 1
        elif a.has_default_value():
            pairs.append((a, a.default_value))
        else:
            raise Unsupported(named(s), f"the call lacks the argument {a.name}")
    return pairs


def _dispatched(
    w: Lines,
    values: Values,
    s: Extern,
    op: torch._ops.OpOverload,
    given: Given,
    kinds: MutableMapping[str, Kind],
) -> None:
    """Print a call through the dispatcher; its results lie on the stack."""
    stack = [values.on_stack(x, a.real_type) for a, x in given]
    returns = op._schema.returns
    result_types = [argument_type(r) for r in returns]
    if result_types != result_types[::-1]:  # torch_call_dispatcher reads the types of results in reverse order
        raise values.refuse(f"results of the types {', '.join(result_types)}")
    room = [*stack, *["0"] * max(0, len(returns) - len(stack))] or ["0"]
    name = values.local(f"StableIValue @[] = {{{', '.join(room)}}};")
    overload = "" if op._overloadname == "default" else op._overloadname
    w.add(f"call({quoted(op._schema.name)}, {quoted(overload)}, {name});")
    names = list(s.outs)
    for k, r in enumerate(returns):
        kind = argument_type(r)
        item = f"{name}[{k}]"
        if kind == "List[Tensor]":
            count = len(names) if len(returns) == 1 else next(n for at, n in s.lists if at == len(s.outs) - len(names))
            tensors = values.local(f"std::vector<Tensor> @ = tensors_from({item});")
            for j, o in enumerate(names[:count]):
                if o is not None:
                    w.add(f"t_{o} = std::move({tensors}.at({j}));")
            del names[:count]
            continue
        o = names.pop(0) if names else None
        match kind:
            case "Tensor" | "Optional[Tensor]":
                convert = "tensor_from" if kind == "Tensor" else "optional_tensor_from"
                target = f"t_{o}" if o is not None else values.local("Tensor @;")
                w.add(f"{target} = {convert}({item});")
            case "int" | "float" | "bool":
                if o is not None:
                    w.add(f"{o} = from_stack<{CTYPES[kinds.get(o, 'int')]}>({item});")
            case _:
                raise values.refuse(f"a result of type {kind}")


# --- functions of this package's runtime -----------------------------------------------------------------------------


def _as_strided(w: Lines, values: Values, s: Extern) -> None:
    source, sizes, strides, offset = s.args
    w.add(f"t_{s.outs[0]} = as_strided({values.handle(source)}, {ints(sizes)}, {ints(strides)}, {int64(offset)});")


def _strided_copy(w: Lines, values: Values, s: Extern) -> None:
    source, strides = s.args
    w.add(f"t_{s.outs[0]} = strided_copy({values.handle(source)}, {ints(strides)});")


def _require(w: Lines, values: Values, s: Extern) -> None:
    holds, message = s.args
    text = translate(str(holds), values.types)[0] if isinstance(holds, HostNumber) else str(bool(holds)).lower()
    check = "require_index" if s.target is checks.require_index else "require"
    w.add(f"py::{check}({text}, {quoted(str(message))});")


def _seeds(w: Lines, values: Values, s: Extern) -> None:
    """Print the draw of the seeds of random numbers, two integers each, by the operator that Python calls."""
    count, device = s.args
    place = ", ".join(values.device(device))
    arguments = f"on_stack(INT64_MIN), on_stack(INT64_MAX), list({{on_stack(int64_t({count})), on_stack(int64_t(2))}})"
    more = f"some(code_on_stack(code(Dtype::int64))), nothing(), some(device_on_stack({place})), nothing()"
    w.add(f"StableIValue drawn[] = {{{arguments}, {more}}};")
    w.add('call("aten::randint", "low", drawn);')
    w.add("const Tensor seeds = tensor_from(drawn[0]);")
    for k, o in enumerate(s.outs):
        if o is not None:
            w.add(f"t_{o} = view(seeds.get(), {{2}}, {{1}}, {2 * k});")


_OWN: dict[Callable[..., object], Callable[[Lines, Values, Extern], None]] = {
    philox.philox_seeds: _seeds,
    runtime_ops.as_strided: _as_strided,
    runtime_ops.strided_copy: _strided_copy,
    checks.require: _require,
    checks.require_index: _require,
}


def check_results(w: Lines, planned: LaunchPlan, s: Extern, used: Set[str], foreign: bool) -> None:
    """Print the checks of those results that are used: sizes as traced, and the strides that kernels expect."""
    p = planned.program
    for o in s.outs:
        if o is None or o not in p.buffers or o not in used:
            continue
        b = p.buffers[o]
        geometry = f"{ints(b.sizes)}, {ints(b.strides)}"
        name = quoted(str(s.target))
        if foreign:
            w.add(f"t_{o} = promised(std::move(t_{o}), {name}, {dtype_text(b.dtype)}, {geometry});")
        elif b.sizes and not s.aliases:  # a view has the traced strides, and must stay a view
            w.add(f"t_{o} = with_strides(std::move(t_{o}), {name}, {geometry});")


def unbacked_numbers(s: Extern, kinds: MutableMapping[str, Kind]) -> list[str]:
    """Return the lines that compute the numbers a call defines, and that check what later code relies on."""
    lines = [f"{name} = {translate(text, {**kinds, **_buffers(s)})[0]};" for name, text in s.binds]
    for condition, message in s.requires:
        lines.append(f"py::require({translate(condition, kinds)[0]}, {quoted(message)});")
    return lines


def _buffers(s: Extern) -> dict[str, Kind]:
    return {o: "tensor" for o in s.outs if o is not None and o not in s.defines}
