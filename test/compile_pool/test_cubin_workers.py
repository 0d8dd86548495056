"""Workers that turn Triton into machine code: replaced when they die, bounded in time, with errors that say why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from altbackend.compile_pool import cuda, workers
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
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
    return sorted(folder.rglob("*.cubin"))


def test_a_job_and_its_entry(cfg: Config, tmp_path: Path) -> None:
    cubin = cuda.submit(job(2), cfg).result(timeout=100)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.name == "double_it"
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["", "{", '{"cubin": "AA", "digest": "0"}', "\0" * 100, "[]", "null"])
def test_a_damaged_entry_is_built_anew(cfg: Config, tmp_path: Path, damage: str) -> None:
    want = cuda.submit(job(3), cfg).result(timeout=100)
    (entry,) = entries(tmp_path)
    entry.write_bytes(damage.encode())
    cuda._submit.cache_clear()
    assert cuda.submit(job(3), cfg).result(timeout=100) == want
    assert entry.read_bytes() != damage.encode()


def test_an_idle_worker_that_is_killed_is_replaced(cfg: Config) -> None:
    cuda.submit(job(4), cfg).result(timeout=100)
    worker = workers.pool(1, "subprocess").idle.get(timeout=100)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    workers.pool(1, "subprocess").idle.put(worker)
    assert cuda.submit(job(5), cfg).result(timeout=100).code
    assert worker.process.stdout is not None
    assert worker.process.stdout.closed


def test_a_worker_ignores_an_interrupt_and_obeys_a_shutdown(cfg: Config) -> None:
    cuda.submit(job(14), cfg).result(timeout=100)
    worker = workers.pool(1, "subprocess").idle.get(timeout=100)
    os.kill(worker.process.pid, signal.SIGINT)
    workers.pool(1, "subprocess").idle.put(worker)
    assert cuda.submit(job(15), cfg).result(timeout=100).code
    assert worker.alive
    os.kill(worker.process.pid, signal.SIGTERM)
    assert worker.process.wait(100) == -signal.SIGTERM


ONCE = """
import os, pathlib, signal
if not pathlib.Path({place!r}).exists():
    pathlib.Path({place!r}).touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_is_killed_at_work_is_replaced_and_its_job_done(cfg: Config, tmp_path: Path) -> None:
    place = tmp_path / "killed"
    assert cuda.submit(job(10, ONCE.format(place=str(place)) + SOURCE), cfg).result(timeout=100).code
    assert place.exists()


def test_a_job_that_kills_every_worker_is_an_error_with_their_last_words(cfg: Config) -> None:
    words = "import os, sys\nprint('LLVM ERROR: no', file=sys.stderr, flush=True)\nos.abort()\n"
    with pytest.raises(CompilerFailed, match="ended with status -6 LLVM ERROR: no"):
        cuda.submit(job(11, words), cfg).result(timeout=100)
    assert cuda.submit(job(12), cfg).result(timeout=100).code


def test_a_job_is_done_here_where_no_worker_can_be_started(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "pool", workers.Pool)  # one that has no worker yet
    monkeypatch.setattr(workers, "WORKER", ["/no-such-python"])  # as where Python is part of another program
    assert cuda.submit(job(13), cfg).result(timeout=100).code


def test_a_kernel_that_does_not_end_is_an_error(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SECONDS", 3.0)
    endless = job(6, "while True:\n    pass\n# def kernel( {factor}\n")
    with pytest.raises(CompilerFailed, match="double_it did not compile within 3 s"):
        cuda.submit(endless, cfg).result(timeout=100)
    monkeypatch.setattr(workers, "SECONDS", 100.0)
    assert cuda.submit(job(7), cfg).result(timeout=100).code


def test_an_error_names_its_reason_and_the_source(cfg: Config) -> None:
    wrong = job(8, SOURCE.replace("tl.load(x + at)", "tl.no_such_function(x)"))
    with pytest.raises(CompilerFailed, match="no_such_function"):
        cuda.submit(wrong, cfg).result(timeout=100)


def test_what_is_kept_waits_for_no_thread(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = cuda.submit(job(9), cfg).result(timeout=100)
    cuda._submit.cache_clear()

    def no_queue(*args: object) -> None:
        raise AssertionError("queued")

    monkeypatch.setattr(workers.Pool, "submit", no_queue)
    assert cuda.submit(job(9), cfg).result(timeout=0) == cubin
