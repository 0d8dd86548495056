"""Build packages here, then load and run them under another Python, with torch's own loader and with ours.

    python tools/packages_elsewhere.py OTHER_PYTHON [--cases resnet50,vit_b16,bert,gpt2] [--preset tiny]

OTHER_PYTHON needs an installed torch and nothing else. Its results must equal eager's here within 1e-4 of the largest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import altbackend
from benchmarks.cases import find
from benchmarks.options import names

CASES = ["resnet50", "vit_b16", "bert", "gpt2"]
ROOT = Path(__file__).parents[1]
# Runs under the other Python. The trees of arguments are those of the export: positions, then names.
OTHER = """
import sys, time
import torch
import torch._inductor
folder = sys.argv[1]
saved = torch.load(f"{folder}/calls.pt", weights_only=True)
for name, (args, kwargs, want) in saved.items():
    start = time.perf_counter()
    theirs = torch._inductor.aoti_load_package(f"{folder}/{name}.pt2")
    loaded = time.perf_counter() - start
    import altbackend
    ours = altbackend.aot_load(f"{folder}/{name}.pt2")
    for loader, model in (("torch's loader", theirs), ("aot_load", ours)):
        got = [t for t in torch.utils._pytree.tree_leaves(model(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        assert len(got) == len(want), f"{name}: {len(got)} results instead of {len(want)}"
        far = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want))
        assert far <= 1e-4, f"{name} by {loader}: relative difference {far:.1e}"
        print(f"{name} by {loader} under torch {torch.__version__}: difference {far:.1e}, loaded in {loaded:.2f} s")
"""


def prepared(name: str, preset: Any, folder: Path) -> tuple[Any, Any, list[torch.Tensor]]:
    """Write the package of one model; return arguments and eager's results."""
    torch.manual_seed(0)
    module, args, kwargs = find(name).build(preset)
    module = module.eval()
    with torch.no_grad():
        leaves = pytree.tree_leaves(module(*args, **kwargs))
        program = torch.export.export(module, tuple(args), dict(kwargs))
    altbackend.aot_package(folder / f"{name}.pt2", program, programs=False)
    return list(args), dict(kwargs), [t.clone() for t in leaves if isinstance(t, torch.Tensor)]


def main() -> int:
    """Build, run elsewhere and return the other process's status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("python", metavar="OTHER_PYTHON")
    p.add_argument("--cases", type=names, default=CASES, metavar="A,B")
    p.add_argument("--preset", choices=["tiny", "cpu"], default="tiny")
    options = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: prepared(name, options.preset, Path(folder)) for name in options.cases}
        torch.save(calls, f"{folder}/calls.pt")
        print(f"built with torch {torch.__version__}: {', '.join(calls)}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        return subprocess.run([options.python, "-c", OTHER, folder], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
