"""The JSON form of a compiled graph's code. It holds small constants; larger ones come from the graph at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TypeVar

import torch
from torch.fx import GraphModule

from ..compile_pool.cuda import Job
from ..compiled.artifact import Code, HostText, Subgraph
from ..compiled.replay import Facts
from ..disk_cache.json_object import JsonObject
from ..runtime.cpp_host import HostForm
from . import small_constants
from .json_values import NotCacheable, decode, decode_calls, encode, encode_calls
from .key import resolve


def attributes(gm: GraphModule) -> dict[int, str]:
    """Return the path from the outermost graph of each value that a `get_attr` node reads, by the value's `id`.

    Includes the nodes of graphs inside it. Must be called before the graph is compiled.
    """
    paths: dict[int, str] = {}
    for n in gm.graph.nodes:
        if n.op == "get_attr":
            value = resolve(gm, path := str(n.target))
            paths[id(value)] = path
            if isinstance(value, GraphModule):
                paths |= {i: f"{path}.{inner}" for i, inner in attributes(value).items() if i not in paths}
    return paths


def write(code: Code, paths: Mapping[int, str]) -> JsonObject:
    """Return the JSON form of `code`.

    `paths` comes from `attributes`. Raise NotCacheable if a value has no text form.
    """
    return {
        "device": str(code.device),
        "python": code.python,
        "kernels": code.kernels,
        "library_calls": code.library_calls,
        "cpp": code.cpp,
        **_write_jobs(code.jobs),
        "constants": {name: _write_constant(name, value, paths) for name, value in code.constants.items()},
        "names_lines": code.names_lines,
        "recording": None if code.recording is None else asdict(code.recording),
        "main_inputs": code.main_inputs,
        "prologue_inputs": code.prologue_inputs,
        "weight_prologue": None if code.weight_prologue is None else encode_calls(code.weight_prologue),
        "layouts": code.layouts,
        "host": None if code.host is None else asdict(code.host),
        "subgraphs": [{"names": s.names, "code": write(s.code, paths)} for s in code.subgraphs],
    }


def read(stored: JsonObject, gm: GraphModule) -> Code:
    """Return the code that `write` stored, with constants of `gm`. Raise ValueError for any other value."""
    try:
        return _read(stored, gm)
    except Exception as cause:  # torch.fx raises many types of errors for a malformed graph
        raise ValueError(f"not an entry of this version: {type(cause).__name__}: {cause}") from cause


def _read(stored: JsonObject, gm: GraphModule) -> Code:
    if set(stored) != {f.name for f in fields(Code)} | {"launches"}:
        raise ValueError(f"an entry with the fields {sorted(stored)}")
    device = torch.device(_text(stored["device"]))
    return Code(
        device,
        _text(stored["python"]),
        _number(stored["kernels"]),
        _number(stored["library_calls"]),
        _text(stored["cpp"]),
        _read_jobs(stored["jobs"], stored["launches"]),
        {name: _read_constant(x, gm) for name, x in stored["constants"].items()},
        _of(bool, stored["names_lines"]),
        None if stored["recording"] is None else _read_facts(stored["recording"], device),
        tuple(map(_number, stored["main_inputs"])),
        tuple(map(_number, stored["prologue_inputs"])),
        None if stored["weight_prologue"] is None else decode_calls(stored["weight_prologue"]),
        tuple(Subgraph(tuple(map(_text, s["names"])), _read(s["code"], gm)) for s in stored["subgraphs"]),
        tuple((_number(k), tuple(map(_number, strides)), _of(bool, w)) for k, strides, w in stored["layouts"]),
        None if stored["host"] is None else _read_host(stored["host"]),
    )


def takes_constants(stored: JsonObject) -> bool:
    """Return whether stored code, or a subgraph of it, reads constants that only its own graph holds."""
    own = any("attribute" in x for x in stored["constants"].values())
    return own or any(takes_constants(subgraph["code"]) for subgraph in stored["subgraphs"])


def _write_constant(name: str, value: object, paths: Mapping[int, str]) -> object:
    if isinstance(value, torch.Tensor) and (content := small_constants.write(value)) is not None:
        return {"tensor": content}
    if id(value) in paths:
        return {"attribute": paths[id(value)]}
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        raise NotCacheable(f"{name} is a {type(value).__name__} made by a pass")
    return encode(value)


def _read_constant(stored: JsonObject, gm: GraphModule) -> object:
    if "tensor" in stored:
        return small_constants.read(stored["tensor"])
    return resolve(gm, stored["attribute"]) if "attribute" in stored else decode(stored)


def _write_jobs(jobs: tuple[Job, ...]) -> dict[str, object]:
    """Return the distinct jobs, and for each launch the number of its job."""
    distinct = dict.fromkeys(jobs)
    number = {job: k for k, job in enumerate(distinct)}
    return {"jobs": [asdict(job) for job in distinct], "launches": [number[job] for job in jobs]}


def _read_jobs(stored: Sequence[JsonObject], launches: Sequence[object]) -> tuple[Job, ...]:
    jobs = [
        Job(
            _text(j["source"]),
            tuple((_text(a), _text(b)) for a, b in j["signature"]),
            tuple((_text(a), _number(b)) for a, b in j["constexprs"]),
            tuple(map(_number, j["aligned"])),
            _number(j["warps"]),
            _number(j["stages"]),
            _number(j["capability"]),
            _text(j["name"]),
            _of(bool, j["contract"]),
        )
        for j in stored
    ]
    return tuple(jobs[_number(k)] for k in launches)


def _read_facts(stored: JsonObject, device: torch.device) -> Facts:
    written = tuple(map(_number, stored["written"]))
    return Facts(_text(stored["refusal"]), written, _of(bool, stored["sized"]), device.index or 0)


def _read_host(stored: JsonObject) -> HostText:
    form = stored["form"]
    outputs, constants = (tuple(map(_text, form[k])) for k in ("outputs", "constants"))
    steps = _number(stored["segments"]), _number(stored["steps"])
    donated = tuple(map(_number, form["donated"]))
    return HostText(_text(stored["text"]), HostForm(_text(form["inputs"]), outputs, constants, donated), *steps)


Kind = TypeVar("Kind")


def _of(kind: type[Kind], x: object) -> Kind:
    if not isinstance(x, kind) or type(x) is not kind:
        raise TypeError(f"{type(x).__name__} instead of {kind.__name__}")
    return x


def _text(x: object) -> str:
    return _of(str, x)


def _number(x: object) -> int:
    number = _of(int, x)
    if number < 0:
        raise ValueError("a negative number")
    return number
