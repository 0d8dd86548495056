"""Runs the host program of a GPU without one: its buffers are CPU tensors, its launches Triton's interpreter."""

from __future__ import annotations

import ctypes
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from altbackend import pipeline
from altbackend.codegen.host import cuda_program
from altbackend.codegen.triton.print_triton import TritonKernel
from altbackend.compat import torch_api
from altbackend.compiled import load
from altbackend.config.resolve import resolve
from altbackend.ir.loops import Extern, Program
from altbackend.runtime import cuda as runtime
from test.graphs import Scheduled

# a library result whose strides are right; its memory has to be noted by the call that checks them
_HASTY = re.compile(r"^( +)if \w+\.stride\(\) != .*:\n +(\w+ = ensure_strides\(.*\))$", re.MULTILINE)
Launch = Callable[[TritonKernel, list[torch.Tensor], list[int], int], None]


@dataclass
class Memory:
    """Storage by address: what a pointer in the tables of the host program means."""

    at: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    nothing: set[int] = field(default_factory=set)

    def hold(self, t: torch.Tensor) -> torch.Tensor:
        if not t.numel():
            self.nothing.add(t.data_ptr())
        else:
            self.at[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    def find(self, place: int, dtype: torch.dtype) -> torch.Tensor:
        """All that is behind a pointer, as one flat tensor. Raises LookupError for one that nothing here has."""
        address = ctypes.c_void_p.from_address(place).value or 0
        for begin, storage in self.at.items():
            if begin <= address < begin + storage.nbytes():
                room = (begin + storage.nbytes() - address) // dtype.itemsize
                if not room:
                    raise LookupError(f"a kernel takes {storage.nbytes()} bytes as a tensor of {dtype}")
                return torch.empty(0, dtype=dtype).set_(storage, (address - begin) // dtype.itemsize, (room,), (1,))
        if address not in self.nothing:
            raise LookupError(f"a kernel of the host program takes the pointer {address:#x}, which no tensor has")
        return torch.empty(0, dtype=dtype)


class Flag:
    """An error flag whose number is looked at when the call ends."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32)

    def data_ptr(self) -> int:
        return self.flag.data_ptr()

    def check(self) -> None:
        if self.flag.item():
            self.flag.zero_()
            raise IndexError("index out of range")


def launched(s: Scheduled, steps: Sequence[Any]) -> tuple[Program, list[cuda_program.Step]]:
    """Return a scheduled graph on a GPU, and its library calls and launches."""
    device = torch.device("cuda", 0)
    p = replace(s.program, buffers={n: replace(b, device=device) for n, b in s.program.buffers.items()})
    found: list[cuda_program.Step] = []
    for n, step in enumerate(steps):
        if isinstance(step, Extern):
            found.append(step)
        else:
            p, more = cuda_program.launches(p, step[0], step[1], (), n, step[2])
            found += more
    return p, found


def build(s: Scheduled, steps: Sequence[Any], launch: Launch) -> tuple[str, Callable[[list[Any]], Any]]:
    """The text of the host program of a scheduled graph, and its call; errors of indices are raised by the call."""
    p, found = launched(s, steps)
    printed = cuda_program.build(p, found)
    memory, flags = Memory(), []

    def flag(lines: Sequence[str]) -> Flag:
        flags.append(Flag(lines))
        memory.hold(flags[-1].flag)
        return flags[-1]

    def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        t = torch.empty_strided(sizes, strides, dtype=dtype)
        # what no kernel writes must not look right by chance
        return memory.hold(t.fill_(float("nan") if dtype.is_floating_point else 77))

    def ensure_strides(
        t: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], real: Any = runtime.ensure_strides
    ) -> torch.Tensor:
        if tuple(t.shape) != tuple(sizes):  # ATen's CPU form of some operators gives other shapes than it says
            raise ValueError(f"a library call gave {tuple(t.shape)} instead of {tuple(sizes)}")
        return memory.hold(real(t, sizes, strides))

    names: dict[str, Any] = {
        "ErrorFlag": flag,
        "empty_cuda": empty,
        "aligned": lambda t, real=runtime.aligned: memory.hold(real(t)),
        "ensure_strides": ensure_strides,
        "on_device": lambda call, device: call,
        "get_device": lambda: 0,
        "raw_stream": lambda device: 0,
        "thread": types.SimpleNamespace(bound=True),
    }
    constants = {n: _held(c, memory) for n, c in pipeline.callables(found, s.constants).items()}
    with patch.multiple(runtime, **names), torch_api.real_tensors():
        kernels = [_launcher(k, memory, launch) for k, _ in printed.launches]
        call = load.load(_HASTY.sub(r"\1\2", printed.python), resolve(), kernels, constants, 0)
        for c in constants.values():
            if isinstance(c, torch.Tensor):
                memory.hold(c)

    fixed = dict(memory.at)

    def run(args: list[Any]) -> Any:
        memory.at = dict(fixed)
        for a in args:
            if isinstance(a, torch.Tensor) and a.layout == torch.strided:
                memory.hold(a)
        out = call(args)
        for f in flags:
            f.check()
        return out

    run._boxed_call = True  # type: ignore[attr-defined]
    return printed.python, run


def _held(constant: Any, memory: Memory) -> Any:
    """A function whose results kernels may read wherever they lie; other constants as they are."""
    if not isinstance(constant, types.FunctionType):
        return constant

    def call(*args: Any, **kwargs: Any) -> Any:
        out = constant(*args, **kwargs)
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                memory.hold(t)
        return out

    return call


def _launcher(k: TritonKernel, memory: Memory, launch: Launch) -> Callable[..., None]:
    dtypes = [q.dtype for q in k.params] + [w.dtype for w in k.workspace] + [torch.int32] * k.checks

    def run(programs: int, stream: Any, places: Any) -> None:
        pointers = [memory.find(places[n], d) for n, d in enumerate(dtypes)]
        symbols = [ctypes.c_int64.from_address(places[len(dtypes) + n]).value for n in range(len(k.symbols))]
        if programs:
            launch(k, pointers, symbols, programs)

    return run
