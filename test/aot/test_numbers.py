"""Python's arithmetic on numbers of the host program, translated to C++: each expression gives Python's value."""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from altbackend.codegen.host.cpp_numbers import CTYPES, Kind, translate
from altbackend.compat import stable_abi
from altbackend.errors import Unsupported
from altbackend.ir.host_functions import FUNCTIONS
from altbackend.runtime import isa

TYPES: dict[str, Kind] = {"i": "int", "j": "int", "x": "float", "b": "bool"}
EXPRESSIONS = [
    "i + j * 3 - (i - j)",
    "i // j",
    "i % j",
    "-i // j + (-i) % j",
    "x // j",
    "x % j",
    "i / j",
    "i ** 3",
    "x ** 2",
    "abs(i) + abs(-j)",
    "abs(x)",
    "max(i, j) + min(i, 2, j)",
    "max(x, i)",
    "sum((i, j, x, ))",
    "round(x)",
    "math.floor(x) + math.ceil(x) * math.trunc(x)",
    "math.sqrt(abs(x) + 1.5)",
    "int(x) + int(b)",
    "float(i) + 0.1",
    "float('inf')",
    "(i if i > j else j) + b",
    "i < j <= 7 and not b or i == 3",
    "bool(i)",
    "i & 6 | j ^ 3",
    "(i << 2) + (j >> 1) + ~i",
    "slice_begin(i, 5) + indexed_size(5, j)",
    "bits_of(x)",
    "-9223372036854775807 + abs(i)",
    "b * 2.5 - x * -1e300",
]
INPUTS = list(itertools.product((-7, 0, 3, 8), (-2, 1, 5), (-2.5, -0.5, 0.0, 1.5, 7.25), (False, True)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_every_expression_has_pythons_value(tmp_path: Path) -> None:
    lines = [
        "#include <altbackend/aot/definitions.h>",
        "#include <altbackend/aot/numbers.h>",
        "using namespace alt::aot;",
    ]
    kinds = []
    for k, e in enumerate(EXPRESSIONS):
        text, kind = translate(e, TYPES)
        kinds.append(kind)
        arguments = "int64_t i, int64_t j, double x, bool b"
        lines.append(f'extern "C" {CTYPES[kind]} f{k}({arguments}) {{ return {text}; }}')
    source, library = tmp_path / "n.cpp", tmp_path / "n.so"
    source.write_text("\n".join(lines) + "\n")
    includes = [f"-I{isa.INCLUDE_DIR}", f"-I{stable_abi.INCLUDE}", stable_abi.TARGET_FLAG]
    linked = [str(source), "-o", str(library), f"-L{stable_abi.LIBRARIES}", "-ltorch_cpu"]
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", *includes, *linked], check=True)
    dll = ctypes.CDLL(str(library))
    results = {"int": ctypes.c_int64, "float": ctypes.c_double, "bool": ctypes.c_bool}
    for k, (e, kind) in enumerate(zip(EXPRESSIONS, kinds, strict=True)):
        f = getattr(dll, f"f{k}")
        f.argtypes, f.restype = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_bool), results[kind]
        for i, j, x, b in INPUTS:
            want = eval(e, {"math": math, **FUNCTIONS}, {"i": i, "j": j, "x": x, "b": b})
            got = f(i, j, x, b)
            assert got == want, (e, i, j, x, b, got, want)
            assert isinstance(got, (type(want), float)), (e, type(want))  # max(1.5, 2) is an int in Python


@pytest.mark.parametrize(
    "text", ["i ** j", "[i]", "unknown(i)", "i @ j", "x & 1", "i if b else x", "y + 1", "x.item()"]
)
def test_what_has_no_c_form_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(Unsupported, match="has no C"):
        translate(text, TYPES)
