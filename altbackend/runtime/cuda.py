"""Runtime of generated CUDA host programs: kernel launches through the driver, argument tables, streams.

A launch is one call of `cuLaunchKernel` with an argument array that was laid out beforehand. Each argument is the
address of a slot in a table of pointers or sizes, so only the table is written between launches.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch

from altbackend.lazy_dataclass import dataclass

from .boxed import Args, BoxedCall, Values
from .host import wrong_sizes

_guards: ModuleType = torch._C._dynamo.guards
view: Callable[..., torch.Tensor] = _guards._reinterpret_tensor
empty_cuda: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", torch.empty_strided)

_SHARED_LIMIT = 48 << 10  # bytes of shared memory that a kernel may use without setting an attribute
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ALIGNMENT = 16  # bytes: kernels take addresses of tensors to be multiples of it
_EXTRA = 2  # Triton's kernels end with two pointers to scratch memory, null here


@dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel, its shared memory in bytes, its warps per program, and its function's name."""

    code: bytes
    shared: int
    warps: int
    name: str = "kernel"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status} in {what}: {(text.value or b'?').decode()}")


thread = threading.local()  # `bound`: whether this thread has the context of a device; host programs ask in each call

get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def bind_context(device: int) -> None:
    """Give this thread the context of `device` if it has none: unlike torch's calls, the driver's do not make one.

    autograd's threads, which run backwards, start without a context. Raise RuntimeError if the driver refuses.
    """
    if getattr(thread, "bound", False):
        return
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "reading the context")
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "making a context")
        _check(driver.cuCtxSetCurrent(context), "binding a context")
    thread.bound = True


def load(cubin: Cubin, name: str) -> Callable[[int, ctypes.c_void_p, ctypes.Array[ctypes.c_void_p]], None]:
    """Return a function `launch(programs, stream, arguments)` on the current device. Errors call the kernel `name`.

    Its attribute `kernel` holds the driver's function, the threads per program, and the bytes of shared memory. Raise
    RuntimeError if the driver refuses the code.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    bind_context(torch.cuda.current_device())
    _check(driver.cuModuleLoadData(ctypes.byref(module), cubin.code), f"loading {name}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, cubin.name.encode()), f"loading {name}")
    if cubin.shared > _SHARED_LIMIT:
        _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, cubin.shared), f"loading {name}")
    call, threads, shared = driver.cuLaunchKernel, 32 * cubin.warps, cubin.shared

    def launch(programs: int, stream: ctypes.c_void_p, arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        if programs:
            status = call(function, programs, 1, 1, threads, 1, 1, shared, stream, arguments, None)
            if status:
                _check(status, f"launching {name}")

    vars(launch)["kernel"] = (function.value or 0, threads, shared)
    return launch


def launch_address() -> int:
    """Return the address of the driver's function that launches kernels. Raise OSError without a driver."""
    return ctypes.cast(_driver().cuLaunchKernel, ctypes.c_void_p).value or 0


Argument = tuple[str, int]  # ("p", slot of a pointer) or ("s", number of a size)


@dataclass
class Table:
    """The pointers and sizes of one call, and for each launch the array of their addresses."""

    pointers: ctypes.Array[ctypes.c_void_p]
    sizes: ctypes.Array[ctypes.c_int64]
    launches: list[ctypes.Array[ctypes.c_void_p]]
    nothing: ctypes.c_void_p


class Tables:
    """The tables of one graph, one for each running call. `launches` holds the arguments of each launch, in order."""

    def __init__(
        self, slots: int, sizes: int, launches: Sequence[Sequence[Argument]], fixed: Mapping[int, torch.Tensor]
    ) -> None:
        self.slots, self.sizes, self.launches, self.fixed = slots, sizes, launches, fixed
        self.idle: list[Table] = []  # calls take one with `pop` and return it with `append`, which need no lock

    def make(self) -> Table:
        """Return a new table."""
        pointers = (ctypes.c_void_p * max(self.slots, 1))()
        sizes = (ctypes.c_int64 * max(self.sizes, 1))()
        nothing = ctypes.c_void_p()
        for slot, tensor in self.fixed.items():
            pointers[slot] = tensor.data_ptr()
        base = {"p": ctypes.addressof(pointers), "s": ctypes.addressof(sizes)}
        arrays = []
        for arguments in self.launches:
            addresses = [base[kind] + 8 * k for kind, k in arguments] + [ctypes.addressof(nothing)] * _EXTRA
            arrays.append((ctypes.c_void_p * len(addresses))(*addresses))
        return Table(pointers, sizes, arrays, nothing)


def stream(device: int) -> ctypes.c_void_p:
    """Return the current stream of `device` in the driver's type."""
    return ctypes.c_void_p(raw_stream(device))


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Return `t`, or a copy with its strides at an address that is a multiple of 16, as kernels assume."""
    if t.data_ptr() % ALIGNMENT == 0:
        return t
    if t.is_neg():  # kernels read memory without the negative bit
        t = torch._neg_view(t)
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def on_device(call: BoxedCall, device: int) -> BoxedCall:
    """Return `call` with `device` made current, for allocation and launches. Its attribute `check` is copied."""
    guard = torch.cuda.device(device)

    def run(args: Args) -> Values:
        if get_device() == device and getattr(thread, "bound", False):
            return call(args)
        with guard:
            bind_context(device)
            return call(args)

    vars(run)["check"] = getattr(call, "check", None)
    return run


class ErrorFlag:
    """A number in pinned host memory that kernels set when an index is out of range.

    The next call reads it, since reading it earlier would wait for the device. Eager's own checks on a GPU are as
    late.
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
    """Return a library result with the strides and the alignment that the kernels were generated for.

    A zero tensor without memory, such as the gradient of `sgn`, is copied into memory. Raise RuntimeError if its
    sizes differ from the traced ones.
    """
    if t.shape != sizes:
        raise wrong_sizes(t, sizes)
    equal_strides = t.stride() == strides or all(
        n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=True)
    )
    if equal_strides and not t._is_zerotensor() and t.data_ptr() % ALIGNMENT == 0:
        return t
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device).copy_(t)
