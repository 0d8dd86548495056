"""A read-only cache folder: its files are used, and new files go to another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from altbackend.autotune.measured_times import MeasuredTimes as Times
from altbackend.cli import cache as cli
from altbackend.compile_pool import cpp
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.disk_cache import folders, storage
from altbackend.disk_cache.storage import Store, open_store
from altbackend.errors import CacheFolderWarning
from altbackend.graph_cache import entry_files as entries
from altbackend.runtime.host import Library
from test import fresh
from test.mounts import namespaces

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    folders.usable_folder.cache_clear()
    folders.readable.cache_clear()


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that refuses what is new, as far as this process asks; the temporary folder is the test's own."""
    folder, unusable = tmp_path / "kept", folders.unusable_reason
    folder.mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(folders, "unusable_reason", lambda f: "it cannot be written" if f == folder else unusable(f))
    return folder


def opened(folder: Path) -> Store:
    with pytest.warns(CacheFolderWarning, match="reading files of the other"):
        return open_store(resolve(None, {"cache_dir": str(folder)}))


def files(folder: Path) -> dict[str, tuple[bytes, float]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime) for p in folder.rglob("*") if p.is_file()}


def test_what_is_there_is_read_and_what_is_new_goes_elsewhere(read_only: Path) -> None:
    there = Store(read_only)
    there.write("cpp/a/a.so", b"there")
    os.utime(there.path("cpp/a/a.so"), (0, 0))
    before = files(read_only)
    store = opened(read_only)
    assert store.folder != read_only
    assert store.read("cpp/a/a.so") == b"there"
    store.write("cpp/a/b.so", b"new")
    assert store.read("cpp/a/b.so") == b"new"
    store.write("cpp/a/a.so", b"newer")
    assert store.read("cpp/a/a.so") == b"newer"
    store.path("cpp/a/a.so").write_bytes(b"damaged")
    file = store.find("cpp/a/a.so")
    assert file == storage.StoredFile(read_only / "cpp/a/a.so", b"there")
    assert files(read_only) == before


def test_a_library_is_opened_where_it_lies_or_from_a_copy(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = resolve(None, {"cache_dir": str(read_only)})
    folders.usable_folder.cache_clear()
    with monkeypatch.context() as m:
        m.setattr(folders, "unusable_reason", lambda _: "")
        built = cpp.load(SOURCE % 41, cfg)
    assert built.path.startswith(str(read_only))
    folders.usable_folder.cache_clear()
    monkeypatch.setattr(cpp, "failure", lambda *_: pytest.fail("built again"))
    with pytest.warns(CacheFolderWarning):
        assert cpp.load(SOURCE % 41, cfg).path == built.path

    class NoExec(Library):
        def __init__(self, path: str) -> None:
            if path.startswith(str(read_only)):
                raise OSError("failed to map segment from shared object")
            super().__init__(path)

    monkeypatch.setattr(cpp, "Library", NoExec)
    copied = cpp.load(SOURCE % 41, cfg)
    assert copied.path == str(open_store(cfg).path(cpp.name_of(SOURCE % 41, cfg)))
    assert copied.dll.answer() == 41


def test_entries_below_are_listed_compared_and_left(read_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = entries.EntryPath(Store(read_only), "f" * 16, "a" * 64)
    assert entries.write(there, {"code": 1}, {"x": {"": "1"}}) == ""
    store = opened(read_only)
    own_path = entries.EntryPath(store, "f" * 16, "b" * 64)
    assert entries.write(own_path, {"code": 2}, {"x": {"": "2"}}) == ""
    assert {p.key for p in entries.entry_paths(store)} == {"a" * 64, "b" * 64}
    assert [p.key for p in entries.family_members(own_path)] == ["a" * 64]
    assert cli.stats(store) == 0
    assert f"also read: {read_only}" in capsys.readouterr().out
    assert cli.clear(store.own) == 0
    assert [p.key for p in entries.entry_paths(store)] == ["a" * 64]


def test_measured_times_below_are_read(tmp_path: Path) -> None:
    Times(tmp_path / "below").write("how long", {"a": 1.0})
    assert Times(tmp_path / "above").read("how long") is None
    above = Times(tmp_path / "above", read_only=(tmp_path / "below",))
    assert above.read("how long") == {"a": 1.0}
    above.write("how long", {"a": 2.0})
    assert above.read("how long") == {"a": 2.0}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be two users")
def test_whose_folders_are_read(tmp_path: Path) -> None:
    """One's own and the administrator's; nobody else's, and none that everybody may write to."""
    assert folders.readable(tmp_path)
    assert not folders.readable(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert not folders.readable(tmp_path / "file")
    open_to_all, foreign = tmp_path / "open", tmp_path / "theirs"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert not folders.readable(open_to_all)
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    assert not folders.readable(foreign)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and path.is_relative_to("/tmp/pytest-of-root"):
            path.chmod(0o755)
    code = "import os, sys; from pathlib import Path; from altbackend.disk_cache import folders; os.setuid(12345)"
    ask = "; print(*(folders.readable(Path(p)) for p in sys.argv[1:]))"
    paths = [str(tmp_path), str(open_to_all), str(foreign)]
    done = subprocess.run(
        [sys.executable, "-c", code + ask, *paths],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


# --- real file systems -----------------------------------------------------------------------------------------------

COMPILE = """
import os, sys, warnings, torch
from altbackend import pipeline
from altbackend.compile_pool import cpp
from test import mounts
def f(x):
    return torch.softmax(x * 2, -1).sum(0)
def refuse(*_):
    raise AssertionError("compiled")
def compile_():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.linspace(0, 1, 128).reshape(8, 16)
        call = torch.compile(f, backend="alt", options={"cache_graphs": True, "strict": True})
        torch.testing.assert_close(call(x), f(x))
    ours = [w.message for w in caught if "altbackend" in type(w.message).__module__]
    print(*(str(message).split(": ")[1].split("\\n")[0] for message in ours))
mounts.enter()
mounts.mount("mode=700,size=100m")
if (pid := os.fork()) == 0:
    compile_()
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
mounts.mount("remount," + sys.argv[1], "none")
pipeline.translate = cpp.failure = refuse
compile_()
"""


@pytest.mark.skipif(not namespaces(), reason="no file system can be mounted here")
@pytest.mark.parametrize(
    ("mount", "reason", "copies"),
    [
        ("ro", "it cannot be written (Read-only file system)", 0),
        ("noexec", "it is on a file system mounted noexec", 1),
    ],
)
def test_a_process_finds_what_a_mount_holds(tmp_path: Path, mount: str, reason: str, copies: int) -> None:
    for name in ("kept", "tmp"):
        (tmp_path / name).mkdir()
    environ = os.environ | {
        "ALTBACKEND_CACHE_DIR": str(tmp_path / "kept"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": str(ROOT),
    }
    done = fresh.run(["-c", COMPILE, mount], 280, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", reason]
    assert len(list((tmp_path / "tmp").rglob("*.so"))) == copies


def test_a_folder_of_ones_own_is_the_only_one(tmp_path: Path) -> None:
    store = open_store(Config(cache_dir=str(tmp_path / "kept")))
    assert store.folders == (tmp_path / "kept",)
