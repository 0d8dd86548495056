"""python -m benchmarks.flex: FlexAttention with common functions, against dense eager in float64, and timed.

Every case is checked at a small size, forward and (on a GPU) backward: the error of the compiled results by float64
beside eager's. Then eager, TorchInductor and this package are timed in turns in one process. `--tiles` times the
forward and backward for every choice of tiles instead, through the call's kernel options.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Tensor = torch.Tensor
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WINDOW, DOCUMENT = 256, 700  # rows


@dataclass(frozen=True)
class Size:
    """`batch` x `heads` matrices of `rows` x `depth`; keys and values have `key_heads`."""

    batch: int
    heads: int
    key_heads: int
    rows: int
    depth: int


@dataclass(frozen=True)
class Captured:
    """Tensors that the functions read: the number of each row's document, a slope for each head, a bias by distance."""

    documents: Tensor
    slopes: Tensor
    distances: Tensor


Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A name, and the functions that it makes of captured tensors."""

    name: str
    mask: Callable[[Captured], Mask] | None = None
    score: Callable[[Captured], Score] | None = None


def _causal(c: Captured) -> Mask:
    return lambda b, h, q, k: q >= k


def _window(c: Captured) -> Mask:
    return lambda b, h, q, k: (q >= k) & (q - k < WINDOW)


def _documents(c: Captured) -> Mask:
    return lambda b, h, q, k: (q >= k) & (c.documents[q] == c.documents[k])


def _alibi(c: Captured) -> Score:
    return lambda s, b, h, q, k: s + c.slopes[h] * (k - q)


def _soft_cap(c: Captured) -> Score:
    return lambda s, b, h, q, k: 30 * torch.tanh(s / 30)


def _distances(c: Captured) -> Score:
    return lambda s, b, h, q, k: s + c.distances[h, torch.clamp(q - k, 0, WINDOW - 1)]


CASES = (
    Case("plain"),
    Case("causal", _causal),
    Case("sliding window", _window),
    Case("documents", _documents),
    Case("ALiBi, causal", _causal, _alibi),
    Case("soft cap, causal", _causal, _soft_cap),
    Case("bias by distance, causal", _causal, _distances),
)


def call_of(case: Case, size: Size, c: Captured, options: dict[str, Any] | None = None) -> Callable[..., Tensor]:
    """Return the attention of a case as a function of query, key and value."""
    device = c.slopes.device.type
    mask = None
    if case.mask is not None:
        mask = create_block_mask(case.mask(c), None, None, size.rows, size.rows, device=device)
    score = None if case.score is None else case.score(c)
    grouped = size.heads != size.key_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(
            q,
            k,
            v,
            score_mod=score,
            block_mask=mask,
            enable_gqa=grouped,
            kernel_options=options,  # type: ignore[arg-type]
        )
        assert isinstance(out, Tensor)
        return out

    return call


def inputs_of(size: Size, dtype: torch.dtype, device: str) -> list[Tensor]:
    heads = (size.heads, size.key_heads, size.key_heads)
    return [torch.randn(size.batch, h, size.rows, size.depth, device=device).to(dtype) for h in heads]


def captured_of(size: Size, device: str) -> Captured:
    return Captured(
        torch.arange(size.rows, device=device) // DOCUMENT,
        torch.rand(size.heads, device=device) / 10,
        torch.randn(size.heads, WINDOW, device=device),
    )


def values(call: Callable[..., Tensor], inputs: Sequence[Tensor], by: Tensor | None) -> list[Tensor]:
    """Return the result, and with `by` the gradients of the inputs."""
    if by is None:
        with torch.no_grad():
            return [call(*inputs)]
    xs = [x.detach().requires_grad_() for x in inputs]
    out = call(*xs)
    return [out.detach(), *torch.autograd.grad(out, xs, by.to(out.dtype))]


# --- results ---------------------------------------------------------------------------------------------------------


def check(case: Case, size: Size, dtype: torch.dtype, device: str) -> bool:
    """Print the largest errors by float64, of eager and compiled; return whether the compiled ones are small."""
    c, inputs = captured_of(size, device), inputs_of(size, dtype, device)
    call = call_of(case, size, c)
    backward = device == "cuda"
    by = torch.randn_like(inputs[0]) if backward else None
    torch._dynamo.reset()
    ours = values(torch.compile(call, backend="alt", options={"strict": True}), inputs, by)
    eager = values(call, inputs, by)
    wide = Captured(c.documents, c.slopes.double(), c.distances.double())
    exact = values(call_of(case, size, wide), [x.double() for x in inputs], None if by is None else by.double())
    good, texts = True, []
    for name, o, e, x in zip(("out", "by q", "by k", "by v"), ours, eager, exact, strict=False):
        scale = float(x.abs().max())
        mine, theirs = (float((t.double() - x).abs().max()) / scale for t in (o, e))
        # weights are rounded before, not after, they are divided by their sum
        bound = 2 * theirs + 2 * torch.finfo(dtype).eps
        good &= mine <= bound
        texts.append(f"{name} {mine:.1e} ({theirs:.1e})")
    print(
        f"{'ok ' if good else 'BAD'} {case.name:26s} {str(dtype)[6:]:9s} {size.heads}/{size.key_heads} heads: ", end=""
    )
    print(", ".join(texts), flush=True)
    return good


# --- times -----------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds of one call: on a GPU, of ten calls in a row, divided by ten."""
    turns = 10 if device == "cuda" else 1
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(turns):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / turns


