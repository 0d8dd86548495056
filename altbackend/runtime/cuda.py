"""What a generated host program for CUDA runs on: kernels launched through the driver, argument tables, streams.

A launch is one call of `cuLaunchKernel` whose argument array was laid out beforehand: each entry is the address of a
place in a table of pointers or of sizes, so that only the table is written between launches.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .host import wrong_sizes

_guards: Any = torch._C._dynamo.guards
view: Callable[..., torch.Tensor] = _guards._reinterpret_tensor
empty_cuda: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", torch.empty_strided)

_SHARED_LIMIT = 48 << 10  # bytes a kernel may use without asking
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ALIGNMENT = 16
_EXTRA = 2  # Triton's kernels end with two scratch pointers, null here


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel, its shared memory in bytes, warps a program, and the function's name."""

    code: bytes
    shared: int
    warps: int
    name: str = "kernel"


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status} in {what}: {(text.value or b'?').decode()}")


_thread = threading.local()


def bind_context(device: int) -> None:
    """Give this thread the context of `device` if it has none: unlike torch's own calls, the driver's do not make one.

    The threads that run a backward start without. Raises RuntimeError if the driver refuses.
    """
    if getattr(_thread, "bound", False):
        return
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "making a context")
        _check(driver.cuCtxSetCurrent(context), "binding a context")
    _thread.bound = True


def load(cubin: Cubin, name: str) -> Callable[[int, Any, Any], None]:
    """A function `launch(programs, stream, arguments)` on the current device; `name` is what errors say.

    Raises RuntimeError if the driver refuses the code.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    bind_context(torch.cuda.current_device())
    _check(driver.cuModuleLoadData(ctypes.byref(module), cubin.code), f"loading {name}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, cubin.name.encode()), f"loading {name}")
    if cubin.shared > _SHARED_LIMIT:
        _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, cubin.shared), f"loading {name}")
    call, threads, shared = driver.cuLaunchKernel, 32 * cubin.warps, cubin.shared

    def launch(programs: int, stream: Any, arguments: Any) -> None:
        if programs:
            status = call(function, programs, 1, 1, threads, 1, 1, shared, stream, arguments, None)
            if status:
                _check(status, f"launching {name}")

    return launch


Argument = tuple[str, int]  # ("p", slot of a pointer) or ("s", number of a size)


@dataclass
class Table:
    """One call's pointers and sizes, and per launch the array of their addresses."""

    pointers: Any
    sizes: Any
    launches: list[Any]
    nothing: Any


class Tables:
    """Tables of one graph, one per running call. `launches`: what each launch takes, in order."""

    def __init__(self, slots: int, sizes: int, launches: Sequence[Sequence[Argument]], fixed: dict[int, Any]) -> None:
        self.slots, self.sizes, self.launches, self.fixed = slots, sizes, launches, fixed
        self.idle: list[Table] = []
        self.lock = threading.Lock()

    def take(self) -> Table:
        with self.lock:
            if self.idle:
                return self.idle.pop()
        return self._make()

    def give(self, t: Table) -> None:
        with self.lock:
            self.idle.append(t)

    def _make(self) -> Table:
        pointers = (ctypes.c_void_p * max(self.slots, 1))()
        sizes = (ctypes.c_int64 * max(self.sizes, 1))()
        nothing = ctypes.c_void_p()
        for slot, tensor in self.fixed.items():
            pointers[slot] = tensor.data_ptr()
        base = {"p": ctypes.addressof(pointers), "s": ctypes.addressof(sizes)}
        arrays = []
        for arguments in self.launches:
            places = [base[kind] + 8 * k for kind, k in arguments] + [ctypes.addressof(nothing)] * _EXTRA
            arrays.append((ctypes.c_void_p * len(places))(*places))
        return Table(pointers, sizes, arrays, nothing)


def stream(device: int) -> Any:
    """The current stream of `device`, as the driver takes it."""
    return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))


def aligned(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy with its strides whose address is a multiple of 16, which kernels assume of what they read."""
    if t.data_ptr() % _ALIGNMENT == 0:
        return t
    if t.is_neg():  # kernels take what is in memory
        t = torch._neg_view(t)
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def on_device(call: Callable[[list[Any]], Any], device: int) -> Callable[[list[Any]], Any]:
    """`call` with `device` current, as allocation and launches need it; `check` is what to do before a replay of it."""
    current, guard = torch._C._cuda_getDevice, torch.cuda.device(device)

    def run(args: list[Any]) -> Any:
        if current() == device:
            bind_context(device)
            return call(args)
        with guard:
            bind_context(device)
            return call(args)

    run.check = getattr(call, "check", None)  # type: ignore[attr-defined]
    return run


class ErrorFlag:
    """A number in host memory that kernels set when an index is out of range.

    It is read when the next call begins: looking earlier would wait for the device. Eager's own checks on a GPU come
    as late.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.number = ctypes.c_int32.from_address(self.flag.data_ptr())

    def data_ptr(self) -> int:
        return self.flag.data_ptr()

    def check(self) -> None:
        if self.number.value:
            self.number.value = 0
            raise IndexError(
                f"an earlier call met an index out of range in {'; '.join(self.lines) or 'an indexing operation'}"
            )


def ensure_strides(t: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A library result with the strides and the alignment that the kernels were generated for.

    A tensor of zeros that has no memory, as the gradient of `sgn` is, gets some. Raises RuntimeError for other sizes
    than tracing was promised.
    """
    if t.shape != sizes:
        raise wrong_sizes(t, sizes)
    same = t.stride() == strides or all(n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=True))
    if same and not t._is_zerotensor() and t.data_ptr() % _ALIGNMENT == 0:
        return t
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device).copy_(t)
