"""Where compiled code is kept, and whether a folder can hold it."""

from __future__ import annotations

import contextlib
import functools
import getpass
import mmap
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from altbackend.config.options import Config
from altbackend.errors import CacheFolderUnusable, CacheFolderWarning, NoRoom


def cache_folder(cfg: Config, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of compiled code: `cache_dir`, else `altbackend` in the user's cache folder.

    `environ` defaults to the process environment (XDG_CACHE_HOME is honoured). Nothing is created.
    """
    env = os.environ if environ is None else environ
    if cfg.cache_dir:
        return Path(cfg.cache_dir).expanduser()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "altbackend"
    home = _home()
    return temporary_folder() if home is None else home / ".cache" / "altbackend"


def _home() -> Path | None:
    """The user's home folder, None for a user without one. An empty HOME would stand for the root folder."""
    with contextlib.suppress(RuntimeError, KeyError, OSError):
        if os.environ.get("HOME") != "":
            return Path.home()
        listed = Path(os.path.expanduser(f"~{getpass.getuser()}"))
        return listed if listed.is_absolute() else None
    return None


def temporary_folder() -> Path:
    """The folder used where the cache folder is not usable: one per user under the system's temporary folder."""
    user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
    return Path(tempfile.gettempdir()) / f"altbackend-{user}"


@functools.cache
def usable_folder(wanted: Path) -> Path:
    """`wanted` if compiled code can be kept in it and loaded from it, else a temporary one, with one warning."""
    reason = why_unusable(wanted)
    if not reason:
        return wanted
    fallback = temporary_folder()
    if fallback.is_symlink() or why_unusable(fallback):  # anybody can put something there
        fallback = Path(tempfile.mkdtemp(prefix="altbackend-"))
    error = CacheFolderUnusable(str(wanted), reason)
    also = ", and reading what the other holds" if readable(wanted) else ""
    warnings.warn(f"{error}; using {fallback} for this process{also}", CacheFolderWarning, stacklevel=2)
    return fallback


@functools.cache
def readable(folder: Path) -> bool:
    """Whether what a folder holds may be used although nothing can be kept in it: nobody else can have put it there."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode) and not _why_not_trusted(folder.stat(), (0,))
    except OSError:
        return False


BUILD_BYTES = 32 << 20  # that a build may take: texts, objects, and the compiler's own files


def build_folder(kept: Path) -> Path:
    """Where files of a build go: the system's temporary folder, or `kept` where that is full. Raises NoRoom."""
    try:
        usual = Path(tempfile.gettempdir())
    except OSError:  # no folder of those that it tries takes a file
        usual = kept
    found = next((folder for folder in (usual, kept) if _has_room(folder)), None)
    if found is None:
        raise NoRoom(" and ".join(dict.fromkeys((str(usual), str(kept)))), BUILD_BYTES >> 20)
    return found


def _has_room(folder: Path) -> bool:
    try:
        make_folder(folder)
        held = os.statvfs(folder)
    except OSError:
        return False
    except AttributeError:  # Windows
        return True
    return held.f_bavail * held.f_frsize >= BUILD_BYTES and (held.f_favail > 0 or held.f_files == 0)


def make_folder(path: Path) -> None:
    """Create a folder, with those around it, for this user alone. Raises OSError."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in place at once: whoever reads it finds all of it or what was there before. Raises OSError."""
    try:
        _write_whole(path, content)
    except FileNotFoundError:  # another process has removed the folder since it was made
        _write_whole(path, content)


def _write_whole(path: Path, content: bytes) -> None:
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def one_at_a_time(path: Path, seconds: float) -> Iterator[None]:
    """One process at a time holds `path`; whoever waited longer than `seconds`, or cannot lock, goes on without.

    Another thread than the one that has entered may leave it.
    """
    held = None
    with contextlib.suppress(OSError, Timeout):
        make_folder(path.parent)
        held = FileLock(path, timeout=seconds, thread_local=False)
        held.acquire()
    try:
        yield
    finally:
        if held is not None and held.is_locked:
            held.release()


def why_unusable(folder: Path) -> str:
    """Why compiled code cannot be kept in and loaded from `folder`; "" if it can. Creates the folder."""
    try:
        make_folder(folder)
        if reason := _why_not_trusted(folder.stat()):
            return reason
        with tempfile.NamedTemporaryFile(dir=folder, prefix="probe-") as probe:
            probe.write(bytes(mmap.PAGESIZE))
            probe.flush()
            return "" if _executable(probe.fileno()) else "it is on a file system mounted noexec"
    except OSError as cause:
        return f"it cannot be written ({cause.strerror or cause})"


def _why_not_trusted(held: os.stat_result, others: tuple[int, ...] = ()) -> str:
    """Who can write to a folder can have this user run code. `others`: users who are trusted as this one is."""
    if hasattr(os, "geteuid") and held.st_uid not in (os.geteuid(), *others):
        return "it belongs to another user"
    return "every user may write to it (chmod o-w)" if held.st_mode & stat.S_IWOTH else ""


def _executable(descriptor: int) -> bool:
    """Whether a file's pages may be mapped for execution, which is what loading a shared library does."""
    if sys.platform == "win32":  # no mount option forbids it there
        return True
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except PermissionError:
        return False
    return True
