"""Digests of the code generated for the benchmark models, for CPUs and for GPUs, on a machine without a GPU.

    python -m tools.generated_digest --out before.json      # before a change that must not change generated code
    python -m tools.generated_digest --against before.json  # after it: prints each case whose code differs
    python -m tools.generated_digest --text FOLDER          # the normalised texts, to compare with `diff -r`

A case is a model, a mode (inference, training) and a device. Its digest covers the host program and the kernels of
every graph, in order. Names that the compiler has made up are normalised: identifiers are numbered in order of their
first use, unless they belong to a library (`torch.`, `tl.`, `std::`), and comments and import lines are left out.

The models are traced on the CPU and never run. For a GPU, the passes, the scheduler and the printers for a GPU then
work on that graph; operators that dispatch differently on a GPU (attention) are those of a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import re
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from altbackend import backend, decomp, fx_passes, pipeline
from altbackend.compat import aot_autograd, torch_api
from altbackend.compiled.artifact import Code
from altbackend.compiled.load import Job
from altbackend.config.options import Config, resolve
from altbackend.debug.trace import Trace
from altbackend.schedule.device import H200
from benchmarks import subject
from benchmarks.cases import SUITES, Case, choose
from benchmarks.records import Request

MODES = ("inference", "training")
DEVICES = ("cpu", "cuda")
GPU = torch.device("cuda", 0)
LIBRARY_NAME = re.compile(r"(?:(?:torch|tl|libdevice|std|aten|prims|at|math|ctypes)(?:\.|::)\w+(?:(?:\.|::)\w+)*)")
TOKEN = re.compile(rf"{LIBRARY_NAME.pattern}|0x[0-9a-fA-F]+|\d[\w.]*|[A-Za-z_]\w*|\"[^\"\n]*\"|'[^'\n]*'|\S|\n")


class _Captured(Exception):
    """Ends a compilation once its code is known."""


# --- code of one case --------------------------------------------------------------------------------------------


def codes(case: Case, mode: str, device: str) -> list[Code]:
    """Return the code of every graph of a case: one of inference, or the forward and the backward of training."""
    found: list[Code] = []
    # weights are frozen on a CPU, as the default has it where the kernel guards memory, and are not on a GPU
    cfg = resolve(options={"freezing": "guarded" if device == "cpu" else False, "threads": 8})

    def keep(gm: GraphModule, job: Job) -> None:
        found.extend(pipeline.translate(gm, cfg, Trace("graph", cfg), job).whole())

    def inference(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        keep(gm, Job("inference", *backend._inputs_and_outputs("inference")))
        raise _Captured

    def training(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        trace = Trace("joint", cfg)
        backend._joint_passes(joint, cfg, trace)
        forward, backward = backend.split_joint(joint, inputs, kwargs, cfg, trace)
        keep(forward, Job("forward", *backend._inputs_and_outputs("forward")))
        keep(backward, Job("backward"))
        raise _Captured

    def compile_(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fx_passes.pre_grad(gm, cfg)
        build = aot_autograd.aot_autograd(
            fw_compiler=lambda gm, _: gm,
            bw_compiler=lambda gm, _: gm,
            inference_compiler=inference,
            decompositions=decomp.table(cfg.numerics),
            partition_fn=training,
            keep_inference_input_mutations=True,
        )
        whole = aot_autograd.left_whole(decomp.taken_apart(cfg.numerics))
        with aot_autograd.functorch_settings(), whole:
            return build(gm, inputs)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    with _for_gpu() if device == "cuda" else contextlib.nullcontext():
        _trace(case, mode, device, compile_)
    return found


def _trace(case: Case, mode: str, device: str, compile_: Callable[..., Any]) -> None:
    preset, dtype = ("cpu", "float32") if device == "cpu" else ("gpu", "bfloat16")
    request = Request(case.name, "alt", case.mode or mode, preset, "cpu", dtype)
    try:
        built = subject.build(case, preset, request)
        with torch.set_grad_enabled(mode == "training"):
            subject._subject(case, built, request, lambda m: torch.compile(m, backend=compile_)).run()
    except Exception as cause:
        causes = [cause, cause.__cause__, cause.__context__]
        if not any(isinstance(c, _Captured) or "_Captured" in str(c) for c in causes):
            raise


@contextlib.contextmanager
def _for_gpu() -> Iterator[None]:
    """Graphs of CPU tensors are compiled for a GPU: lowering sees their values on it."""
    lower = pipeline.lower_graph

    def lowered(gm: GraphModule, cfg: Config, *rest: Any, **more: Any) -> Any:
        for n in gm.graph.nodes:
            n.meta["val"] = tree_map_only(FakeTensor, _on_gpu, n.meta.get("val"))
            n.args, n.kwargs = tree_map_only(torch.device, lambda d: GPU, (n.args, n.kwargs))
        return lower(gm, cfg, *rest, **more)

    with (
        patch.object(pipeline, "lower_graph", lowered),
        patch.object(pipeline, "device_of", lambda gm: GPU),
        patch.object(torch_api, "cuda_properties", lambda device: asdict(H200)),
        patch.object(fx_passes, "on_gpu", lambda gm: True),
    ):
        yield


def _on_gpu(x: FakeTensor) -> FakeTensor:
    geometry = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(x.fake_mode, geometry, GPU)


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
    kept, first = [], True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (first and token.type == tokenize.STRING):
            continue
        first = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
        kept.append((token.type, token.string))
    return "\n".join(" ".join(s for _, s in line) for line in _lines(kept))


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


def wanted(suite: str, names: list[str]) -> Iterator[tuple[Case, str, str]]:
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
        found = codes(case, mode, device)
        texts = [text_of(c) for c in found]
        digests[key] = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        verdict = "" if not before else "equal" if before.get(key) == digests[key] else "DIFFERS"
        differ += [key] * (verdict == "DIFFERS")
        kernels = f"{sum(c.kernels for c in found)} kernels, {sum(c.library_calls for c in found)} library calls"
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
