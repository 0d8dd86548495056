"""Builds of ahead-of-time libraries: objects by their content from the store, or compiled side by side, and linked."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat import stable_abi, torch_api
from ..config.options import Config
from ..disk_cache.folders import build_folder
from ..disk_cache.storage import open_store
from ..errors import AltError, CompilerFailed
from ..runtime import isa
from . import children, cpp, workers

# The host program only moves pointers, so the compiler need not work hard on it.
_HOST = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-w")
_KERNELS = ("-fwrapv", "-fopenmp-simd", "-fno-exceptions", "-fno-rtti", "-w")
# templates of the C++ library would be visible otherwise, and all of it where the compiler links it statically
_EXPORTS = "{{ global: {0}AOTInductor*; {0}altbackend_*; local: *; }};\n"
_HOST_EXPORTS = "{ global: alt_graph_*; local: *; };\n"
BLOCK = "alt_block"  # the symbol of the embedded file


@dataclass(frozen=True)
class Unit:
    """One translation unit. `kernels`: it has loops, and no calls of torch. `piece`: (number, count) of a long text."""

    name: str
    text: str
    kernels: bool
    piece: tuple[int, int] = (0, 1)


def kernel_units(name: str, text: str) -> list[Unit]:
    """Return the units of a text of kernels, several for a long one."""
    count = max(1, min(text.count(isa.PIECE), cpp.MOST_UNITS))
    return [Unit(f"{name}{n}", text, True, (n, count)) for n in range(count)]


@dataclass(frozen=True)
class EarlyUnit:
    """A unit that is compiled into the store while others are printed. `ended`: with or without success."""

    unit: Unit
    ended: Future[None]


@contextlib.contextmanager
def compiled_early(unit: Unit, target: str, cfg: Config) -> Iterator[EarlyUnit]:
    """Compile a unit into the store in the background; at the end of the block, stop a compiler that still runs."""
    batch = children.Batch()
    try:
        task = functools.partial(_compile_into_store, unit, target, cfg, batch)
        yield EarlyUnit(unit, workers.pool_of(cfg).submit(task))
    finally:
        batch.end()


def _compile_into_store(unit: Unit, target: str, cfg: Config, batch: children.Batch) -> None:
    """Compile a unit that the store lacks. If that fails, `build` compiles it again and raises the error."""
    with contextlib.suppress(AltError, OSError):
        store = open_store(cfg)
        if store.find(_stored_name(unit, target, cfg)) is None:
            with tempfile.TemporaryDirectory(prefix="altbackend-aot-", dir=build_folder(store.folder)) as folder:
                if not cpp.run_compiler(batch, _command(unit, Path(folder), target, cfg)):
                    _keep_object(unit, Path(folder), target, cfg)


def build(units: Sequence[Unit], early: EarlyUnit, block: tuple[str, Path], target: str, cfg: Config) -> bytes:
    """Return a library of the units and of a file that it embeds. `block`: assembler for a path `@`, and the file.

    `early`: one more unit, whose compilation has begun.

    It is a shared library or one object file, by the option `aot_format`.
    Raise CompilerMissing or CompilerFailed.
    """
    compiler, store = cpp.find_compiler(cfg.cxx), open_store(cfg)
    with tempfile.TemporaryDirectory(prefix="altbackend-aot-", dir=build_folder(store.folder)) as name:
        folder = Path(name)
        assembler, content = block
        symbol = cfg.aot_prefix + BLOCK
        (folder / "block.S").write_text(assembler.replace(BLOCK, symbol).replace("@", str(content)))
        embedded = folder / "block.o"
        objects = _objects(units, folder, target, cfg, [compiler, "-c", str(folder / "block.S"), "-o", str(embedded)])
        early.ended.result()
        objects += [embedded, *_objects([early.unit], folder, target, cfg)]
        built = folder / "library"
        _run([_link(compiler, objects, built, folder, cfg)], cfg)
        return built.read_bytes()


def _objects(units: Sequence[Unit], folder: Path, target: str, cfg: Config, *others: list[str]) -> list[Path]:
    """Return the objects of units, in a folder: from the store, or compiled. `others`: commands that run beside."""
    commands: dict[str, list[str]] = {}
    for unit in units:
        stored = open_store(cfg).find(_stored_name(unit, target, cfg))
        if stored is None:
            commands[unit.name] = _command(unit, folder, target, cfg)
        else:
            (folder / f"{unit.name}.o").write_bytes(stored.content)
    _run([*commands.values(), *others], cfg)
    for unit in units:
        if unit.name in commands:
            _keep_object(unit, folder, target, cfg)
    return [folder / f"{unit.name}.o" for unit in units]


def _command(unit: Unit, folder: Path, target: str, cfg: Config) -> list[str]:
    """Write the text of a unit into a folder and return the command that compiles it there."""
    source = folder / f"{unit.name}.cpp"
    source.write_text(unit.text)
    flags = _flags(unit, target, cfg)
    return [cpp.find_compiler(cfg.cxx), *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]


def _keep_object(unit: Unit, folder: Path, target: str, cfg: Config) -> None:
    with contextlib.suppress(OSError):
        open_store(cfg).write(_stored_name(unit, target, cfg), (folder / f"{unit.name}.o").read_bytes())


def _link(compiler: str, objects: Sequence[Path], built: Path, folder: Path, cfg: Config) -> list[str]:
    """Return the command that links objects."""
    named = [*map(str, objects), "-o", str(built)]
    if cfg.aot_format == "object":
        return [compiler, "-r", "-nostdlib", *named]
    (folder / "exports").write_text(_EXPORTS.format(cfg.aot_prefix))
    torch_library = [f"-L{stable_abi.LIBRARIES}", "-ltorch_cpu", "-Wl,-s", f"-Wl,--version-script={folder}/exports"]
    return [compiler, "-shared", *named, *torch_library]


def _prefixed(cfg: Config) -> tuple[str, ...]:
    """Return the flags that put the prefix before C names, the block's symbol and the namespace of everything else."""
    if not cfg.aot_prefix:
        return ()
    prefix = cfg.aot_prefix
    return (f"-DALTBACKEND_PREFIX={prefix}", f"-D{BLOCK}={prefix}{BLOCK}", f"-Dalt={prefix}alt")


