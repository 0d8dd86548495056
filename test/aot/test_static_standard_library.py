"""Compilers that link the C++ library statically: none of it is visible, so no other library's copy mixes with it.

The standard library marks its statics as unique in the process. A library that exports its own copy then has some
objects of one copy and some of another. TorchInductor's packages do so, and fail while torch loads them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import altbackend
from altbackend.compile_pool import cpp

from .models import Mlp


def exported(library: Path) -> list[str]:
    """Return the names that a library defines for others."""
    lines = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in lines.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a compiler that links the C++ library statically."""
    real = cpp.find_compiler()
    found = subprocess.run([real, "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("the compiler has no static C++ library")
    path = tmp_path_factory.mktemp("compiler") / "c++"
    path.write_text(f'#!/bin/sh\nexec {real} "$@" -static-libstdc++\n')
    path.chmod(0o755)
    return str(path)


def test_a_library_shows_its_interface_alone(compiler: str, tmp_path: Path) -> None:
    model, x = Mlp().eval(), torch.randn(4, 16)
    program = torch.export.export(model, (x,))
    path = altbackend.aot_compile(program, options={"cxx": compiler, "aot_output_path": str(tmp_path / "model.so")})
    names = exported(Path(path))
    assert "AOTInductorModelContainerRun" in names
    assert not [n for n in names if not n.startswith(("AOTInductor", "altbackend_"))]
    torch.testing.assert_close(altbackend.aot_load(path)(x), model(x), atol=1e-4, rtol=1e-4)


def test_a_host_program_shows_its_interface_alone(compiler: str, tmp_path: Path) -> None:
    model = nn.Sequential(Mlp(), nn.Softmax(-1), nn.Linear(8, 4)).eval()
    options: dict[str, Any] = {"cxx": compiler, "cache_dir": str(tmp_path), "host": "cpp", "strict": True}
    compiled, x = torch.compile(model, backend="alt", options=options), torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    libraries = list(tmp_path.rglob("host/*/*.so"))
    assert libraries
    for path in libraries:
        names = exported(path)
        assert "alt_graph_call" in names
        assert not [n for n in names if not n.startswith("alt_graph_")]
