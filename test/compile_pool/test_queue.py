"""One queue of builds, C++ and Triton, with one limit; and what compiles Triton kernels (`worker_start`)."""

from __future__ import annotations

import functools
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from altbackend.compat import torch_api
from altbackend.compile_pool import children, cores, cpp, cuda, workers
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.errors import CompilerFailed
from altbackend.runtime.isa import PIECE

needs_triton = pytest.mark.skipif(not torch_api.triton_version(), reason="triton is not installed")
CPP = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'
TRITON = """
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * {factor})
"""
# Under way is what has a file; each says in a second folder how many it has seen.
NOTED = """
import os, time
mine = os.path.join({place!r}, "now", str(os.getpid()))
open(mine, "w").close()
seen = len(os.listdir(os.path.dirname(mine)))
open(os.path.join({place!r}, "seen", f"{{seen}}-{{os.getpid()}}-{factor}"), "w").close()
time.sleep(0.3)
os.unlink(mine)
"""


def job(factor: int, before: str = "") -> cuda.Job:
    signature = (("x", "*fp32"), ("y", "*fp32"), ("BLOCK", "constexpr"))
    source = (before + TRITON).format(factor=factor, place="")
    return cuda.Job(source, signature, (("BLOCK", 128),), (0, 1), 4, 1, 90, "times")


def compiler(folder: Path, script: str) -> str:
    """A C++ compiler that does something before it compiles."""
    path = folder / "noted-g++"
    path.write_text(f'#!/bin/sh\n[ "$1" = -dumpfullversion ] && exec g++ "$@"\n{script}\nexec g++ "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def long_text(pieces: int) -> str:
    """A text that is compiled as so many units."""
    return "#include <altbackend/kernel.h>\n" + "".join(
        f"{PIECE}{n})\nint part{n}() {{ return {n}; }}\n#endif\n" for n in range(pieces)
    )


@needs_triton
@pytest.mark.parametrize("most", [1, 2])
def test_c_and_triton_together_are_no_more_than_may_be(tmp_path: Path, most: int) -> None:
    for name in ("now", "seen"):
        (tmp_path / name).mkdir()
    count = f"ls {tmp_path}/now | wc -l"
    script = f"touch {tmp_path}/now/$$; touch {tmp_path}/seen/$({count})-$$; sleep 0.3; rm {tmp_path}/now/$$"
    options = {"cxx": compiler(tmp_path, script), "cache_dir": str(tmp_path / "kept"), "compile_threads": most}
    cfg = resolve(None, options)
    noted = NOTED.replace("{place!r}", repr(str(tmp_path)))
    with ThreadPoolExecutor(6) as users:
        libraries = [users.submit(cpp.load, CPP % n, cfg) for n in range(3)]
        libraries.append(users.submit(cpp.load, long_text(3), cfg))
        kernels = [cuda.submit(job(n, noted), cfg) for n in range(20, 24)]
        assert all(k.result(timeout=100).code for k in kernels)
        assert [lib.result(timeout=100).dll.answer() for lib in libraries[:3]] == [0, 1, 2]
        libraries[3].result(timeout=100)
    seen = [int(p.name.split("-")[0]) for p in (tmp_path / "seen").iterdir()]
    assert len(seen) == 4 + 3 + 3 + 1  # kernels, texts, units and their link
    assert max(seen) == most


def test_a_unit_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = 'case "$*" in *ALT_UNIT=1*) echo wrong >&2; exit 1;; *ALT_UNIT=*) sleep 100;; esac'
    options = {"cxx": compiler(tmp_path, script), "cache_dir": str(tmp_path / "kept"), "compile_threads": 2}
    start = time.monotonic()
    with pytest.raises(CompilerFailed, match="wrong"):
        cpp.load(long_text(6).replace("part0", "part"), resolve(None, options))
    assert time.monotonic() - start < 60
    limit = time.monotonic() + 10
    while any("ALT_UNIT" in word for c in children._children for word in c.command):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_batch_that_has_ended_starts_nothing() -> None:
    batch = children.Batch()
    assert batch.run(["echo", "said"], 30) == (0, "said")
    batch.end()
    with pytest.raises(children.ChildFailed, match="not started"):
        batch.run(["echo", "said"], 30)


def test_a_batch_ends_what_other_threads_wait_for() -> None:
    batch = children.Batch()
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(batch.run, ["sleep", "100"], 60) for _ in range(2)]
        while len(batch._running) < 2:
            time.sleep(0.01)
        batch.end()
        assert [d.result(timeout=60)[0] for d in done] == [-9, -9]


def test_threads_that_ask_at_once_get_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*asked: Any) -> object:
        time.sleep(0.1)
        return object()

    monkeypatch.setattr(workers, "_pool", functools.cache(slow))
    with ThreadPoolExecutor(6) as threads:
        got = [t.result() for t in [threads.submit(workers.pool, 2, "subprocess") for _ in range(6)]]
    assert len(set(map(id, got))) == 1


# --- what compiles Triton kernels ------------------------------------------------------------------------------------


@pytest.fixture
def cfg(tmp_path: Path) -> Callable[[str], Config]:
    return lambda start: resolve(
        None, {"cache_dir": str(tmp_path / start), "compile_threads": 1, "worker_start": start}
    )