def _step(fn: Callable[..., Tensor], inputs: Sequence[Tensor], by: Tensor | None) -> Callable[[], object]:
    return lambda: values(fn, inputs, by)


def _runs(name: str, step: Callable[[], object]) -> bool:
    """Return whether a call runs: it may lack memory, or have a form that a compiler does not take."""
    try:
        step()
    except Exception as cause:
        print(f"{name}: {type(cause).__name__}: {str(cause)[:200]}", flush=True)
        return False
    return True


def times(
    calls: dict[str, Callable[..., Tensor]], inputs: Sequence[Tensor], by: Tensor | None, device: str, rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of each call, measured in turns; nan for one that fails."""
    steps = {name: _step(fn, inputs, by) for name, fn in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in list(steps.items()):
        if not _runs(name, step):
            del steps[name]
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(seconds(step, device) * 1e3)
    return {name: median(found) if found else float("nan") for name, found in taken.items()}


def measure(case: Case, size: Size, dtype: torch.dtype, device: str, rounds: int) -> None:
    """Print a line for each direction: milliseconds by eager, TorchInductor and this package."""
    call = call_of(case, size, captured_of(size, device))
    inputs = inputs_of(size, dtype, device)
    for by in (None, torch.randn_like(inputs[0])) if device == "cuda" else (None,):
        torch._dynamo.reset()
        calls = {"eager": call, "inductor": torch.compile(call), "alt": torch.compile(call, backend="alt")}
        ms = times(calls, inputs, by, device, rounds)
        direction = "forward" if by is None else "both"
        ratio = ms["alt"] / ms["inductor"]
        print(
            f"{case.name:26s} {str(dtype)[6:]:9s} {size.rows:6d} x {size.depth:3d} {direction:8s}"
            f" {ms['eager']:9.3f} {ms['inductor']:9.3f} {ms['alt']:9.3f} {ratio:7.2f}",
            flush=True,
        )


def sweep(case: Case, size: Size, dtype: torch.dtype, rounds: int) -> None:
    """Print the milliseconds of this package for choices of tiles, the fastest first."""
    c, inputs = captured_of(size, "cuda"), inputs_of(size, dtype, "cuda")
    for prefix, names, by in (
        ("fwd_", ("BLOCK_M", "BLOCK_N"), None),
        ("bwd_", ("BLOCK_M1", "BLOCK_N1"), torch.randn_like(inputs[0])),
        ("bwd_", ("BLOCK_M2", "BLOCK_N2"), torch.randn_like(inputs[0])),
    ):
        found = []
        for rows, columns, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)):
            sides = dict(zip((prefix + n for n in names), (rows, columns), strict=True))
            options = {**sides, f"{prefix}num_warps": warps, f"{prefix}num_stages": stages}
            torch._dynamo.reset()
            compiled = torch.compile(call_of(case, size, c, options), backend="alt")
            ms = times({"alt": compiled}, inputs, by, "cuda", rounds)["alt"]
            found.append((ms, f"{rows}x{columns}, {warps} warps, {stages} stages"))
        print(f"{case.name}, {str(dtype)[6:]}, {size.depth} elements, {' and '.join(names)}:")
        for ms, label in sorted(x for x in found if x[0] == x[0])[:8]:
            print(f"  {ms:9.3f} ms  {label}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", default="", help="parts of names, separated by commas")
    parser.add_argument("--dtypes", default="float16,bfloat16,float32")
    parser.add_argument("--rows", type=int, default=0, help="of the timed sizes; 4096 on a GPU, 1024 on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", choices=("", "check", "time"))
    parser.add_argument("--tiles", action="store_true", help="time choices of tiles (GPU)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    wanted = [w.strip() for w in args.cases.split(",")]
    cases = [c for c in CASES if any(w in c.name for w in wanted)]
    dtypes = [DTYPES[n] for n in args.dtypes.split(",")]
    gpu = args.device == "cuda"
    timed = Size(2 if gpu else 1, 16 if gpu else 8, 16 if gpu else 8, args.rows or (4096 if gpu else 1024), 64)
    if args.tiles:
        for case, dtype, depth in itertools.product(cases, dtypes, (64, 128)):
            sweep(case, replace(timed, depth=depth), dtype, args.rounds)
        return
    good = True
    if args.only != "time":
        for case, dtype in itertools.product(cases, dtypes):
            for size in (Size(2, 4, 4, 1000, 64), Size(2, 4, 2, 777, 80)):
                good &= check(case, size, dtype, args.device)
    if args.only != "check":
        columns = " ".join(f"{name:>9s}" for name in ("eager", "inductor", "alt"))
        print(f"{'milliseconds':26s} {'dtype':9s} {'size':12s} {'':8s} {columns} {'ratio':>7s}")
        for case, dtype, depth in itertools.product(cases, dtypes, (64, 128)):
            measure(case, replace(timed, depth=depth), dtype, args.device, args.rounds)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
