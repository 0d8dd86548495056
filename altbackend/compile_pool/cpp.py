"""Building C++: find the compiler once, compile to a shared library, keep it by the hash of what made it."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from .. import compat, folders
from ..config import Config, resolve
from ..errors import CacheFolderUnusable, CacheFolderWarning, CompilerFailed, CompilerMissing
from ..runtime import isa
from ..runtime.host import Library
from . import children

TIMEOUT = 300  # seconds for one compiler run
VERSION_TIMEOUT = 30
KILLED = "Killed signal terminated program"  # what g++ says when that happens to a part of it


COMPILERS = ("g++", "clang++", "c++")


def lookup_compiler(cxx: str, environ: Mapping[str, str]) -> str | None:
    """Path of the C++ compiler: `cxx` alone if given, else $CXX, else the usual names; None without one."""
    names = (cxx,) if cxx else (environ.get("CXX", ""), *COMPILERS)
    found = (shutil.which(name, path=environ.get("PATH")) for name in names if name)
    return next((path for path in found if path), None)


@functools.cache
def find_compiler(cxx: str = "") -> str:
    """Path of the C++ compiler. Raises CompilerMissing."""
    found = lookup_compiler(cxx, os.environ)
    if found is None:
        raise CompilerMissing((cxx,) if cxx else COMPILERS, sys.platform)
    return found


@functools.cache
def _compiler_version(path: str) -> str:
    _, said = children.run([path, "-dumpfullversion", "-dumpversion"], VERSION_TIMEOUT)
    return said


@functools.cache
def _header_hash() -> str:
    digest = hashlib.sha256()
    for header in sorted((isa.INCLUDE_DIR / "altbackend").glob("*.h")):
        digest.update(header.read_bytes())
    return digest.hexdigest()


def flags(cfg: Config) -> tuple[str, ...]:
    """Compiler flags of every generated translation unit."""
    target = isa.flags(None if cfg.isa == "auto" else cfg.isa)  # type: ignore[arg-type]
    return (*target, "-fwrapv", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-w", f"-I{isa.INCLUDE_DIR}")


def _link_flags() -> tuple[str, ...]:
    # torch's OpenMP runtime by file, and not the compiler's own beside it
    gomp = compat.libgomp()
    if gomp is None:
        return ("-shared", "-fopenmp")
    return ("-shared", "-nostdlib", str(gomp), "-lm", "-lc", "-lgcc")


@functools.cache
def usable_folder(wanted: Path) -> Path:
    """`wanted` if compiled code can be kept in it and loaded from it, else a temporary one, with one warning."""
    reason = folders.why_unusable(wanted)
    if not reason:
        return wanted
    fallback = folders.temporary_folder()
    if folders.why_unusable(fallback):
        fallback = Path(tempfile.mkdtemp(prefix="altbackend-"))
    error = CacheFolderUnusable(str(wanted), reason)
    warnings.warn(f"{error}; using {fallback} for this process", CacheFolderWarning, stacklevel=2)
    return fallback


def identity(cfg: Config) -> dict[str, str]:
    """What decides a build's bytes beside its source, by name and without a path. Raises CompilerMissing."""
    return {
        "flags": "\0".join(f for f in flags(cfg) if not f.startswith("-I")),
        "isa": isa.detect() if cfg.isa == "auto" else cfg.isa,
        "cpu": _cpu_name(),
        "compiler": _compiler_version(find_compiler(cfg.cxx)),
        "headers": _header_hash(),
    }


def key(source: str, cfg: Config) -> str:
    """Name of a build: everything that decides its bytes, no path among it. Raises CompilerMissing."""
    made_of = "\0".join([source, *identity(cfg).values()])
    return hashlib.sha256(made_of.encode()).hexdigest()[:40]


@functools.cache
def _cpu_name() -> str:
    """-march=native means this CPU model."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags")):
                return hashlib.sha256(line.encode()).hexdigest()[:12]
    except OSError:
        pass
    return "unknown"


def build(source: str, cfg: Config) -> Path:
    """The shared library of a translation unit, from the cache folder or built now.

    Raises CompilerMissing, or CompilerFailed with the command, the compiler's words and the source path.
    """
    name = key(source, cfg)
    folder = usable_folder(folders.cache_folder(cfg)) / "cpp" / name[:2]
    target = folder / f"{name}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"{name}.cpp"
    _write_atomically(text, source)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".so.tmp")
    os.close(handle)
    command = [find_compiler(cfg.cxx), *flags(cfg), str(text), "-o", temporary, *_link_flags()]
    try:
        _run(command, text)
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return target


def _write_atomically(path: Path, content: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as f:
        f.write(content)
    os.replace(temporary, path)


def _run(command: list[str], source: Path) -> None:
    """Run the compiler; once more if it was killed, as by a system that is out of memory."""
    for last in (False, True):
        try:
            status, said = children.run(command, TIMEOUT)
        except (OSError, children.ChildFailed) as cause:
            raise CompilerFailed(" ".join(command), str(cause), str(source)) from cause
        if status == 0:
            return
        if last or not (status < 0 or KILLED in said):
            raise CompilerFailed(" ".join(command), said or f"exit status {status}", str(source))


def load(source: str, cfg: Config | None = None) -> Library:
    """Build (or find) and open a translation unit."""
    return Library(str(build(source, cfg or resolve())))
