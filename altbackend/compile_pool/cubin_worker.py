"""The worker process that compiles Triton kernels: `python -m altbackend.compile_pool.cubin_worker`.

It never imports torch. Each line of its input is a job in JSON. Each line of its output is the answer: `{"cubin":
base64, "shared": bytes, "name": text}` or `{"error": text}`. The worker ends when its input closes, so it does not
outlive its parent.
"""

from __future__ import annotations

import base64
import functools
import json
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from altbackend.disk_cache.json_object import JsonObject

from .packed_adds import replace_packed_adds
from .spills import least_spilled


def compile_job(job: JsonObject) -> JsonObject:
    """Return the answer to one job, a `compile_pool.cuda.Job` with its key; `aligned` is a list of numbers."""
    try:
        return _compile(job)
    except Exception as cause:
        return {"error": "".join(traceback.format_exception(cause))[-4000:]}


def _compile(job: JsonObject) -> JsonObject:
    triton, source, target = _triton()
    hints = {(k,): [["tt.divisibility", 16]] for k in job["aligned"]}
    options = {"num_warps": job["warps"], "num_stages": job["stages"], "enable_fp_fusion": job["contract"]}

    def build(more: dict[str, int]) -> SimpleNamespace:
        compiled: SimpleNamespace = triton.compile(
            source(_function(job), job["signature"], job["constexprs"], hints),
            target=target("cuda", job["capability"], 32),
            options=options | more,
        )
        return compiled

    kernel = least_spilled(build, job["warps"])
    code = kernel.asm["ptx"].encode() if job.get("ptx") else kernel.asm["cubin"]
    return {
        "cubin": base64.b64encode(code).decode(),
        "shared": kernel.metadata.shared,
        "name": job["name"],
    }


@functools.cache
def _triton() -> tuple[ModuleType, Callable[..., object], Callable[..., object]]:
    """Return triton, its ASTSource and its GPUTarget. Only processes that compile import Triton.

    From then on this process's Triton avoids instructions that NVIDIA's assembler translates wrongly.
    """
    import triton  # noqa: PLC0415
    import triton.compiler.code_generator  # noqa: PLC0415 - otherwise the first kernel imports it
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.backends.nvidia.compiler import CUDABackend  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    replace_packed_adds(CUDABackend)
    return triton, ASTSource, GPUTarget


def _without_cache() -> None:
    """Disable Triton's cache in this process: the caller stores machine code itself, and asks only for missing kernels.

    Triton's cache would first digest all files of Triton, 0.4 s per process. It would also return code that names
    the file of another call's kernel. Processes that run user-defined kernels keep that cache.
    """
    import triton  # noqa: PLC0415
    from triton.runtime import cache  # noqa: PLC0415

    knobs: object = getattr(getattr(triton, "knobs", None), "compilation", None)
    if callable(getattr(cache, "triton_key", None)) and hasattr(knobs, "always_compile"):  # as in versions 3.6 and 3.7
        knobs.always_compile = True
        cache.triton_key = lambda: "altbackend"


def _function(job: JsonObject) -> object:
    """Return the kernel. Its text is in linecache, where Triton looks for it, so no file is written."""
    source = job["source"].replace("def kernel(", f"def {job['name']}(", 1)
    file = f"<kernel {job['key']}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        space: dict[str, object] = {"__name__": f"kernel_{job['key']}"}
        exec(compile(source, file, "exec"), space)
        return space[job["name"]]
    finally:
        del linecache.cache[file]


def main() -> int:
    _triton()  # importing Triton takes longer than compiling most kernels
    _without_cache()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for line in sys.stdin:
        answers.write(json.dumps(compile_job(json.loads(line))) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
