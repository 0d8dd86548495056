"""The error of one drawn program's compiled form, without any timing: first and later calls, in memory full of NaN."""

from __future__ import annotations

import copy

import torch

from altbackend import alt
from benchmarks.rivals.program import largest_error, prepare

SMALL, SMALL_BLOCKS = 1 << 20, 64  # bytes: the allocator keeps tensors of at most 1 MiB in blocks of their own
LARGE = 1 << 30
CALLS = 2


def errors(text: str, device: torch.device) -> dict[str, float]:
    """Return eager's and our largest relative error over all results and gradients, against eager in float64.

    Neither may use TF32. Memory that a kernel reads but nothing has written holds NaN.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    subject = prepare(text, device)
    buffers = copy.deepcopy(dict(subject.model.named_buffers()))
    expected = subject.reference(torch.float64)
    found = {"eager": largest_error(subject.call(subject.model)(), expected)}
    for name, value in buffers.items():
        subject.model.get_buffer(name).copy_(value)
    call = subject.call(torch.compile(subject.model, backend=alt, dynamic=False))
    results = list[list[torch.Tensor]]()  # all alive, so that no call gets the memory of the one before
    for _ in range(CALLS):
        _poison(device)
        results.append(call())
    found["alt"] = max(largest_error(r, expected) for r in results)
    return found


def _poison(device: torch.device) -> None:
    """Fill the memory that the allocator gives out next with NaN."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    sizes = [SMALL] * SMALL_BLOCKS + [min(LARGE, torch.cuda.mem_get_info(device)[0] // 16)]
    blocks = [torch.full((n // 4,), torch.nan, device=device) for n in sizes]
    torch.cuda.synchronize(device)
    del blocks
