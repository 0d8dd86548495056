"""The cache folder under everything that can happen to one: results stay right, and errors cost caching at most."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from altbackend.disk_cache import eviction, folders, storage
from altbackend.disk_cache.storage import Store
from altbackend.errors import CacheFolderWarning
from test import fresh
from test.mounts import namespaces

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)  # processes that import torch, on a busy machine
DAY = 86400.0


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    folders.usable_folder.cache_clear()
    eviction._written.clear()


def fill(store: Store, names: list[str], size: int = 1000) -> None:
    """Files that were last used one second after another, an hour ago."""
    for n, name in enumerate(names):
        store.write(name, bytes(size))
        os.utime(store.path(name), (time.time() - 3600 + n,) * 2)


def names_in(store: Store) -> set[str]:
    return {
        p.relative_to(store.folder).as_posix()
        for p in store.folder.rglob("*")
        if p.is_file() and eviction.LOCKS not in p.parts
    }


# --- the limit -------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_leaves(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, [f"cpp/a{n}/{n}.so" for n in range(10)])
    assert store.read("cpp/a0/0.so") is not None  # it is used again
    assert eviction.sweep(tmp_path, 6000) == 6
    assert names_in(store) == {"cpp/a0/0.so", *(f"cpp/a{n}/{n}.so" for n in (7, 8, 9))}
    assert {p.name for p in (tmp_path / "cpp").iterdir()} == {"a0", "a7", "a8", "a9"}
    assert eviction.sweep(tmp_path, 6000) == 0
    assert eviction.sweep(tmp_path, 0) == 0


def test_the_files_of_an_entry_leave_together(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, ["graphs/f/a.parts", "graphs/f/b.parts", "graphs/f/a.graph", "graphs/f/b.graph"])
    os.utime(store.path("graphs/f/b.parts"), (0, 0))  # only entries are read again and again
    assert eviction.sweep(tmp_path, 3000) == 2
    assert names_in(store) == {"graphs/f/b.parts", "graphs/f/b.graph"}


def test_writing_keeps_the_folder_within_its_limit(tmp_path: Path) -> None:
    store = Store(tmp_path, most_bytes=100_000)
    for n in range(300):
        store.write(f"cpp/{n % 7}/{n}.so", bytes(2000))
        assert store.read(f"cpp/{n % 7}/{n}.so") == bytes(2000)
    assert 80_000 < eviction.size(tmp_path)[1] < 100_000 + 100_000 / eviction.SHARE + 3000


def test_a_file_larger_than_the_limit_may_be_used_once(tmp_path: Path) -> None:
    store = Store(tmp_path, most_bytes=10)
    store.write("cpp/a/a.so", bytes(1000))  # no error
    assert names_in(store) == set()
    store.write("cpp/a/a.so", bytes(1000))


def test_a_process_that_writes_little_looks_now_and_then(tmp_path: Path) -> None:
    fill(Store(tmp_path), [f"cpp/a/{n}.so" for n in range(20)])
    store = Store(tmp_path, most_bytes=10_000)
    eviction._written.clear()  # as in another process
    store.write("cpp/b/b.so", b"")
    assert len(names_in(store)) == 21  # somebody has looked a moment ago
    os.utime(tmp_path / eviction.LOCKS / "swept", (time.time() - 2 * eviction.OFTEN_S,) * 2)
    store.write("cpp/b/c.so", b"")
    assert len(names_in(store)) < 12


@pytest.mark.parametrize("ahead", [DAY, 400 * DAY])
def test_a_clock_that_was_set_back(tmp_path: Path, ahead: float) -> None:
    """A file with a time in the future counts as used now, and ages from then on."""
    store = Store(tmp_path)
    fill(store, ["cpp/a/old.so", "cpp/a/new.so", "cpp/a/ahead.so"])
    (tmp_path / eviction.LOCKS).mkdir(exist_ok=True)
    stamp = tmp_path / eviction.LOCKS / "swept"
    for path in (store.path("cpp/a/ahead.so"), stamp):
        path.touch()
        os.utime(path, (time.time() + ahead,) * 2)
    assert not eviction._recent(stamp)
    eviction.sweep(tmp_path, 3000)
    assert store.path("cpp/a/ahead.so").stat().st_mtime <= time.time()
    assert names_in(store) == {"cpp/a/new.so", "cpp/a/ahead.so"}
    assert store.read("cpp/a/ahead.so") is not None


def test_what_a_killed_writer_has_left_is_removed_and_a_writer_at_work_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, ["cpp/a/a.so", "cpp/a/old.tmp", "cpp/a/new.tmp"])
    os.utime(store.path("cpp/a/old.tmp"), (0, 0))
    os.utime(store.path("cpp/a/new.tmp"))
    assert eviction.sweep(tmp_path, 0) == 1
    assert names_in(store) == {"cpp/a/a.so", "cpp/a/new.tmp"}


def test_two_processes_do_not_look_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path, most_bytes=1000)
    (tmp_path / eviction.LOCKS).mkdir()
    with FileLock(tmp_path / eviction.LOCKS / "swept.lock"):
        fill(store, [f"cpp/a/{n}.so" for n in range(5)])
        assert len(names_in(store)) == 5
    store.write("cpp/a/last.so", b"")
    assert len(names_in(store)) < 3


def test_locks_do_not_pile_up(tmp_path: Path) -> None:
    for n in range(500):
        with folders.exclusive(tmp_path / "locks" / f"{n % 256:02x}.lock", 1):
            assert len(list((tmp_path / "locks").iterdir())) <= 256


# --- folders ---------------------------------------------------------------------------------------------------------


def test_folders_are_for_one_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert folders.unusable_reason(tmp_path / "a" / "b") == ""
        Store(tmp_path / "a" / "b").write("cpp/c/d.so", b"x")
    finally:
        os.umask(before)
    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {oct(p.stat().st_mode & 0o077) for p in made if eviction.LOCKS not in p.parts} == {"0o0"}


def test_a_folder_that_every_user_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert folders.unusable_reason(tmp_path) == "every user may write to it (chmod o-w)"
    tmp_path.chmod(0o775)
    assert folders.unusable_reason(tmp_path) == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be two users")
def test_two_users(tmp_path: Path) -> None:
    """Neither uses what the other can write, wherever the temporary folder's name leads."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and path.is_relative_to("/tmp/pytest-of-root"):
            path.chmod(0o755)
    foreign, shared = tmp_path / "theirs", tmp_path / "shared"
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    shared.mkdir()
    shared.chmod(0o1777)
    assert folders.unusable_reason(foreign) == "it belongs to another user"
    code = """
import os, sys, tempfile, warnings
from pathlib import Path
from altbackend.disk_cache import folders
from altbackend.disk_cache.storage import Store
tempfile.tempdir = sys.argv[2]
os.setgid(12345); os.setuid(12345)
warnings.simplefilter("ignore")
mine, other = Path(sys.argv[1]), Path(sys.argv[1]).parent
print(folders.unusable_reason(mine))
print(folders.usable_folder(other))
Store(folders.usable_folder(other)).write("cpp/a/a.so", b"x")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(foreign), str(shared)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines() == ["", str(shared / "altbackend-12345")], done.stderr
    assert (shared / "altbackend-12345").stat().st_mode & 0o777 == 0o700
    assert folders.unusable_reason(shared / "altbackend-12345") == "it belongs to another user"


def test_a_link_in_the_place_of_the_temporary_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "precious").mkdir()
    folders.temporary_folder().symlink_to(tmp_path / "precious")
    (tmp_path / "file").touch()
    with pytest.warns(CacheFolderWarning, match="cannot be written"):
        used = folders.usable_folder(tmp_path / "file")
    assert used.parent == tmp_path
    assert used != folders.temporary_folder()
    assert list((tmp_path / "precious").iterdir()) == []


def test_a_folder_that_is_removed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = folders.make_folder

    def make_and_remove(path: Path) -> None:
        make(path)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr(folders, "make_folder", make_and_remove)
    store = Store(tmp_path / "kept")
    store.write("cpp/a/a.so", b"x")
    assert store.read("cpp/a/a.so") == b"x"


def test_reading_touches_now_and_then_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write("cpp/a/a.so", b"x")
    touched: list[Path] = []

    def refuse(path: Path, *_: object) -> None:
        touched.append(path)
        raise PermissionError(1, "read only")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.read("cpp/a/a.so") == b"x"
    assert touched == []
    monkeypatch.setattr(storage, "TOUCH_S", -1.0)
    assert store.read("cpp/a/a.so") == b"x"
    assert touched == [store.path("cpp/a/a.so")]


# --- file systems that refuse, for a whole compilation ---------------------------------------------------------------

COMPILE = """
import os, sys, warnings, torch
from altbackend.debug.trace import Trace
caught, seen, record = [], [], Trace.decision
def decision(self, kind, subject, verdict, reason):
    record(self, kind, subject, verdict, reason)
    if kind == "cache":
        seen.append(verdict)
