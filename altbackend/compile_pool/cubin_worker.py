"""A process that compiles Triton kernels: `python -m altbackend.compile_pool.cubin_worker`. It never imports torch.

Each line of its input is a job in JSON, each line of its output the answer: `{"cubin": base64, "shared": bytes, "name":
text}`, or `{"error": text}`. It ends when its input does, so it does not outlive the process that started it.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile one kernel. `job`: name, source, signature, constexprs, aligned (numbers), warps, stages, capability."""
    path = folder / f"kernel_{job['key']}.py"  # triton reads a function's text from its file
    path.write_text(job["source"].replace("def kernel(", f"def {job['name']}(", 1))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hints = {(k,): [["tt.divisibility", 16]] for k in job["aligned"]}
    made = triton.compile(
        ASTSource(getattr(module, job["name"]), job["signature"], job["constexprs"], hints),
        target=GPUTarget("cuda", job["capability"], 32),
        options={"num_warps": job["warps"], "num_stages": job["stages"]},
    )
    return {"cubin": base64.b64encode(made.asm["cubin"]).decode(), "shared": made.metadata.shared, "name": job["name"]}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    with tempfile.TemporaryDirectory(prefix="altbackend-cubin-") as folder:
        for line in sys.stdin:
            try:
                answer = compile_job(json.loads(line), Path(folder))
            except Exception as cause:
                answer = {"error": "".join(traceback.format_exception(cause))[-4000:]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
