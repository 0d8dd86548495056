"""The object that all libraries share is compiled while the graph is still being captured."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import altbackend
from altbackend.errors import BadGraph, CompilerFailed

pytestmark = pytest.mark.timeout(120)

LOGGED = """#!/bin/sh
case "$*" in *container.cpp*) echo $$ >> {log}; {action} ;; esac
exec g++ "$@"
"""
Compiler = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    """A compiler that writes its process number into `log` and takes an action before it compiles the container."""

    def make(action: str) -> Path:
        script = tmp_path / "cxx"
        script.write_text(LOGGED.format(log=tmp_path / "log", action=action))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return script

    return make


def build(compiler: Path, folder: Path, program: Any = None) -> str:
    options = {"cxx": str(compiler), "cache_dir": str(folder / "cache")}
    torch.manual_seed(0)
    linear = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    return altbackend.aot_compile(program or linear, options=options)


def test_it_is_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    script = compiler(":")
    first = build(script, tmp_path)
    assert build(script, tmp_path) == first
    assert len((tmp_path / "log").read_text().split()) == 1
    assert altbackend.aot_load(first)(torch.ones(1, 2)).shape == (1, 2)


def test_its_failure_is_an_error_of_the_build(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(CompilerFailed, match="container is broken"):
        build(compiler("echo container is broken >&2; exit 1"), tmp_path)


def test_a_graph_that_cannot_be_compiled_stops_it(compiler: Compiler, tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))  # no tuple
    log = tmp_path / "log"
    with pytest.raises(BadGraph):
        build(
            compiler(f"while [ ! -e {tmp_path}/never ]; do sleep 0.05; done"), tmp_path, torch.fx.GraphModule({}, graph)
        )
    if not log.exists():
        return  # it was stopped before it began
    for process in map(int, log.read_text().split()):
        while _runs(process):
            time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
