"""The functions of torch's stable C ABI that compute an operator: their declarations, read from torch's headers.

A library calls such a function directly. Other operators go through the dispatcher, and so do those whose declaration
does not match their schema as expected here. The dispatcher takes no argument of the schema's type `Scalar`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

from altbackend.lazy_dataclass import dataclass

TARGET = (2, 11)  # libraries run under this version of torch and all later ones
TARGET_FLAG = "-DTORCH_TARGET_VERSION=0x020b000000000000"
INCLUDE = Path(torch.__file__).parent / "include"
LIBRARIES = Path(torch.__file__).parent / "lib"
_HEADERS = ("generated/c_shim_cpu.h", "c/shim_cpu.h", "generated/c_shim_aten.h", "generated/c_shim_cuda.h")
_CPU = ("aoti_torch_cpu_", "aoti_torch_cpu_mkldnn_", "aoti_torch_aten_")
_CUDA = ("aoti_torch_cuda_", "aoti_torch_aten_")
_DECLARATION = re.compile(r"AOTI_TORCH_EXPORT\s+AOTITorchError\s+(aoti_torch_\w+)\s*\(([^;]*)\)\s*;")
_GATE = re.compile(r"#if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_0(.*?)#endif", re.DOTALL)

# C parameters of an argument, by the type in the schema. Names in C++ text: `*` optional, `[]` list.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "Tensor": ("AtenTensorHandle",),
    "Optional[Tensor]": ("AtenTensorHandle*",),
    "List[Tensor]": ("const AtenTensorHandle*", "int64_t"),
    "List[Optional[Tensor]]": ("const AtenTensorHandle**", "int64_t"),
    "int": ("int64_t",),
    "Optional[int]": ("int64_t*",),
    "List[int]": ("const int64_t*", "int64_t"),
    "Optional[List[int]]": ("const int64_t**", "int64_t"),
    "number": ("double",),
    "Optional[number]": ("double*",),
    "List[Optional[number]]": ("const double**", "int64_t"),
    "float": ("double",),
    "Optional[float]": ("double*",),
    "List[float]": ("const double*", "int64_t"),
    "Optional[List[float]]": ("const double**", "int64_t"),
    "bool": ("int32_t",),
    "Optional[bool]": ("int32_t*",),
    "List[bool]": ("const int32_t*", "int64_t"),
    "str": ("const char*",),
    "Optional[str]": ("const char**",),
    "ScalarType": ("int32_t",),
    "Optional[ScalarType]": ("int32_t*",),
    "Layout": ("int32_t",),
    "Optional[Layout]": ("int32_t*",),
    "MemoryFormat": ("int32_t",),
    "Optional[MemoryFormat]": ("int32_t*",),
    "Device": ("int32_t", "int32_t"),
    "Optional[Device]": ("int32_t*", "int32_t"),
    "Optional[Generator]": ("AtenGeneratorHandle*",),
}
_RESULTS = {"Tensor": "AtenTensorHandle*"}


def type_name(t: torch._C.JitType) -> str:
    """Return the name of a schema type as the tables here spell it."""
    match t.kind():
        case "OptionalType":
            return f"Optional[{type_name(t.getElementType())}]"
        case "ListType":
            return f"List[{type_name(t.getElementType())}]"
        case kind:
            return str(_NAMES.get(kind, kind))


_NAMES = {
    "TensorType": "Tensor",
    "IntType": "int",
    "SymIntType": "int",
    "FloatType": "float",
    "SymFloatType": "float",
    "BoolType": "bool",
    "SymBoolType": "bool",
    "NumberType": "number",
    "StringType": "str",
    "ScalarTypeType": "ScalarType",
    "LayoutType": "Layout",
    "LayoutKind": "Layout",
    "MemoryFormatType": "MemoryFormat",
    "DeviceObjType": "Device",
    "GeneratorType": "Generator",
}


def argument_type(argument: torch._C.Argument) -> str:
    """Return the type of a schema's argument or result, where dtypes and layouts are no integers."""
    return type_name(argument.real_type)


@dataclass(frozen=True)
class Shim:
    """A function of the stable ABI: its name and its parameter types, out-parameters of results last."""

    name: str
    parameters: tuple[str, ...]

    @property
    def declaration(self) -> str:
        """Return the C++ declaration. A function for GPUs is looked up in its first call: not every torch has it."""
        if self.name.startswith(_CUDA[0]):
            names = [f"a{k}" for k in range(len(self.parameters))]
            typed = ", ".join(f"{t} {a}" for t, a in zip(self.parameters, names, strict=True))
            stem = self.name.removeprefix(_CUDA[0])
            pointer = f"alt::aot::gpu_function<AOTITorchError (*)({', '.join(self.parameters)})>"
            name = f'"aoti_torch_" ALT_TEXT(ALT_GPU) "_{stem}"'
            body = f"static const auto f = {pointer}({name}); return f({', '.join(names)});"
            return f"static AOTITorchError {self.name}({typed}) {{ {body} }}"
        return f'extern "C" AOTITorchError {self.name}({", ".join(self.parameters)});'


@functools.cache
def _declared() -> dict[str, tuple[str, ...]]:
    """Return the parameter types of every declared function that torch `TARGET` has."""
    functions: dict[str, tuple[str, ...]] = {}
    for header in _HEADERS:
        path = INCLUDE / "torch/csrc/inductor/aoti_torch" / header
        text = path.read_text() if path.exists() else ""
        text = _GATE.sub(lambda m: m[3] if (int(m[1]), int(m[2])) <= TARGET else "", text)
        for name, parameters in _DECLARATION.findall(text):
            functions[name] = tuple(_type_of(p) for p in parameters.split(",") if p.strip())
    return functions


def _type_of(parameter: str) -> str:
    """Return the type of a C parameter, without its name."""
    words = re.sub(r"\s*\*\s*", "* ", " ".join(parameter.split())).replace("* *", "**").split()
    return " ".join(words[:-1])


def shim_of(op: torch._ops.OpOverload, on_gpu: bool = False) -> Shim | None:
    """Return the function that computes an operator on a CPU or GPU, if its declaration is the one expected."""
    schema = op._schema
    base = schema.name.split("::")[1]
    stem = base if op._overloadname == "default" else f"{base}_{op._overloadname}"
    expected = _expected(schema, first_out=op._overloadname == "out")
    if expected is None:
        return None
    if base.endswith("_") and op._overloadname != "default":  # the mark of writing in place comes last
        stem = f"{base[:-1]}_{op._overloadname}_"
    for prefix in _CUDA if on_gpu else _CPU:
        name = prefix + stem
        declared = _declared().get(name)
        if declared == expected and (prefix != "aoti_torch_cpu_mkldnn_" or schema.name.startswith("mkldnn::")):
            return Shim(name, expected)
    return None


def _expected(schema: torch._C.FunctionSchema, first_out: bool) -> tuple[str, ...] | None:
    """Return the parameter types that follow from a schema; None if one of its types has no C form."""
    arguments = [a for a in schema.arguments if not a.is_out]
    outs = [a for a in schema.arguments if a.is_out] if first_out else []
    names = [argument_type(a) for a in (*outs, *arguments)]
    results = [] if outs else [argument_type(r) for r in schema.returns]
    if any(n not in _PARAMETERS for n in names) or any(r not in _RESULTS for r in results):
        return None
    return (*(p for n in names for p in _PARAMETERS[n]), *(_RESULTS[r] for r in results))
