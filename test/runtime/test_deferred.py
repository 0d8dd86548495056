"""Deferred builds: Dynamo goes on meanwhile, and the first call meets slow, failed or forked builds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import altbackend
from altbackend.compiled.deferred import DeferredBuild, build_at_first_call
from altbackend.errors import CompilerFailed, FallbackWarning

ROOT = Path(__file__).parents[2]
T = torch.Tensor


class Scaled(torch.nn.Module):
    """In inference the product of parameters is a prologue."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.rand(7)), torch.nn.Parameter(torch.rand(7))

    def forward(self, x: T) -> T:
        return torch.softmax(x * (self.a * self.b), -1)


@pytest.fixture
def blocked(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Options whose compiler waits until a file is there, and that file."""
    compiler, go = tmp_path / "slow-g++", tmp_path / "go"
    wait = f'case "$*" in *.cpp*) while [ ! -e {go} ]; do sleep 0.05; done;; esac'
    compiler.write_text(f'#!/bin/sh\n{wait}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    return {"cxx": str(compiler), "cache_dir": str(tmp_path / "cache"), "cache_graphs": True}, go


def captured(fn: Callable[..., Any], *inputs: T, **options: Any) -> Callable[..., Any]:
    """Return the callable that the backend gives to Dynamo."""
    with torch.no_grad():
        return altbackend.alt(torch.fx.symbolic_trace(fn), inputs, options=options)


def test_the_backend_returns_before_the_kernels_are_built(blocked: tuple[dict[str, Any], Path]) -> None:
    options, go = blocked
    x = torch.randn(5, 7)
    call = captured(lambda x: (torch.softmax(x, -1) * 2,), x, strict=True, **options)
    entries = Path(options["cache_dir"]) / "graphs"
    assert not go.exists()
    assert not [*entries.glob("*/*.graph")]
    threading.Timer(0.3, go.touch).start()
    torch.testing.assert_close(call(x)[0], torch.softmax(x, -1) * 2)
    assert [*entries.glob("*/*.graph")]
    for t in [t for t in threading.enumerate() if t.name == "altbackend-build"]:
        t.join(10)  # it ends just after the call has what it waited for
        assert not t.is_alive()


def test_work_on_parameters_is_done_while_kernels_are_built(blocked: tuple[dict[str, Any], Path]) -> None:
    options, go = blocked
    net, x = Scaled().eval(), torch.randn(5, 7)
    compiled = torch.compile(net, backend="alt", options={"strict": True, **options})
    threading.Timer(0.3, go.touch).start()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), net(x))
            net.a.mul_(3)


def test_times_of_all_stages_are_asked_for(blocked: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    options, go = blocked
    go.touch()
    folder = tmp_path / "debug"
    captured(lambda x: (torch.softmax(x, -1) * 2,), torch.randn(5, 7), debug_dir=str(folder), **options)
    (timings,) = folder.glob("*inference/timings.txt")
    assert "build" in timings.read_text()


def test_a_build_that_fails_late(tmp_path: Path) -> None:
    x, options = torch.randn(5, 7), {"cxx": "/bin/false", "cache_dir": str(tmp_path), "cache_graphs": False}
    expected = torch.softmax(x, -1) * 2
    call = captured(lambda x: (torch.softmax(x, -1) * 2,), x, **options)
    with pytest.warns(FallbackWarning, match="library calls only"):
        torch.testing.assert_close(call(x)[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(call(x)[0], expected)
    strict = captured(lambda x: (torch.softmax(x, -1) * 2,), x, strict=True, **options)
    for _ in range(2):
        with pytest.raises(CompilerFailed, match="Reproduce: python"):
            strict(x)


FORK = """
import os, sys, time
from pathlib import Path
import torch
import altbackend
torch.set_num_threads(1)
compiler, folder, go = sys.argv[1:]
x = torch.randn(5, 7)
with torch.no_grad():
    gm = torch.fx.symbolic_trace(lambda x: (torch.softmax(x, -1) * 2,))
    call = altbackend.alt(gm, [x], options={"cxx": compiler, "cache_dir": folder, "cache_graphs": True, "strict": True})
if (fork := os.fork()) == 0:
    Path(go).touch()
    torch.testing.assert_close(call(x)[0], torch.softmax(x, -1) * 2)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
torch.testing.assert_close(call(x)[0], torch.softmax(x, -1) * 2)
sys.exit(status)
"""


def test_a_fork_does_not_wait_for_its_parents_thread(blocked: tuple[dict[str, Any], Path]) -> None:
    options, go = blocked
    command = [sys.executable, "-c", FORK, options["cxx"], options["cache_dir"], str(go)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=60)


def test_threads_that_call_at_once_bind_once() -> None:
    built, bound = Future[int](), list[int]()

    def bind(n: int) -> Callable[[list[Any]], Any]:
        bound.append(n)
        return lambda args: [n + args[0]]

    def failed(cause: Exception) -> Callable[[list[Any]], Any]:
        raise cause

    run, results = build_at_first_call(DeferredBuild(built, lambda: 0, bind, failed)), list[Any]()
    threads = [threading.Thread(target=lambda k=k: results.append(run([k]))) for k in range(4)]
    for t in threads:
        t.start()
    time.sleep(0.05)
    assert not results
    built.set_result(10)
    for t in threads:
        t.join(10)
    assert sorted(results) == [[10], [11], [12], [13]]
    assert bound == [10]


def test_what_is_ahead_is_done_before_the_wait_and_what_interrupts_it_ends_nothing() -> None:
    built, seen = Future[int](), list[str]()

    def ahead(args: list[Any]) -> None:
        seen.append(f"ahead of {args}")
        if len(seen) == 1:
            raise KeyboardInterrupt
        built.set_result(1)

    def failed(cause: Exception) -> Callable[[list[Any]], Any]:
        raise AssertionError("nothing has failed") from cause

    run = build_at_first_call(DeferredBuild(built, lambda: 0, lambda n: lambda args: [n, *args], failed, ahead))
    with pytest.raises(KeyboardInterrupt):
        run([5])
    assert run([5]) == [1, 5]
    assert seen == ["ahead of [5]"] * 2
