"""A long translation unit in pieces: the whole and the linked units are the same library."""

import re
from pathlib import Path

import pytest
import torch

from altbackend.codegen.cpp import translation_units
from altbackend.compile_pool import cpp
from altbackend.config.resolve import resolve
from altbackend.errors import CompilerFailed
from altbackend.runtime.isa import PIECE


def _kernels(count: int, lines: int) -> list[str]:
    body = "\n".join(f"  p[{k}] += {k}.0f * threads;" for k in range(lines))
    return [
        f"static void kernel{n}(float* p, const int threads) {{\n{body}\n  p[0] += {n};\n}}\n" for n in range(count)
    ]


def _segment(calls: int) -> str:
    head = 'extern "C" __attribute__((visibility("default")))\nvoid segment0'
    lines = [f"  kernel{n}((float*)p[0], threads);" for n in range(calls)]
    return "\n".join([f"{head}(void** p, const int64_t* s, int threads, int32_t* error) {{", *lines, "}\n"])


def _result(source: str, folder: Path) -> list[float]:
    out = torch.zeros(200)
    table = torch.tensor([out.data_ptr()])
    cpp.load(source, resolve(None, {"cache_dir": str(folder)})).fn("segment0")(table.data_ptr(), 0, 2, 0)
    return list(out.tolist())


def test_a_short_text_is_one_unit() -> None:
    text = translation_units.unit(_kernels(3, 4), [_segment(3)])
    assert text.count(PIECE) == 0
    assert text.count("static void kernel") == 3


def test_linked_units_compute_what_the_whole_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = translation_units.unit(_kernels(6, 150), [_segment(6)])
    assert text.count(PIECE) >= 3
    assert re.findall(r"#if ALT_PIECE\((\d+)\)", text) == [str(n) for n in range(text.count(PIECE))]
    apart = _result(text, tmp_path / "apart")
    monkeypatch.setattr(cpp, "MOST_UNITS", 1)
    assert apart == _result(text, tmp_path / "whole")
    assert apart[:3] == [15.0, 12.0, 24.0]


def test_a_unit_that_fails_is_the_reason(tmp_path: Path) -> None:
    kernels = _kernels(6, 150)
    kernels[4] = kernels[4].replace("p[7]", "undeclared_name")
    with pytest.raises(CompilerFailed, match="undeclared_name"):
        cpp.load(translation_units.unit(kernels, [_segment(6)]), resolve(None, {"cache_dir": str(tmp_path)}))
