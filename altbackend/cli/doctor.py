"""`python -m altbackend doctor`: check that everything that compiled code needs is installed, and say what to do."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from altbackend import __version__
from altbackend.compile_pool.cpp import COMPILERS, lookup_compiler
from altbackend.config.options import Config
from altbackend.config.resolve import known_variables, resolve
from altbackend.disk_cache.folders import cache_folder, unusable_reason
from altbackend.errors import AltError, install_compiler
from altbackend.lazy_dataclass import dataclass

BUILD_SECONDS = 60.0
# Sums 0..999 on however many threads: right only if OpenMP's reduction works.
PROBE = """
extern "C" long probe(void) {
    long sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (long i = 0; i < 1000; i++) sum += i;
    return sum;
}
"""
PROBE_RESULT = 999 * 1000 // 2


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do unless `ok`; only a `required` one makes the command fail."""

    name: str
    ok: bool
    finding: str
    fix: str = ""
    required: bool = True


def run(environ: Mapping[str, str] | None = None) -> int:
    """Print all findings. Return 1 if something required is missing, else 0."""
    checks = examine(os.environ if environ is None else environ)
    print(report(checks), end="")
    return int(any(check.required and not check.ok for check in checks))


def examine(environ: Mapping[str, str]) -> list[Check]:
    """Return all findings, in the order to read them."""
    options, cfg = check_options(environ)
    compiler = lookup_compiler(cfg.cxx, environ)
    return [
        Check("altbackend", True, f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        check_torch(torch.__version__),
        options,
        check_compiler(cfg.cxx, compiler),
        check_openmp_library(Path(torch.__file__).parent),
        check_build(compiler),
        Check("vector instructions", True, torch.backends.cpu.get_cpu_capability()),
        check_cuda(),
        check_triton(torch.cuda.is_available()),
        check_cache_folder(cache_folder(cfg, environ)),
    ]


def report(checks: Sequence[Check]) -> str:
    """Return one line per finding, with a line for the fix below each that is not ok."""
    lines = []
    for check in checks:
        mark = "ok  " if check.ok else "MISS" if check.required else "note"
        lines.append(f"{mark}  {check.name:<20} {check.finding}")
        if not check.ok:
            lines.append(f"      {'':<20} -> {check.fix}")
    bad = [check.name for check in checks if check.required and not check.ok]
    lines.append(f"\nnot ready: {', '.join(bad)}" if bad else "\nready")
    return "\n".join(lines) + "\n"


def check_options(environ: Mapping[str, str]) -> tuple[Check, Config]:
    """Check the ALTBACKEND_ variables: values must be valid, and each name must be known."""
    try:
        cfg = resolve(environ=environ)
    except AltError as error:
        return Check("environment", False, str(error).splitlines()[0], "correct or unset that variable"), Config()
    unread = sorted(name for name in environ if name.startswith("ALTBACKEND_") and name not in known_variables())
    if unread:
        fix = "unset or rename them; `python -m altbackend config` lists every name"
        return Check("environment", False, f"nothing reads {', '.join(unread)}", fix, required=False), cfg
    variables = sorted(name for name in environ if name in known_variables())
    return Check("environment", True, ", ".join(variables) or "no ALTBACKEND_ variable set"), cfg


def check_torch(version: str) -> Check:
    """Check that torch has one of the versions that this release is tested with."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    fix = "install a torch from 2.11 to 2.15; others may work but are not tested"
    return Check("torch", (2, 11) <= release < (2, 16), version, fix, required=release < (2, 11))


def check_compiler(cxx: str, compiler: str | None) -> Check:
    """Check that a C++ compiler is on PATH, or where `cxx` says, and that it runs."""
    if compiler is None:
        fix = f"correct the option cxx, or {install_compiler(sys.platform)}" if cxx else install_compiler(sys.platform)
        return Check("C++ compiler", False, f"none ({cxx or ', '.join(COMPILERS)} not found)", fix)
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as cause:
        return Check("C++ compiler", False, f"{compiler} does not run: {cause}", install_compiler(sys.platform))
    return Check("C++ compiler", True, f"{compiler}: {(done.stdout.splitlines() or [''])[0]}")


def check_openmp_library(torch_folder: Path) -> Check:
    """Check the OpenMP runtime of torch's package; generated code shares it to share torch's threads."""
    folders = (torch_folder / "lib", torch_folder.parent / "torch.libs")
    candidates = sorted(path for folder in folders for path in folder.glob("*omp*") if path.name.startswith("lib"))
    runtimes = [path for path in candidates if path.name.startswith(("libgomp", "libomp", "libiomp"))]
    fix = "install torch from its official wheels, or see that the system's libgomp or libomp is installed"
    return Check("OpenMP of torch", bool(runtimes), str(runtimes[0]) if runtimes else "none", fix, required=False)


def check_build(compiler: str | None) -> Check:
    """Check that a small OpenMP library can be built, loaded and run."""
    name = "build and load"
    if compiler is None:
        return Check(name, False, "not tried without a compiler", "see `C++ compiler` above")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(PROBE, encoding="utf-8")
        command = [compiler, "-O1", "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=True)
            result = int(ctypes.CDLL(str(library)).probe())
        except subprocess.CalledProcessError as error:
            message = (error.stderr.strip().splitlines() or ["no message"])[0]
            return Check(
                name, False, message, "install the compiler's OpenMP support (libgomp with g++, libomp with clang++)"
            )
        except (OSError, subprocess.SubprocessError) as cause:
            return Check(name, False, str(cause), "see that TMPDIR is writable and not mounted noexec")
    return Check(name, result == PROBE_RESULT, f"OpenMP sum {result}", f"{compiler} gives a wrong sum: use another one")


def check_cuda() -> Check:
    """Check that a CUDA device is visible; without one, models run on the CPU."""
    if torch.cuda.is_available():
        return Check("CUDA", True, f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}", required=False)
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
    return Check("CUDA", False, f"no device ({built})", "only needed to compile for a GPU", required=False)


def check_triton(needed: bool) -> Check:
    """Check that Triton is installed; it is `needed` if there is a CUDA device."""
    if importlib.util.find_spec("triton") is None:
        fix = "`pip install triton`; only needed to compile for a GPU"
        return Check("Triton", False, "not installed", fix, required=needed)
    return Check("Triton", True, importlib.metadata.version("triton"), required=needed)


def check_cache_folder(folder: Path) -> Check:
    """Check that compiled code can be written to the cache folder and run from it."""
    reason = unusable_reason(folder)
    fix = "set ALTBACKEND_CACHE_DIR to a folder you own on a file system that is not mounted noexec"
    return Check("cache folder", not reason, f"{folder}: {reason}" if reason else str(folder), fix)
