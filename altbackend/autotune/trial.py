"""Trials as plain data (JSON): launches and library calls on buffers of given sizes, to be measured together."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from ..codegen.triton.print_triton import TritonKernel
from ..ir import expr as ex
from ..ir.loops import Extern, Program, View
from ..runtime.cuda import Cubin
from .trial_data import StepData, Trial, ViewData

ERROR, SCRATCH = "error", "scratch"  # buffers of a kernel's error flag and of its programs' scratch memory
# A kernel, the program's buffers that its parameters stand for, and its machine code.
Launch = tuple[TritonKernel, tuple[str, ...], Cubin]


def refusal(kernel: TritonKernel) -> str | None:
    """Return why a kernel cannot be measured alone, or None."""
    if kernel.symbols:
        return "its sizes are symbolic"
    return "it is several kernels" if kernel.finish or kernel.workspace or kernel.zeroed else None


def of(p: Program, steps: Sequence[Extern | Launch]) -> Trial:
    """Return the trial of some steps of a program with static sizes, run one after the other."""
    buffers: dict[str, tuple[str, int]] = {}
    rows = [_call(s) if isinstance(s, Extern) else _launch(s) for s in steps]
    for b in dict.fromkeys(b for s in rows for b in s["buffers"]):
        if (buffer := p.buffers.get(b)) is not None:
            buffers[b] = (str(buffer.dtype).removeprefix("torch."), ex.numbers([buffer.extent])[0])
    bytes_ = max((s[0].scratch * _programs(s[0]) for s in steps if isinstance(s, tuple)), default=0)
    own = {ERROR: ("int32", 1), SCRATCH: ("uint8", bytes_)}
    return {"buffers": buffers | {b: n for b, n in own.items() if any(b in s["buffers"] for s in rows)}, "steps": rows}


def _programs(kernel: TritonKernel) -> int:
    (programs,) = kernel.grid
    assert isinstance(programs, int)  # kernels with symbolic sizes are refused
    return programs


def _launch(s: Launch) -> StepData:
    kernel, buffers, cubin = s
    return {
        "buffers": [*buffers, *[ERROR] * kernel.checks, *[SCRATCH] * bool(kernel.scratch)],
        "grid": _programs(kernel),
        "cubin": base64.b64encode(cubin.code).decode(),
        "shared": cubin.shared,
        "warps": cubin.warps,
        "name": cubin.name,
    }


def _call(s: Extern) -> StepData:
    (out,) = s.outs
    assert out is not None
    views = [a for a in s.args if isinstance(a, View)]
    return {
        "buffers": [*dict.fromkeys(v.buffer for v in views), out],
        "operator": s.target._schema.name.removeprefix("aten::"),
        "args": [_argument(a) for a in s.args],
        "kwargs": dict(s.kwargs),
        "out": out,
    }


def _argument(a: View | float) -> ViewData | float:
    if not isinstance(a, View):
        return a
    sizes, strides, (offset,) = ex.numbers(a.sizes), ex.numbers(a.strides), ex.numbers([a.offset])
    return ViewData(buffer=a.buffer, sizes=sizes, strides=strides, offset=offset)
