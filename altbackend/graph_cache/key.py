"""The cache key of a functional graph: all that its code depends on, as text, and how two keys differ."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..compat import torch_api
from ..compile_pool import cpp
from ..config.options import SPECS, Config, uncacheable
from ..lowering.facts import device_of, user_line
from .json_values import NotCacheable, encode

Parts = dict[str, dict[str, str]]  # part of the key -> its values by name
_ALSO_CODE = ("threads",)  # options that only affect running, but that the scheduler reads
MOST_NAMED = 3  # differences that an explanation lists
MOST_CHARS = 200  # characters of each value in an explanation


def parts_of(gm: GraphModule, cfg: Config, job: Mapping[str, object]) -> Parts:
    """Return all that the code of a functional graph depends on. `job` is the compilation job, by field.

    Names of nodes are included, since the host program uses them; lines of the user's code are not (`lines_of`).
    Raise NotCacheable or CompilerMissing.
    """
    if reason := uncacheable(cfg):
        raise NotCacheable(reason)
    device = device_of(gm)
    return {
        "graph": {n.name: _call(n) for n in gm.graph.nodes},
        "inputs": {n.name: _meta(n) for n in gm.graph.nodes if n.op == "placeholder"},
        "values": {n.name: _meta(n) for n in gm.graph.nodes if n.op == "call_function"} | _views_of_inputs(gm),
        "constants": {n.name: content_of(resolve(gm, str(n.target))) for n in gm.graph.nodes if n.op == "get_attr"},
        "sizes": sizes_of(n.meta.get("val") for n in nodes_of(gm)),
        "job": {name: str(value) for name, value in job.items()},
        "options": options_of(cfg),
        "versions": versions(),
        "settings": settings(),
        "machine": gpu(device) if device.type == "cuda" else cpp.identity(cfg),
    }


def key_of(parts: Parts) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def family_of(parts: Parts) -> str:
    """Return the digest of the operators that a graph calls. A miss is explained by other graphs of its family."""
    calls = "\n".join(text.partition("(")[0] for text in parts["graph"].values())
    return hashlib.sha256(calls.encode()).hexdigest()[:16]


def differences(current: Parts, cached: Parts) -> str:
    """Return the parts of the key that differ from a cached graph's, with both values; "" if none do."""
    texts = [
        f"{part} {name}: {_short(cached.get(part, {}).get(name))} cached, {_short(current.get(part, {}).get(name))} now"
        for part in {**current, **cached}
        for name in {**current.get(part, {}), **cached.get(part, {})}
        if current.get(part, {}).get(name) != cached.get(part, {}).get(name)
    ]
    more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return "; ".join(texts[:MOST_NAMED]) + more


def _short(text: str | None) -> str:
    if text is None:
        return "nothing"
    return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + "..."


def lines_of(gm: GraphModule) -> str:
    """Return the digest of the user's lines behind the nodes, which errors of a compiled call name."""
    lines = "\n".join(user_line(n) for n in nodes_of(gm) if n.op == "call_function")
    return hashlib.sha256(lines.encode()).hexdigest()


def nodes_of(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of the graphs inside it."""
    for n in gm.graph.nodes:
        yield n
        if n.op == "get_attr" and isinstance(inner := resolve(gm, str(n.target)), GraphModule):
            yield from nodes_of(inner)


def resolve(gm: GraphModule, path: str) -> object:
    """Return the value that a graph's `get_attr` of `path` reads."""
    return functools.reduce(getattr, path.split("."), gm)


def _call(n: Node) -> str:
    if n.op == "call_function":
        kwargs = f", {json.dumps(encode(n.kwargs))}" if n.kwargs else ""
        return f"{_target(n.target)}({json.dumps(encode(n.args))}{kwargs})"
    return f"{n.op}({json.dumps(encode(n.args))})" if n.op == "output" else n.op


@functools.lru_cache(maxsize=4096)
def _target(target: object) -> str:
    return json.dumps(encode(target))


# --- values ----------------------------------------------------------------------------------------------------------


def _meta(n: Node) -> str:
    unbacked = n.meta.get("unbacked_bindings")
    return describe(n.meta.get("val")) + (f" decides {[*map(str, unbacked)]}" if unbacked else "")


def _views_of_inputs(gm: GraphModule) -> dict[str, str]:
    """Return the results that AOTAutograd rebuilds as views of inputs, with their geometry."""
    views = gm.graph.output_node().meta.get("of_inputs") or {}
    return {f"result {k}": f"{base.name} {describe(fake)}" for k, (base, fake) in views.items()}


def describe(x: object) -> str:
    """Return the geometry of a traced tensor, or the text of a traced number. Raise NotCacheable for other types."""
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided:
            return f"{x.dtype} {x.device} {x.layout} {[*x.shape]}"
        flags = " conjugate" * x.is_conj() + " negative" * x.is_neg()
        return f"{x.dtype} {x.device} {[*x.shape]} strides {[*x.stride()]} offset {x.storage_offset()}{flags}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(describe, x))})"
    if x is None or isinstance(x, (bool, int, float, complex, str)):
        return repr(x)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(x).__name__} {x.node.expr}"
    if (name := torch_api.opaque_class(x)) is not None:  # the host program passes it on; sizes that follow are traced
        return f"object {name}"
    raise NotCacheable(f"a value of type {type(x).__name__} has no text form")


