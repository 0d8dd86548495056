"""Print the arguments of library calls as C++: for a function of torch's stable ABI, or for the dispatcher's stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch

from ...compat.stable_abi import type_name
from ...errors import Unsupported
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import Constant, Extern, HostNumber, View, views
from ...lowering.graph import Opaque
from ..cpp import print_cpp
from ..lines import Lines
from .cpp_numbers import Types, real, tensor, translate
from .launch_plan import LaunchPlan

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name if name != "bool" else "bool_"
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
        *("uint64", "bool", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
NOTHING: Mapping[View, str] = MappingProxyType({})
_LAYOUTS = {torch.strided: "strided", torch.sparse_coo: "sparse_coo", torch.sparse_csr: "sparse_csr"}
_FORMATS = {
    torch.contiguous_format: "contiguous_format",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
    torch.preserve_format: "preserve_format",
}


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype as C++. Raise Unsupported for one that the stable ABI does not have."""
    if dtype not in DTYPES:
        raise Unsupported(None, f"a tensor of {dtype} in an ahead-of-time library")
    return f"Dtype::{DTYPES[dtype]}"


def ints(xs: Sequence[Index]) -> str:
    """Return indices as a C++ list of 64-bit integers."""
    return "{" + ", ".join(int64(x) for x in xs) + "}"


def int64(x: Index) -> str:
    """Return an index as a 64-bit integer."""
    return f"{x}LL" if isinstance(x, int) else f"int64_t({print_cpp.index(x)})"


def quoted(text: str) -> str:
    """Return a C++ string literal, in ASCII: other bytes and controls are octal."""
    octal = (chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode())
    return '"' + "".join(octal) + '"'


def named(s: Extern) -> str:
    """Return the operator of a call and the user's line, for messages."""
    line = next((o.line for o in s.origins if o.line), "")
    return f"{s.target}" + (f" ({line})" if line else "")


