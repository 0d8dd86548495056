"""Build packages here, then load and run each in fresh processes: torch's loader, ours, and a program in C++.

    python tools/packages_elsewhere.py OTHER_PYTHON [--cases resnet50,vit_b16,bert,gpt2] [--preset tiny] [--cpp]

OTHER_PYTHON needs an installed torch and nothing else; it may be the Python that builds. Each model is exported twice:
with the sizes of its inputs, and with any batch (and any length of tokens), which is then called in two sizes. Results
must equal eager's here within 1e-4 of the largest. Seconds are those of the whole process.
`--cpp` also builds `examples/aot_cpp/replay.cpp` against OTHER_PYTHON's torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import altbackend
from benchmarks.cases import find
from benchmarks.options import names

CASES = ["resnet50", "vit_b16", "bert", "gpt2"]
ROOT = Path(__file__).parents[1]
# Runs under the other Python.
OTHER = """
import sys
import torch
loader, package, calls = sys.argv[1:]
if loader == "torch's loader":
    import torch._inductor
    model = torch._inductor.aoti_load_package(package)
else:
    import altbackend
    model = altbackend.aot_load(package)
differences = []
for inputs, want in torch.load(calls, weights_only=True):
    got = [t for t in torch.utils._pytree.tree_leaves(model(*inputs)) if isinstance(t, torch.Tensor)]
    assert len(got) == len(want), f"{len(got)} results instead of {len(want)}"
    differences += [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want)]
assert all(d <= 1e-4 for d in differences), f"relative differences {differences}"  # NaN is none
print(f"difference {max(differences):.1e}")
"""


@dataclass(frozen=True)
class Packaged:
    """A package, and the file of its calls: inputs and eager's results."""

    label: str
    package: Path
    calls: Path


def larger(t: Tensor) -> Tensor:
    """Return an input with another batch, and another length if it holds tokens."""
    more = torch.cat([t, t.flip(0), t[:1]])
    return torch.cat([more, more[:, :5]], 1) if t.dtype == torch.int64 else more


class Positional(nn.Module):
    """A module whose inputs, those by name too, are given by position."""

    def __init__(self, module: nn.Module, positions: int, by_name: Sequence[str]) -> None:
        super().__init__()
        self.module, self.positions, self.by_name = module, positions, by_name

    def forward(self, *inputs: Tensor) -> Any:
        named = dict(zip(self.by_name, inputs[self.positions :], strict=True))
        return self.module(*inputs[: self.positions], **named)


def sizes(t: Tensor) -> dict[int, Any]:
    """Return the dimensions of an input that an export leaves open."""
    return dict.fromkeys(range(2 if t.dtype == torch.int64 else 1), torch.export.Dim.DYNAMIC)


def prepared(name: str, preset: Any, dynamic: bool, folder: Path) -> Packaged:
    """Write the package of one model, and its calls."""
    torch.manual_seed(0)
    module, args, kwargs = find(name).build(preset)
    model = Positional(module.eval(), len(args), list(kwargs))
    inputs: list[Tensor] = [*args, *kwargs.values()]
    shapes = (tuple(map(sizes, inputs)),) if dynamic else None
    calls = []
    with torch.no_grad():
        program = torch.export.export(model, tuple(inputs), dynamic_shapes=shapes)
        for given in [inputs, [larger(t) for t in inputs]] if dynamic else [inputs]:
            results = pytree.tree_leaves(model(*given))
            calls.append([[t.detach().clone() for t in ts if isinstance(t, Tensor)] for ts in (given, results)])
    label = f"{name}, any size" if dynamic else name
    made = Packaged(label, folder / f"{label}.pt2", folder / f"{label}.calls")
    altbackend.aot_package(made.package, program, programs=False)
    torch.save(calls, made.calls)
    return made


def cpp_program(python: str, folder: Path) -> Path:
    """Compile `replay.cpp` against the torch of a Python, and return the program."""
    code = "import torch, os; print(os.path.dirname(torch.__file__))"
    root = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    flags = ["-std=c++20", "-O1", f"-I{root}/include", f"-L{root}/lib"]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    program = folder / "replay"
    source = ROOT / "examples/aot_cpp/replay.cpp"
    subprocess.run(["g++", *flags, str(source), "-o", str(program), *libraries], check=True)
    return program


def run(made: Packaged, loader: str, command: list[str]) -> bool:
    """Run a package in a fresh process, print what it finds, and return whether the results are right."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    found = (done.stdout or done.stderr).strip() or f"ended with status {done.returncode}"
    print(f"{made.label} by {loader}: {found}, {seconds:.2f} s", flush=True)
    return done.returncode == 0


def main() -> int:
    """Build, run elsewhere and return 1 if a result is wrong."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("python", metavar="OTHER_PYTHON")
    p.add_argument("--cases", type=names, default=CASES, metavar="A,B")
    p.add_argument("--preset", choices=["tiny", "cpu"], default="tiny")
    p.add_argument("--cpp", action="store_true", help="also in a program without Python")
    options = p.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        program = cpp_program(options.python, folder) if options.cpp else None
        for name in options.cases:
            for dynamic in (False, True):
                made = prepared(name, options.preset, dynamic, folder)
                files = [str(made.package), str(made.calls)]
                for loader in ("torch's loader", "aot_load"):
                    command = [options.python, "-c", OTHER, loader, *files]
                    right &= run(made, loader, command)
                if program:
                    right &= run(made, "a program in C++", [str(program), *files])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
