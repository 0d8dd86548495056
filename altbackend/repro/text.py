"""A functional graph as a Python program that builds it again, with inputs of the same geometry.

The program defines `OPTIONS`, `JOB`, `inputs(make)` and `Graph`, which `altbackend.repro.rebuild` reads, and runs
itself: it compiles the graph, compares a call with eager and prints what it finds.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import _custom_builtins
from torch.utils._sympy.printers import PythonPrinter

from ..compat import aot_autograd, torch_api
from ..config.options import DEFAULTS, SPECS, Config

LARGEST_CONSTANT = 64  # elements of a constant that is written out; a larger one gets random content
# options that say where something is written, or what happens at a failure, and not what is compiled
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
    """The graph holds something that has no text form; says what."""


def text_of(
    gm: GraphModule, cfg: Config, job: Mapping[str, Any], title: str, file: str, modules: Sequence[str] = ()
) -> str:
    """The program for a graph whose nodes carry traced values. `modules` are imported first. Raises NotWritable.

    Inputs and constants of more than `LARGEST_CONSTANT` elements become random numbers of a fixed seed; sizes that
    vary keep their symbols, with the value that tracing saw.
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
        raise NotWritable(f"line {cause.lineno}, {(cause.text or '').strip()!r}, is no Python") from None
    return written


def _docstring(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''").rstrip('"')


def _notes(cfg: Config) -> str:
    given = [name for name, spec in SPECS.items() if spec.is_pass and getattr(cfg, name)]
    return f"Not in this file: the passes given as {', '.join(given)}.\n\n" if given else ""


def _options(cfg: Config) -> dict[str, Any]:
    held = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in _NOT_WRITTEN}
    return {name: v for name, v in held.items() if v != DEFAULTS[name] and not SPECS[name].is_pass}


def _without_releases(lines: Any) -> list[str]:
    """Drops the `;  x = None` by which printed graphs let go of values, and the empty lines at both ends."""
    named = [line for line in lines if "# No stacktrace found" not in line]
    cleaned = [re.sub(r";\s+(\w+ = )+None(\s+#.*)?$", r"\2", line) for line in named]
    return "\n".join(cleaned).strip("\n").split("\n")


def _imports(names: Mapping[str, Any], source: str) -> list[str]:
    found = {"import torch"}
    for name, held in names.items():
        if not re.search(rf"\b{name}\b", source):
            continue
        if name in _custom_builtins:
            found.add(_custom_builtins[name].import_str)
            continue
        module, attribute = getattr(held, "__module__", ""), getattr(held, "__name__", "")
        if getattr(sys.modules.get(module), attribute, None) is not held or importlib.util.find_spec(module) is None:
            raise NotWritable(f"{held!r} cannot be imported by name")
        found.add(f"from {module} import {attribute} as {name}")
    return sorted(found, key=lambda line: (line.startswith("from"), line))


# --- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(gm: GraphModule) -> str:
    nodes = gm.graph.find_nodes(op="placeholder")
    values = [n.meta.get("val") for n in nodes]
    sizes = [f"    {name} = make.size({hint})" for name, hint in symbols(values).items()]
    rows = [f"        {_input(n, v)},  # {n.name}" for n, v in zip(nodes, values, strict=True)]
    return "\n".join([*sizes, "    return [", *rows, "    ]"])


def _input(n: Node, x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"make.tensor({geometry(x)}{n.meta.get('content', '')})"
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(x)
    if x is None or isinstance(x, (bool, int, float)):
        return repr(x) if x == x and abs(x or 0) != float("inf") else f"float({str(x)!r})"
    raise NotWritable(f"the input {n.name} is of type {type(x).__name__}")


def symbols(values: Sequence[Any]) -> dict[str, int]:
    """The symbols in traced values, with the value that tracing saw, or one that their range allows."""
    found: dict[str, int] = {}
    for number in (n for value in values for n in numbers_of(value)):
        for s in sorted(number.node.expr.free_symbols, key=str):
            found[str(s)] = aot_autograd.size_seen(number.node.shape_env, s)
    return found


def numbers_of(x: Any) -> list[Any]:
    """The symbolic numbers of an input."""
    held = (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) and x.layout == torch.strided else (x,)
    return [n for n in held if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool))]


def geometry(x: torch.Tensor) -> str:
    """Shape, strides, dtype and device as arguments."""
    if type(x) is not torch.Tensor and not torch_api.is_fake(x) and not isinstance(x, torch.nn.Parameter):
        raise NotWritable(f"a tensor of type {type(x).__name__}")
    if x.layout != torch.strided or x.is_conj() or x.is_neg():
        raise NotWritable("a tensor that is sparse, conjugate or negated")
    return f"{_numbers(x.shape)}, {_numbers(x.stride())}, {x.dtype}, {str(x.device)!r}"


def _numbers(items: Sequence[Any]) -> str:
    return "(" + "".join(f"{_number(n)}, " for n in items).removesuffix(" " if len(items) == 1 else ", ") + ")"


def _number(n: Any) -> str:
    return PythonPrinter().doprint(n.node.expr) if hasattr(n, "node") else repr(n)


# --- constants -------------------------------------------------------------------------------------------------------


def _constants(gm: GraphModule) -> list[str]:
    names = sorted({str(n.target) for n in gm.graph.find_nodes(op="get_attr")})
    return [f"self.{name} = {_constant(name, getattr(gm, name, None))}" for name in names]


def _constant(name: str, held: Any) -> str:
    if not isinstance(held, torch.Tensor):
        raise NotWritable(f"the constant {name} is of type {type(held).__name__}")
    where = geometry(held)
    if held.numel() > LARGEST_CONSTANT or torch_api.is_fake(held) or held.dtype not in _EXACT:
        return f"constant({where})"
    with torch_api.real_tensors(), torch.no_grad():
        content = held.detach().cpu().tolist()
    text = re.sub(r"\b(inf|nan)\b", r"float('\1')", repr(content))
    return f"constant({where}, {text})"


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT = frozenset([*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64])
