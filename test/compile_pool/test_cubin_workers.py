"""Workers that turn Triton into machine code: started early, replaced when they die, bounded in time, never orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from altbackend.compile_pool import cuda
from altbackend.config import Config, resolve
from altbackend.errors import CompilerFailed

pytest.importorskip("triton")

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * {factor})
"""


def job(factor: int, source: str = SOURCE) -> cuda.Job:
    signature = (("x", "*fp32"), ("y", "*fp32"), ("BLOCK", "constexpr"))
    return cuda.Job(source.format(factor=factor), signature, (("BLOCK", 128),), (0, 1), 4, 1, 90, "double_it")


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return resolve(None, {"cache_dir": str(tmp_path), "compile_threads": 1})


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def test_a_job_and_its_entry(cfg: Config, tmp_path: Path) -> None:
    made = cuda.submit(job(2), cfg).result(timeout=100)
    assert made.code.startswith(b"\x7fELF")
    assert made.name == "double_it"
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["", "{", '{"cubin": "AA", "digest": "0"}', "\0" * 100, "[]", "null"])
def test_a_damaged_entry_is_built_anew(cfg: Config, tmp_path: Path, damage: str) -> None:
    want = cuda.submit(job(3), cfg).result(timeout=100)
    (entry,) = entries(tmp_path)
    entry.write_text(damage)
    cuda._submit.cache_clear()
    assert cuda.submit(job(3), cfg).result(timeout=100) == want
    assert entry.read_text() != damage


def test_a_worker_that_is_killed_is_replaced(cfg: Config) -> None:
    cuda.submit(job(4), cfg).result(timeout=100)
    worker = cuda._idle.get(timeout=100)
    worker.kill()
    worker.wait()
    cuda._idle.put(worker)
    assert cuda.submit(job(5), cfg).result(timeout=100).code


def test_a_kernel_that_does_not_end_is_an_error(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SECONDS", 3.0)
    endless = job(6, "while True:\n    pass\n# def kernel( {factor}\n")
    with pytest.raises(CompilerFailed, match="did not compile within 3 s"):
        cuda.submit(endless, cfg).result(timeout=100)
    monkeypatch.setattr(cuda, "SECONDS", 100.0)
    assert cuda.submit(job(7), cfg).result(timeout=100).code


def test_an_error_names_its_reason_and_the_source(cfg: Config) -> None:
    wrong = job(8, SOURCE.replace("tl.load(x + at)", "tl.no_such_function(x)"))
    with pytest.raises(CompilerFailed, match="no_such_function"):
        cuda.submit(wrong, cfg).result(timeout=100)


PARENT = """
import sys, time
from altbackend.compile_pool import cuda
from altbackend.config import resolve
cuda.warm(resolve(None, {"compile_threads": 2}))
workers = [cuda._idle.get(timeout=60) for _ in range(2)]
print(*(w.pid for w in workers), flush=True)
time.sleep(100)
"""


def test_workers_start_early_and_end_with_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    limit = time.monotonic() + 30
    while any(alive(p) for p in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(alive(p) for p in pids)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
