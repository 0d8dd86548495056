"""python -m benchmarks.passes: what each graph pass does, and what it costs.

Three tables. `models`: pass × model with the number of rewrites, the nodes removed and milliseconds, and the share of
all passes in the backend's own seconds of a cold compilation. `attention`: per architecture of transformers, with
attention written out ("eager"), the softmaxes, the attentions that were fused, why others were kept, and the
difference to eager. `rules`: seconds of the matcher for many rules over a large graph.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import table
from altbackend.fx_passes.attention import rewrite
from altbackend.fx_passes.context import Context, Pass
from altbackend.fx_passes.pattern.register import register_replacement
from altbackend.fx_passes.pattern.rules import Rules
from altbackend.fx_passes.pattern.terms import Arg, Call
from altbackend.fx_passes.pattern.trace import Traced, fwd_only
from benchmarks.cases import SUITES, SWEEPS, Case
from benchmarks.options import names

TABLES = ("models", "attention", "rules")
# Six networks beside the suite, as the sweep has them.
MORE = ("opt", "mistral", "swin", "whisper", "bart", "clip")


@dataclass
class Spent:
    """The work of a pass in one compilation."""

    fired: int = 0
    removed: int = 0
    seconds: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the chosen tables."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.passes", description="What graph passes do and cost.")
    p.add_argument("tables", nargs="*", metavar="TABLE", help="models, attention, rules; all by default")
    p.add_argument("--cases", type=names, default=[], metavar="A,B", help="only these models")
    p.add_argument("--preset", choices=["tiny", "cpu"], default="cpu", help="sizes of the models (default: cpu)")
    args = p.parse_args(argv)
    for name in args.tables or TABLES:
        print(f"\n## {name}\n", flush=True)
        {"models": models, "attention": attention, "rules": rules}[name](args)
    return 0


# --- pass × model


def models(args: argparse.Namespace) -> None:
    """Print the table pass × model."""
    cases = [case for case in SUITES["models"] + SWEEPS["transformers"] if _chosen(case, args.cases)]
    columns = {case.name: measured(case, args.preset) for case in cases}
    passes = list(dict.fromkeys(row.name for row in table.PASSES))
    print("rewrites / nodes removed / milliseconds\n")
    print(f"| pass | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in passes:
        cells = [column[0].get(name, Spent()) for column in columns.values()]
        if any(cell.fired or cell.removed for cell in cells):
            print(f"| {name} | " + " | ".join(f"{c.fired}/{c.removed}/{c.seconds * 1e3:.1f}" for c in cells) + " |")
    totals = [sum(spent.seconds for spent in spents.values()) for spents, _ in columns.values()]
    owns = [own for _, own in columns.values()]
    print("| all passes, ms | " + " | ".join(f"{t * 1e3:.0f}" for t in totals) + " |")
    print("| own cold compilation, ms | " + " | ".join(f"{own * 1e3:.0f}" for own in owns) + " |")
    print("| share | " + " | ".join(f"{t / own:.1%}" for t, own in zip(totals, owns, strict=True)) + " |")


def _chosen(case: Case, chosen: Sequence[str]) -> bool:
    return case.name in (chosen or [c.name for c in SUITES["models"]] + [*MORE])


def measured(case: Case, preset: Any) -> tuple[dict[str, Spent], float]:
    """Return what each pass did in a cold compilation for inference, and the backend's own seconds of it."""
    spent: dict[str, Spent] = defaultdict(Spent)
    module, args, kwargs = case.build(preset)
    module = eager_attention(module).eval()
    traces: list[Trace] = []
    finish = Trace.finish

    def kept(trace: Trace) -> None:
        traces.append(trace)
        finish(trace)

    with (
        torch.no_grad(),
        tempfile.TemporaryDirectory() as folder,
        _recording(spent),
        patch.object(Trace, "finish", kept),
    ):
        torch._dynamo.reset()
        # with `log`, the stages include the C++ compiler
        torch.compile(module, backend="alt", options={"cache_dir": folder, "log": 1})(*args, **kwargs)
    return spent, sum(trace.seconds() for trace in traces)


def _recording(spent: dict[str, Spent]) -> AbstractContextManager[object]:
    rows = tuple(replace(row, run=_recorded(row, spent)) for row in table.PASSES)
    return patch.object(table, "PASSES", rows)


def _recorded(row: Pass, spent: dict[str, Spent]) -> Callable[[GraphModule, Context], int]:
    def run(gm: GraphModule, ctx: Context) -> int:
        nodes, began = len(gm.graph.nodes), time.perf_counter()
        count = row.run(gm, ctx)
        entry = spent[row.name]
        entry.seconds += time.perf_counter() - began
        entry.fired += count
        entry.removed += nodes - len(gm.graph.nodes)
        return count

    return run


