"""Runs the C++ host program of a GPU without one: its buffers are CPU tensors, its launches Triton's interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from altbackend.codegen.host import cpp_cuda, cpp_graph, cuda_program
from altbackend.compat import torch_api
from altbackend.compile_pool import libraries
from altbackend.config.resolve import resolve
from altbackend.disk_cache.storage import open_store
from altbackend.ir import expr as ex
from altbackend.ir.expr import Index
from altbackend.ir.loops import Program
from altbackend.runtime import cuda
from altbackend.runtime.boxed import boxed
from altbackend.runtime.cpp_host import CppHost, HostForm, bound
from test.cuda_host import launched
from test.graphs import Scheduled

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
STREAM = 77  # any number: the fake launches only compare it


def build(s: Scheduled, steps: Sequence[Any], launch: Callable[..., None], **options: Any) -> tuple[str, Any]:
    """Return the text of the host program of a scheduled graph with static shapes, and its call."""
    p, found = launched(s, steps)
    planned, cfg = cpp_cuda.plan_of(p, found), resolve(options={"host": "cpp"})
    printed = cpp_graph.build_cuda(planned, cfg, cpp_graph.Calling(any_strides=False, drops=False))
    flags = (*libraries._HOST, "-DALT_GPU=cpu")
    with patch.object(libraries, "_HOST", flags):
        name = libraries.host_name(printed.text)
        if open_store(cfg).find(name) is None:
            libraries.build_host(printed.text, cfg, low_priority=False)
        file = open_store(cfg).find(name)
    assert file is not None
    path = Path(file.path)

    @LAUNCH  # type: ignore[untyped-decorator]
    def fake(function: int, programs: int, *rest: Any) -> int:
        *_, stream, arguments, _ = rest
        assert stream == STREAM
        interpret(p, planned.launches[function - 1], programs, arguments, launch)
        return 0

    form = HostForm(printed.inputs, printed.outputs, printed.constants, printed.donated)
    host = CppHost(str(path), form, fake, [], s.constants, 0)
    address = ctypes.cast(fake, ctypes.c_void_p).value or 0
    count = len(planned.launches)
    with torch_api.real_tensors():
        host.use_gpu(address, [(k + 1, 128, 0) for k in range(count)], torch.zeros(1, dtype=torch.int32), 0)
    call = bound(host, form, _no_python, device=0)

    @boxed
    def run(args: list[Any]) -> Any:
        with patch.multiple(
            cuda, get_device=lambda: 0, raw_stream=lambda device: STREAM, thread=SimpleNamespace(bound=True)
        ):
            return call(args)

    return printed.text, run


def _no_python(args: list[Any]) -> Any:
    raise AssertionError("the program in C++ gave the call up")


def interpret(
    p: Program,
    s: cuda_program.CudaLaunch,
    programs: int,
    arguments: Any,
    launch: Callable[..., None],
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Run a launch from the addresses of its arguments. `sizes`: symbols that the kernel does not take."""
    first = len(s.buffers) + s.kernel.checks
    symbols = [ctypes.c_int64.from_address(arguments[first + n]).value for n in range(len(s.kernel.symbols))]
    named = {**dict(zip(s.kernel.symbols, symbols, strict=True)), **(sizes or {})}
    buffers = [p.buffers[b] for b in s.buffers]
    pointers = [_tensor(arguments[k], b.dtype, _count(b.extent, named)) for k, b in enumerate(buffers)]
    if s.kernel.checks:
        pointers.append(_tensor(arguments[len(buffers)], torch.int32, 1))
    launch(s.kernel, pointers, symbols, programs)


def _count(extent: Index, sizes: Mapping[str, int]) -> int:
    if isinstance(extent, int):
        return extent
    return int(eval(ex.show(extent), {}, dict(sizes)))


def _tensor(place: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return the elements behind a pointer that lies at `place`."""
    address = ctypes.c_void_p.from_address(place).value
    if not count:
        return torch.empty(0, dtype=dtype)
    assert address
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)
