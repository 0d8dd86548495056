"""What a generated host program runs on: the kernel library, workspaces, and tensor views."""

from __future__ import annotations

import _ctypes
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .memory import plan

# Both exist in every supported torch and cost a fraction of the Python-level calls.
_guards: Any = torch._C._dynamo.guards
empty_cpu: Callable[..., torch.Tensor] = _guards._empty_strided_cpu
view: Callable[..., torch.Tensor] = _guards._reinterpret_tensor

_dlclose: Callable[[int], None] | None = getattr(_ctypes, "dlclose", None)  # not on Windows

Block = tuple[tuple[int, ...], int, int, int]  # slots, bytes, first step, last step
Window = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]  # slot, dtype, sizes, strides, offset
Layout = Callable[..., tuple[Sequence[Block], Sequence[Window]]]


@dataclass
class Workspace:
    """Memory of one call's temporaries: the arena, the pointer table, and the tensors that library calls use."""

    arena: torch.Tensor
    pointers: Any
    views: list[torch.Tensor]
    error: Any  # three integers, of which kernels set the first: see `check_error`
    error_pointer: Any
    scalars: Any


class Workspaces:
    """Workspaces of one graph, handed out one per running call, so that concurrent calls never share.

    `slots`: length of the pointer table. `fixed`: constants, kept alive here. `keep`: keep workspaces between calls.
    `others`: how many numbers kernels read beyond the sizes that decide the layout; a call writes them itself.
    """

    def __init__(
        self, layout: Layout, slots: int, fixed: dict[int, torch.Tensor], reuse: bool, keep: bool, others: int = 0
    ) -> None:
        self.others = others
        self.layout, self.slots, self.fixed, self.reuse, self.keep = layout, slots, fixed, reuse, keep
        self.idle: dict[tuple[int, ...], list[Workspace]] = {}
        self.lock = threading.Lock()
        self.constants: dict[str, Any] = {}

    def take(self, *symbols: int) -> Workspace:
        try:
            return self.idle[symbols].pop()
        except (KeyError, IndexError):
            return self._make(symbols)

    def give(self, ws: Workspace, *symbols: int) -> None:
        if not self.keep:
            return
        with self.lock:
            if symbols not in self.idle and len(self.idle) >= 8:
                self.idle.pop(next(iter(self.idle)))
            waiting = self.idle.setdefault(symbols, [])
            if len(waiting) < 4:
                waiting.append(ws)

    def _make(self, symbols: tuple[int, ...]) -> Workspace:
        blocks, windows = self.layout(*symbols)
        offsets, total = plan([b[1:] for b in blocks], self.reuse)
        arena = torch.empty(total + 64, dtype=torch.uint8)
        base = -arena.data_ptr() % 64
        at = {slot: base + off for b, off in zip(blocks, offsets, strict=True) for slot in b[0]}
        pointers = (ctypes.c_void_p * max(self.slots, 1))()
        start = arena.data_ptr()
        for slot, offset in at.items():
            pointers[slot] = start + offset
        for slot, constant in self.fixed.items():
            pointers[slot] = constant.data_ptr()
        views = [_window(arena, at[w[0]], w) for w in windows]
        scalars = (ctypes.c_int64 * max(len(symbols) + self.others, 1))(*symbols)
        error = (ctypes.c_int64 * 3)()
        return Workspace(arena, pointers, views, error, ctypes.addressof(error), scalars)


def _window(arena: torch.Tensor, at: int, w: Window) -> torch.Tensor:
    _, dtype, sizes, strides, offset = w
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    flat = arena[at : at + extent * dtype.itemsize].view(dtype)
    return flat.as_strided(sizes, strides, flat.storage_offset() + offset)


class Library:
    """A built kernel library; `fn(name)` gives a segment taking (pointers, scalars, threads, error).

    It stays mapped as long as the library or one of its segments is referred to. Raises OSError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.dll = ctypes.CDLL(path)
        if _dlclose is not None:
            # segments refer to `dll`; nothing is closed at exit, when threads may still be in it
            weakref.finalize(self.dll, _dlclose, self.dll._handle).atexit = False

    def fn(self, name: str) -> Any:
        f = getattr(self.dll, name)
        f.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        f.restype = None
        return f


def ensure_strides(t: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A library result with the strides that the kernels were generated for; copies only when they differ.

    A tensor of zeros that has no memory, as the gradient of `sgn` is, gets some. Raises RuntimeError for other sizes
    than tracing was promised: kernels would leave the tensor.
    """
    if t.shape != sizes:
        raise wrong_sizes(t, sizes)
    same = t.stride() == strides or all(n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=True))
    if same and not t._is_zerotensor():
        return t
    out = torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device)
    return out.copy_(t)


def check_input(
    t: torch.Tensor, name: str, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Raise AssertionError for an input that kernels were not generated for, or that its storage does not hold."""
    wanted = f"{dtype} {sizes} by {strides}"
    found = f"{t.dtype} {tuple(t.shape)} by {t.stride()}"
    same = all(n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=False))
    if t.dtype != dtype or t.shape != sizes or not (same or 0 in sizes):
        raise AssertionError(f"input {name} of a compiled graph is {found}, and it was compiled for {wanted}")
    last = t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if t.layout == torch.strided and 0 not in sizes and last * t.itemsize > t.untyped_storage().nbytes():
        held = t.untyped_storage().nbytes()
        raise AssertionError(f"input {name} of a compiled graph, {found}, reaches beyond its storage of {held} bytes")


def retyped(
    t: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The bytes from the first element of `t` on as a tensor of another dtype; `offset` counts its elements.

    Raises RuntimeError where the storage of `t` is too small for that.
    """
    begin = t.storage_offset() * t.itemsize // dtype.itemsize + offset
    last = begin + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    if 0 not in sizes and last * dtype.itemsize > t.untyped_storage().nbytes():
        raise RuntimeError(
            f"{sizes} of {dtype} by {strides} from {begin} on do not fit into the result they are read of"
        )
    out = torch.empty(0, dtype=dtype, device=t.device)
    return out.set_(t.untyped_storage(), begin, sizes, strides)


def wrong_sizes(t: torch.Tensor, sizes: tuple[int, ...]) -> RuntimeError:
    """What is raised for a result of a library call whose sizes are not those that its fake kernel gave."""
    return RuntimeError(
        f"a library call gave a tensor of size {tuple(t.shape)} where its fake kernel had said {sizes}; the line "
        "of the host program above names the call. What to do: correct the fake (meta) kernel of that operator"
    )


def check_error(error: Any, lines: Sequence[str]) -> None:
    """Raise what eager would for what a kernel met: `error` is (code, index, size), code 0 where there was nothing.

    Raises IndexError (1) or RuntimeError (3) for an index out of range, RuntimeError (2) for a division by zero.
    """
    code, index, size = error
    if not code:
        return
    error[0] = 0
    where = "; ".join(lines) or "an indexing operation"
    if code == 2:
        raise RuntimeError(f"ZeroDivisionError in {where}")
    kind = IndexError if code == 1 else RuntimeError
    raise kind(f"index {index} is out of bounds for a dimension of size {size} in {where}")
