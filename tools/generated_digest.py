"""Digests of the code generated for the benchmark models, for CPUs and for GPUs, on a machine without a GPU.

    python -m tools.generated_digest --out before.json      # before a change that must not change generated code
    python -m tools.generated_digest --against before.json  # after it: prints each case whose code differs
    python -m tools.generated_digest --text FOLDER          # the normalised texts, to compare with `diff -r`

A case is a model, a mode (inference, training) and a device. Its digest covers the host program and the kernels of
every graph, in order. Names that the compiler has made up are normalised: identifiers are numbered in order of their
first use, unless they belong to a library (`torch.`, `tl.`, `std::`). Comments and import lines are left out.

`tools/translated.py` makes the code; no model runs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path

import torch

from altbackend.compiled.artifact import Code
from altbackend.config.resolve import resolve
from benchmarks import subject
from benchmarks.cases import SUITES, Case, Mode, Preset, choose
from benchmarks.records import Request
from tools.translated import Backend, codes

MODES: tuple[Mode, ...] = ("inference", "training")
DEVICES = ("cpu", "cuda")
LIBRARY_NAME = re.compile(r"(?:(?:torch|tl|libdevice|std|aten|prims|at|math|ctypes)(?:\.|::)\w+(?:(?:\.|::)\w+)*)")
TOKEN = re.compile(rf"{LIBRARY_NAME.pattern}|0x[0-9a-fA-F]+|\d[\w.]*|[A-Za-z_]\w*|\"[^\"\n]*\"|'[^'\n]*'|\S|\n")


def case_codes(case: Case, mode: Mode, device: str) -> list[Code]:
    """Return the code of every graph of a case, in the sizes and dtype that benchmarks take on the device."""
    preset: Preset = "cpu" if device == "cpu" else "gpu"
    dtype = "float32" if device == "cpu" else "bfloat16"
    request = Request(case.name, "alt", case.mode or mode, preset, "cpu", dtype)

    def run(compiler: Backend) -> None:
        built = subject.build(case, preset, request)
        with torch.set_grad_enabled(mode == "training"):
            subject._subject(case, built, request, lambda m: torch.compile(m, backend=compiler)).run()

    # weights are frozen on a CPU, as the default has it where the kernel guards memory, and are not on a GPU
    return codes(run, device, resolve(options={"freezing": "guarded" if device == "cpu" else False, "threads": 8}))


# --- normalised text -------------------------------------------------------------------------------------------------


def text_of(code: Code) -> str:
    """Return the host program, the C++ translation unit and the Triton kernels of a graph, normalised."""
    cpp = _without_cpp_comments(code.cpp)
    parts = [_without_python_comments(code.python), cpp, *(_without_python_comments(j.source) for j in code.jobs)]
    return "\n".join(map(normalised, parts))


def normalised(text: str) -> str:
    """Return `text` with names numbered in order of their first use; names of libraries stay."""
    numbers: dict[str, str] = {}

    def name(token: str) -> str:
        plain = token.isidentifier() and not LIBRARY_NAME.fullmatch(token)
        return numbers.setdefault(token, f"n{len(numbers)}") if plain else token

    lines = (line for line in text.splitlines() if not line.startswith(("import ", "from ")))
    return "\n".join(" ".join(map(name, TOKEN.findall(line))) for line in lines if line.strip())


def _without_python_comments(text: str) -> str:
    """Docstrings stay away too: a string that is a statement of its own."""
    spellings, first = [], True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (first and token.type == tokenize.STRING):
            continue
        first = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
        spellings.append((token.type, token.string))
    return "\n".join(" ".join(s for _, s in line) for line in _lines(spellings))


def _lines(tokens: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    line: list[tuple[int, str]] = []
    for kind, text in tokens:
        if kind in (tokenize.NEWLINE, tokenize.NL):
            yield line
            line = []
        else:
            line.append((kind, text if kind not in (tokenize.INDENT, tokenize.DEDENT) else ""))
    yield line


def _without_cpp_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


# --- command ---------------------------------------------------------------------------------------------------------


def wanted(suite: str, names: list[str]) -> Iterator[tuple[Case, Mode, str]]:
    for case in choose(suite, names):
        for mode in MODES:
            if case.mode in (None, mode):
                yield from ((case, mode, device) for device in DEVICES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="only these models")
    parser.add_argument("--suite", choices=sorted(SUITES), default="models")
    parser.add_argument("--out", type=Path, help="file for the digests")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    parser.add_argument("--text", type=Path, help="folder for the normalised texts")
    chosen = parser.parse_args()
    before = json.loads(chosen.against.read_text()) if chosen.against else {}
    digests, differ = {}, []
    for case, mode, device in wanted(chosen.suite, chosen.cases):
        key, start = f"{case.name}-{mode}-{device}", time.monotonic()
        compiled = case_codes(case, mode, device)
        texts = [text_of(c) for c in compiled]
        digests[key] = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        verdict = "" if not before else "equal" if before.get(key) == digests[key] else "DIFFERS"
        differ += [key] * (verdict == "DIFFERS")
        kernels = f"{sum(c.kernels for c in compiled)} kernels, {sum(c.library_calls for c in compiled)} library calls"
        print(f"{key:34} {digests[key][:12]} {kernels:36} {time.monotonic() - start:5.1f} s {verdict}", flush=True)
        if chosen.text:
            chosen.text.mkdir(parents=True, exist_ok=True)
            (chosen.text / f"{key}.txt").write_text("\n\n".join(texts))
    if chosen.out:
        chosen.out.write_text(json.dumps(digests, indent=1) + "\n")
    if before:
        print(f"{len(differ)} of {len(digests)} differ: {' '.join(differ)}" if differ else f"{len(digests)} equal")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
