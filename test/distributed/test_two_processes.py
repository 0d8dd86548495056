"""Two processes over gloo: gradients equal one process's, and a cold start compiles each graph once for both."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed

from test import fresh

ROOT = Path(__file__).parents[2]
WORLD = 2
LIMIT = 150  # seconds, on a machine with other work
COMPILED = re.compile(r"(graph\w+): compiled in .*\blower\b")  # a graph from the cache is not lowered

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch has no gloo"
)


def outputs(folder: Path, *programs: str) -> list[tuple[list[str], str]]:
    """Run programs in two processes that share a cache; return each one's output and log."""
    env = {
        **os.environ,
        "ALTBACKEND_CACHE_DIR": str(folder / "cache"),
        "ALTBACKEND_CACHE_GRAPHS": "1",
        "ALTBACKEND_LOG": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    module = ["-m", "test.distributed.programs"]
    ranks = [fresh.Fresh([*module, str(r), str(WORLD), str(folder / "store"), *programs], env) for r in range(WORLD)]
    try:
        done = [r.communicate(LIMIT) for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    return [(out.split(), log) for out, log in done]


@pytest.mark.parametrize("programs", [("replicas", "sharded"), ("tensor_parallel", "collectives")], ids="-".join)
def test_gradients_and_compilations(tmp_path: Path, programs: tuple[str, ...]) -> None:
    compilations: Counter[str] = Counter()
    for out, log in outputs(tmp_path, *programs):
        assert out == list(programs), log[-3000:]
        compilations.update(COMPILED.findall(log))
    assert compilations
    assert set(compilations.values()) == {1}, compilations
