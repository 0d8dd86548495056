"""Processes that compile end with the process that started them, whatever ends it, and take nothing of it along."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from altbackend.compile_pool import children, cores, cpp
from altbackend.config.resolve import resolve
from altbackend.errors import CompilerFailed, NoRoom

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at processes in /proc")

ORPHAN_S = 5.0
EXIT_S = 20.0  # on a busy machine; what an exit could wait for takes 50
ROOT = Path(__file__).parents[2]

# Each prints the process group that it has started, as soon as something is under way in it, and goes on.
BUSY_WORKER = """
import signal, subprocess, sys, threading, time
from altbackend.compile_pool.children import Child
code = ('import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); '
        'sys.stdin.readline(); subprocess.Popen(["sleep", "50"]); print(1, flush=True); sys.stdin.readline(); '
        'subprocess.run(["sleep", "50"])')
made = []
def start():  # a thread that is over when the parent ends
    made.append(Child([sys.executable, "-c", code]))
    made[0].ask("begin", 60)
thread = threading.Thread(target=start)
thread.start()
thread.join()
threading.Thread(target=made[0].ask, args=("go on", 60), daemon=True).start()
print(made[0].process.pid, flush=True)
"""
BUSY_COMPILER = """
import pathlib, sys, threading
from altbackend.compile_pool import cpp
from altbackend.config.resolve import resolve
cfg = resolve(None, {"cxx": sys.argv[1], "cache_dir": sys.argv[2]})
def build():
    try:
        cpp.load("int x;", cfg)
    except Exception:
        pass
if sys.argv[3] == "thread":
    threading.Thread(target=build, daemon=True).start()
else:
    build()
"""
THEN = {
    "sleeps": "\nimport time\ntime.sleep(60)\n",
    "ends": "\nsys.exit(3)\n",
    "raises": "\nraise KeyError\n",
    "aborts": "\nimport os\nos.abort()\n",
    "forks": "\nimport os, time\nif os.fork() == 0:\n    time.sleep(30)\ntime.sleep(60)\n",
}


@pytest.fixture
def slow_compiler(tmp_path: Path) -> str:
    """A compiler that does not end, nor the part that it starts, and says which process it is."""
    path = tmp_path / "slow-g++"
    lines = [
        "#!/bin/sh",
        "[ $1 = -dumpfullversion ] && exit",
        "trap '' TERM INT HUP",
        "sleep 50 &",
        f"echo $$ > {tmp_path}/group.new",
        f"mv {tmp_path}/group.new {tmp_path}/group",
        "wait",
    ]
    path.write_text("\n".join(lines))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def in_the_foreground() -> None:
    """Heed signals of a terminal, which a shell has processes ignore that it starts in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start_(code: str, *args: str, **more: object) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
                preexec_fn=in_the_foreground,
                **more,  # type: ignore[call-overload]
            )
        )
        return processes[-1]

    yield start_
    for p in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.communicate()


def members(group: int) -> list[int]:
    """The processes of a group that run; one that has ended and that nobody has waited for does not."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            pids.append(int(path.parent.name))
    return pids


def become(group: int, count: int, seconds: float) -> bool:
    """Return whether a group reaches `count` members in time."""
    limit = time.monotonic() + seconds
    while len(members(group)) != count:
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def gone(group: int) -> bool:
    return become(group, 0, ORPHAN_S)


def group_of(p: subprocess.Popen[str]) -> int:
    assert p.stdout is not None
    group = int(p.stdout.readline())
    assert become(group, 3, 60)  # the worker, and two processes of its own
    return group


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_no_busy_worker_outlives_a_killed_parent(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    parent = start(BUSY_WORKER + THEN["sleeps"])
    group = group_of(parent)
    os.kill(parent.pid, number)
    parent.wait()
    assert gone(group)


@pytest.mark.parametrize("way", ["ends", "raises", "aborts"])
def test_no_busy_worker_outlives_or_delays_a_parent_that_ends(
    start: Callable[..., subprocess.Popen[str]], way: str
) -> None:
    parent = start(BUSY_WORKER + THEN[way])
    group = int(parent.stdout.readline())
    parent.wait(EXIT_S)
    assert gone(group)


def test_a_fork_of_the_parent_keeps_no_worker_alive(start: Callable[..., subprocess.Popen[str]]) -> None:
    """As a data loader's process does, which may live on for a while."""
    parent = start(BUSY_WORKER + THEN["forks"])
    group = group_of(parent)
    assert become(parent.pid, 2, 60)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(group)
    assert len(members(parent.pid)) == 1