class Values:
    """Prints the values of one call into the lines of its block.

    `types`: those of the numbers of the program. `view_handles`: the handles of views that the program holds already.
    """

    def __init__(
        self, planned: LaunchPlan, w: Lines, types: Types, call: Extern, view_handles: Mapping[View, str] = NOTHING
    ) -> None:
        self.planned, self.w, self.types, self.call, self.view_handles = planned, w, types, call, view_handles
        self.counter = 0

    def refuse(self, what: str) -> Unsupported:
        """Return the error for a value without a C++ form; it names the operator and the user's line."""
        return Unsupported(named(self.call), f"{what} in an ahead-of-time library")

    def local(self, declaration: str) -> str:
        """Print the declaration of a local, in which `@` is its name; return the name."""
        name = f"a{self.counter}"
        self.counter += 1
        self.w.add(declaration.replace("@", name))
        return name

    # --- leaves ------------------------------------------------------------------------------------------------------

    def handle(self, x: object) -> str:
        """Return the handle of a tensor argument."""
        if isinstance(x, Opaque):
            return tensor(str(x))
        if isinstance(x, (bool, int, float)) and self.promotes(x):
            kind = "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float"
            return self.local(f"const Tensor @ = scalar({self.number(x, kind)});") + ".get()"
        if not isinstance(x, View):
            raise self.refuse(f"the argument {x!r} as a tensor")
        if x in self.planned.locations.windows:
            return f"ws->views[{self.planned.locations.windows[x]}].get()"
        if x in self.view_handles:
            return self.view_handles[x]
        text = view_text(self.planned, x)
        return tensor(x.buffer) if text is None else self.local(f"const Tensor @ = {text};") + ".get()"

    def promotes(self, x: float) -> bool:
        """Return whether a tensor of one number gives the result's dtype that the number itself would give.

        Another argument must have dimensions and a dtype of the number's category or above.
        """
        buffers = self.planned.program.buffers
        dtypes = [v.dtype or buffers[v.buffer].dtype for v in views(self.call) if v.sizes]
        if isinstance(x, float):
            return any(d.is_floating_point or d.is_complex for d in dtypes)
        return any(d != torch.bool or isinstance(x, bool) for d in dtypes)

    def number(self, x: object, kind: str) -> str:
        """Return a number as C++ of the type "int", "float" or "bool"."""
        ctype = {"int": "int64_t", "float": "double", "bool": "bool"}[kind]
        if isinstance(x, HostNumber):
            return f"{ctype}({translate(str(x), self.types)[0]})"
        if isinstance(x, ex.Expr):
            return f"{ctype}({print_cpp.index(x)})"
        if isinstance(x, (bool, int)):
            return f"{ctype}({int(x)}{'LL' if abs(x) > 2**31 - 1 else ''})"
        if isinstance(x, float) and kind != "int":
            return f"{ctype}({real(x)})"
        raise self.refuse(f"the argument {x!r} of type {kind}")

    def enum(self, x: object, kind: str) -> str:
        """Return a dtype, layout or memory format as the code that torch's own function gives."""
        if kind == "ScalarType" and isinstance(x, torch.dtype):
            return f"code({dtype_text(x)})"
        if kind == "ScalarType" and isinstance(x, int):  # a default of the schema, as torch's number
            return f"int32_t({x})"
        if kind == "Layout" and x in _LAYOUTS:
            return f"aoti_torch_layout_{_LAYOUTS[x]}()"
        if kind == "MemoryFormat" and x in _FORMATS:
            return f"aoti_torch_memory_format_{_FORMATS[x]}()"
        raise self.refuse(f"the argument {x!r} of type {kind}")

    def device(self, x: object) -> tuple[str, str]:
        """Return the codes of a device: its type and its index."""
        device = torch.device(x) if isinstance(x, (torch.device, str)) else None
        if device is not None and device.type == "cpu":
            return "aoti_torch_device_type_cpu()", "0"
        own = {b.device for b in self.planned.program.buffers.values() if b.device.type == "cuda"}
        if device is not None and device.type == "cuda" and own <= {device, torch.device("cuda", device.index or 0)}:
            return "gpu_type()", "frame.device"
        raise self.refuse(f"the device {x}")

    # --- the dispatcher's stack --------------------------------------------------------------------------------------

    def on_stack(self, x: Any, t: torch._C.JitType) -> str:
        """Return a value of a schema's type as the dispatcher takes it."""
        match t.kind():
            case "OptionalType":
                return "nothing()" if x is None else f"some({self.on_stack(x, t.getElementType())})"
            case "ListType":
                repeated = [x] if isinstance(x, (int, float)) else x
                return "list({" + ", ".join(self.on_stack(y, t.getElementType()) for y in repeated) + "})"
        name = type_name(t)
        match name:
            case "Tensor":
                return f"on_stack({self.handle(x)})"
            case "int" | "float" | "bool":
                return f"on_stack({self.number(x, name)})"
            case "ScalarType" | "Layout" | "MemoryFormat":
                return f"code_on_stack({self.enum(x, name)})"
            case "str" if isinstance(x, str) and not isinstance(x, (HostNumber, Constant, Opaque)):
                return f"on_stack({quoted(x)})"
            case "Device":
                return f"device_on_stack({', '.join(self.device(x))})"
        raise self.refuse(f"an argument of type {name}, which torch's stable interface does not pass,")

    # --- parameters of a function of the stable ABI ------------------------------------------------------------------

    def parameters(self, x: Any, t: str) -> list[str]:
        """Return the C parameters of a value of a schema's type."""
        if t == "Device":
            return list(self.device(x))
        if t == "Optional[Device]":
            if x is None:
                return ["nullptr", "0"]
            kind, index = self.device(x)
            return ["&" + self.local(f"int32_t @ = {kind};"), index]
        if t.startswith("Optional[List["):
            if x is None:
                return ["nullptr", "0"]
            items, count = self.parameters(x, t[len("Optional[") : -1])
            return ["&" + self.local(f"const auto* @ = {items};"), count]
        if t.startswith("Optional["):
            return ["nullptr"] if x is None else ["&" + self.stored(x, t[len("Optional[") : -1])]
        if t.startswith("List["):
            return self.items([x] if isinstance(x, (int, float)) else x, t[len("List[") : -1])
        return [self.plain(x, t)]

    def plain(self, x: Any, t: str) -> str:
        """Return one C parameter."""
        scalar: dict[str, Callable[[], str]] = {
            "Tensor": lambda: self.handle(x),
            "int": lambda: self.number(x, "int"),
            "float": lambda: self.number(x, "float"),
            "number": lambda: self.number(x, "float"),
            "bool": lambda: f"int32_t({self.number(x, 'bool')})",
            "str": lambda: quoted(x),
        }
        return scalar[t]() if t in scalar else self.enum(x, t)

    def stored(self, x: object, t: str) -> str:
        """Print a local that holds a value, and return its name."""
        return self.local(f"{_LOCALS.get(t, 'int32_t')} @ = {self.plain(x, t)};")

    def items(self, xs: Sequence[object], t: str) -> list[str]:
        """Print an array of the values, and return it with its length."""
        if not xs:
            return ["nullptr", "0"]
        if t.startswith("Optional["):
            inner = t[len("Optional[") : -1]
            stored = ["nullptr" if x is None else "&" + self.stored(x, inner) for x in xs]
            ctype = "const " + _LOCALS.get(inner, "int32_t") + "*"
            return [self.local(f"{ctype} @[] = {{{', '.join(stored)}}};"), str(len(xs))]
        values = [self.plain(x, t) for x in xs]
        return [self.local(f"{_LOCALS.get(t, 'int32_t')} @[] = {{{', '.join(values)}}};"), str(len(xs))]


_LOCALS = {"Tensor": "Handle", "int": "int64_t", "float": "double", "number": "double", "str": "const char*"}


def view_text(planned: LaunchPlan, v: View) -> str | None:
    """Return the C++ text that makes a view of a buffer; None if it is the buffer itself."""
    b = planned.program.buffers[v.buffer]
    if v.dtype not in (None, b.dtype):
        assert v.dtype is not None
        geometry = f"{ints(v.sizes)}, {ints(v.strides)}, {int64(v.offset)}"
        return f"retyped({tensor(v.buffer)}, {dtype_text(v.dtype)}, {geometry})"
    same = all(s == t or n == 1 for n, s, t in zip(v.sizes, v.strides, b.strides, strict=False))
    if v.sizes == b.sizes and same and v.offset == 0:
        return None
    return f"view({tensor(v.buffer)}, {ints(v.sizes)}, {ints(v.strides)}, {int64(v.offset)})"


def hoisted_views(planned: LaunchPlan, s: Extern, wanted: Set[View]) -> dict[View, str]:
    """Return those views of a call that are in `wanted`, with the C++ texts that make them."""
    taken = [v for v in dict.fromkeys(views(s)) if v in wanted and v not in planned.locations.windows]
    texts = {v: view_text(planned, v) for v in taken}
    return {v: text for v, text in texts.items() if text is not None}
