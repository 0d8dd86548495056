"""`altbackend.aot_compile`: a program as a shared library that torch's loaders and C++ servers run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch.export import ExportedProgram

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..compile_pool import libraries
from ..compile_pool.libraries import EarlyUnit, Unit, kernel_units
from ..config.options import Config
from ..config.resolve import resolve
from ..debug.trace import Trace
from ..disk_cache.folders import build_folder
from ..disk_cache.storage import open_store
from ..errors import BadOptionValue
from ..runtime import isa
from . import machine_code, text, weights
from .capture import Captured, capture
from .machine_code import Architecture
from .programs import Programs, print_programs
from .weights import Block

_numbers = itertools.count()
_CONTAINER = Unit("container", "#include <altbackend/aot/c_interface.h>\n", False)


@dataclass(frozen=True)
class Library:
    """A built library: its path and the files beside it, and what it was built from."""

    path: Path
    files: tuple[Path, ...]
    captured: Captured
    programs: Programs
    target: str
    storage: str
    architectures: tuple[Architecture, ...] = ()


# Passes whose calls are functions of Python: they choose by the values of a weight's zero points.
_RUN_PYTHON = ("quantised linears", "quantised convolutions", "quantised sums")


def aot_compile(
    gm: torch.fx.GraphModule | ExportedProgram,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    options: Mapping[str, object] | None = None,
) -> str:
    """Compile a program ahead of time and return the path of the library.

    `gm`: an exported program, its `module()`, or a GraphModule that returns a tuple. `args`, `kwargs`: example inputs;
    an exported program needs none. Raise BadGraph, Unsupported, CompilerMissing, CompilerFailed, or errors of options.
    """
    return str(build(gm, args, kwargs or {}, options or {}).path)


def build(
    gm: torch.fx.GraphModule | ExportedProgram,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Mapping[str, object],
) -> Library:
    """Compile a program to a library, with the facts of its compilation. Raise as `aot_compile`."""
    asked = resolve(None, options)
    if not re.fullmatch(r"(?:[A-Za-z_]\w*)?", asked.aot_prefix, re.ASCII):
        raise BadOptionValue("aot_prefix", asked.aot_prefix, "it must be the beginning of a C identifier")
    target = isa.detect() if asked.aot_isa == "auto" else asked.aot_isa
    # eager's own generator draws random numbers; weights are folded when the library is created
    disabled = ",".join(filter(None, (asked.disabled_passes, *_RUN_PYTHON)))
    cfg = replace(asked, freezing=True, fallback_random=True, cudagraphs=False, disabled_passes=disabled)
    trace = Trace(f"library{next(_numbers)}", cfg)
    with libraries.compiled_early(_CONTAINER, target, cfg) as container, ThreadPoolExecutor(1) as beside:
        with torch_api.without_gc():
            captured = capture(gm, args, kwargs, cfg)
            text.specs(captured)  # raises for a tree that has no text, before anything is compiled
            block = beside.submit(weights.place, [w.tensor for w in captured.weights])  # hashing takes no lock
            programs = print_programs(captured, cfg, trace)
        with trace.stage("build"):
            library = _built(_Parts(captured, programs, block.result(), container), target, cfg, trace)
    trace.finish()
    return library


@dataclass(frozen=True)
class _Parts:
    """Hold what a library is built from. `block`: its weights in their places."""

    captured: Captured
    programs: Programs
    block: Block
    container: EarlyUnit


def _built(parts: _Parts, target: str, cfg: Config, trace: Trace) -> Library:
    captured, programs, block = parts.captured, parts.programs, parts.block
    literals = weights.place(programs.literals)
    on_gpu = programs.device.type == "cuda"
    code = machine_code.NONE
    if on_gpu:
        target = "generic"  # the CPU runs the host program only
        jobs = [job for part in programs.jobs.values() for job in part]
        code = machine_code.build(jobs, machine_code.architectures(cfg, programs.device), cfg)
    content = text.Content(
        captured, programs, block, literals, cfg.aot_constants, target, code, cfg.aot_format == "object"
    )
    host = text.model_text(content)
    trace.artifact("library.cpp", lambda: host, "output_code")
    units = [Unit("model", host, False)]
    for name, program in (("main", programs.main), ("fold", programs.fold)):
        if program is not None and program.has_kernels:
            trace.artifact(f"kernels_{name}.cpp", functools.partial(getattr, program, "kernels"), "kernel_code")
            units += kernel_units(name, program.kernels)
    room = build_folder(open_store(cfg).folder)
    with tempfile.TemporaryDirectory(prefix="altbackend-aot-", dir=room) as folder:
        embedded = Path(folder) / "block"
        with embedded.open("wb") as file:
            for part in ((block,) if content.before_literals else ()) + (literals,):
                for chunk in part.chunks():
                    file.write(chunk)
            file.write(code.block)
        binary = libraries.build(units, parts.container, (text.block_text("@"), embedded), target, cfg)
    chunks = [binary]
    appended: Iterable[bytes] = ()
    if content.appended:
        chunks.append(b"\0" * (-len(binary) % weights.AFTER_CODE))
        appended = block.with_header()
    path = _output_path(hashlib.sha256(binary + block.digest.encode()).hexdigest()[:40], cfg)
    _replace(path, itertools.chain(chunks, appended))
    files = [path]
    if cfg.aot_constants == "file" and captured.weights:
        beside = path.with_name(text.weights_name(block))
        block.write(beside)
        files.append(beside)
    return Library(path, tuple(files), captured, programs, target, cfg.aot_constants, code.architectures)


def _output_path(digest: str, cfg: Config) -> Path:
    """Return the path that the option names, else one by the digest of the content in the cache folder."""
    name = "model.o" if cfg.aot_format == "object" else "model.so"
    if cfg.aot_output_path:
        path = Path(cfg.aot_output_path).expanduser()
        return path / name if path.is_dir() else path
    return open_store(cfg).folder / "aot" / "libraries" / digest / name


def _replace(path: Path, content: Iterable[bytes]) -> None:
    """Write a file by renaming, so that a process which has mapped the old one keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".altbackend-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(content)
        os.chmod(name, 0o755)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
