"""Small CPU tensors stored by value, such as a list of numbers in the user's code."""

from __future__ import annotations

import base64
import math

import torch

from ..compat import torch_api
from ..disk_cache.json_object import JsonObject
from .key import bytes_of

LARGEST = 1 << 16  # bytes
_DTYPES = {str(d).removeprefix("torch."): d for d in list(vars(torch).values()) if isinstance(d, torch.dtype)}


def write(tensor: torch.Tensor) -> dict[str, object] | None:
    """Return the JSON form of a plain, dense tensor of at most `LARGEST` bytes on the CPU; None for any other.

    A GPU tensor is not stored, since an entry may serve another device than the one that it was made on.
    """
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.requires_grad
    ):
        return None
    if tensor.device.type != "cpu" or tensor.numel() * tensor.itemsize > LARGEST:
        return None
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return None
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sizes": list(tensor.shape),
        "content": base64.b64encode(bytes_of(tensor)).decode(),
    }


def read(stored: JsonObject) -> torch.Tensor:
    """Return the tensor that `write` stored. Raise ValueError, KeyError or TypeError if the form is malformed."""
    dtype, sizes = _DTYPES[stored["dtype"]], tuple(stored["sizes"])
    if any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"{sizes} are not sizes")
    content = bytearray(base64.b64decode(stored["content"], validate=True))
    if len(content) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {sizes} of {dtype}")
    with torch_api.real_tensors():
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(sizes)
