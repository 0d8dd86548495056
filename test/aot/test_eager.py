"""Eager operators from the persistent cache, each test in processes of its own, since registering lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from altbackend import eager
from altbackend.errors import BadGraph
from test import fresh

_COMMON = """
import torch
from altbackend import eager
aten, builds, build = torch.ops.aten, [], eager.build
def counted(*args):
    builds.append(args)
    return build(*args)
eager.build = counted
torch.manual_seed(0)
x, i = torch.randn(8, 8), torch.arange(5)
"""
# Results are exact, and assert_close would multiply: a build for each of its products.
_CALLS = """
calls = [
    lambda: x * 2.5,
    lambda: i * 1.5,
    lambda: torch.sort(x),
    lambda: torch.mul(x, x, out=out),
]
out = torch.empty(8, 8)
expected = [f() for f in calls]
eager.register([aten.mul.Tensor, aten.mul.out, aten.sort.default])
for turn in range(2):
    for f, want in zip(calls, expected):
        got = f()
        pairs = list(zip(got, want) if isinstance(got, tuple) else [(got, want)])
        assert all(torch.equal(g, w) and g.dtype == w.dtype for g, w in pairs)
        assert all(g.stride() == w.stride() for g, w in pairs)
assert torch.mul(x, x, out=out) is out
y = x.clone().requires_grad_()
(y * y).sum().backward()
assert torch.equal(y.grad, x + x)
try:
    x * torch.ones(3)
    raise SystemExit("no error")
except RuntimeError as error:
    assert "must match" in str(error), error
assert len(eager._loaded) >= 4, eager._loaded
print(len(builds))
"""


def _run(code: str, folder: Path) -> str:
    environment = {**os.environ, "ALTBACKEND_CACHE_DIR": str(folder)}
    run = fresh.run(["-c", code], env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_operators_of_other_kinds_and_a_second_process_that_compiles_nothing(folder: Path) -> None:
    assert int(_run(_COMMON + _CALLS, folder)) >= 4
    environment = {**os.environ, "ALTBACKEND_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", _COMMON + _CALLS]  # which hashes in another order
    assert int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout) == 0


_ONE = """
path = eager.compile_with_persistent_cache("aten", "exp", "cpu", False, aten.exp.default, (x,), {})
print(len(builds), path)
"""


def test_one_of_two_processes_compiles(folder: Path) -> None:
    environment = {**os.environ, "ALTBACKEND_CACHE_DIR": str(folder)}
    runs = [fresh.Fresh(["-c", _COMMON + _ONE], environment) for _ in range(2)]
    results = [run.communicate(100)[0].split() for run in runs]
    assert sorted(count for count, _ in results) == ["0", "1"]
    (path,) = {path for _, path in results}
    facts = json.loads(_unsealed(Path(path).with_suffix(".json")))
    shown = {"dtype": "torch.float32", "device": "cpu", "sizes": [8, 8], "strides": [8, 1]}
    assert (facts["operator"], facts["inputs"]) == ("aten::exp", {"0": shown})


def _unsealed(path: Path) -> str:
    content = path.read_bytes()
    return content[: content.rindex(b"}") + 1].decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic": True}, "static shapes only"),
        ({"device_type": "cuda"}, "the device is cuda"),
        ({"args": (torch.ones(2), object())}, "an argument is a object"),
        ({"args": (torch.ones(2).to_sparse(),)}, "layout"),
    ],
)
def test_what_the_cache_does_not_take(change: dict[str, object], message: str) -> None:
    given = {"ns": "aten", "op_overload_name": "exp", "device_type": "cpu", "dynamic": False, "f": torch.exp}
    with pytest.raises(BadGraph, match=message):
        eager.compile_with_persistent_cache(**{**given, "args": (torch.ones(2),), "kwargs": {}, **change})  # type: ignore[arg-type]
