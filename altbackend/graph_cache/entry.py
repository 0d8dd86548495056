"""A compiled graph's code as a JSON value. Only small constants are in it: others are those of the graph that asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.fx import GraphModule

from ..compile_pool.cuda import Job
from ..compiled.artifact import Body, Code
from ..compiled.replay import Facts
from . import small_constants
from .json_values import NotCacheable, decode, decode_calls, encode, encode_calls
from .key import resolve


def attributes(gm: GraphModule) -> dict[int, str]:
    """Identity of what `get_attr` nodes of a graph, and of those inside it, give -> its path from the outermost.

    To be asked before the graph is compiled.
    """
    found: dict[int, str] = {}
    for n in gm.graph.nodes:
        if n.op == "get_attr":
            held = resolve(gm, path := str(n.target))
            found[id(held)] = path
            if isinstance(held, GraphModule):
                found |= {i: f"{path}.{inner}" for i, inner in attributes(held).items() if i not in found}
    return found


def write(code: Code, paths: Mapping[int, str]) -> dict[str, Any]:
    """The JSON form of `code`; `paths` as `attributes` gives them. Raises NotCacheable."""
    return {
        "device": str(code.device),
        "python": code.python,
        "kernels": code.kernels,
        "library_calls": code.library_calls,
        "cpp": code.cpp,
        **_write_jobs(code.jobs),
        "bound": {name: _write_bound(name, held, paths) for name, held in code.bound.items()},
        "names_lines": code.names_lines,
        "recording": None if code.recording is None else asdict(code.recording),
        "kept": code.kept,
        "watched": code.watched,
        "prologue": None if code.prologue is None else encode_calls(code.prologue),
        "layouts": code.layouts,
        "bodies": [{"names": body.names, "code": write(body.code, paths)} for body in code.bodies],
    }


def read(held: Any, gm: GraphModule) -> Code:
    """The code that `write` wrote, with constants of `gm`. Raises ValueError for anything else."""
    try:
        return _read(held, gm)
    except Exception as cause:  # torch.fx alone has many words for a graph that is none
        raise ValueError(f"not an entry of this version: {type(cause).__name__}: {cause}") from cause


def _read(held: Any, gm: GraphModule) -> Code:
    if set(held) != {f.name for f in fields(Code)} | {"launches"}:
        raise ValueError(f"an entry with the fields {sorted(held)}")
    return Code(
        torch.device(_text(held["device"])),
        _text(held["python"]),
        _number(held["kernels"]),
        _number(held["library_calls"]),
        _text(held["cpp"]),
        _read_jobs(held["jobs"], held["launches"]),
        {name: _read_bound(x, gm) for name, x in held["bound"].items()},
        _of(bool, held["names_lines"]),
        None if held["recording"] is None else _read_facts(held["recording"]),
        tuple(map(_number, held["kept"])),
        tuple(map(_number, held["watched"])),
        None if held["prologue"] is None else decode_calls(held["prologue"]),
        tuple(Body(tuple(map(_text, b["names"])), _read(b["code"], gm)) for b in held["bodies"]),
        tuple((_number(k), tuple(map(_number, strides)), _of(bool, w)) for k, strides, w in held["layouts"]),
    )


def takes_constants(held: Mapping[str, Any]) -> bool:
    """Whether code as `write` gives it, or a body of it, needs constants that only its graph has."""
    own = any("attribute" in x for x in held["bound"].values())
    return own or any(takes_constants(body["code"]) for body in held["bodies"])


def _write_bound(name: str, held: Any, paths: Mapping[int, str]) -> Any:
    if isinstance(held, torch.Tensor) and (value := small_constants.write(held)) is not None:
        return {"tensor": value}
    if id(held) in paths:
        return {"attribute": paths[id(held)]}
    if isinstance(held, (torch.Tensor, torch.nn.Module)):
        raise NotCacheable(f"{name} is a {type(held).__name__} that a pass has made")
    return encode(held)


def _read_bound(held: Any, gm: GraphModule) -> Any:
    if "tensor" in held:
        return small_constants.read(held["tensor"])
    return resolve(gm, held["attribute"]) if "attribute" in held else decode(held)


def _write_jobs(jobs: tuple[Job, ...]) -> dict[str, Any]:
    """Each job once, and per launch its number."""
    once = dict.fromkeys(jobs)
    number = {job: k for k, job in enumerate(once)}
    return {"jobs": [asdict(job) for job in once], "launches": [number[job] for job in jobs]}


def _read_jobs(held: Any, launches: Any) -> tuple[Job, ...]:
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
        for j in held
    ]
    return tuple(jobs[_number(k)] for k in launches)


def _read_facts(held: Any) -> Facts:
    written = tuple(map(_number, held["written"]))
    return Facts(_text(held["refusal"]), written, _of(bool, held["sized"]), _number(held["device"]))


def _of(kind: type, x: Any) -> Any:
    if type(x) is not kind:
        raise TypeError(f"{type(x).__name__} where {kind.__name__} belongs")
    return x


def _text(x: Any) -> str:
    return str(_of(str, x))


def _number(x: Any) -> int:
    found = int(_of(int, x))
    if found < 0:
        raise ValueError("a number below zero")
    return found
