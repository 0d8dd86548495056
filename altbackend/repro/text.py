"""A functional graph as a Python program that rebuilds it, with inputs of the same geometry.

The program defines `OPTIONS`, `JOB`, `inputs(make)` and `Graph`, which `altbackend.repro.rebuild` reads. Run as a
script, it compiles the graph, compares a call with eager, and prints the verdict.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import _custom_builtins
from torch.utils._sympy.printers import PythonPrinter

from ..compat import aot_autograd, torch_api
from ..config.options import DEFAULTS, SPECS, Config

LARGEST_CONSTANT = 64  # elements of the largest constant that is written by value; a larger one gets random content
# options that name output folders or the reaction to failures, and do not affect the compiled code
_NOT_WRITTEN = frozenset(["strict", "repro", "debug_dir", "cache_dir", "cache_key_file", "cache_url", "log"])

HEAD = '''"""{title}

{notes}Run it:    python {file}
Shrink it: python -m altbackend minify {file}
"""

{imports}

OPTIONS = {options}
JOB = {job}


def inputs(make):
{inputs}


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
{constants}
{code}

if __name__ == "__main__":
    from altbackend.minify.trial import main

    raise SystemExit(main(__file__))
'''


class NotWritable(Exception):
    """Raised for a graph that holds something without a text form; the message says what."""


def text_of(
    gm: GraphModule, cfg: Config, job: Mapping[str, object], title: str, file: str, modules: Sequence[str] = ()
) -> str:
    """Return the program for a graph whose nodes carry traced values. `modules` are imported first. Raise NotWritable.

    Inputs, and constants of more than `LARGEST_CONSTANT` elements, become random numbers with a fixed seed. Varying
    sizes keep their symbols, with the value that tracing saw.
    """
    printed = gm.graph.python_code("self", verbose=True, include_stride=True)
    written = HEAD.format(
        title=_docstring(title),
        file=file,
        notes=_notes(cfg),
        imports="\n".join([*_imports(printed.globals, printed.src), *(f"import {m}" for m in modules)]),
        options=repr(_options(cfg)),
        job=repr(dict(job)),
        inputs=_inputs(gm),
        constants="\n".join(f"        {line}" for line in _constants(gm)),
        code="\n".join(_without_releases(f"    {line}".rstrip() for line in printed.src.splitlines())),
    )
    try:
        compile(written, file, "exec")
    except SyntaxError as cause:
        raise NotWritable(f"line {cause.lineno}, {(cause.text or '').strip()!r}, is not Python") from None
    return written


def _docstring(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''").rstrip('"')


def _notes(cfg: Config) -> str:
    passes = [name for name, spec in SPECS.items() if spec.is_pass and getattr(cfg, name)]
    return f"Not in this file: the passes given as {', '.join(passes)}.\n\n" if passes else ""


def _options(cfg: Config) -> dict[str, object]:
    values = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in _NOT_WRITTEN}
    return {name: v for name, v in values.items() if v != DEFAULTS[name] and not SPECS[name].is_pass}


def _without_releases(lines: Iterable[str]) -> list[str]:
    """Return the lines without the `;  x = None` that release values, and without blank lines at both ends."""
    named = [line for line in lines if "# No stacktrace found" not in line]
    cleaned = [re.sub(r";\s+(\w+ = )+None(\s+#.*)?$", r"\2", line) for line in named]
    return "\n".join(cleaned).strip("\n").split("\n")


def _imports(names: Mapping[str, object], source: str) -> list[str]:
    lines = {"import torch"}
    for name, value in names.items():
        if not re.search(rf"\b{name}\b", source):
            continue
        if name in _custom_builtins:
            lines.add(_custom_builtins[name].import_str)
            continue
        module, attribute = getattr(value, "__module__", ""), getattr(value, "__name__", "")
        if getattr(sys.modules.get(module), attribute, None) is not value or importlib.util.find_spec(module) is None:
            raise NotWritable(f"{value!r} cannot be imported by name")
        lines.add(f"from {module} import {attribute} as {name}")
    return sorted(lines, key=lambda line: (line.startswith("from"), line))


# --- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(gm: GraphModule) -> str:
    nodes = gm.graph.find_nodes(op="placeholder")
    values = [n.meta.get("val") for n in nodes]
    sizes = [f"    {name} = make.size({hint})" for name, hint in symbols(values).items()]
    rows = [f"        {_input(n, v)},  # {n.name}" for n, v in zip(nodes, values, strict=True)]
    return "\n".join([*sizes, "    return [", *rows, "    ]"])


def _input(n: Node, x: object) -> str:
    if isinstance(x, torch.Tensor):
        return f"make.tensor({geometry(x)}{n.meta.get('content', '')})"
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(x)
    if x is None or isinstance(x, (bool, int, float)):
        return repr(x) if x == x and abs(x or 0) != float("inf") else f"float({str(x)!r})"
    raise NotWritable(f"the input {n.name} is of type {type(x).__name__}")


def symbols(values: Sequence[object]) -> dict[str, int]:
    """Return the symbols in traced values, with the value that tracing saw or one in their range."""
    hints: dict[str, int] = {}
    for number in (n for value in values for n in numbers_of(value)):
        for s in sorted(number.node.expr.free_symbols, key=str):
            hints[str(s)] = aot_autograd.traced_size(number.node.shape_env, s)
    return hints


def numbers_of(x: object) -> list[torch.SymInt | torch.SymFloat | torch.SymBool]:
    """Return the symbolic numbers of an input."""
    numbers = (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) and x.layout == torch.strided else (x,)
    return [n for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool))]


def geometry(x: torch.Tensor) -> str:
    """Return shape, strides, dtype and device as text of arguments."""
    if type(x) is not torch.Tensor and not torch_api.is_fake(x) and not isinstance(x, torch.nn.Parameter):
        raise NotWritable(f"a tensor of type {type(x).__name__}")
    if x.layout != torch.strided or x.is_conj() or x.is_neg():
        raise NotWritable("a tensor that is sparse, conjugate or negated")
    return f"{_numbers(x.shape)}, {_numbers(x.stride())}, {x.dtype}, {str(x.device)!r}"


def _numbers(items: Sequence[object]) -> str:
    return "(" + "".join(f"{_number(n)}, " for n in items).removesuffix(" " if len(items) == 1 else ", ") + ")"


def _number(n: object) -> str:
    return PythonPrinter().doprint(n.node.expr) if hasattr(n, "node") else repr(n)


# --- constants -------------------------------------------------------------------------------------------------------


def _constants(gm: GraphModule) -> list[str]:
    names = sorted({str(n.target) for n in gm.graph.find_nodes(op="get_attr")})
    return [f"self.{name} = {_constant(name, getattr(gm, name, None))}" for name in names]


def _constant(name: str, value: object) -> str:
    if not isinstance(value, torch.Tensor):
        raise NotWritable(f"the constant {name} is of type {type(value).__name__}")
    geometry_text = geometry(value)
    if value.numel() > LARGEST_CONSTANT or torch_api.is_fake(value) or value.dtype not in _EXACT:
        return f"constant({geometry_text})"
    with torch_api.real_tensors(), torch.no_grad():
        content = value.detach().cpu().tolist()
    text = re.sub(r"\b(inf|nan)\b", r"float('\1')", repr(content))
    return f"constant({geometry_text}, {text})"


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT = frozenset([*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64])