# A command has a session of its own, and Linux divides processors between sessions first (`man 7 sched`, autogroup).
# The priority of a process counts within its session alone. At equal shares of two cores, steps of 50 ms took 4 s
# beside a build, since threads of a team wait for each other.
_LOW_PRIORITY = ("sh", "-c", '(echo 15 > /proc/self/autogroup) 2> /dev/null; exec nice -n 15 "$@"', "nice")


def host_name(text: str) -> str:
    """Return the name in the store of the library of a graph's host program, which fits every CPU and compiler."""
    digest = hashlib.sha256(
        "\0".join([text, *_HOST, _HOST_EXPORTS, _headers(), torch.__version__]).encode()
    ).hexdigest()[:40]
    return f"host/{digest[:2]}/{digest}.so"


def build_host(text: str, cfg: Config, low_priority: bool) -> None:
    """Build the library of a graph's host program and store it. Raise CompilerMissing, CompilerFailed or OSError.

    `low_priority`: other processes run first.
    """
    store = open_store(cfg)
    with tempfile.TemporaryDirectory(prefix="altbackend-host-", dir=build_folder(store.folder)) as folder:
        source, exports, built = (Path(folder) / name for name in ("host.cpp", "exports", "host.so"))
        source.write_text(text)
        exports.write_text(_HOST_EXPORTS)
        nice = _LOW_PRIORITY if low_priority and shutil.which("nice") else ()
        paths = [str(source), "-o", str(built), f"-L{stable_abi.LIBRARIES}", "-ltorch_cpu", "-Wl,-s"]
        paths.append(f"-Wl,--version-script={exports}")
        flags = (*_HOST, stable_abi.TARGET_FLAG, f"-I{isa.INCLUDE_DIR}", f"-I{stable_abi.INCLUDE}")
        _run([[*nice, cpp.find_compiler(cfg.cxx), *flags, "-shared", *paths]], cfg)
        store.write(host_name(text), built.read_bytes())


def _flags(unit: Unit, target: str, cfg: Config) -> tuple[str, ...]:
    include = f"-I{isa.INCLUDE_DIR}"
    if not unit.kernels:
        return (*_HOST, *_prefixed(cfg), stable_abi.TARGET_FLAG, include, f"-I{stable_abi.INCLUDE}")
    float8 = () if torch_api.float8_saturates() else ("-DALT_E4M3FN_SATURATE=0",)
    number, count = unit.piece
    unit_flags = (f"-DALT_UNITS={count}", f"-DALT_UNIT={number}") if count > 1 else ()
    return (*isa.flags(target), *_KERNELS, *_prefixed(cfg), *float8, *unit_flags, include)


@functools.cache
def _headers() -> str:
    digest = hashlib.sha256()
    for header in sorted([*isa.INCLUDE_DIR.rglob("*.h"), *isa.INTERFACE_DIR.glob("*.h")]):
        digest.update(header.read_bytes())
    return digest.hexdigest()


def _stored_name(unit: Unit, target: str, cfg: Config) -> str:
    """Return the name of a unit's object in the store, by all that determines it."""
    version = torch.__version__ if not unit.kernels else ""
    flags = [f for f in _flags(unit, target, cfg) if not f.startswith("-I")]
    parts = [unit.text, *flags, _headers(), cpp.compiler_version(cpp.find_compiler(cfg.cxx)), version]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
    return f"aot/{digest[:2]}/{digest}.o"


def _run(commands: list[list[str]], cfg: Config) -> None:
    if commands and (reason := cpp.failure(commands, cfg)):
        raise CompilerFailed(" ".join(commands[0]), reason, "")
