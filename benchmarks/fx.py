"""python -m benchmarks.fx [--write]: `altbackend.fx` on exported models: nodes before and after, and differences.

Every function gets a copy of the exported graph of its own. Its results are compared with those of the module, as the
largest difference relative to the largest result. `--write` makes benchmarks/results/fx.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from altbackend import fx
from benchmarks import machine
from benchmarks.cases import find
from benchmarks.options import names

PAGE = Path(__file__).parent / "results" / "fx.md"
MODELS = (
    *("bert", "gpt2_padded", "llama_padded", "t5_short", "vit", "swin", "whisper"),
    *("resnet50", "mobilenetv3_l", "efficientnet_b0"),
)
FUNCTIONS: Mapping[str, Callable[[ExportedProgram], GraphModule]] = {
    "inline": lambda p: fx.inline(p.module()),
    "peephole": lambda p: fx.peephole(p.module(), addmm_fusion=True),
    "optimize": lambda p: fx.optimize(p.module()),
    "freeze_module": lambda p: fx.freeze_module(p),
}


@dataclass(frozen=True)
class Row:
    """The effect of one function on one model."""

    model: str
    function: str
    before: int
    after: int
    seconds: float
    difference: float


def rows_of(name: str) -> list[Row]:
    """Run every function on an exported model. Raise AssertionError if results have other trees, shapes or dtypes."""
    torch.manual_seed(0)
    module, args, kwargs = find(name).build("tiny")
    module = module.eval()
    with torch.no_grad():
        want = pytree.tree_leaves(module(*args, **kwargs))
        program = torch.export.export(module, tuple(args), dict(kwargs))
        return [_row(name, function, program, args, kwargs, want) for function in FUNCTIONS]


def _row(
    name: str, function: str, program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any], want: list[Any]
) -> Row:
    exported: Any = program.module()
    before = _calls(exported)
    start = time.perf_counter()
    done = FUNCTIONS[function](program)
    seconds = time.perf_counter() - start
    got = pytree.tree_leaves(done(*args, **kwargs))
    assert len(got) == len(want), f"{name}, {function}: {len(got)} results instead of {len(want)}"
    return Row(name, function, before, _calls(done), seconds, max(map(difference, got, want), default=0.0))


def _calls(gm: GraphModule) -> int:
    return sum(n.op.startswith("call_") for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)


def difference(a: Any, b: Any) -> float:
    """Return the largest difference of two results, relative to the largest element of the second."""
    if not isinstance(b, torch.Tensor):
        assert a == b, f"{a!r} instead of {b!r}"
        return 0.0
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    if not b.numel() or not b.is_floating_point():
        return float(not torch.equal(a, b))
    return float((a.double() - b.double()).abs().max() / (b.double().abs().max() or 1))


def page(rows: Sequence[Row]) -> str:
    """Return the page of results."""
    lines = [
        "# Graph optimisation as a library",
        "",
        f"`python -m benchmarks.fx --write` on {machine.cpu_model()}, torch {torch.__version__}.",
        "Models of small sizes, exported by `torch.export.export`. Calls: those of the exported graph, and after each",
        "function on a copy of it. `inline` removes the module that checks inputs. Difference: the largest one to the",
        "module's results, relative to the largest result.",
        "",
        f"| model | exported | {' | '.join(FUNCTIONS)} | largest difference | seconds of all |",
        f"|---|---:|{'---:|' * len(FUNCTIONS)}---:|---:|",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        counts = " | ".join(str(row.after) for row in own)
        worst, seconds = max(row.difference for row in own), sum(row.seconds for row in own)
        lines.append(f"| {model} | {own[0].before} | {counts} | {worst:.1e} | {seconds:.2f} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it; return 1 if a result differs beyond rounding."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.fx", description="altbackend.fx on exported models.")
    p.add_argument("--cases", type=names, default=list(MODELS), metavar="A,B", help="only these models")
    p.add_argument("--write", action="store_true", help="write benchmarks/results/fx.md")
    options = p.parse_args(argv)
    rows = [row for name in options.cases for row in rows_of(name)]
    text = page(rows)
    if options.write:
        PAGE.write_text(text)
    print(text)
    return int(any(row.difference > 1e-4 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
