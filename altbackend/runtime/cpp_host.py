"""Host programs in C++: load the library of one, and call it with Python's tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from . import cuda
from .boxed import Args, BoxedCall, Values, boxed
from .donated import owned
from .host import close_with

# Handles of tensors for C++, and tensors of such handles. Each handle is a capsule that owns nothing.
handles_of: Callable[[list[torch.Tensor]], list[ctypes.c_void_p]] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
tensors_of: Callable[[list[ctypes.c_void_p]], list[torch.Tensor]] = (
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
)
# Modes intercept the operators of the Python program; C++ would pass them by.
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


@dataclass(frozen=True)
class HostForm:
    """The calling convention of a host program in C++.

    `inputs`: a letter each: "t" tensor, "n" integer, "-" not used. `outputs`: tensor, int, float, bool or none.
    `donated`: inputs whose memory the program takes over, if the call owns it; one more number says whether it does.
    """

    inputs: str
    outputs: tuple[str, ...]
    constants: tuple[str, ...]
    donated: tuple[int, ...] = ()


class CppHost:
    """A loaded host program. Raise OSError if the library cannot be loaded, AttributeError if it is another one.

    `segments`: addresses of the functions that run kernels, which `kernels` keeps alive.
    """

    def __init__(
        self,
        path: str,
        form: HostForm,
        kernels: object,
        segments: Sequence[int],
        constants: Mapping[str, Any],
        threads: int,
    ) -> None:
        dll = ctypes.PyDLL(path)
        self.kernels, self.constants = kernels, [constants[name] for name in form.constants]
        kinds = "".join({"tensor": "t", "none": "-"}.get(o, o[0]) for o in form.outputs).encode()
        dll.alt_graph_new.restype = ctypes.c_void_p
        addresses = (ctypes.c_void_p * max(len(segments), 1))(*segments)
        self.state = ctypes.c_void_p(dll.alt_graph_new(addresses, kinds, threads))
        dll.alt_graph_constants.argtypes = (ctypes.c_void_p, ctypes.py_object)
        dll.alt_graph_constants(self.state, handles_of(self.constants))
        dll.alt_graph_call.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.py_object, ctypes.c_void_p)
        dll.alt_graph_call.restype = ctypes.py_object
        self.run, self.dll = dll.alt_graph_call, dll
        # nothing is deleted at exit, when threads may still run it
        weakref.finalize(self, dll.alt_graph_delete, self.state).atexit = False
        close_with(dll)  # after the deletion, since that refers to `dll`

    def use_gpu(self, launch: int, kernels: Sequence[tuple[int, int, int]], flag: torch.Tensor, device: int) -> None:
        """Give the program its kernels on a GPU: (function, threads, shared memory) of each, and their error flag.

        The flag is a number in memory that the host and the GPU share.

        `launch`: the address of cuLaunchKernel.
        """
        numbers = [x for k in kernels for x in k]
        table = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
        self.flag = flag
        pointers = ctypes.c_void_p(launch), table, len(kernels), ctypes.c_void_p(flag.data_ptr())
        self.dll.alt_graph_gpu(self.state, *pointers, device)


def bound(host: CppHost, form: HostForm, python: BoxedCall, device: int = -1) -> BoxedCall:
    """Return the call of a host program in C++. `device`: the number of the GPU on whose current stream it runs, or -1.

    `python` is the same program in Python. It runs calls under a dispatch mode, and calls that C++ gave up before they
    had an effect: it raises their errors.
    """
    run, nothing = host.run, list[int]()
    is_tensor = [kind == "t" for kind in form.inputs]
    tensors = [k for k, t in enumerate(is_tensor) if t]
    numbers = [k for k, kind in enumerate(form.inputs) if kind == "n"]
    only_tensors = all(is_tensor)
    finish, donated, on_gpu = _results(form), form.donated, device >= 0

    @boxed
    def call(args: Args) -> Values:
        stream = 0
        if on_gpu:
            if cuda.get_device() != device or not getattr(cuda.thread, "bound", False):
                return elsewhere(args)
            stream = cuda.raw_stream(device)
        if _modes():
            return python(args)
        own = [int(owned(args, donated))] if donated else nothing
        try:
            handles = handles_of(args if only_tensors else [args[k] for k in tensors])
        except TypeError:  # an input that is no tensor, which only Python can pass on
            return python(args)
        rest = nothing if only_tensors else [None if t else x for t, x in zip(is_tensor, args, strict=True)]
        args.clear()
        given = [rest[k] for k in numbers] + own if numbers else own
        out = run(host.state, handles, given, stream)
        if out is not None:
            return finish(out)
        tensors_left = iter(tensors_of(handles))
        return python([next(tensors_left) if t else rest[k] for k, t in enumerate(is_tensor)])

    elsewhere = cuda.on_device(call, device) if on_gpu else call
    return call


def _results(form: HostForm) -> Callable[[list[Any]], Values]:
    """Return the function that makes the results of a call from handles and numbers."""
    where = [k for k, kind in enumerate(form.outputs) if kind == "tensor"]

    def mixed(out: list[Any]) -> Values:
        for k, t in zip(where, tensors_of([out[k] for k in where]), strict=True):
            out[k] = t
        return tuple(out)

    return mixed if len(where) < len(form.outputs) else tensors_of
