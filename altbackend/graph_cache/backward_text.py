"""A backward graph as Python text, for programs that trace through a backward that the cache provides.

Compiled autograd traces the operators of a backward. A cache hit loads compiled code, which cannot be traced, so the
entry holds these operators too. Nothing reads them otherwise.
"""

from __future__ import annotations

import base64
import functools
import math
import operator
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from ..runtime.boxed import Function
from . import own_device

_NAMES: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
    "NoneType": type(None),
    "math": math,
    "_operator": operator,
}
_UNUSED = ("fx_pytree", "pytree")  # torch.fx lists them whether or not the text uses them


def write(gm: GraphModule, gpu: int | None) -> str:
    """Return the text of a graph, compressed; "" for a graph with attributes or with functions that have no name.

    The text does not contain `gpu`, the number of the graph's only GPU.
    """
    if any(n.op in ("get_attr", "call_module") for n in gm.graph.nodes):
        return ""
    code = gm.graph.python_code("self")
    if any(_NAMES.get(name) is not value for name, value in code.globals.items() if name not in _UNUSED):
        return ""
    source = code.src.replace("def forward(self, ", "def backward(", 1)  # it reads no attribute
    return base64.b85encode(zlib.compress(own_device.without_number(source, gpu).encode())).decode()


def read(text: str, gpu: int | None) -> Function:
    """Return the function that runs the operators of a stored text, on `gpu`. Raise ValueError if it is damaged."""
    try:
        source = zlib.decompress(base64.b85decode(text)).decode()
    except (ValueError, zlib.error) as cause:
        raise ValueError(f"the stored backward cannot be read: {cause}") from cause
    names = dict(_NAMES)
    exec(compile(own_device.with_number(source, gpu), "<cached backward>", "exec"), names)
    backward: Function = names["backward"]
    return backward


def reader(text: str, gpu: int | None) -> Callable[[], Function] | None:
    """Return what reads a text when it is needed; None if there is no text."""
    return functools.partial(read, text, gpu) if text else None
