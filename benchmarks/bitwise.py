"""python -m benchmarks.bitwise: pointwise operators under `numerics="eager"` against eager, bit for bit.

Every unary, binary and other pointwise operator of torch's own operator database, and each result times 1.1 in the
same kernel, which shows whether it was rounded first. `--dense` takes functions of one operand at all values of the
16-bit types, and at a million of float32: side by side in memory, where eager's loops take vectors, and with gaps,
where they take scalars. NaNs count as equal whatever their bits; zeros of unlike sign do not. Random numbers are
eager's (`fallback_random`). Exit status 1 if a case differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.exc

import altbackend

from .opinfo import SEED, Case, Sample, Settings, _subject, copied, database, library_calls, one_line, tensors

DTYPES = ("float32", "bfloat16", "float16")
OPTIONS: dict[str, Any] = {
    "strict": True,
    "numerics": "eager",
    "fallback_random": True,
    "repro": "never",
    "compile_threads": 1,
}
# pointwise operators that the database declares without a class of their own
_NAMES = (
    "addcdiv addcmul clamp lerp where masked_fill nan_to_num hypot copysign logit nn.functional.gelu nn.functional.relu"
    " nn.functional.silu nn.functional.mish nn.functional.softplus nn.functional.elu nn.functional.celu"
    " nn.functional.selu nn.functional.hardswish nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.relu6"
    " nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.softsign nn.functional.threshold"
    " nn.functional.hardshrink nn.functional.softshrink nn.functional.tanhshrink"
)
OTHERS = frozenset(_NAMES.split())
LAYOUTS = ("vectors", "scalars")
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def pointwise() -> list[str]:
    """Names of the operators that are compared."""
    return sorted(name for name, ops in database().items() if _is_pointwise(name, ops[0]))


def _is_pointwise(name: str, op: Any) -> bool:
    kinds = {kind.__name__ for kind in type(op).__mro__}
    return bool(kinds & {"UnaryUfuncInfo", "BinaryUfuncInfo"}) or name.partition(".no_")[0] in OTHERS


def compare(name: str, dtype: str, samples: int = 4, device: str = "cpu") -> tuple[str, str]:
    """(status, detail). Status: "equal", "differs", "library" (equal, by library calls only), "error" or "none"."""
    kind = getattr(torch, dtype)
    op = next((o for o in database()[name] if kind in o.supported_dtypes(device)), None)
    if op is None:
        return "none", "not of this dtype"
    subject = _subject(Case(name, dtype, "forward"), Settings(device, samples))
    torch._dynamo.reset()

    fn = subject.fn

    def every(held: list[Sample]) -> list[Any]:
        results = [tensors(fn(x, *args, **kwargs)) for x, args, kwargs in held]
        return [[t, t * 1.1] if t.is_floating_point() else [t] for ts in results for t in ts]

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {**OPTIONS, "debug_dir": folder}
        try:
            run = torch.compile(every, backend=altbackend.alt, fullgraph=True, dynamic=False, options=options)
            torch.manual_seed(SEED)
            results = run(copied(subject.samples))
        except torch._dynamo.exc.Unsupported as cause:  # operators that Dynamo refuses for any backend
            return "none", f"not captured: {one_line(cause)[:200]}"
        except Exception as cause:
            return "error", one_line(cause)[:300]
        library = library_calls(Path(folder), [])
    torch.manual_seed(SEED)
    for k, (a, b) in enumerate(zip(tensors(results), tensors(every(copied(subject.samples))), strict=True)):
        if text := difference(a, b):
            return "differs", f"result {k}: {text}"
    return ("library", ", ".join(library)) if library else ("equal", "")


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the number of elements in which two tensors differ, and the first pair; "" if all bits are the same."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {[*a.shape]} instead of {b.dtype} {[*b.shape]}"
    apart = a != b if a.dtype.is_complex or a.dtype == torch.bool else bits(a) != bits(b)
    apart = apart & ~((a != a) & (b != b))
    if not bool(apart.any()):
        return ""
    return f"{int(apart.sum())} of {a.numel()} elements, {a[apart][0].item()!r} instead of {b[apart][0].item()!r}"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def values(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit type; 2**20 float32 numbers, a quarter of them any bits, the others of usual size."""
    if dtype != torch.float32:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(3, 1 << 18, generator=generator) * torch.tensor([[1.0], [10.0], [100.0]])
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32)
    return torch.cat([usual.reshape(-1), anything.view(torch.float32)])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` side by side in memory ("vectors"; a few elements are left to the loop's end) or with gaps ("scalars")."""
    return torch.stack([x, x], 1).flatten()[::2] if layout == "scalars" else torch.cat([x, x[:5]])


def dense(
    functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    dtype: torch.dtype,
    layout: str = "vectors",
    device: str = "cpu",
) -> dict[str, str]:
    """Return how each function of one operand, compiled, differs from eager; "" where all bits are the same."""

    def every(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: f(x) for name, f in functions.items()}

    torch._dynamo.reset()
    x = laid_out(values(dtype), layout).to(device)
    mine = torch.compile(every, backend=altbackend.alt, fullgraph=True, dynamic=False, options=OPTIONS)(x)
    return {name: difference(mine[name], eager) for name, eager in every(x).items()}


def unary() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The functions of one operand in torch's database, as `torch` and `torch.nn.functional` have them."""
    found = {}
    for name in pointwise():
        op, (first, *_) = name.rpartition(".")[2], database()[name]
        f = getattr(torch.nn.functional if name.startswith("nn.functional") else torch, op, None)
        kinds = {kind.__name__ for kind in type(first).__mro__}
        if "UnaryUfuncInfo" in kinds and f is not None and torch.bfloat16 in first.supported_dtypes("cpu"):
            found[name] = f
    return {name: f for name, f in found.items() if _takes_one(f)}


def _takes_one(f: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    try:
        return all(f(torch.ones(2, dtype=getattr(torch, d))).shape == (2,) for d in DTYPES)
    except (TypeError, RuntimeError, AttributeError):
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Print every operator that is not equal, and the counts by dtype."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.bitwise", description="numerics='eager', bit for bit.")
    p.add_argument("--ops", default="", metavar="A,B", help="names; all pointwise ones by default")
    p.add_argument("--dtypes", default=",".join(DTYPES), metavar="A,B")
    p.add_argument("--samples", type=int, default=4, metavar="N")
    p.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="seconds the whole may take")
    p.add_argument("--dense", action="store_true", help="functions of one operand at many values instead")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = p.parse_args(argv)
    warnings.simplefilter("ignore")
    if args.dense:
        return _print_dense(args.dtypes.split(","), args.device)
    end, counts = time.monotonic() + args.budget, Counter[tuple[str, str]]()
    for name in args.ops.split(",") if args.ops else pointwise():
        for dtype in args.dtypes.split(","):
            late = time.monotonic() > end
            status, detail = ("not run", "") if late else compare(name, dtype, args.samples, args.device)
            counts[dtype, status] += 1
            if status in ("differs", "error"):
                print(f"{status:8} {name:40} {dtype:9} {detail}", flush=True)
    for (dtype, status), n in sorted(counts.items()):
        print(f"{dtype:9} {status:8} {n:4}")
    return int(any(status in ("differs", "error") for _, status in counts))


def _print_dense(dtypes: Sequence[str], device: str) -> int:
    differing = 0
    for dtype, layout in itertools.product(dtypes, LAYOUTS):
        found = dense(unary(), getattr(torch, dtype), layout, device)
        apart = {name: text for name, text in found.items() if text}
        print("".join(f"differs  {name:40} {dtype:9} {layout} {text}\n" for name, text in apart.items()), end="")
        print(f"{dtype:9} {layout:8} {len(found) - len(apart)} of {len(found)} equal", flush=True)
        differing += len(apart)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