def written(path: Path) -> int:
    limit = time.monotonic() + 60
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    return int(path.read_text())


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["thread", "main"])
def test_no_compiler_outlives_its_parent(
    start: Callable[..., subprocess.Popen[str]], slow_compiler: str, tmp_path: Path, number: signal.Signals, place: str
) -> None:
    parent = start(BUSY_COMPILER + THEN["sleeps"], slow_compiler, str(tmp_path), place)
    group = written(tmp_path / "group")
    assert become(group, 2, 60)
    # Ctrl-C at a terminal is a signal to the group
    (os.killpg if number == signal.SIGINT else os.kill)(parent.pid, number)
    parent.wait(EXIT_S)
    assert gone(group)


def test_ctrl_c_ends_the_compilers_of_a_process_that_goes_on(
    start: Callable[..., subprocess.Popen[str]], slow_compiler: str, tmp_path: Path
) -> None:
    build = BUSY_COMPILER.replace(
        "    build()\n", "    try:\n        build()\n    except KeyboardInterrupt:\n        pass\n"
    )
    parent = start(build + THEN["sleeps"], slow_compiler, str(tmp_path), "main")
    group = written(tmp_path / "group")
    assert become(group, 2, 60)
    os.killpg(parent.pid, signal.SIGINT)
    assert gone(group)
    assert parent.poll() is None


def test_an_exit_does_not_wait_for_a_compiler(
    start: Callable[..., subprocess.Popen[str]], slow_compiler: str, tmp_path: Path
) -> None:
    wait = f"\nimport os, time\nwhile not os.path.exists('{tmp_path}/group'):\n    time.sleep(0.02)\n"
    parent = start(BUSY_COMPILER + wait, slow_compiler, str(tmp_path), "thread")
    group = written(tmp_path / "group")
    parent.wait(EXIT_S)
    assert gone(group)


TASK = """
import time
from altbackend.compile_pool import children, workers
from altbackend.config.resolve import resolve
def task():
    status, _ = children.run(["sleep", "50"], 60)
    time.sleep(0.3)  # as a task in C++ code of torch, which must not find the interpreter gone
    print("ended", status, flush=True)
workers.run_in_thread(task, resolve(None, {}))
while not children._children:
    time.sleep(0.01)
"""


def test_an_exit_waits_for_a_task_whose_compiler_it_has_killed() -> None:
    """A daemon thread that the interpreter's end unwinds through C++ code aborts the process."""
    started = time.monotonic()
    made = subprocess.run(
        [sys.executable, "-c", TASK], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (made.returncode, made.stdout, made.stderr) == (0, "ended -9\n", "")
    assert time.monotonic() - started < EXIT_S


LEFT = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("altbackend")], flush=True))
from altbackend.compile_pool import background, workers  # its own work at exit comes before what is registered above
from altbackend.config.resolve import resolve
pool = workers.pool_of(resolve(None, {}))
results = [pool.submit(lambda: 1) for _ in range(8)]
workers.run_in_thread(lambda: [r.result() for r in results], resolve(None, {})).result()
print(len(background._state.threads) > 0, flush=True)
"""


def test_an_exit_leaves_no_thread_that_waits_for_tasks() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", LEFT], env=env, capture_output=True, text=True, timeout=EXIT_S)
    assert (made.returncode, made.stdout, made.stderr) == (0, "True\n[]\n", "")


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    slow_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "TIMEOUT", 2)
    with pytest.raises(CompilerFailed, match="no result after 2 s"):
        cpp.load("int hangs;", resolve(None, {"cxx": slow_compiler, "cache_dir": str(tmp_path)}))
    assert gone(written(tmp_path / "group"))


def test_many_graphs_do_not_wait_for_a_compiler_that_hangs(
    slow_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "TIMEOUT", 2)
    monkeypatch.setattr(cpp, "TIMEOUT_AFTER", 0.25)
    monkeypatch.setattr(cpp, "_hung", set())
    cfg = resolve(None, {"cxx": slow_compiler, "cache_dir": str(tmp_path)})
    for n, limit in enumerate(("2 s", "0.25 s", "0.25 s")):
        with pytest.raises(CompilerFailed, match=f"no result after {limit}"):
            cpp.load(f"int hangs{n};", cfg)


def test_a_compiler_that_does_not_say_its_version_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "silent-g++"
    path.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nsleep 100\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cpp, "VERSION_TIMEOUT", 0.5)
    for _ in range(3):
        with pytest.raises(CompilerFailed, match=r"no result after 0\.5 s"):
            cpp.load("int silent;", resolve(None, {"cxx": str(path), "cache_dir": str(tmp_path / "cache")}))
    assert (tmp_path / "asked").read_text().split() == ["asked"]


def test_a_build_goes_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folders without room the compiler sees none: a build there would fail half-way, or be cut short."""
    cfg = resolve(None, {"cache_dir": str(tmp_path / "cache")})
    full = {tempfile.gettempdir()}
    room = os.statvfs

    def statvfs(path: Any) -> Any:
        held = room(path)
        return os.statvfs_result((*held[:4], 0, *held[5:])) if str(path) in full else held

    monkeypatch.setattr(os, "statvfs", statvfs)
    seen: list[tuple[str, str]] = []
    start = children.Batch.run

    def noted(self: Any, command: Any, seconds: float, more: Any = None) -> Any:
        seen.append((command[command.index("-o") + 1], more["TMPDIR"]))
        return start(self, command, seconds, more)

    monkeypatch.setattr(children.Batch, "run", noted)
    cpp.load("int room;", cfg)
    assert all(place.startswith(str(tmp_path / "cache")) for pair in seen for place in pair)
    seen.clear()
    full.add(str(tmp_path / "cache"))
    with pytest.raises(NoRoom, match="TMPDIR"):
        cpp.load("int none;", cfg)
    assert not seen