@needs_triton
def test_all_give_the_same_code(cfg: Callable[[str], Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # which "inline" reads: what lies there names an older file
    cubins = [cuda.submit(job(30), cfg(start)).result(timeout=100) for start in ("subprocess", "spawn", "inline")]
    assert cubins[0] == cubins[1] == cubins[2]


@needs_triton
def test_a_spawned_worker_compiles_one_kernel_and_ends(cfg: Callable[[str], Config], tmp_path: Path) -> None:
    say = f"import os\nopen({str(tmp_path)!r} + '/' + str(os.getpid()), 'w').close()\n"
    before = set(children._children)
    for n in (31, 32):
        assert cuda.submit(job(n, say), cfg("spawn")).result(timeout=100).code
    assert len([p for p in tmp_path.iterdir() if p.name.isdigit()]) == 2
    assert set(children._children) == before
    assert workers.pool(1, "spawn").idle.empty()


@needs_triton
def test_a_worker_of_its_own_that_is_killed_is_replaced(cfg: Callable[[str], Config], tmp_path: Path) -> None:
    once = f"import os, pathlib\np = pathlib.Path({str(tmp_path / 'once')!r})\n"
    once += "if not p.exists():\n    p.touch()\n    os.kill(os.getpid(), 9)\n"
    assert cuda.submit(job(33, once), cfg("spawn")).result(timeout=100).code


@needs_triton
def test_workers_have_compiled_before_the_first_kernel() -> None:
    pool = workers.Pool(2)
    pool.warm()
    for _ in range(2):
        worker = pool.idle.get(timeout=100)
        assert "cubin" in json.loads(worker.ask(json.dumps(workers.FIRST_KERNEL), 60))
        worker.end()


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> tuple[workers.Pool, set[children.Child]]:
    """A pool of three whose workers are being started before any options are known, and all processes before them."""
    before = set(children._children)
    monkeypatch.setattr(workers, "_pool", functools.cache(workers.Pool))
    monkeypatch.setattr(cuda, "_warm", functools.cache(workers.Pool.warm))
    unknown = resolve(None, {"compile_threads": 3})
    cuda.start_workers_early(unknown)
    return workers.pool_of(unknown), before


@needs_triton
@pytest.mark.parametrize("start", ["subprocess", "spawn", "inline"])
def test_workers_that_were_expected_end_where_other_options_hold(
    expected: tuple[workers.Pool, set[children.Child]], cfg: Callable[[str], Config], start: str
) -> None:
    pool, before = expected
    waiting = pool.idle.get(timeout=100)  # one is ready, others are being started
    pool.idle.put(waiting)
    cuda.end_unneeded_early_workers(cfg(start))
    pool.submit(lambda: None).result(timeout=100)
    limit = time.monotonic() + 60
    while children._children - before:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert not waiting.alive
    assert pool.idle.empty()
    assert cuda.submit(job(36), cfg(start)).result(timeout=100).code


@needs_triton
def test_workers_that_were_expected_stay_where_their_options_hold(
    expected: tuple[workers.Pool, set[children.Child]],
) -> None:
    cuda.end_unneeded_early_workers(resolve(None, {"compile_threads": 3}))
    cuda.end_unneeded_early_workers(resolve(None, {"compile_threads": 1}))  # of another call; the first has settled it
    for _ in range(3):
        worker = expected[0].idle.get(timeout=100)
        assert worker.alive
        worker.end()


def test_cores_are_counted_once(cfg: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel asks for the pool; where the system's files are slow to read, counting took 30 ms."""
    counted: list[int] = []

    def count(requested: int) -> int:
        counted.append(requested)
        return requested

    monkeypatch.setattr(cores, "workers", count)
    workers._count.cache_clear()
    assert len({workers.pool_of(cfg("inline")) for _ in range(3)}) == 1
    workers._count.cache_clear()
    assert counted == [1]


@needs_triton
def test_inline_starts_nothing(cfg: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "Child", lambda *_: pytest.fail("a worker was started"))
    cuda.warm(cfg("inline"))
    before = threading.active_count()
    future = cuda.submit(job(34), cfg("inline"))
    assert future.done()
    assert future.result().code
    wrong = job(35, "raise KeyError('mine')\n")
    with pytest.raises(CompilerFailed, match="mine"):
        cuda.submit(wrong, cfg("inline")).result()
    assert threading.active_count() == before


def test_inline_runs_compilers_in_the_calling_thread(
    cfg: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    reason = cpp.run_compiler

    def noted(*args: Any) -> str:
        threads.append(threading.get_ident())
        return reason(*args)

    monkeypatch.setattr(cpp, "run_compiler", noted)
    assert cpp.load(CPP % 36, cfg("inline")).dll.answer() == 36
    cpp.load(long_text(3), cfg("inline"))
    assert threads == [threading.get_ident()] * 5


def test_ctrl_c_inline_is_not_kept_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.Pool(1, "inline").submit(interrupted)


@pytest.mark.parametrize("start", ["subprocess", "spawn", "inline"])
def test_a_graph_compiles_by_each(start: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strict": True, "worker_start": start, "cache_dir": str(tmp_path)}
    x = torch.linspace(0, 1, 128).reshape(8, 16)
    got = torch.compile(lambda x: torch.softmax(x * 3, -1), backend="alt", options=options)(x)
    torch.testing.assert_close(got, torch.softmax(x * 3, -1))


@pytest.mark.parametrize(("given", "want"), [("fork", "subprocess"), ("spawn", "spawn"), ("subprocess", "subprocess")])
def test_torchinductors_name(given: str, want: str) -> None:
    assert resolve(None, {"worker_start_method": given}, {}).worker_start == want


def test_a_fork_of_a_process_that_has_built_builds_too(tmp_path: Path) -> None:
    code = f"""
import os
from altbackend.compile_pool import cpp
from altbackend.config.resolve import resolve
cfg = resolve(None, {{"cache_dir": {str(tmp_path)!r}}})
text = {CPP!r}
assert cpp.load(text % 1, cfg).dll.answer() == 1
if os.fork() == 0:
    os._exit(cpp.load(text % 7, cfg).dll.answer())
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=100)
    assert done.stdout == "7\n", done.stderr
