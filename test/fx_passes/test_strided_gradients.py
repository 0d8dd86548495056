"""Gradients of strided 1x1 convolutions of few channels avoid the kernel of oneDNN that writes past its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import strided_gradients
from altbackend.fx_passes.context import Context
from test import fresh
from test.compare import check_gradients
from test.fx_passes.test_cuda_inference import T, traced
from test.fx_passes.test_cuda_joint import joint

CONFIG = resolve()
Convolution = Callable[[T, T], T]
CASES: dict[str, tuple[Convolution, tuple[int, ...], tuple[int, ...], int]] = {  # the gradients that are split
    "few channels": (lambda x, w: F.conv2d(x, w, stride=2), (2, 8, 12, 11), (6, 8, 1, 1), 1),
    "one stride": (lambda x, w: F.conv2d(x, w, stride=(1, 3)), (2, 3, 12, 11), (6, 3, 1, 1), 1),
    "with a bias": (lambda x, w: F.conv2d(x, w, w.sum((1, 2, 3)), 2), (2, 4, 12, 12), (6, 4, 1, 1), 1),
    "groups": (lambda x, w: F.conv2d(x, w, stride=2, groups=4), (2, 32, 9, 9), (8, 8, 1, 1), 1),
    "volumes": (lambda x, w: F.conv3d(x, w, stride=2), (2, 8, 6, 5, 4), (6, 8, 1, 1, 1), 1),
    "whole vectors": (lambda x, w: F.conv2d(x, w, stride=2), (2, 16, 12, 12), (6, 16, 1, 1), 0),
    "no stride": (lambda x, w: F.conv2d(x, w), (2, 8, 12, 12), (6, 8, 1, 1), 0),
    "a window": (lambda x, w: F.conv2d(x, w, stride=2), (2, 8, 12, 12), (6, 8, 3, 1), 0),
    "padded": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (2, 8, 12, 12), (6, 8, 1, 1), 0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    fn, *shapes, count = CASES[name]
    inputs = [torch.randn(s) for s in shapes]
    gm = traced(joint(lambda x, w: fn(x, w).sin().sum()), *inputs)
    want = gm(*inputs)
    assert strided_gradients.run(gm, Context(CONFIG, Trace("joint", CONFIG), device="cpu")) == count
    gm.graph.lint()
    gm.recompile()
    for g, w in zip(gm(*inputs), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    check_gradients(fn, *inputs)
    check_gradients(fn, *inputs, dynamic=True)


PROGRAM = """
import torch

m = torch.nn.Conv2d(8, 32, 1, 2).to(memory_format=torch.channels_last)
x = torch.randn(6, 8, 96, 96).to(memory_format=torch.channels_last).requires_grad_()
f = torch.compile(lambda x: m(x).sin(), backend="alt", options={"cache_graphs": False})
for _ in range(10):
    f(x).sum().backward()
print("ended")
"""


def test_memory_that_malloc_checks_stays_whole() -> None:
    """The C library reads the variable when a process starts."""
    command, env = [sys.executable, "-c", PROGRAM], {**os.environ, "MALLOC_CHECK_": "3"}
    done = subprocess.run(command, env=env, cwd=fresh.ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-2000:]
