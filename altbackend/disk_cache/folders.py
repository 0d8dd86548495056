"""The cache folder and its fallback, and checks that a folder can hold compiled code."""

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
    """Return the folder of compiled code: `cache_dir`, else `altbackend` in the user's cache folder.

    `environ` defaults to the process environment; XDG_CACHE_HOME is honoured. No folder is created.
    """
    env = os.environ if environ is None else environ
    if cfg.cache_dir:
        return Path(cfg.cache_dir).expanduser()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "altbackend"
    home = _home()
    return temporary_folder() if home is None else home / ".cache" / "altbackend"


def _home() -> Path | None:
    """Return the user's home folder, or None. An empty HOME would mean the root folder."""
    with contextlib.suppress(RuntimeError, KeyError, OSError):
        if os.environ.get("HOME") != "":
            return Path.home()
        home = Path(os.path.expanduser(f"~{getpass.getuser()}"))
        return home if home.is_absolute() else None
    return None


def temporary_folder() -> Path:
    """Return the fallback folder: one per user under the system's temporary folder."""
    user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
    return Path(tempfile.gettempdir()) / f"altbackend-{user}"


@functools.cache
def usable_folder(preferred: Path) -> Path:
    """Return `wanted` if compiled code can be stored in and loaded from it, else a temporary folder with one
    warning.
    """
    reason = unusable_reason(preferred)
    if not reason:
        return preferred
    fallback = temporary_folder()
    if fallback.is_symlink() or unusable_reason(fallback):  # other users can create entries there
        fallback = Path(tempfile.mkdtemp(prefix="altbackend-"))
    error = CacheFolderUnusable(str(preferred), reason)
    also = " , and reading files of the other" if readable(preferred) else ""
    warnings.warn(f"{error}; using {fallback} for this process{also}", CacheFolderWarning, stacklevel=2)
    return fallback


@functools.cache
def readable(folder: Path) -> bool:
    """Return whether a read-only folder may be used: only this user or root can have written its files."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode) and not _distrust_reason(folder.stat(), (0,))
    except OSError:
        return False


BUILD_BYTES = 32 << 20  # space that a build may take: texts, objects, and the compiler's own files


def build_folder(fallback: Path) -> Path:
    """Return the folder for build files: the system's temporary folder, or `fallback` if that is full. Raise NoRoom."""
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:  # no temporary folder is writable
        temporary = fallback
    folder = next((candidate for candidate in (temporary, fallback) if _has_room(candidate)), None)
    if folder is None:
        raise NoRoom(" and ".join(dict.fromkeys((str(temporary), str(fallback)))), BUILD_BYTES >> 20)
    return folder


def _has_room(folder: Path) -> bool:
    try:
        make_folder(folder)
        space = os.statvfs(folder)
    except OSError:
        return False
    except AttributeError:  # Windows
        return True
    return space.f_bavail * space.f_frsize >= BUILD_BYTES and (space.f_favail > 0 or space.f_files == 0)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, accessible to this user alone. Raise OSError."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees all of the new content or all of the old one. Raise OSError."""
    try:
        _write_atomically(path, content)
    except FileNotFoundError:  # another process has removed the folder since it was made
        _write_atomically(path, content)


def _write_atomically(path: Path, content: bytes) -> None:
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
def exclusive(path: Path, seconds: float) -> Iterator[None]:
    """Let one process at a time hold `path`. A process that waits longer than `seconds`, or cannot lock, goes on.

    Another thread than the one that has entered the context may leave it.
    """
    lock = None
    with contextlib.suppress(OSError, Timeout):
        make_folder(path.parent)
        lock = FileLock(path, timeout=seconds, thread_local=False)
        lock.acquire()
    try:
        yield
    finally:
        if lock is not None and lock.is_locked:
            lock.release()


def unusable_reason(folder: Path) -> str:
    """Create `folder` and return why compiled code cannot be stored in and loaded from it, or ""."""
    try:
        make_folder(folder)
        if reason := _distrust_reason(folder.stat()):
            return reason
        with tempfile.NamedTemporaryFile(dir=folder, prefix="probe-") as probe:
            probe.write(bytes(mmap.PAGESIZE))
            probe.flush()
            return "" if _executable(probe.fileno()) else "it is on a file system mounted noexec"
    except OSError as cause:
        return f"it cannot be written ({cause.strerror or cause})"


def _distrust_reason(status: os.stat_result, others: tuple[int, ...] = ()) -> str:
    """Return why a folder is not safe: users who can write to it can run code as this user. `others`: trusted users."""
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), *others):
        return "it belongs to another user"
    return "every user may write to it (chmod o-w)" if status.st_mode & stat.S_IWOTH else ""


def _executable(descriptor: int) -> bool:
    """Return whether a file's pages may be mapped for execution, as loading a shared library does."""
    if sys.platform == "win32":  # Windows has no mount option that forbids it
        return True
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except PermissionError:
        return False
    return True
