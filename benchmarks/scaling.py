"""python -m benchmarks.scaling: seconds and memory per node of every stage, from small graphs to very large ones.

Graphs are made as Dynamo would capture them. They are a chain of pointwise operators, a chain of linear layers with an
activation and a residual, and a stack of transformer layers. All of them are also trained (`training` is the stack): a
joint graph is split, and nodes are those of both halves. Each (kind, size) runs in a process of its own, with an empty
cache. AOTAutograd is torch's and is listed apart; `own` is everything else but the C++ compiler. All is processor time,
which other work on the machine stretches least; the C++ compiler's is that of its processes. `first`: what the first
call takes above the second, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from benchmarks.options import names

ROOT = Path(__file__).resolve().parent.parent
SIZES = (100, 300, 1000, 3000, 10000, 20000)
STAGES = ("partition", "post_grad", "lower", "schedule", "codegen", "build", "load")
FLAT = 1.5  # most that time per node may grow from 1,000 nodes to the largest


class Maker:
    """A graph under construction: calls, and parameters that become inputs."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.inputs: list[torch.Tensor] = []
        self.places: list[Node] = []
        self.calls = 0

    def given(self, *sizes: int) -> Node:
        """An input of random numbers."""
        self.inputs.append(torch.randn(*sizes) * 0.1)
        node = self.graph.placeholder(f"given{len(self.inputs)}")
        self.places.append(node)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        self.calls += 1
        return self.graph.call_function(target, args, kwargs)

    def finish(self, result: Node) -> GraphModule:
        """The graph, its inputs moved to the front."""
        self.graph.output((result,))
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for place in self.places:
            first.prepend(place)
        return GraphModule(nn.Module(), self.graph)


def pointwise(m: Maker, size: int) -> Node:
    """A chain of pointwise operators with a row of parameters now and then, and a reduction every 50."""
    x = m.given(64, 256)
    row = m.given(256)
    while m.calls < size:
        x = m.call(torch.tanh, x)
        x = m.call(torch.add, x, row)
        x = m.call(torch.sigmoid, x)
        x = m.call(torch.mul, x, 1.01)
        x = m.call(torch.sub, x, 0.5)
        if m.calls % 50 == 0:
            x = m.call(torch.softmax, x, -1)
    return x