def test_a_compiler_that_was_killed_is_run_once_more(tmp_path: Path) -> None:
    path = tmp_path / "killed-g++"
    path.write_text(f'#!/bin/sh\nif [ "$1" != -dumpfullversion ] && mkdir {tmp_path}/once; then kill -9 $$; fi\n')
    with path.open("a") as f:
        f.write('exec g++ "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    cfg = resolve(None, {"cxx": str(path), "cache_dir": str(tmp_path / "cache")})
    assert Path(cpp.load("int once;", cfg).path).exists()
    assert (tmp_path / "once").is_dir()


def test_a_child_inherits_only_its_own_pipes() -> None:
    read, write = os.pipe()
    os.set_inheritable(read, True)
    child = children.Child(
        [sys.executable, "-c", "import os; input(); print(*sorted(map(int, os.listdir('/proc/self/fd'))))"]
    )
    try:
        held = [int(n) for n in child.ask("", 60).split()]
        assert held[:3] == [0, 1, 2]
        assert len(held) == 5  # the pipe that ends it, and the folder that it reads
    finally:
        child.end()
        os.close(read)
        os.close(write)


def test_a_fork_has_no_children_of_its_parent() -> None:
    """It may end its copies, and the parent goes on using them."""
    child = children.Child(["cat"])
    if (fork := os.fork()) == 0:
        closed = child.process.stdin is not None and child.process.stdin.closed
        quiet = not child.alive and not children._children and child.end() == 0
        os._exit(0 if closed and quiet else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert child.ask("still here", 60) == "still here"
    child.end()


def test_an_ended_child_leaves_nothing_open() -> None:
    before = set(children._children), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        child = children.Child(["cat"])
        assert child.ask("x" * 300_000, 60) == "x" * 300_000  # more than a pipe holds
        child.end()
        child.end()
        assert children.run(["echo", "a"], 60) == (0, "a")
        with pytest.raises(children.ChildFailed, match="no result after"):
            children.run(["sleep", "50"], 0.2)
        with pytest.raises(OSError, match="no-such-program"):
            children.Child(["/no-such-program"])
    assert (children._children, len(os.listdir("/proc/self/fd"))) == before


# --- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 10**6),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 10**6),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "3:cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000"}, 10**6),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, 10**6),
    ],
)
def test_cores_are_those_that_affinity_and_control_groups_grant(
    tmp_path: Path, files: dict[str, str], most: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.usable(tmp_path) == min(len(os.sched_getaffinity(0)), most)


def test_workers_of_a_host_are_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 6)
    assert [cores.workers(0, {"LOCAL_WORLD_SIZE": n}) for n in ("1", "3", "8", "", "x")] == [6, 2, 1, 6, 6]
    assert cores.workers(3, {"LOCAL_WORLD_SIZE": "8"}) == 3
