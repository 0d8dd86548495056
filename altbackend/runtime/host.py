"""Runtime of generated CPU host programs: the kernel library, workspaces, and tensor views."""

from __future__ import annotations

import _ctypes
import ctypes
import threading
import weakref
from collections.abc import Callable, MutableSequence, Sequence
from types import ModuleType

import torch

from altbackend.lazy_dataclass import dataclass

from . import huge_pages
from .memory import plan

# Both exist in every supported torch and cost a fraction of the Python-level calls.
_guards: ModuleType = torch._C._dynamo.guards
empty_cpu: Callable[..., torch.Tensor] = _guards._empty_strided_cpu
view: Callable[..., torch.Tensor] = _guards._reinterpret_tensor

_dlclose: Callable[[int], None] | None = getattr(_ctypes, "dlclose", None)  # not on Windows

Block = tuple[tuple[int, ...], int, int, int]  # slots, bytes, first step, last step
Window = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]  # slot, dtype, sizes, strides, offset
Layout = Callable[..., tuple[Sequence[Block], Sequence[Window]]]


@dataclass
class Workspace:
    """The memory of one call's temporaries: the arena, the pointer table, and the tensors of library calls."""

    arena: torch.Tensor
    pointers: object
    views: list[torch.Tensor]
    error: object  # three integers that kernels set; see `check_error`
    error_pointer: object
    scalars: object


MOST_SPARE = 4  # workspaces of one layout that wait for a call


class Workspaces:
    """The workspaces of one graph. Each running call takes its own, so that concurrent calls never share one.

    `slots`: length of the pointer table. `fixed`: constants, which this object keeps alive. `keep`: whether
    workspaces are reused by later calls. `others`: how many numbers, beyond the sizes that decide the layout, a
    call writes for its kernels.
    """

    def __init__(
        self, layout: Layout, slots: int, fixed: dict[int, torch.Tensor], reuse: bool, keep: bool, others: int = 0
    ) -> None:
        self.others = others
        self.layout, self.slots, self.fixed, self.reuse, self.keep = layout, slots, fixed, reuse, keep
        self.idle: dict[tuple[int, ...], list[Workspace]] = {}
        self.spare = list[Workspace]()  # those of a graph without sizes, which its program takes without a call
        self.lock = threading.Lock()
        self.constants: dict[str, object] = {}

    def take(self, *symbols: int) -> Workspace:
        try:
            return self.idle[symbols].pop()
        except (KeyError, IndexError):
            return self.make(*symbols)

    def give(self, ws: Workspace, *symbols: int) -> None:
        if not self.keep:
            return
        with self.lock:
            if symbols not in self.idle and len(self.idle) >= 8:
                self.idle.pop(next(iter(self.idle)))
            waiting = self.idle.setdefault(symbols, [])
            if len(waiting) < MOST_SPARE:
                waiting.append(ws)

    def release(self) -> None:
        """Free the workspaces that no call uses."""
        self.idle.clear()
        self.spare.clear()

    def make(self, *symbols: int) -> Workspace:
        """Return a new workspace for these sizes."""
        blocks, windows = self.layout(*symbols)
        offsets, total = plan([b[1:] for b in blocks], self.reuse)
        arena = torch.empty(total + 64, dtype=torch.uint8)
        huge_pages.advise(arena.data_ptr(), total + 64)
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


def empty_large(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor on the CPU, in huge pages if it is large. A small one costs a comparison."""
    t = empty_cpu(sizes, strides, dtype)
    if t.nbytes >= huge_pages.LEAST_BYTES:
        huge_pages.advise(t.data_ptr(), t.untyped_storage().nbytes())
    return t


class Library:
    """A built kernel library. `fn(name)` returns a segment that takes (pointers, scalars, threads, error).

    The library stays mapped while it or one of its segments is referenced. Raise OSError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.dll = ctypes.CDLL(path)
        close_with(self.dll)  # segments refer to `dll`

    def fn(self, name: str) -> Callable[..., None]:
        f: ctypes._NamedFuncPointer = getattr(self.dll, name)
        f.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        f.restype = None
        return f


def close_with(dll: ctypes.CDLL) -> None:
    """Close a library when nothing refers to `dll` any more. At exit it stays open, since threads may still run it."""
    if _dlclose is not None:
        weakref.finalize(dll, _dlclose, dll._handle).atexit = False


def ensure_strides(t: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a library result with the strides that the kernels were generated for; copy only if they differ.

    A zero tensor without memory, such as the gradient of `sgn`, is copied into memory. Raise RuntimeError if its
    sizes differ from the traced ones: kernels would read beyond the tensor.
    """
    if t.shape != sizes:
        raise wrong_sizes(t, sizes)
    equal_strides = t.stride() == strides or all(
        n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=True)
    )
    if equal_strides and not t._is_zerotensor():
        return t
    out = torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device)
    return out.copy_(t)


def check_input(
    t: torch.Tensor, name: str, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Raise AssertionError for an input that kernels were not generated for, or that its storage does not contain."""
    expected = f"{dtype} {sizes} by {strides}"
    actual = f"{t.dtype} {tuple(t.shape)} by {t.stride()}"
    equal_strides = all(n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=False))
    if t.dtype != dtype or t.shape != sizes or not (equal_strides or 0 in sizes):
        raise AssertionError(f"input {name} of a compiled graph is {actual}, and it was compiled for {expected}")
    last = t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if t.layout == torch.strided and 0 not in sizes and last * t.itemsize > t.untyped_storage().nbytes():
        storage_bytes = t.untyped_storage().nbytes()
        raise AssertionError(
            f"input {name} of a compiled graph, {actual}, reaches beyond its storage of {storage_bytes} bytes"
        )


def retyped(
    t: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return the bytes from the first element of `t` on as a tensor of another dtype; `offset` counts its elements.

    Raise RuntimeError if the storage of `t` is too small.
    """
    begin = t.storage_offset() * t.itemsize // dtype.itemsize + offset
    last = begin + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    if 0 not in sizes and last * dtype.itemsize > t.untyped_storage().nbytes():
        raise RuntimeError(
            f"{sizes} of {dtype} by {strides} from {begin} on do not fit into the tensor that they reinterpret"
        )
    out = torch.empty(0, dtype=dtype, device=t.device)
    return out.set_(t.untyped_storage(), begin, sizes, strides)


def wrong_sizes(t: torch.Tensor, sizes: tuple[int, ...]) -> RuntimeError:
    """Return the error for a library result whose sizes differ from those of its fake kernel."""
    return RuntimeError(
        f"a library call gave a tensor of size {tuple(t.shape)} but its fake kernel returned {sizes}; the line "
        "of the host program above names the call. What to do: correct the fake (meta) kernel of that operator"
    )


def check_error(error: MutableSequence[int], lines: Sequence[str]) -> None:
    """Raise the error of eager for a kernel's error. `error` is (code, index, size); code 0 means no error.

    Raise IndexError (1) or RuntimeError (3) for an index out of range, RuntimeError (2) for a division by zero.
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