def linear(m: Maker, size: int) -> Node:
    """Linear layers with GELU and a residual; eight sets of parameters in turns."""
    x = m.given(32, 64)
    weights = [(m.given(64, 64), m.given(64)) for _ in range(8)]
    while m.calls < size:
        weight, bias = weights[m.calls // 3 % 8]
        y = m.call(nn.functional.linear, x, weight, bias)
        x = m.call(torch.add, x, m.call(nn.functional.gelu, y))
    return x


def transformer(m: Maker, size: int) -> Node:
    """Layers of attention and a feed-forward part, 17 calls each; four sets of parameters in turns."""
    rows, width, heads = 16, 64, 4
    x = m.given(2, rows, width)
    layers = [_layer(m, width) for _ in range(4)]
    count = 0
    while m.calls < size:
        x = _transformer_layer(m, x, layers[count % 4], (rows, width, heads))
        count += 1
    return x


def _layer(m: Maker, width: int) -> dict[str, Node]:
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return {
        **{name: m.given(*shape) for name, shape in shapes.items()},
        **{name: m.given(width) for name in ("scale1", "shift1", "scale2", "shift2")},
    }


def _transformer_layer(m: Maker, x: Node, p: dict[str, Node], shape: tuple[int, int, int]) -> Node:
    rows, width, heads = shape
    y = m.call(nn.functional.layer_norm, x, (width,), p["scale1"], p["shift1"])
    qkv = m.call(torch.reshape, m.call(nn.functional.linear, y, p["qkv"]), (2, rows, 3, heads, width // heads))
    parts = m.call(torch.permute, qkv, (2, 0, 3, 1, 4))
    q, k, v = (m.call(torch.select, parts, 0, i) for i in range(3))
    a = m.call(nn.functional.scaled_dot_product_attention, q, k, v)
    a = m.call(torch.reshape, m.call(torch.transpose, a, 1, 2), (2, rows, width))
    x = m.call(torch.add, x, m.call(nn.functional.linear, a, p["out"]))
    y = m.call(nn.functional.layer_norm, x, (width,), p["scale2"], p["shift2"])
    y = m.call(nn.functional.gelu, m.call(nn.functional.linear, y, p["up"]))
    return m.call(torch.add, x, m.call(nn.functional.linear, y, p["down"]))


KINDS: dict[str, Callable[[Maker, int], Node]] = {"pointwise": pointwise, "linear": linear, "transformer": transformer}
TRAINED: dict[str, Callable[[Maker, int], Node]] = {
    "training": transformer,
    "training-linear": linear,
    "training-pointwise": pointwise,
}
KINDS |= TRAINED


def measure(kind: str, size: int, build: bool) -> dict[str, float]:
    """Seconds per stage in this process, nodes of the functional graph, and the peak of memory in bytes."""
    from altbackend import backend, decomp, pipeline  # noqa: PLC0415 - importing it is not measured
    from altbackend.compat import aot_autograd, torch_api  # noqa: PLC0415
    from altbackend.compiled.load import Job, bind  # noqa: PLC0415
    from altbackend.config.resolve import resolve  # noqa: PLC0415
    from altbackend.debug import trace as debug  # noqa: PLC0415
    from altbackend.debug.trace import Trace  # noqa: PLC0415

    m = Maker()
    gm = m.finish(KINDS[kind](m, size))
    for parameter in m.inputs[1:]:
        parameter.requires_grad_(kind in TRAINED)
    found = {"nodes": 0.0, "own": 0.0, "build": 0.0, "partition": 0.0, "aot_bytes": 0.0}
    cfg = resolve(options={"strict": True, "cache_graphs": False})
    before = _peak()

    def split(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        found["aot_bytes"] = _peak() - before
        halves = backend.partition_with(cfg, 0)(joint, inputs, **kwargs)
        found["partition"] = time.process_time() - start
        found["own"] += found["partition"]
        return halves

    def compile_(job: Job) -> Callable[..., Any]:
        def compile_part(aten: GraphModule, inputs: Sequence[Any]) -> Any:
            start, children = time.process_time(), _compiler_seconds()
            trace = Trace("scaling", cfg)
            found["nodes"] += len(aten.graph.nodes)
            found["aot_bytes"] = found["aot_bytes"] or _peak() - before
            with torch_api.without_gc(), patch.object(debug, "perf_counter", time.process_time):
                code = pipeline.translate(aten, cfg, trace, job)
                call = bind(code, cfg, trace, job) if build else _nothing(len(aten.graph.nodes))
            for stage, seconds in trace.timings.items():
                found[stage] = found.get(stage, 0.0) + seconds
            found["own"] += time.process_time() - start
            found["build"] += _compiler_seconds() - children
            return call

        return compile_part

    start = time.process_time()
    with torch.set_grad_enabled(kind in TRAINED), aot_autograd.functorch_settings():
        call = aot_autograd.aot_autograd(
            fw_compiler=compile_(Job("forward", tuple(range(1, len(m.inputs))))),
            bw_compiler=compile_(Job("backward")),
            inference_compiler=compile_(Job("inference", tuple(range(1, len(m.inputs))))),
            partition_fn=split,
            decompositions=decomp.table(),
            keep_inference_input_mutations=True,
        )(gm, m.inputs)
        found["aot"] = time.process_time() - start - found["own"]
        found["bytes"] = _peak() - before - found["aot_bytes"]
        if build:
            found["first"] = _first_call(lambda: call(*m.inputs)[0])
    return found


def _first_call(call: Callable[[], torch.Tensor]) -> float:
    """Processor seconds of a first call, and of its backward if it has one, above those of a second one."""
    torch.set_num_threads(1)
    spent = []
    for _ in range(2):
        start = time.process_time()
        result = call()
        if result.requires_grad:
            result.sum().backward()
        spent.append(time.process_time() - start)
    return spent[0] - spent[1]


def _nothing(count: int) -> Callable[..., Any]:
    def call(args: list[Any]) -> Any:
        raise RuntimeError(f"a graph of {count} nodes that was not built")

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _compiler_seconds() -> float:
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _peak() -> float:
    """Most memory that the process has held so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def in_process(kind: str, size: int, build: bool) -> dict[str, float]:
    """`measure` in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.scaling", "--answer", str(answer), "--kinds", kind]
        command += ["--sizes", str(size)] + ([] if build else ["--no-build"])
        environment = {**os.environ, "ALTBACKEND_CACHE_DIR": folder}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return dict(json.loads(answer.read_text()))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--kinds", type=names, default=list(KINDS), metavar="A,B", help=", ".join(KINDS))
    p.add_argument("--sizes", type=names, default=[str(n) for n in SIZES], metavar="N,N", help="calls in the graph")
    p.add_argument("--rounds", type=int, default=1, help="medians of so many processes")
    p.add_argument("--no-build", action="store_true", help="leave out the C++ compiler")
    p.add_argument("--out", type=Path, default=None, metavar="FILE", help="every figure as JSON")
    p.add_argument("--answer", type=Path, default=None, help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 if time per node grows by more than `FLAT` above 1,000 nodes."""
    args = parser().parse_args(argv)
    if args.answer:
        args.answer.write_text(json.dumps(measure(args.kinds[0], int(args.sizes[0]), not args.no_build)))
        return 0
    print(
        f"{'kind':<18}{'nodes':>7}"
        + "".join(f"{s + ' us':>13}" for s in ("aot", *STAGES, "own", "first"))
        + f"{'own KiB':>10}"
    )
    rows: dict[str, list[dict[str, float]]] = {}
    for kind in args.kinds:
        for size in map(int, args.sizes):
            found = [in_process(kind, size, not args.no_build) for _ in range(args.rounds)]
            row = {name: median(f.get(name, 0.0) for f in found) for name in found[0]}
            rows.setdefault(kind, []).append(row)
            print(line(kind, row), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    worst = {kind: growth(found) for kind, found in rows.items()}
    print("own seconds per node, largest over that at 1,000: " + ", ".join(f"{k} {g:.2f}" for k, g in worst.items()))
    return 1 if any(g > FLAT for g in worst.values()) else 0


def line(kind: str, row: dict[str, float]) -> str:
    """Microseconds per node and stage, and KiB per node above what AOTAutograd had needed."""
    nodes = row["nodes"]
    cells = [row.get(s, 0.0) / nodes * 1e6 for s in ("aot", *STAGES, "own", "first")]
    return f"{kind:<18}{nodes:>7.0f}" + "".join(f"{c:>13.1f}" for c in cells) + f"{row['bytes'] / nodes / 1024:>10.1f}"


def growth(rows: Sequence[dict[str, float]]) -> float:
    """Own time per node of the worst graph above 1,000 nodes over that of the first one there; 1 with less than two."""
    large = [r["own"] / r["nodes"] for r in rows if r["nodes"] >= 900]
    return max(large) / large[0] if large else 1.0


if __name__ == "__main__":
    sys.exit(main())
