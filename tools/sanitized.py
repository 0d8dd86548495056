"""python tools/sanitized.py: small programs in C++, of libraries and of compiled graphs, under AddressSanitizer.

Each program makes right calls, calls that raise, and swaps of weights. Exit status 1 if the sanitizer finds anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

CHILD = "ALT_SANITIZED"
FLAGS = ("-fsanitize=address", "-fsanitize=undefined", "-fno-sanitize=vptr", "-g")


def library() -> None:
    """Call a library rightly and wrongly, and replace its weights."""
    import torch  # noqa: PLC0415 - only the child process has the sanitizer

    import altbackend  # noqa: PLC0415

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.BatchNorm1d(32)).eval()
    x = torch.randn(4, 16)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes={"input": {0: rows}})
    loaded = altbackend.aot_load(altbackend.aot_compile(program))
    for n in (4, 9, 64, 2):
        x = torch.randn(n, 16)
        torch.testing.assert_close(loaded(x), model(x))
    for wrong in (torch.randn(65, 16), torch.randn(4, 15), torch.randn(4), x.double(), x.t()):
        try:
            loaded(wrong)
        except altbackend.errors.BadCall:
            continue
        raise SystemExit("a wrong call has run")
    loaded.update_weights({k: v * 2 for k, v in model.state_dict().items() if k in loaded.weights}, inactive=True)
    loaded.swap_weights()
    loaded(x)


def graph() -> None:
    """Train and call compiled graphs with host programs in C++."""
    import torch  # noqa: PLC0415

    import altbackend  # noqa: PLC0415

    torch._functorch.config.check_custom_op_aliasing = False
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.LayerNorm(32))
    compiled = torch.compile(model, backend=altbackend.alt, options={"host": "cpp"})
    for _ in range(3):
        compiled(torch.randn(4, 16, requires_grad=True)).sum().backward()

    def f(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x @ x.t())[at].softmax(-1), x[0], (x + 1).sum()

    indexed = torch.compile(f, backend=altbackend.alt, dynamic=True, options={"host": "cpp"})
    for n in (3, 5, 8):
        x, at = torch.randn(n, n), torch.tensor([1, 2])
        torch.testing.assert_close(indexed(x, at), f(x, at))
        try:
            indexed(x, at + 50)
        except IndexError:
            continue
        raise SystemExit("a wrong index has passed")


def _runtime(name: str) -> str:
    """Return the path of a runtime of the compiler."""
    process = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(process.stdout.strip()).resolve())


def main() -> int:
    """Run both programs in a child process with the sanitizer; return its exit status."""
    if os.environ.get(CHILD):
        from altbackend.compile_pool import cpp, libraries  # noqa: PLC0415

        whole = cpp.flags
        with (
            patch.object(libraries, "_HOST", (*libraries._HOST, *FLAGS)),
            patch.object(libraries, "_KERNELS", (*libraries._KERNELS, *FLAGS)),
            patch.object(cpp, "flags", lambda cfg: (*whole(cfg), *FLAGS)),
        ):
            library()
            graph()
        print("the sanitizer has found nothing")
        return 0
    runtimes = [_runtime("libasan.so"), _runtime("libubsan.so")]
    with tempfile.TemporaryDirectory() as folder:
        more = {
            CHILD: "1",
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "ALTBACKEND_CACHE_DIR": folder,
        }
        return subprocess.run([sys.executable, *sys.argv], env={**os.environ, **more}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
