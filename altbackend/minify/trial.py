"""One trial of a repro file: compile the graph, run it, and compare its results with eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing

from altbackend.lazy_dataclass import dataclass

from ..compiled.load import Job
from ..config.resolve import resolve
from ..debug.trace import Trace
from ..errors import AltError
from ..fx_passes.graph import snapshot
from ..pipeline import compile_graph
from ..repro.rebuild import SEED, Rebuilt, rebuild

Kind = Literal["ok", "invalid", "error", "wrong", "crash", "hang"]
# Largest |result - eager| / |eager| of a correct result; other dtypes are compared exactly.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
TOLERANCE |= {torch.complex64: 1e-3, torch.complex128: 1e-7}


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial. `invalid`: eager cannot run the graph. `name`: the type of an error."""

    kind: Kind
    name: str = ""
    message: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.kind, self.name, self.message)))


def main(file: str) -> int:
    """Run a file's trial and print the verdict. Return the exit status: 1 for a failure."""
    verdict = examine(Path(file))
    print(verdict)
    return int(verdict.kind != "ok")


def examine(path: Path, cache_dir: str = "") -> Verdict:
    """Return the verdict on a file. Crashes and hangs of the compiled code are not caught."""
    rebuilt = rebuild(path)
    options = {**rebuilt.options, "strict": True, "repro": "never", "cache_graphs": False}
    cfg = resolve(options=options | ({"cache_dir": cache_dir} if cache_dir else {}))
    gm = torch.fx.GraphModule(rebuilt.gm, snapshot(rebuilt.gm.graph)())
    trace = Trace(f"repro_{rebuilt.job['kind']}", replace(cfg, debug_dir=""))
    try:
        with tracing(TracingContext(rebuilt.mode)):
            call = compile_graph(gm, cfg, trace, Job(**rebuilt.job))
    except Exception as cause:
        return _raised(cause)
    return _compared(rebuilt, call)


def _raised(cause: Exception) -> Verdict:
    inner = cause.__cause__ if isinstance(cause, AltError) and cause.__cause__ is not None else cause
    message = inner.headline if isinstance(inner, AltError) else str(inner)
    return Verdict("error", type(inner).__name__, message.partition("\n")[0][:500])


def _compared(rebuilt: Rebuilt, call: Callable[[list[object]], Sequence[object]]) -> Verdict:
    eager_args, args = rebuilt.real_inputs(), rebuilt.real_inputs()
    with torch.no_grad():
        try:
            torch.manual_seed(SEED)
            expected = rebuilt.gm(*eager_args)
        except Exception as cause:
            return Verdict("invalid", type(cause).__name__, str(cause)[:500])
        try:
            torch.manual_seed(SEED)
            results = call([*args])
        except Exception as cause:
            return _raised(cause)
    if rebuilt.draws and not rebuilt.options.get("fallback_random"):
        return Verdict("ok", "", "not compared, since it draws random numbers; put 'fallback_random': True in OPTIONS")
    pairs = [*_pairs(results, expected, "result"), *_pairs(args, eager_args, "input")]
    for what, a, b in pairs:
        if text := difference(a, b):
            return Verdict("wrong", "", f"{what} {text}")
    return Verdict("ok")


def _pairs(results: Sequence[object], eager: Sequence[object], what: str) -> list[tuple[str, Tensor, Tensor]]:
    return [
        (f"{what} {k}", a, b)
        for k, (a, b) in enumerate(zip(results, eager, strict=True))
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    ]


def difference(result: Tensor, eager: Tensor) -> str:
    """Return how a result differs from eager's by more than rounding, or ""."""
    if (result.shape, result.dtype) != (eager.shape, eager.dtype):
        return f"is {result.dtype} {[*result.shape]}, eager's is {eager.dtype} {[*eager.shape]}"
    if eager.numel() == 0:
        return ""
    error = _relative_error(result, eager)
    tolerance = TOLERANCE.get(eager.dtype, 0.0)
    return "" if error <= tolerance else f"differs from eager's by {error:.1e} of its largest element"


def _relative_error(result: Tensor, eager: Tensor) -> float:
    a, b = _wide(result), _wide(eager)
    finite = b.isfinite()
    # infinities and NaNs must be equal
    if not torch.equal(finite, a.isfinite()) or not torch.equal(_special(a[~finite]), _special(b[~finite])):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / (float(b.abs().max()) or 1.0))


def _wide(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj()
    return (torch.view_as_real(x) if x.dtype.is_complex else x).double()


def _special(x: Tensor) -> Tensor:
    return x.nan_to_num(0, 1, -1)


def as_row(verdict: Verdict) -> dict[str, str]:
    return asdict(verdict)
