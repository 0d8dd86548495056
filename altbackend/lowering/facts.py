"""What a traced graph says of itself before anything is lowered."""

from __future__ import annotations

import torch

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