# --- attention in architectures


def eager_attention(module: torch.nn.Module) -> torch.nn.Module:
    """Let the model write its attention out, where it is one of transformers."""
    for part in module.modules():
        if hasattr(part, "set_attn_implementation"):
            switch: Any = part.set_attn_implementation
            switch("eager")
            break
    return module


def attention(args: argparse.Namespace) -> None:
    """Print a row per architecture: softmaxes, attentions fused and kept, and the difference to eager."""
    print("| architecture | softmaxes | fused | kept because | difference |\n|---|---|---|---|---|")
    total = [0, 0]
    for case in SWEEPS["transformers"]:
        if args.cases and case.name not in args.cases:
            continue
        try:
            row = of_case(case)
        except Exception as cause:  # an architecture that this version of transformers cannot build or trace
            print(f"| {case.name} | | | {type(cause).__name__} | |", flush=True)
            continue
        total = [total[0] + row[0], total[1] + row[1]]
        print(f"| {case.name} | {row[0]} | {row[1]} | {'; '.join(row[2])} | {row[3]:.1e} |", flush=True)
    print(f"\n{total[1]} of {total[0]} softmaxes belong to attentions that were fused.")


def of_case(case: Case) -> tuple[int, int, list[str], float]:
    """Fuse the attentions of an architecture and compare its result with eager's."""
    torch.manual_seed(0)
    module, args, kwargs = case.build("tiny")
    module = eager_attention(module).eval()
    cfg = resolve(None, {"attention": "on"})
    counts, reasons = [0, 0], dict[str, None]()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        ctx = Context(cfg, Trace("captured", cfg))
        counts[0] += sum("softmax" in str(n.target) for graph in rewrite.graphs_of(gm) for n in graph.nodes)
        counts[1] += rewrite.run(gm, ctx)
        reasons.update(dict.fromkeys(d.reason for d in ctx.trace.decisions if d.verdict == "kept"))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.manual_seed(0)  # some draw positions or patches
        want = module(*args, **kwargs)
        torch.manual_seed(0)
        got = torch.compile(module, backend=backend)(*args, **kwargs)
    return counts[0], counts[1], list(reasons), float((got - want).abs().max() / want.abs().max())


# --- the matcher


def rules(args: argparse.Namespace) -> None:
    """Print seconds of many rules over a large graph."""
    print("| rules | nodes | rewrites | seconds |\n|---|---|---|---|")
    for rules_, nodes in ((100, 1000), (1000, 1000), (100, 10000), (1000, 10000)):
        some, gm = many_rules(rules_), large_graph(nodes)
        began = time.perf_counter()
        with torch_api.without_gc():  # as the compiler runs its passes
            done = some.apply(gm)
        print(f"| {rules_} | {nodes} | {len(done)} | {time.perf_counter() - began:.2f} |", flush=True)


UNARY = ("sin", "cos", "tanh", "exp", "sigmoid", "relu", "neg", "abs", "sqrt", "erf", "floor", "ceil", "log", "atan")


def many_rules(count: int) -> Rules:
    """Return rules for chains of three pointwise operators and a number; each differs in operators or number."""
    out = Rules()
    aten = torch.ops.aten
    ops = [getattr(aten, name).default for name in UNARY]
    k = 0
    while len(out) < count:
        first, second, third = ops[k % 14], ops[k // 14 % 14], ops[k // 196 % 14]
        inner = Call((second,), (Call((third,), (Arg("x"),)),))
        pattern = Traced(("x",), (Call((first,), (inner,)),), (0,))
        register_replacement(
            _search(first, second, third), _same, [torch.empty(4)], fwd_only, out, search_fn_pattern=pattern
        )
        k += 1
    return out


def _search(first: Any, second: Any, third: Any) -> Callable[[Any], Any]:
    return lambda x: first(second(third(x)))


def _same(x: torch.Tensor) -> torch.Tensor:
    return torch.sinh(x)


def large_graph(nodes: int) -> GraphModule:
    """Return a chain of pointwise operators, of which the rules know some triples."""
    graph = Graph()
    aten = torch.ops.aten
    x = graph.placeholder("x")
    with FakeTensorMode():
        value = torch.empty(4)
    x.meta["val"] = value
    ops = [getattr(aten, name).default for name in UNARY]
    for k in range(nodes):
        target = ops[(k * 5) % 14] if k % 10 else aten.sinh.default
        x = graph.call_function(target, (x,))
        x.meta["val"] = value
    graph.output((x,))
    return GraphModule(torch.nn.Module(), graph)


if __name__ == "__main__":
    raise SystemExit(main())
