"""python -m tools.walkthrough: write docs/walkthrough.md, one program followed through every step of the compiler.

The texts between the paragraphs are what the debug folder holds; a test compares the page with what this prints.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import torch

from altbackend.compiled.artifact import Code
from altbackend.config.resolve import resolve
from tools.translated import Backend, codes

PAGE = Path(__file__).parents[1] / "docs" / "walkthrough.md"

INTRODUCTION = """# Walkthrough: softmax(x @ w)

One program, followed through every step. `python -m tools.walkthrough` writes this page from the debug
folder, and a test compares it with what the compiler does now. See the same files for your own program with
`ALTBACKEND_DEBUG=folder`.

```python
def program(x, w):  # float32 [64, 128] and [128, 256]
    return torch.softmax(x @ w, dim=-1)
```
"""

GRAPH = """## 1. The graph

Dynamo captures the calls, AOTAutograd turns them into functional ATen operators, and graph passes simplify
them. Two calls remain. `fx_passes/` holds the passes.
"""

LOOPS = """## 2. The loop IR

`lowering/` replaces each operator by loop nodes. The matrix product has no lowering, so it is a library call.
The softmax is four nodes: a maximum, an exponential, a sum and a division. Each line says which buffer a node
writes, at which index, from which scalar tree, over which loops. Below each line is the node of the graph it
comes from.
"""

KERNELS = """## 3. Kernels

`schedule/` puts the four nodes into one kernel of 64 rows, since each reads only its own row of the others.
The maximum and the sum are scalars of the row. The exponentials stay in scratch memory of the row, which fits
in the L1 cache. Only the quotient goes to memory. The refusals and reasons are in `decisions.txt`:
"""

CPP = """## 4. C++

`codegen/cpp/scalars.py` places each scalar in the outermost loop where its operands are known: the reciprocal of
the sum is outside the last loop. `print_cpp.py` spells the result. Threads share the rows.
"""

HOST = """## 5. The host program

`codegen/host/` prints what runs at each call. The product writes into the arena (`V[0]`), and the result is a
new tensor. The program is complete: run the file from the debug folder by itself to time it.
"""

TRITON = """## 6. The same for a GPU

For a GPU the same loop program gets other tiles. A row of 256 fits in registers, so a program holds whole
rows, and nothing is stored between the steps. The kernel's text names no buffer of the graph, so that equal
layers share one kernel.
"""


def page() -> str:
    """Return the text of the page."""
    with tempfile.TemporaryDirectory() as folder:
        (cpu,) = _code("cpu", Path(folder) / "cpu")
        (gpu,) = _code("cuda", Path(folder) / "gpu")
        texts = {p.name.partition("_")[2]: p.read_text() for p in (Path(folder) / "cpu" / "inference").glob("*_*")}
        decisions = (Path(folder) / "cpu" / "inference" / "decisions.txt").read_text()
    return "\n".join(
        [
            INTRODUCTION,
            GRAPH,
            _block("python", _without_places(texts["post_grad_graph.txt"])),
            LOOPS,
            _block("", texts["loop_ir.txt"]),
            KERNELS,
            _block("", decisions),
            _block("", texts["kernels.txt"]),
            CPP,
            _block("cpp", cpu.cpp),
            HOST,
            _block("python", _without_places(cpu.python).partition("\nSOURCE")[0]),
            TRITON,
            _block("python", "\n".join(job.source for job in gpu.jobs)),
        ]
    )


def _code(device: str, folder: Path) -> list[Code]:
    options = {"debug_dir": str(folder), "isa": "generic", "threads": 4, "freezing": False}

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, dim=-1)

    def run(compiler: Backend) -> None:
        with torch.no_grad():
            torch.compile(program, backend=compiler)(torch.ones(64, 128), torch.ones(128, 256))

    return codes(run, device, resolve(options=options, environ={}))


def _without_places(text: str) -> str:
    """Remove the file and line of the user's code, which differ from machine to machine."""
    text = re.sub(r"\n\s*# File: [^\n]*", "", text)
    return re.sub(r" \| \w+\.py:\d+: [^\n]*", "", text)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
