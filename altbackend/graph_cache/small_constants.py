"""Small CPU tensors by value: what a graph was traced with, such as a list of numbers in the user's code."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch

from ..compat import torch_api
from .key import bytes_of

LARGEST = 1 << 16  # bytes
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def write(held: torch.Tensor) -> dict[str, Any] | None:
    """The JSON form of a plain tensor that is dense and small; None for any other.

    Not of one on a GPU, since an entry may serve another device than the one that it was made on.
    """
    if type(held) is not torch.Tensor or held.layout != torch.strided or held.is_quantized or held.requires_grad:
        return None
    if held.device.type != "cpu" or held.numel() * held.itemsize > LARGEST:
        return None
    if held.is_conj() or held.is_neg() or not held.is_contiguous():
        return None
    return {
        "dtype": str(held.dtype).removeprefix("torch."),
        "sizes": list(held.shape),
        "content": base64.b64encode(bytes_of(held)).decode(),
    }


def read(held: dict[str, Any]) -> torch.Tensor:
    """The tensor that `write` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    dtype, sizes = _DTYPES[held["dtype"]], tuple(held["sizes"])
    if any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"{sizes} are no sizes")
    content = bytearray(base64.b64decode(held["content"], validate=True))
    if len(content) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {sizes} of {dtype}")
    with torch_api.real_tensors():
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(sizes)
