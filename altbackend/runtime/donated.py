"""Memory of inputs that a program may take over: an answer, at every call, to whether the call owns its inputs.

AOTAutograd gives a backward its saved tensors and forgets them, with three exceptions. The graph is kept for another
backward (`retain_graph`, `create_graph`), a hook holds the tensors, or results share their memory. In each of these
cases something else holds a reference.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .boxed import Args
from .escapes import storage_of

_storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_tensor_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count")  # noqa: B009 - no stub has it


def owned(args: Args, indices: Sequence[int]) -> bool:
    """Return whether nothing but the list `args` refers to these tensors and to their memory, which they fill."""
    limits = _counts_of_owned()
    for k in indices:
        t = args[k]
        if type(t) is not torch.Tensor or t.requires_grad:
            return False
        storage = storage_of(t)
        if storage.nbytes() != t.numel() * t.itemsize:
            return False
        if any(n > limit for n, limit in zip(_counts(args, k, storage), limits, strict=True)):
            return False
    return True


def _counts(args: Args, k: int, storage: torch.UntypedStorage) -> tuple[int, int, int]:
    """Return the references to `args[k]` in Python, to the tensor, and to its storage."""
    t: torch.Tensor = args[k]
    return sys.getrefcount(t), _tensor_use_count(t), _storage_use_count(storage._cdata)


@functools.cache
def _counts_of_owned() -> tuple[int, int, int]:
    """Return `_counts` of a tensor that only its list holds, taken in the way in which `owned` takes them."""
    with _disable_current_modes():
        args: Args = [torch.empty(1)]
    t = args[0]
    storage = storage_of(t)
    return _counts(args, 0, storage)
