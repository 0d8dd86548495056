"""Imports: the package imports little at once, and only a process that compiles imports the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test import fresh

ROOT = Path(__file__).parents[1]
FOREIGN = ("torch._inductor", "triton", "networkx", "jinja2")  # what a compiler for the CPU has no use for
PROGRAM = """
import json, os, sys
import torch, torch._dynamo.utils
from torch import nn
def run(backend, mode):
    if backend == "alt":
        import altbackend
        backend = altbackend.alt
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1))
    with torch.set_grad_enabled(mode == "training"):
        y = torch.compile(net, backend=backend)(torch.randn(4, 8))
        if mode == "training":
            y.sum().backward()
    print(json.dumps(sorted(sys.modules)))
for one in sys.argv[1:]:
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        run(*one.split("-"))
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
"""


def modules(folder: Path, *runs: str) -> list[set[str]]:
    """Return what is imported after each run, `backend-mode`, in a fork of a process that has imported torch alone."""
    env = {**os.environ, "ALTBACKEND_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *runs], env=env, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_compiling_imports_no_other_compiler_and_nothing_foreign(tmp_path: Path) -> None:
    runs = [f"{backend}-{mode}" for mode in ("inference", "training") for backend in ("alt", "aot_eager")]
    results = modules(tmp_path, *runs)
    for ours, base in (results[:2], results[2:]):
        more = {m for m in ours - base if m.split(".")[0] != "altbackend"}
        assert "altbackend.pipeline" in ours
        assert sorted(m for m in more if m.startswith(FOREIGN)) == []
        assert {"torch._inductor.debug", "torch._inductor.ir", "torch._inductor.scheduler"} & ours == set()


def test_importing_the_package_imports_nothing_else() -> None:
    """The backend's name is looked up by torch.compile; until then the package costs one file."""
    program = "import sys, torch; old = set(sys.modules); import altbackend; print(sorted(set(sys.modules) - old))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['altbackend']"


def test_a_kept_graph_is_bound_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTBACKEND_CACHE_GRAPHS", "1")
    first = fresh.run(["-c", PROGRAM, "alt-training"], env=os.environ | {"ALTBACKEND_CACHE_DIR": str(tmp_path)})
    assert first.returncode == 0, first.stderr
    second, base = modules(tmp_path, "alt-training", "eager-training")
    compiler = (
        "altbackend.lowering.graph",
        "altbackend.schedule",
        "altbackend.codegen.cpp.emit",
        "altbackend.fx_passes",
    )
    assert sorted(m for m in second if m.startswith(compiler)) == []
    assert "torch._functorch.aot_autograd" not in second - base
