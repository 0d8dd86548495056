"""Detection of the instruction set from /proc/cpuinfo, and the compiler flags."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from altbackend.runtime.isa import INCLUDE_DIR, ISAS, Isa, best_isa, cpu_flags, detect, flags

pytestmark = pytest.mark.timeout(60)
HASWELL = "fpu sse sse2 ssse3 sse4_1 sse4_2 avx fma f16c avx2 bmi1 bmi2"
SKYLAKE_X = HASWELL + " avx512f avx512dq avx512bw avx512vl avx512cd"


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        (SKYLAKE_X, "avx512"),
        (HASWELL, "avx2"),
        (HASWELL.replace(" fma", ""), "generic"),
        (SKYLAKE_X.replace(" avx512dq", ""), "avx2"),  # Knights Landing
        ("fpu sse sse2", "generic"),
        ("", "generic"),
    ],
)
def test_best_isa(features: str, isa: Isa) -> None:
    assert best_isa(frozenset(features.split())) == isa


def test_cpu_flags_reads_the_first_processor() -> None:
    text = "processor\t: 0\nmodel name\t: X: y\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert cpu_flags(text) == {"fpu", "avx2"}
    assert cpu_flags("nothing here\n") == frozenset()


def test_detect_without_cpuinfo_is_generic(tmp_path: Path) -> None:
    assert detect(tmp_path / "missing") == "generic"


def test_detect_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {SKYLAKE_X}\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert detect(tmp_path / "cpuinfo") == "avx512"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert detect(tmp_path / "cpuinfo") == "generic"


@pytest.mark.parametrize("isa", [*ISAS, None])
def test_no_flag_gives_up_ieee_values(isa: Isa | None) -> None:
    options = flags(isa)
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only", "-fno-signed-zeros", "-freciprocal-math"} & set(options)
    assert "-ffp-contract=off" in options
    assert ("-march=native" in options) == (isa is None and detect() != "generic")


def test_unknown_isa() -> None:
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        flags("sse9")


@pytest.mark.parametrize(("isa", "defined"), [("avx512", "__AVX512VL__"), ("avx2", "__FMA__"), ("generic", "__SSE2__")])
def test_flags_make_the_compiler_target_the_isa(isa: Isa, defined: str) -> None:
    wider = {"avx512": (), "avx2": ("__AVX512F__",), "generic": ("__AVX__", "__FMA__")}[isa]
    command = ["g++", *flags(isa), "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "__x86_64__" not in macros:
        pytest.skip("not x86-64")
    assert f"#define {defined} " in macros
    assert not [name for name in wider if f"#define {name} " in macros]


def test_header_needs_no_heavy_include(tmp_path: Path) -> None:
    """The header preprocesses to few lines: no <cmath>, <algorithm> or ATen behind it."""
    (tmp_path / "only.cpp").write_text("#include <altbackend/cpu.h>\n")
    command = ["g++", *flags("generic"), f"-I{INCLUDE_DIR}", "-M", str(tmp_path / "only.cpp")]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    names = {Path(f).name for f in files}
    assert not names & {"cmath", "math.h", "algorithm", "vector", "type_traits", "ATen.h"}
    assert "special.h" in names
