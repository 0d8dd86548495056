"""Graph modules: what the functions of this room take, and how they change them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..fx_passes import attention_mask

Program = GraphModule | torch.export.ExportedProgram


def graph_module(program: Program) -> GraphModule:
    """Return the graph module of a program: itself, or that of an exported program. Raise TypeError for others."""
    if isinstance(program, torch.export.ExportedProgram):
        module = program.module()
        assert isinstance(module, GraphModule)
        return module
    if isinstance(program, GraphModule):
        return program
    raise TypeError(
        f"a {type(program).__name__} has no graph; give a GraphModule (torch.fx.symbolic_trace) or an ExportedProgram "
        "(torch.export.export)"
    )


def attribute(gm: GraphModule, path: str) -> Any:
    """Return the attribute that a dotted path names."""
    return functools.reduce(getattr, path.split("."), gm)


def set_constant(gm: GraphModule, value: torch.Tensor) -> str:
    """Register a tensor as a buffer with a new name; return the name."""
    number = sum(name.startswith("_constant_") for name in gm._buffers)
    while hasattr(gm, name := f"_constant_{number}"):
        number += 1
    gm.register_buffer(name, value)
    return name


def has_effect(n: Node) -> bool:
    """Return whether a call must stay even if nobody reads its result."""
    if n.op in ("placeholder", "output", "call_module") or n.is_impure():
        return True
    return n.op in ("call_function", "call_method") and attention_mask.writes_in_place(n)


def drop_unread(gm: GraphModule) -> int:
    """Erase calls without users and without effect; return their number."""
    count = 0
    for n in reversed(list(gm.graph.nodes)):
        if not n.users and not has_effect(n):
            gm.graph.erase_node(n)
            count += 1
    return count
