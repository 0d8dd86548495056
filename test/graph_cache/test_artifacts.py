"""`torch.compiler.save_cache_artifacts` takes compiled graphs along, to processes with other folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from altbackend.disk_cache.storage import Store
from altbackend.graph_cache import archive, artifacts, entry_files
from test import fresh

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(400)  # processes that import torch, on a busy machine

PROCESS = """
import sys, torch
import altbackend.graph_cache.artifacts
from altbackend.compile_pool import cpp
from altbackend.debug.trace import Trace
seen, record = [], Trace.decision
def decision(self, kind, subject, verdict, reason):
    record(self, kind, subject, verdict, reason)
    if kind in ("cache", "warm start") and verdict in ("hit", "miss"):
        seen.append(f"{kind}:{verdict}".replace(" ", "_"))
Trace.decision = decision
if sys.argv[1] == "load":
    info = torch.compiler.load_cache_artifacts(open(sys.argv[2], "rb").read())
    assert len(info.altbackend_artifacts) == 5, info  # three compiled graphs and two captured ones
    cpp.failure = None  # nothing may be compiled
x = torch.linspace(0, 1, 128).reshape(8, 16).requires_grad_()
call = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="alt", options={"strict": True, "cache_graphs": True})
y = call(x)
y.sum().backward()
with torch.no_grad():
    call(x)
if sys.argv[1] == "save":
    made, info = torch.compiler.save_cache_artifacts()
    assert len(info.altbackend_artifacts) == 5, info
    open(sys.argv[2], "wb").write(made)
print(*seen, y.double().sum().item().hex(), x.grad.double().sum().item().hex())
"""


def process(folder: Path, do: str, file: Path) -> list[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "ALTBACKEND_CACHE_DIR": str(folder)}
    words = ["-c", PROCESS, do, str(file)]
    if do == "save":
        done = fresh.run(words, 180, env=environ)
    else:  # it hashes in another order
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environ, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_graphs_travel_with_torchs_artifacts(tmp_path: Path) -> None:
    saved = process(tmp_path / "first", "save", tmp_path / "artifacts")
    loaded = process(tmp_path / "second", "load", tmp_path / "artifacts")
    assert sorted(saved[:-2]) == ["cache:miss"] * 3 + ["warm_start:miss"] * 2
    assert loaded == ["warm_start:hit"] * 2 + saved[-2:]


def test_an_artifact_of_a_graph_that_is_gone_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.compiler._cache.CacheArtifactManager.with_fresh_cache():
        artifacts.record(entry_files.EntryPath(Store(tmp_path / "kept"), "f" * 16, "a" * 64))
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
    monkeypatch.setenv("ALTBACKEND_CACHE_DIR", str(tmp_path / "other"))
    info = torch.compiler.load_cache_artifacts(saved[0])
    assert info is not None
    assert entry_files.entry_paths(Store(tmp_path / "other")) == []


def test_a_bad_artifact_is_logged_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTBACKEND_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    monkeypatch.setattr(artifacts.logger, "warning", lambda form, cause: said.append(form % cause))
    artifacts.GraphArtifact("f/a", b"no bundle").populate_cache()
    assert len(said) == 1
    assert "nothing was imported from the artifact f/a: it is damaged" in said[0]
    assert archive.LIST not in os.listdir(tmp_path)
