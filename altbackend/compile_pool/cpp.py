"""C++ builds: find the compiler, compile to a shared library, and store it by the hash of its source and flags."""

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
from ..config.options import Config
from ..config.resolve import resolve
from ..disk_cache.folders import build_folder
from ..disk_cache.storage import Store, open_store
from ..errors import CompilerFailed, CompilerMissing
from ..runtime import isa
from ..runtime.host import Library
from . import children, workers

TIMEOUT = 300  # seconds for one compiler run
TIMEOUT_AFTER = 30  # seconds for a compiler that has timed out before, so that many graphs do not wait in turn
VERSION_TIMEOUT = 10
MOST_UNITS = 16  # the most units that a text is compiled as
KILLED = "Killed signal terminated program"  # g++ prints this if a part of it is killed


COMPILERS = ("g++", "clang++", "c++")


def lookup_compiler(cxx: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler: `cxx` if given, else $CXX, else the usual names; None if there is none."""
    names = (cxx,) if cxx else (environ.get("CXX", ""), *COMPILERS)
    paths = (shutil.which(name, path=environ.get("PATH")) for name in names if name)
    return next((path for path in paths if path), None)


@functools.cache
def find_compiler(cxx: str = "") -> str:
    """Return the path of the C++ compiler. Raise CompilerMissing."""
    path = lookup_compiler(cxx, os.environ)
    if path is None:
        raise CompilerMissing((cxx,) if cxx else COMPILERS, sys.platform)
    return path


_hung: set[str] = set()  # compilers that have timed out, and have not answered since


def compiler_version(path: str) -> str:
    """Return the compiler's version output. Raise CompilerFailed, at once if it did not answer before."""
    output = _compiler_version(path)
    if isinstance(output, children.ChildFailed):
        raise CompilerFailed(f"{path} -dumpfullversion -dumpversion", str(output), "")
    return output


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
    """Return the compiler flags of every generated translation unit."""
    target = isa.flags(None if cfg.isa == "auto" else cfg.isa)
    float8 = () if torch_api.float8_saturates() else ("-DALT_E4M3FN_SATURATE=0",)
    return (*target, "-fwrapv", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-w", *float8, f"-I{isa.INCLUDE_DIR}")


def _link_flags() -> tuple[str, ...]:
    # link torch's OpenMP runtime by file, not the compiler's own beside it
    gomp = torch_api.libgomp()
    if gomp is None:
        return ("-shared", "-fopenmp")
    return ("-shared", "-nostdlib", str(gomp), "-lm", "-lc", "-lgcc")


def identity(cfg: Config) -> dict[str, str]:
    """Return everything but the source that determines a build, by name and without paths. Raise CompilerMissing."""
    return {
        "flags": "\0".join(f for f in flags(cfg) if not f.startswith("-I")),
        "isa": isa.detect() if cfg.isa == "auto" else cfg.isa,
        "cpu": _cpu_name(),
        "compiler": compiler_version(find_compiler(cfg.cxx)),
        "headers": _header_hash(),
    }


def key(source: str, cfg: Config) -> str:
    """Return the hash of all that determines a build, without paths. Raise CompilerMissing."""
    content = "\0".join([source, *identity(cfg).values()])
    return hashlib.sha256(content.encode()).hexdigest()[:40]


@functools.cache
def _cpu_name() -> str:
    """Return a digest of the CPU model, since -march=native depends on it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags")):
                return hashlib.sha256(line.encode()).hexdigest()[:12]
    except OSError:
        pass
    return "unknown"


def name_of(source: str, cfg: Config) -> str:
    """Return the name of a translation unit's library in the store. Raise CompilerMissing."""
    digest = key(source, cfg)
    return f"cpp/{digest[:2]}/{digest}.so"


def load(source: str, cfg: Config | None = None) -> Library:
    """Return the shared library of a translation unit, from the cache folder or built now.

    A library that cannot be stored is opened from its build folder, which may be removed while it is open. Raise
    CompilerMissing, NoRoom, or CompilerFailed with the command, the compiler's output and the source path.
    """
    cfg = cfg or resolve()
    name, store = name_of(source, cfg), open_store(cfg)
    if (library := _cached(name, store)) is not None:
        return library
    room = build_folder(store.folder)
    with tempfile.TemporaryDirectory(prefix="altbackend-build-", dir=room) as folder:
        text, built = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        text.write_text(source)
        command = [find_compiler(cfg.cxx), *flags(cfg), str(text), "-o", str(built), *_link_flags()]
        units = min(source.count(isa.PIECE), MOST_UNITS)
        if reason := failure([command], cfg) if units < 2 else _units_failure(units, text, built, cfg):
            source_path = store.write_text(name.removesuffix(".so") + ".cpp", source)
            command_line = " ".join(command).replace(str(text), source_path).replace(str(built), os.devnull)
            raise CompilerFailed(command_line, reason, source_path)
        with contextlib.suppress(OSError):  # the disk is full, or the folder was removed
            store.write(name, built.read_bytes())
            return Library(str(store.path(name)))
        return Library(str(built))


def _cached(name: str, store: Store) -> Library | None:
    """Return the library from the store; None if it is missing or cannot be opened."""
    file = store.find(name)
    if file is None:
        return None
    with contextlib.suppress(OSError):
        return Library(str(file.path))
    with contextlib.suppress(OSError):  # another process has removed it, or its folder is mounted noexec
        store.own.write(name, file.content)
        return Library(str(store.path(name)))
    return None


def _units_failure(units: int, text: Path, built: Path, cfg: Config) -> str:
    """Compile the pieces of a long text in parallel as several units, and link them. Return why that failed, or "".

    The number of units depends on the text alone, so that equal texts give equal libraries on every machine.
    """
    objects = [str(text.with_name(f"unit{n}.o")) for n in range(units)]
    commands = [
        [
            find_compiler(cfg.cxx),
            *flags(cfg),
            f"-DALT_UNITS={units}",
            f"-DALT_UNIT={n}",
            "-c",
            str(text),
            "-o",
            output,
        ]
        for n, output in enumerate(objects)
    ]
    link = [find_compiler(cfg.cxx), *flags(cfg), *objects, "-o", str(built), *_link_flags()]
    return failure(commands, cfg) or failure([link], cfg)


def failure(commands: Sequence[list[str]], cfg: Config) -> str:
    """Run compilers in the queue of all builds. Return why one failed, as soon as it has, or ""."""
    pool, batch = workers.pool_of(cfg), children.Batch()
    reasons = [pool.submit(functools.partial(run_compiler, batch, command)) for command in commands]
    try:
        return next(filter(None, (r.result() for r in as_completed(reasons))), "")
    finally:
        batch.end()  # stop the others if one failed or this thread was interrupted


def run_compiler(batch: children.Batch, command: list[str]) -> str:
    """Run a compiler, and again if it was killed, for example for lack of memory. Return why it failed, or ""."""
    compiler, output_path = command[0], Path(command[command.index("-o") + 1])
    environment = {"TMPDIR": str(output_path.parent)}  # the compiler's own files go where there is room
    for last in (False, True):
        try:
            status, output = batch.run(command, TIMEOUT_AFTER if compiler in _hung else TIMEOUT, environment)
        except (OSError, children.ChildFailed) as cause:
            if isinstance(cause, children.ChildFailed) and cause.timed_out:
                _hung.add(compiler)
            return str(cause)
        _hung.discard(compiler)
        if status and not last and (status < 0 or KILLED in output):
            continue
        break
    return "" if status == 0 else output or f"exit status {status}"
