"""python -m benchmarks.profile: where compiled models spend the GPU's time, kernel by kernel.

    python -m benchmarks.profile bert
    python -m benchmarks.profile "dense block;inception" --suite programs --backend inductor,alt --dtype float32

Float32 allows TF32.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import subject
from benchmarks.cases import SUITES, choose
from benchmarks.options import backend_options
from benchmarks.records import Request


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.profile")
    p.add_argument("cases", help="separated by ';'")
    p.add_argument("--suite", choices=sorted(SUITES), default="models")
    p.add_argument("--backend", default="alt", help="or several, separated by commas")
    p.add_argument("--mode", choices=["inference", "training"], default="inference")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--rows", type=int, default=24)
    p.add_argument("--options", type=backend_options, default={}, metavar="K=V")
    args = p.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in args.cases.split(";"):
        for backend in args.backend.split(","):
            options = args.options.get(backend, {})
            request = Request(name, backend, args.mode, "gpu", "cuda", args.dtype, options=options)
            torch._dynamo.reset()
            report(request, args.suite, args.rows)
    return 0


def report(request: Request, suite: str, rows: int) -> None:
    """Print the host's and the device's time of one call, and the kernels that take the most."""
    (case,) = choose(suite, [request.case])
    with subject.surroundings(request):
        made = subject.compiled(case, subject.build(case, "gpu", request), request)
        for _ in range(3):
            made.clear()
            made.run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        made.clear()
        made.run()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            made.clear()
            made.run()
            torch.cuda.synchronize()
    print(f"{request.case} {request.backend}: host {host * 1e3:.2f} ms, until done {whole * 1e3:.2f} ms")
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"{total / 1e3:9.3f} ms on the device")
    for e in events[:rows]:
        print(f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:5} x  {e.key[:110]}")


if __name__ == "__main__":
    raise SystemExit(main())
