"""Facts that are read from a traced graph before it is lowered: its device, the user's lines, views of inputs."""

from __future__ import annotations

import torch

from ..aten.mutates import writes
from ..aten.view import aliased_arguments, storage_owner
from ..compat import torch_api
from ..errors import Unsupported


def device_of(gm: torch.fx.GraphModule) -> torch.device:
    """Return the device for which kernels are generated: the GPU of the graph's tensors if there is one, else the CPU.

    CPU tensors in a graph of a GPU are computed by library calls. Raises Unsupported for a second GPU and for other
    kinds of device.
    """
    device = torch.device("cpu")
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for v in val if isinstance(val, (tuple, list)) else (val,):
            if not isinstance(v, torch.Tensor):
                continue
            if v.device.type == "cpu":
                continue
            if v.device.type != "cuda" or (device.type == "cuda" and device != v.device):
                raise Unsupported(node, f"a tensor on {v.device}: kernels are generated for the CPU or for one GPU")
            device = v.device
    return device


def user_line(n: torch.fx.Node) -> str:
    """Return `file:line: code` of the innermost user frame recorded on the node, or ''."""
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


def in_an_input(n: object, written: bool = False) -> bool:
    """Return whether a value, or one of several, was traced as a view of an input's memory.

    `written`: count only inputs that the graph writes.
    """
    fake = n.meta.get("val") if isinstance(n, torch.fx.Node) else None
    storages = {torch_api.storage_of(v) for v in (fake if isinstance(fake, (tuple, list)) else (fake,))} - {None}
    if not isinstance(n, torch.fx.Node) or not storages:
        return False
    inputs = [i for i in n.graph.find_nodes(op="placeholder") if torch_api.storage_of(i.meta.get("val")) in storages]
    return any(not written or is_written(i) for i in inputs)


def is_written(n: torch.fx.Node) -> bool:
    """Return whether the graph writes the input `n`."""
    return any(a is n or storage_owner(a) is n for m in n.graph.nodes if writes(m) for a in aliased_arguments(m, True))
