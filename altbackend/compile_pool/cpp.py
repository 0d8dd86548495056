"""Building C++: find the compiler once, compile to a shared library, keep it by the hash of what made it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path

from ..compat import torch_api
from ..config.options import Config, resolve
from ..disk_cache.folders import build_folder
from ..disk_cache.storage import Store, open_store
from ..errors import CompilerFailed, CompilerMissing
from ..runtime import isa
from ..runtime.host import Library
from . import children, workers

TIMEOUT = 300  # seconds for one compiler run
TIMEOUT_AFTER = 30  # of one that has taken longer than that before, so that many graphs do not wait in turn
VERSION_TIMEOUT = 10
MOST_UNITS = 16  # that a text is compiled as
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


_hung: set[str] = set()  # compilers that have not answered in time, and have answered nothing since


def compiler_version(path: str) -> str:
    """What the compiler at `path` says of itself. Raises CompilerFailed, at once if it did not answer before."""
    said = _compiler_version(path)
    if isinstance(said, children.ChildFailed):
        raise CompilerFailed(f"{path} -dumpfullversion -dumpversion", str(said), "")
    return said


@functools.cache
def _compiler_version(path: str) -> str | children.ChildFailed:
    try:
        return children.run([path, "-dumpfullversion", "-dumpversion"], VERSION_TIMEOUT)[1]
    except children.ChildFailed as cause:
        return cause


@functools.cache
def _header_hash() -> str:
    digest = hashlib.sha256()
    for header in sorted((isa.INCLUDE_DIR / "altbackend").glob("*.h")):
        digest.update(header.read_bytes())
    return digest.hexdigest()


def flags(cfg: Config) -> tuple[str, ...]:
    """Compiler flags of every generated translation unit."""
    target = isa.flags(None if cfg.isa == "auto" else cfg.isa)  # type: ignore[arg-type]
    float8 = () if torch_api.float8_saturates() else ("-DALT_E4M3FN_SATURATE=0",)
    return (*target, "-fwrapv", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-w", *float8, f"-I{isa.INCLUDE_DIR}")


def _link_flags() -> tuple[str, ...]:
    # torch's OpenMP runtime by file, and not the compiler's own beside it
    gomp = torch_api.libgomp()
    if gomp is None:
        return ("-shared", "-fopenmp")
    return ("-shared", "-nostdlib", str(gomp), "-lm", "-lc", "-lgcc")


def identity(cfg: Config) -> dict[str, str]:
    """What decides a build's bytes beside its source, by name and without a path. Raises CompilerMissing."""
    return {
        "flags": "\0".join(f for f in flags(cfg) if not f.startswith("-I")),
        "isa": isa.detect() if cfg.isa == "auto" else cfg.isa,
        "cpu": _cpu_name(),
        "compiler": compiler_version(find_compiler(cfg.cxx)),
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


def name_of(source: str, cfg: Config) -> str:
    """Name of a translation unit's library in the store. Raises CompilerMissing."""
    made = key(source, cfg)
    return f"cpp/{made[:2]}/{made}.so"


def load(source: str, cfg: Config | None = None) -> Library:
    """The shared library of a translation unit, from the cache folder or built now, opened.

    Where it cannot be kept it is opened from where it was built; that it is gone then does no harm. Raises
    CompilerMissing, NoRoom, or CompilerFailed with the command, the compiler's words and the source path.
    """
    cfg = cfg or resolve()
    name, store = name_of(source, cfg), open_store(cfg)
    if (library := _kept(name, store)) is not None:
        return library
    room = build_folder(store.folder)
    with tempfile.TemporaryDirectory(prefix="altbackend-build-", dir=room) as folder:
        text, built = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        text.write_text(source)
        command = [find_compiler(cfg.cxx), *flags(cfg), str(text), "-o", str(built), *_link_flags()]
        units = min(source.count(isa.PIECE), MOST_UNITS)
        if reason := _why_failed([command], cfg) if units < 2 else _why_units_failed(units, text, built, cfg):
            kept = store.keep_text(name.removesuffix(".so") + ".cpp", source)
            again = " ".join(command).replace(str(text), kept).replace(str(built), os.devnull)
            raise CompilerFailed(again, reason, kept)
        with contextlib.suppress(OSError):  # a full disk, a folder that was removed
            store.write(name, built.read_bytes())
            return Library(str(store.path(name)))
        return Library(str(built))


def _kept(name: str, store: Store) -> Library | None:
    """The library that the store has, opened; None without one, or where it cannot be opened."""
    found = store.find(name)
    if found is None:
        return None
    with contextlib.suppress(OSError):
        return Library(str(found.path))
    with contextlib.suppress(OSError):  # another process has removed it, or no code is run from where it lies
        store.own.write(name, found.content)
        return Library(str(store.path(name)))
    return None


def _why_units_failed(units: int, text: Path, built: Path, cfg: Config) -> str:
    """Compile the pieces of a long text side by side, as so many units, and link them; "" if all went well.

    Their number depends on the text alone, so that equal texts give equal libraries wherever they are built.
    """
    objects = [str(text.with_name(f"unit{n}.o")) for n in range(units)]
    commands = [
        [find_compiler(cfg.cxx), *flags(cfg), f"-DALT_UNITS={units}", f"-DALT_UNIT={n}", "-c", str(text), "-o", made]
        for n, made in enumerate(objects)
    ]
    link = [find_compiler(cfg.cxx), *flags(cfg), *objects, "-o", str(built), *_link_flags()]
    return _why_failed(commands, cfg) or _why_failed([link], cfg)


def _why_failed(commands: Sequence[list[str]], cfg: Config) -> str:
    """Run compilers in the queue of all builds; why one has failed, as soon as it has, "" if none has."""
    pool, batch = workers.pool_of(cfg), children.Batch()
    reasons = [pool.submit(functools.partial(_reason, batch, command)) for command in commands]
    try:
        return next(filter(None, (r.result() for r in as_completed(reasons))), "")
    finally:
        batch.end()  # what others were for has failed, or somebody has interrupted this thread


def _reason(batch: children.Batch, command: list[str]) -> str:
    """Run a compiler, once more if it was killed, as by a system that is out of memory; "" if it has succeeded."""
    compiler, made = command[0], Path(command[command.index("-o") + 1])
    beside = {"TMPDIR": str(made.parent)}  # for the compiler's own files, where there is room
    for last in (False, True):
        try:
            status, said = batch.run(command, TIMEOUT_AFTER if compiler in _hung else TIMEOUT, beside)
        except (OSError, children.ChildFailed) as cause:
            if isinstance(cause, children.ChildFailed) and cause.late:
                _hung.add(compiler)
            return str(cause)
        _hung.discard(compiler)
        if status and not last and (status < 0 or KILLED in said):
            continue
        break
    return "" if status == 0 else said or f"exit status {status}"
