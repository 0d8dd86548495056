"""python -m benchmarks.coverage: which operators become generated loops, which library calls, and which are wrong.

Every sample input of torch's own operator database (`torch.testing._internal.common_methods_invocations.op_db`) is
compiled, forward and where supported backward, and compared with eager. One line per operator and direction:

    generated   no library call is left             library     some are, and they are named
    wrong       a result differs from eager's       error       compilation or the call raised
    untraced    Dynamo does not capture it          crash       the process died, or ran past --timeout

Operators run in a worker process that is started again after a crash.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]
SEED = 1234


@dataclass(frozen=True)
class Finding:
    """One operator in one direction: what became of its samples."""

    op: str
    dtype: str
    direction: str
    status: str
    samples: int
    library: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        more = ", ".join(self.library) if self.status in ("library", "generated") else self.detail
        return f"{self.status:10} {self.op:44} {self.dtype:9} {self.direction:8} {self.samples:3}  {more}"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description="Operators against eager.")
    p.add_argument("--ops", default="", metavar="A,B", help="names, or prefixes ending in *; all by default")
    p.add_argument("--dtype", default="float32", help="dtype of the sample inputs")
    p.add_argument("--samples", type=int, default=16, metavar="N", help="most sample inputs per operator")
    p.add_argument("--direction", choices=["forward", "backward", "both"], default="both")
    p.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds one operator may take")
    p.add_argument("--out", type=Path, metavar="FILE", help="append findings as JSON lines")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; exit status 1 if any is wrong, an error or a crash."""
    args = parser().parse_args(argv)
    if args.worker:
        return work(args, sys.stdin, sys.stdout)
    findings = []
    for finding in supervise(args, selected(args.ops)):
        findings.append(finding)
        print(finding, flush=True)
        if args.out:
            with args.out.open("a") as f:
                f.write(json.dumps(asdict(finding)) + "\n")
    counts = Counter(f.status for f in findings)
    print(", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "no operator has that name")
    return int(any(counts[s] for s in ("wrong", "error", "crash")))


def selected(wanted: str) -> list[str]:
    """Names (with variant, as `name.variant`) in the operator database that match the `--ops` list."""
    names = list(dict.fromkeys(full_name(op) for op in database()))
    patterns = [w for w in wanted.split(",") if w]
    return [n for n in names if not patterns or any(matches(n, w) for w in patterns)]


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def database() -> Iterable[Any]:
    import torch.testing._internal.common_methods_invocations as invocations  # noqa: PLC0415 - takes seconds to import

    # Dynamo does not capture the seeding that it wraps around random operators; `run_all` seeds instead.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return invocations.op_db  # type: ignore[no-any-return]


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def supervise(args: argparse.Namespace, names: Sequence[str]) -> Iterator[Finding]:
    """Feed operators to a worker one by one; replace it when it dies or is late."""
    worker: subprocess.Popen[str] | None = None
    for name in names:
        if worker is None:
            worker = _start(args)
        findings = _ask(worker, name, args.timeout)
        if findings is None:
            worker.kill()
            worker.wait()
            yield Finding(name, args.dtype, args.direction, "crash", 0, detail=f"exit status {worker.returncode}")
            worker = None
            continue
        yield from findings
    if worker is not None:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def _start(args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.coverage", "--worker", "--dtype", args.dtype]
    command += ["--samples", str(args.samples), "--direction", args.direction]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _ask(worker: subprocess.Popen[str], name: str, timeout: float) -> list[Finding] | None:
    """The worker's answer on one operator, None if it gave none in time."""
    import threading  # noqa: PLC0415

    assert worker.stdin is not None
    assert worker.stdout is not None
    late = threading.Timer(timeout, worker.kill)
    late.start()
    try:
        worker.stdin.write(name + "\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith("answer "):
                return [Finding(**{**d, "library": tuple(d["library"])}) for d in json.loads(line[7:])]
    except BrokenPipeError:
        pass
    finally:
        late.cancel()
    return None


def work(args: argparse.Namespace, requests: Iterable[str], answers: Any) -> int:
    """The worker process: one operator name per line in, one line of findings out."""
    warnings.simplefilter("ignore")
    by_name: dict[str, list[Any]] = {}
    for op in database():
        by_name.setdefault(full_name(op), []).append(op)
    for line in requests:
        found = [f for op in by_name[line.strip()] for f in examine(op, args)]
        answers.write("answer " + json.dumps([asdict(f) for f in found]) + "\n")
        answers.flush()
    return 0


def examine(op: Any, args: argparse.Namespace) -> Iterator[Finding]:
    dtype = getattr(torch, args.dtype)
    if args.direction != "backward" and dtype in op.supported_dtypes("cpu"):
        yield check(op, dtype, "forward", args.samples)
    if args.direction != "forward" and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
        yield check(op, dtype, "backward", args.samples)


def check(op: Any, dtype: torch.dtype, direction: str, most: int) -> Finding:
    """Compile all samples of an operator as one graph, or one by one where that fails."""
    label = str(dtype).removeprefix("torch.")
    finish = forward if direction == "forward" else backward
    try:
        samples = usable(op, finish, sample_inputs(op, dtype, direction == "backward", most))
    except Exception as cause:
        return Finding(full_name(op), label, direction, "untraced", 0, detail=f"no samples: {one_line(cause)}")
    status, library, detail = attempt(op, finish, samples)
    if status in ("error", "untraced") and len(samples) > 1:
        parts = [attempt(op, finish, [s]) for s in samples]
        order = ("wrong", "error", "untraced", "library", "generated")
        status = min((p[0] for p in parts), key=order.index)
        library = tuple(sorted({name for p in parts for name in p[1]}))
        detail = "; ".join(f"sample {k}: {p[2]}" for k, p in enumerate(parts) if p[0] == status and p[2])[:600]
    return Finding(full_name(op), label, direction, status, len(samples), library, detail)


def sample_inputs(op: Any, dtype: torch.dtype, requires_grad: bool, most: int) -> list[Sample]:
    torch.manual_seed(SEED)
    every = [(s.input, s.args, s.kwargs) for s in op.sample_inputs("cpu", dtype, requires_grad=requires_grad)]
    step = max(math.ceil(len(every) / most), 1)
    return every[::step]


Finish = Callable[[Any, Sample], list[torch.Tensor]]


def usable(op: Any, finish: Finish, samples: list[Sample]) -> list[Sample]:
    """The samples that eager itself computes."""
    out = []
    for s in samples:
        try:
            finish_all(finish, copied([s]), run_all, op.op)
        except Exception:
            continue
        out.append(s)
    return out


def copied(samples: list[Sample]) -> list[Sample]:
    """The samples with storage of their own, since operators may write to their arguments."""

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided:
            return t
        storage = t.detach().untyped_storage().clone()
        return (
            t.detach()
            .new_empty(0)
            .set_(storage, t.storage_offset(), t.shape, t.stride())
            .requires_grad_(t.requires_grad)
        )

    return torch.utils._pytree.tree_map(copy, samples)  # type: ignore[no-any-return]


def run_all(fn: Callable[..., Any], samples: list[Sample]) -> list[Any]:
    """Results of all samples, in order after one seed."""
    torch.manual_seed(SEED)
    return [fn(x, *args, **kwargs) for x, args, kwargs in samples]


def run_seeded(compiled: Callable[[list[Sample]], list[Any]], samples: list[Sample]) -> list[Any]:
    torch.manual_seed(SEED)
    return compiled(samples)


def finish_all(
    finish: Finish, samples: list[Sample], run: Callable[..., list[Any]], fn: Any
) -> list[list[torch.Tensor]]:
    """What is compared, per sample: results or gradients."""
    return [finish(r, s) for r, s in zip(run(fn, samples), samples, strict=True)]


def forward(result: Any, sample: Sample) -> list[torch.Tensor]:
    return tensors(result)


def backward(result: Any, sample: Sample) -> list[torch.Tensor]:
    """Gradients of a fixed random combination of the results."""
    leaves = [t for t in tensors(list(sample)) if t.requires_grad]
    outs = [t for t in tensors(result) if t.requires_grad]
    if not outs:
        return []
    torch.manual_seed(SEED + 1)
    weights = [torch.randn(t.shape, dtype=t.dtype) for t in outs]
    grads = torch.autograd.grad(outs, leaves, weights, allow_unused=True)
    return [g for g in grads if g is not None]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def attempt(op: Any, finish: Finish, samples: list[Sample]) -> tuple[str, tuple[str, ...], str]:
    """(status, names of library calls, detail) of the samples compiled together."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        compiled = _compiled(op.op, folder)
        try:
            got = finish_all(finish, copied(samples), run_seeded, compiled)
        except Exception as cause:
            kind = type(cause).__module__ + "." + type(cause).__name__
            untraced = "torch._dynamo" in kind and "BackendCompilerFailed" not in kind
            return "untraced" if untraced else "error", (), one_line(cause)
        library = library_calls(Path(folder))
    expected = finish_all(finish, copied(samples), run_all, op.op)
    for k, (mine, eager) in enumerate(zip(got, expected, strict=True)):
        wide = _widened(samples[k])
        difference = compare(mine, eager, lambda w=wide: finish_all(finish, [w], run_all, op.op)[0])  # type: ignore[misc]
        if difference:
            return "wrong", library, f"sample {k}: {difference}"
    return "library" if library else "generated", library, ""


def _compiled(fn: Callable[..., Any], folder: str) -> Callable[[list[Sample]], list[Any]]:
    options = {"strict": True, "verify_ir": True, "debug_dir": folder}

    def every(samples: list[Sample]) -> list[Any]:
        return [fn(x, *args, **kwargs) for x, args, kwargs in samples]

    return torch.compile(every, backend="alt", fullgraph=True, dynamic=False, options=options)


def library_calls(folder: Path) -> tuple[str, ...]:
    found = set()
    for text in folder.glob("*/*kernels.txt"):
        for line in text.read_text().splitlines():
            if line.startswith("library call: "):
                found.add(line.removeprefix("library call: ").removesuffix(".default"))
    return tuple(sorted(found))


def _widened(sample: Sample) -> Sample:
    """The sample with floats in float64."""

    def widen(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    return torch.utils._pytree.tree_map(widen, sample)  # type: ignore[no-any-return]


def compare(mine: list[torch.Tensor], eager: list[torch.Tensor], exact: Callable[[], list[torch.Tensor]]) -> str:
    """'' when equal to eager within dtype tolerances, or as near to the float64 result as eager is."""
    if len(mine) != len(eager):
        return f"{len(mine)} results instead of {len(eager)}"
    for k, (a, b) in enumerate(zip(mine, eager, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {k}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError as difference:
            if not b.is_floating_point() or not _as_near(a, b, exact, k):
                return f"result {k}: {one_line(difference)}"
    return ""


def _as_near(a: torch.Tensor, b: torch.Tensor, exact: Callable[[], list[torch.Tensor]], k: int) -> bool:
    try:
        truth = exact()[k]
    except Exception:
        return False
    if truth.shape != a.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    live = a.isfinite() & truth.isfinite()
    scale = truth[live].abs().max().item() if bool(live.any()) else 0.0
    mine, theirs = ((x.double() - truth)[live].abs().max().item() if scale else 0.0 for x in (a, b))
    return mine <= 2 * theirs + 2 * torch.finfo(a.dtype).eps * scale


def one_line(cause: BaseException) -> str:
    inner = getattr(cause, "inner_exception", None)
    if isinstance(inner, BaseException):
        return one_line(inner)
    return f"{type(cause).__name__}: " + " ".join(str(cause).split())[:300]


if __name__ == "__main__":
    sys.exit(main())
