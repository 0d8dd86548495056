"""Programs over `torch.distributed`, cold and from the cache of an earlier process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")
def test_replicas_and_sharded_tensors(tmp_path: Path) -> None:
    env = {**os.environ, "ALTBACKEND_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    for turn in ("cold", "warm"):
        command = [sys.executable, "-m", "test.runtime.distributed_programs", str(tmp_path / turn)]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
        assert done.stdout.split() == ["equal"], done.stderr[-3000:]
