"""A few random programs with checks in every run; `python -m test.fuzz_checks` for long ones and AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from altbackend.lowering import unbacked_symbols
from test.fuzz_check_operators import KINDS, inputs
from test.fuzz_checks import CALLS, Program, asan_environment, disagreement, program, shrink


@pytest.mark.timeout(110)
@pytest.mark.parametrize("k", range(8))
def test_random_programs(k: int) -> None:
    assert not disagreement(program(0, k)), program(0, k)


PART: tuple[Any, ...] = (("integers", "largest", (0, 0, 0)), ("tensors", "head", (0, 1, 0)))

# What the fuzzer has found; each is a program that once differed from eager.
FOUND: dict[str, Program] = {
    "a part as long as a number in a tensor": Program(3, PART),
    "a number below zero as a position": Program(
        5, (("tensors", "set", (0, 0, 0)), ("tensors", "element", (0, 0, 0))), True
    ),
    "take of one element": Program(5, (("tensors", "total", (0, 0, 0)), ("tensors", "take", (2, 0, 0))), True),
    "a scatter into nothing": Program(
        4638, (("tensors", "zeros", (59, 6, 33)), ("tensors", "scatter", (56, 30, 14))), None
    ),
    "a number that is flipped": Program(
        3, (("tensors", "largest element", (0, 0, 0)), ("tensors", "flipped", (2, 0, 0)))
    ),
    "classes that there are not": Program(1, (("positions", "one_hot", (0, 0, 0)),)),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_found_before(name: str) -> None:
    assert disagreement(FOUND[name]) == ""


def test_a_check_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Program(
        5, (("integers", "largest", (0, 0, 0)), ("checks", "check <", (1, 4, 0)), ("tensors", "sin", (0, 0, 0)))
    )
    assert disagreement(checked) == ""
    monkeypatch.setattr(unbacked_symbols.CallSymbols, "_require", lambda *a: None)
    monkeypatch.setattr(unbacked_symbols, "is_verified", lambda *a: True)
    assert disagreement(checked)


def test_programs_of_a_seed_have_all_operators() -> None:
    programs = [program(0, k) for k in range(600)]
    assert program(0, 3) == programs[3] != program(1, 3)
    assert {(kind, name) for p in programs for kind, name, _ in p.steps} == {
        (k, n) for k, t in KINDS.items() for n in t
    }


def test_inputs_of_later_calls_hold_positions_out_of_range() -> None:
    first, later = ([inputs(s, call, False)[2] for s in range(99)] for call in (0, CALLS - 1))
    assert all(int(at.min()) >= 0 and int(at.max()) < 6 for at in first)
    assert any(int(at.max()) > 1 << 39 for at in later)
    assert any(int(at.min()) < -6 for at in later)


def test_shrinking_leaves_what_is_needed() -> None:
    whole = Program(0, tuple(("tensors", name, (0, 0, 0)) for name in ("sin", "head", "index", "sin")))
    assert [s[1] for s in shrink(whole, lambda p: any(s[1] == "index" for s in p.steps)).steps] == ["index"]


OUTSIDE = """
import ctypes, sys
import torch
from altbackend.compile_pool.cpp import load
source = '#include "altbackend/kernel.h"\\nextern "C" __attribute__((visibility("default"))) void segment0('
source += "void** p, const int64_t* s, int threads, int64_t* error) { error[0] = ((float*)p[0])[s[0]] > 0; }"
x, sizes, error = torch.zeros(10), (ctypes.c_int64 * 1)(int(sys.argv[1])), (ctypes.c_int64 * 3)()
load(source).fn("segment0")((ctypes.c_void_p * 1)(x.data_ptr()), sizes, 1, error)
print("done")
"""


def test_address_sanitizer_sees_generated_code(tmp_path: Path) -> None:
    env = {**os.environ, **asan_environment(tmp_path), "ALTBACKEND_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    if not Path(env["LD_PRELOAD"].split()[0]).is_file():
        pytest.skip("the compiler has no AddressSanitizer")
    for at, reports in ((9, False), (10, True)):
        command = [sys.executable, "-c", OUTSIDE, str(at)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=False)
        assert ("heap-buffer-overflow" in done.stderr) is reports, done.stderr[-2000:]
        assert ("done" in done.stdout) is not reports


@pytest.mark.parametrize("number", [46, 61])
def test_a_graph_that_holds_for_one_float_is_not_stored(number: int, tmp_path: Path) -> None:
    """Rounding a float puts a condition on it that no size of an input tells; the number is part of the graph."""
    options = {"cache_graphs": True, "cache_dir": str(tmp_path), "verify_ir": False}
    for _ in range(2):
        assert disagreement(program(73, number), **options) == ""
