"""What a traced graph says of itself before anything is lowered."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import torch_api
from ..errors import Unsupported


def device_of(gm: torch.fx.GraphModule) -> torch.device:
    """The device of a graph's tensors; CPU tensors may stand beside those of a GPU, and library calls compute them.

    Raises Unsupported for a second GPU and for other kinds of device.
    """
    found = torch.device("cpu")
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for v in val if isinstance(val, (tuple, list)) else (val,):
            if not isinstance(v, torch.Tensor):
                continue
            if v.device.type == "cpu":
                continue
            if v.device.type != "cuda" or (found.type == "cuda" and found != v.device):
                raise Unsupported(node, f"a tensor on {v.device}: kernels are generated for the CPU or for one GPU")
            found = v.device
    return found


def user_line(n: torch.fx.Node) -> str:
    """`file:line: code` of the innermost user frame recorded on the node, or ''."""
    trace = n.meta.get("stack_trace")
    if not trace:
        return ""
    lines = [x.strip() for x in trace.strip().splitlines()]
    for k in range(len(lines) - 1, -1, -1):
        if lines[k].startswith('File "'):
            path, line = lines[k].split('"')[1], lines[k].split("line ")[1].split(",")[0]
            code = lines[k + 1] if k + 1 < len(lines) else ""
            return f"{path.rsplit('/', 1)[-1]}:{line}: {code}"
    return ""


def in_an_input(n: Any, written: bool = False) -> bool:
    """Whether a value, or one of several, was traced as a view of an input's memory; of one that the graph writes."""
    held = n.meta.get("val") if isinstance(n, torch.fx.Node) else None
    mine = {torch_api.storage_of(v) for v in (held if isinstance(held, (tuple, list)) else (held,))} - {None}
    if not isinstance(n, torch.fx.Node) or not mine:
        return False
    found = [i for i in n.graph.find_nodes(op="placeholder") if torch_api.storage_of(i.meta.get("val")) in mine]
    return any(not written or is_written(i) for i in found)


def is_written(n: torch.fx.Node) -> bool:
    """Whether a graph writes an input."""
    return any(u.target is torch.ops.aten.copy_.default and u.args[0] is n for u in n.users)