def content_of(value: object) -> str:
    """Return a digest of a constant's content: of a tensor, or of a graph. Raise NotCacheable for other types."""
    if isinstance(value, GraphModule):
        inner = {n.name: f"{_call(n)} {_inner(value, n)}" for n in value.graph.nodes}
        return f"graph {hashlib.sha256(json.dumps(inner).encode()).hexdigest()}"
    if (
        not isinstance(value, torch.Tensor)
        or type(value) not in (torch.Tensor, torch.nn.Parameter)
        or value.layout != torch.strided
    ):
        raise NotCacheable(f"a constant of type {type(value).__name__} cannot be compared by content")
    return f"{describe(value)} content {hashlib.sha256(bytes_of(value)).hexdigest()}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a strided tensor of any device, dtype and shape, in row-major order."""
    with torch_api.real_tensors(), torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _inner(gm: GraphModule, n: Node) -> str:
    return content_of(resolve(gm, str(n.target))) if n.op == "get_attr" else _meta(n)


# --- symbolic sizes --------------------------------------------------------------------------------------------------


def sizes_of(values: Iterable[object]) -> dict[str, str]:
    """Return the ranges of the symbols in traced values, and the conditions on them that tracing has met."""
    environments: dict[sympy.Symbol, ShapeEnv] = {}
    for value in values:
        for number in numbers_of(value):
            environments.update(dict.fromkeys(number.node.expr.free_symbols, number.node.shape_env))
    out = {
        str(s): str(torch_api.size_range(env, s))
        for s, env in sorted(environments.items(), key=lambda item: str(item[0]))
    }
    if environments:
        env = next(iter(environments.values()))
        conditions = [str(c) for c in torch_api.size_conditions(env) if environments.keys() & c.free_symbols]
        out["conditions"] = "; ".join(sorted(set(conditions)))
    return out


def numbers_of(x: object) -> Iterator[torch.SymInt | torch.SymFloat | torch.SymBool]:
    """Yield the symbolic numbers of a traced value."""
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield x
    elif isinstance(x, torch.Tensor) and torch_api.has_symbolic_geometry(x):
        strides = x.stride() if x.layout == torch.strided else ()
        yield from (s for s in (*x.shape, *strides) if isinstance(s, torch.SymInt))
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from numbers_of(y)


def conditions_on_sizes(gm: GraphModule) -> tuple[str, ...]:
    """Return all conditions on symbolic sizes that tracing and compiling have assumed so far."""
    for n in gm.graph.nodes:
        for number in numbers_of(n.meta.get("val")):
            return torch_api.size_assumptions(number.node.shape_env)
    return ()


# --- surroundings ----------------------------------------------------------------------------------------------------


def options_of(cfg: Config) -> dict[str, str]:
    """Return the options that generated code depends on, as text."""
    names = [name for name, spec in SPECS.items() if spec.affects == "code" or name in _ALSO_CODE]
    return {
        name: repr([p.uuid() for p in getattr(cfg, name)] if SPECS[name].is_pass else getattr(cfg, name))
        for name in names
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of all software that makes code. The package's own version is the digest of its files.

    The files are read once per process.
    """
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": torch_api.triton_version() or "none",
        "python": platform.python_version(),
        "altbackend": _source_digest(Path(__file__).parents[1]),
    }


def _source_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for folder, inner, files in os.walk(package):
        inner.sort()
        for name in sorted(files):
            if name.endswith((".py", ".h")):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def settings() -> dict[str, str]:
    """Return torch's process-wide settings that passes and schedules depend on."""
    mkldnn = torch.backends.mkldnn
    return {
        "threads": str(torch.get_num_threads()),
        "mkldnn": str(torch_api.unannotated(mkldnn.is_available)() and mkldnn.enabled),
        "float32 products": torch.get_float32_matmul_precision(),
        "float32 convolutions": str(torch_api.allows_tf32_convolutions()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "CPU": str(torch_api.cpu_properties()),
    }


def gpu(device: torch.device) -> dict[str, str]:
    """Return the facts about a GPU on which its code depends: its name and every number that the schedule reads."""
    numbers = torch_api.cuda_properties(device)
    return {"name": torch_api.cuda_name(device)} | {name: str(number) for name, number in numbers.items()}
