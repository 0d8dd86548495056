"""A process that compiles Triton kernels: `python -m altbackend.compile_pool.cubin_worker`. It never imports torch.

Each line of its input is a job in JSON, each line of its output the answer: `{"cubin": base64, "shared": bytes, "name":
text}`, or `{"error": text}`. It ends when its input does, so it does not outlive the process that started it.
"""

from __future__ import annotations

import base64
import json
import linecache
import os
import signal
import sys
import traceback
from typing import Any


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    """The answer to one job, a `compile_pool.cuda.Job` with its key; `aligned` is a list of numbers."""
    try:
        return _compile(job)
    except Exception as cause:
        return {"error": "".join(traceback.format_exception(cause))[-4000:]}


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    triton, source, target = _triton()
    hints = {(k,): [["tt.divisibility", 16]] for k in job["aligned"]}
    made = triton.compile(
        source(_function(job), job["signature"], job["constexprs"], hints),
        target=target("cuda", job["capability"], 32),
        options={"num_warps": job["warps"], "num_stages": job["stages"], "enable_fp_fusion": job["contract"]},
    )
    return {"cubin": base64.b64encode(made.asm["cubin"]).decode(), "shared": made.metadata.shared, "name": job["name"]}


def _triton() -> tuple[Any, Any, Any]:
    """(triton, its ASTSource, its GPUTarget), for processes that compile: no other imports Triton."""
    import triton  # noqa: PLC0415
    import triton.compiler.code_generator  # noqa: PLC0415 - else by the first kernel
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    return triton, ASTSource, GPUTarget


def _without_cache() -> None:
    """Every kernel is compiled: the caller keeps machine code in files of its own and asks only for what they lack.

    Triton's own cache would digest all files of Triton first, 0.4 s of each process, and give code that names the file
    of another call's kernel. Only for a process that does nothing but compile: user-defined kernels keep that cache.
    """
    import triton  # noqa: PLC0415
    from triton.runtime import cache  # noqa: PLC0415

    knobs: Any = getattr(getattr(triton, "knobs", None), "compilation", None)
    if callable(getattr(cache, "triton_key", None)) and hasattr(knobs, "always_compile"):  # as versions 3.6 and 3.7
        knobs.always_compile = True
        cache.triton_key = lambda: "altbackend"


def _function(job: dict[str, Any]) -> Any:
    """The kernel, whose text Triton finds where Python's tracebacks find it; no file has to be written or removed."""
    source = job["source"].replace("def kernel(", f"def {job['name']}(", 1)
    file = f"<kernel {job['key']}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        space: dict[str, Any] = {"__name__": f"kernel_{job['key']}"}
        exec(compile(source, file, "exec"), space)
        return space[job["name"]]
    finally:
        del linecache.cache[file]


def main() -> int:
    _triton()  # it takes longer to import than most kernels to compile
    _without_cache()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    for line in sys.stdin:
        answers.write(json.dumps(compile_job(json.loads(line))) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