Trace.decision = decision
def f(x):
    return torch.softmax(x * 2, -1).sum(0)
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.linspace(0, 1, 128).reshape(8, 16)
    options = {{"cache_graphs": True, "warm_start": False}}
    call = torch.compile(f, backend="alt", options=options)
    torch.testing.assert_close(call(x), f(x))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="alt", options=options)(x), f(x))
print(*seen)
print(*(getattr(w.message, "args", [""])[0].split(": ")[1].split("\\n")[0] for w in caught
        if "altbackend" in type(w.message).__module__))
"""


def mounted(options: str) -> str:
    """Return the beginning of a program that mounts a small file system at $ALTBACKEND_CACHE_DIR."""
    return f"from test import mounts; mounts.enter(); mounts.mount('mode=700,{options}')"


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., list[str]]:
    """Return the output of a process that compiles a graph twice with a folder of its own."""

    def run(before: str) -> list[str]:
        (tmp_path / "kept").mkdir()
        (tmp_path / "tmp").mkdir()
        environ = os.environ | {
            "ALTBACKEND_CACHE_DIR": str(tmp_path / "kept"),
            "TMPDIR": str(tmp_path / "tmp"),
            "PYTHONPATH": str(ROOT),
        }
        done = fresh.run(["-c", COMPILE.format(before=before)], 280, env=environ)
        assert done.returncode == 0, done.stderr
        assert [p.name for p in (tmp_path / "tmp").iterdir() if p.name.startswith("altbackend-build")] == []
        return done.stdout.splitlines()

    return run


@pytest.mark.sample(2)
@pytest.mark.skipif(not namespaces(), reason="no file system can be mounted here")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param("size=100m", ["miss hit", ""], id="nothing wrong"),
        pytest.param("size=8k", ["miss not stored miss not stored", ""], id="full"),
        pytest.param("size=100m,noexec", ["miss hit", "it is on a file system mounted noexec"], id="noexec"),
        pytest.param("ro", ["miss hit", "it cannot be written (Read-only file system)"], id="read only"),
    ],
)
def test_mounted(compiled: Callable[..., list[str]], options: str, expected: list[str]) -> None:
    assert compiled(mounted(options)) == expected


def test_a_limit_on_file_sizes_is_a_full_disk(compiled: Callable[..., list[str]]) -> None:
    """Entries are larger than the limit, as is a library: both are refused while they are written."""
    before = """
import altbackend.disk_cache.folders, resource
whole = altbackend.disk_cache.folders._write_atomically
def limited(path, content):
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
    try:
        whole(path, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
altbackend.disk_cache.folders._write_atomically = limited
"""
    assert compiled(before) == ["miss not stored miss not stored", ""]


def test_a_folder_that_is_gone_at_every_step(compiled: Callable[..., list[str]]) -> None:
    before = """
import shutil
from altbackend.disk_cache.storage import Store
for name in ("read", "write"):
    def gone(self, *args, inner=getattr(Store, name)):
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            return inner(self, *args)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
    setattr(Store, name, gone)
"""
    assert compiled(before) == ["miss miss", ""]


def test_libraries_that_leave_before_they_are_opened_are_built_again(compiled: Callable[..., list[str]]) -> None:
    before = """
from altbackend.compile_pool import cpp
from altbackend.runtime.host import Library
class Removed(Library):
    def __init__(self, path):
        if path.startswith(os.environ["ALTBACKEND_CACHE_DIR"]):
            os.unlink(path)
        super().__init__(path)
cpp.Library = Removed
"""
    assert compiled(before) == ["miss hit", ""]
