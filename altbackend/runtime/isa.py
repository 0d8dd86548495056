"""The vector instructions of this CPU, and the compiler flags of generated C++.

`detect` reads /proc/cpuinfo; it compiles and runs nothing.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final, Literal, get_args

Isa = Literal["avx512", "avx2", "generic"]
ISAS: Final[tuple[Isa, ...]] = get_args(Isa)

INCLUDE_DIR: Final = Path(__file__).parent / "include"
"""The folder to pass to the compiler with -I; generated code includes <altbackend/cpu.h>."""

INTERFACE_DIR: Final = Path(__file__).parents[1] / "include"
"""The folder of `altbackend.h`, the C interface of ahead-of-time libraries."""

PIECE: Final = "#if ALT_PIECE("
"""The beginning of each piece of a long generated text, before its number and ")"; see <altbackend/kernel.h>."""

# CPU flags (as /proc/cpuinfo spells them) of each instruction set; the compiler's -m options use the same names.
_CPU_FLAGS: Final[dict[Isa, tuple[str, ...]]] = {
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "generic": (),
}

# -ffp-contract=off: a multiplication and an addition round separately, as eager's two kernels do.
# No -ffast-math: NaN, infinities and signed zero behave as in eager; only errno and traps, which nobody reads, go.
_COMMON_FLAGS: Final = ("-O3", "-std=c++17")
_FLOAT_FLAGS: Final = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_LIBRARY_FLAGS: Final = ("-fno-semantic-interposition", "-fPIC", "-fvisibility=hidden")


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the feature names in the text of /proc/cpuinfo, or an empty set."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def best_isa(features: frozenset[str]) -> Isa:
    """Return the widest instruction set whose features, and those of the narrower ones, are all present."""
    if not features.issuperset(_CPU_FLAGS["avx2"]):
        return "generic"
    return "avx512" if features.issuperset(_CPU_FLAGS["avx512"]) else "avx2"


def detect(cpuinfo: Path = Path("/proc/cpuinfo")) -> Isa:
    """Return the instruction set of this machine; "generic" if it is not x86-64 or cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "generic"
    try:
        return best_isa(cpu_flags(cpuinfo.read_text()))
    except OSError:
        return "generic"


def required_features(isa: str) -> tuple[str, ...]:
    """Return the CPU features that code for an instruction set needs, by their names in /proc/cpuinfo."""
    return (
        (*_CPU_FLAGS["avx2"], *_CPU_FLAGS["avx512"])
        if isa == "avx512"
        else _CPU_FLAGS["avx2" if isa == "avx2" else "generic"]
    )


def flags(isa: str | None = None) -> tuple[str, ...]:
    """Return the compiler flags (g++ and clang++) for kernels of `isa`; None compiles for exactly this machine.

    Raise ValueError for an unknown name. The builder adds OpenMP and the include folder.
    """
    return (*_COMMON_FLAGS, *_target_flags(isa), *_FLOAT_FLAGS, *_LIBRARY_FLAGS)


def _target_flags(isa: str | None) -> tuple[str, ...]:
    wide = "-mprefer-vector-width=512"
    if isa is None:
        return ("-march=native", wide) if detect() != "generic" else ()
    if isa not in ISAS:
        raise ValueError(f"unknown instruction set {isa!r}; one of {', '.join(ISAS)}")
    avx2 = tuple(f"-m{name}" for name in _CPU_FLAGS["avx2"])
    if isa == "avx512":
        return (*avx2, *(f"-m{name}" for name in _CPU_FLAGS["avx512"]), wide)
    return avx2 if isa == "avx2" else ()
