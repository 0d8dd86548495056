"""Time matrix products with epilogues on a GPU, and fit the constants of `altbackend.schedule.products.cost` to it.

    python -m benchmarks.matmul_fit [--json FILE] [--seconds 200] [--all-tiles] [ROWSxCOLUMNSxDEPTH ...]

Per shape and epilogue: the library call alone, with a separate kernel after it, and one kernel for every choice of
tiles; all in microseconds, as max_autotune measures them. At the end the lines to put into matmul_cost, and how far the
model with these lines is from what was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.autotune import products, trial
from altbackend.autotune.measure import MeasurerDied, TrialFailed
from altbackend.config.resolve import resolve
from altbackend.ir import value as va
from altbackend.ir.loops import Program
from altbackend.lowering.graph import lower_graph
from altbackend.schedule import deps as dependencies
from altbackend.schedule.deps import Deps
from altbackend.schedule.device import H200, ScheduleContext, read_device
from altbackend.schedule.fusion import fuse
from altbackend.schedule.loop_mapping import Refusal
from altbackend.schedule.products import cost, epilogue
from altbackend.schedule.products.cost import LIBRARY, SEARCH, TEMPLATES, Rate
from altbackend.schedule.products.epilogue import Candidate
from altbackend.schedule.products.matmul import Tiles

SHAPES = (
    (12608, 3072, 768),
    (8192, 3072, 768),
    (8192, 768, 3072),
    (8192, 768, 768),
    (32768, 4096, 1024),
    (4096, 4096, 4096),
    (2048, 11008, 4096),
    (1024, 1024, 1024),
    (512, 3072, 768),
    (256, 4096, 1024),
)
EPILOGUES: dict[str, Callable[..., torch.Tensor]] = {
    "relu": lambda x, w, b, y: F.relu(F.linear(x, w, b)),
    "gelu": lambda x, w, b, y: F.gelu(F.linear(x, w, b)),
    "residual": lambda x, w, b, y: F.linear(x, w, b) + y,
}
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """One product of bfloat16 with its reader, and what is measured of it."""

    shape: Shape
    name: str
    program: Program
    deps: Deps
    candidate: Candidate
    emitted: dict[str, products.Emitted]


def make_case(
    shape: Shape, name: str, tuner: products.ProductTuner, search: Sequence[Tiles], device: str = "cuda"
) -> Case:
    """A case with its kernels, which compile from here on. Raises ValueError where there is no such kernel."""
    rows, columns, depth = shape
    with FakeTensorMode():
        sizes = ((rows, depth), (columns, depth), (columns,), (rows, columns))
        inputs = [torch.empty(s, dtype=torch.bfloat16, device=device) for s in sizes]
        gm = make_fx(EPILOGUES[name], decomposition_table=decomp.table())(*inputs)
    gm.graph.eliminate_dead_code()
    program, _ = lower_graph(gm, resolve())
    deps = dependencies.analyse(program)
    groups = fuse.fuse(program, deps, resolve(), tuner.gpu, lambda *a: None)
    found: list[Candidate] = []

    def keep(p: Program, d: Deps, c: Candidate) -> Refusal:
        found.append(c)
        return Refusal("only looked at")

    epilogue.attach(program, deps, groups, lambda *a: None, keep)
    if len(found) != 1:
        raise ValueError(f"{name} of {shape}: {len(found)} products with a kernel to fuse, 1 expected")
    emitted = tuner.candidates(program, deps, found[0], search)
    if isinstance(emitted, Refusal):
        raise ValueError(f"{name} of {shape}: {emitted.reason}")
    for kernel, _ in emitted.values():
        tuner.compiled(kernel)
    return Case(shape, name, program, deps, found[0], emitted)


def run_case(case: Case, tuner: products.ProductTuner) -> dict[str, Any]:
    """Microseconds: `call` (the library's alone), `library` (with the separate kernel), and by tiles."""
    call = case.candidate.library.extern
    assert call is not None
    us = {"call": tuner.measured(trial.of(case.program, [call]))}
    us |= tuner.measure(tuner.runs(case.program, case.candidate, case.emitted))
    if products.LIBRARY not in us:
        raise TrialFailed("the separate kernel could not be measured")
    flops = sum(va.flops(q.value) for q in case.candidate.fused.mapped)
    return {"shape": case.shape, "epilogue": case.name, "flops": flops, "us": us}


def show(row: dict[str, Any]) -> str:
    us = row["us"]
    tiles = sorted((t, n) for n, t in us.items() if n not in ("call", products.LIBRARY))
    best = ", ".join(f"{n}: {t:.1f}" for t, n in tiles[:3])
    shape = "x".join(map(str, row["shape"]))
    return f"{shape:18} {row['epilogue']:9} call {us['call']:7.1f}  apart {us[products.LIBRARY]:7.1f}  {best}"


def fit(rate: Rate, rows: Sequence[tuple[Shape, float]], sms: int = H200.sms) -> Rate:
    """`rate` with the constants that have the least relative error on (shape, microseconds)."""
    terms, ones = [], []
    for (m, n, k), us in rows:
        tiles = -(-m // rate.rows) * -(-n // rate.columns)
        waves = cost.waves(tiles, sms)
        terms.append([1 / us, waves / us, waves * k / us])
        ones.append([1.0])
    found = torch.linalg.lstsq(torch.tensor(terms, dtype=torch.float64), torch.tensor(ones, dtype=torch.float64))
    start, per_wave, per_term = found.solution.flatten().tolist()
    return Rate(rate.rows, rate.columns, round(start, 2), round(per_wave, 3), round(per_term, 5))


def fitted(measured: Sequence[dict[str, Any]], sms: int = H200.sms) -> list[str]:
    """Lines for matmul_cost, from the cases with the cheapest epilogue; and the median cost of an epilogue's work."""
    plain = [row for row in measured if row["epilogue"] == "relu"]
    if len(plain) < 4:
        return ["too few cases to fit constants to"]
    lines = [f"LIBRARY = {fit(LIBRARY, [(row['shape'], row['us']['call']) for row in plain], sms)}"]
    for t in SEARCH:
        rows = [(row["shape"], row["us"][str(t)]) for row in plain if str(t) in row["us"]]
        if len(rows) > 3:
            lines.append(f"    {t!r}: {fit(TEMPLATES.get(t, Rate(t.rows, t.columns, 0, 0, 0)), rows, sms)},")
    cheap = {tuple(row["shape"]): row for row in plain}
    costs = []
    for row in measured:
        base = cheap.get(tuple(row["shape"]))
        if base is None or row["epilogue"] != "gelu":
            continue
        waves = row["shape"][0] * row["shape"][1] / (sms * 128 * 128)
        both = [n for n in row["us"] if n in base["us"] and n not in ("call", products.LIBRARY)]
        more = min(row["us"][n] for n in both) - min(base["us"][n] for n in both)
        costs.append(more / (waves * (row["flops"] - base["flops"])))
    if costs:
        lines.append(f"EPILOGUE_US = {sorted(costs)[len(costs) // 2]:.4f}")
    return lines


def verdicts(model: cost.Model, cases: Sequence[Case], measured: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the model as it stands would choose, and what that gains or loses."""
    out = []
    for case, row in zip(cases, measured, strict=True):
        chosen = model.choose(case.program, case.deps, case.candidate)
        us = row["us"]
        best = min(us, key=lambda n: us[n] if n != "call" else float("inf"))
        taken = products.LIBRARY if isinstance(chosen, Refusal) else str(chosen[0])
        apart, got = us[products.LIBRARY], us.get(taken, float("nan"))
        text = f"model takes {taken}: {apart / got:.2f} x apart; best is {best}: {apart / us[best]:.2f} x"
        out.append(f"{'x'.join(map(str, case.shape)):18} {case.name:9} {text}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="ROWSxCOLUMNSxDEPTH")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--seconds", type=float, default=200, help="no further case begins after this time")
    parser.add_argument("--all-tiles", action="store_true", help="every choice of tiles for every epilogue")
    args = parser.parse_args()
    begin = time.monotonic()
    shapes = [tuple(map(int, re.split("x", s))) for s in args.shapes] or list(SHAPES)
    device = torch.device("cuda", torch.cuda.current_device())
    tuner = products.product_tuner(resolve(), ScheduleContext(read_device(device)), device)
    cases = [
        make_case(s, name, tuner, SEARCH if args.all_tiles or name == "relu" else tuple(TEMPLATES))  # type: ignore[arg-type]
        for name in EPILOGUES
        for s in shapes
    ]
    print(f"{tuner.machine}: {len(cases)} cases", flush=True)
    done, measured = [], []
    for case in cases:
        if time.monotonic() - begin > args.seconds:
            print(f"stopped after {args.seconds:.0f} s, before {case.shape} {case.name}")
            break
        try:
            measured.append(run_case(case, tuner))
        except (TrialFailed, MeasurerDied) as cause:
            print(f"{case.shape} {case.name} failed: {cause}", flush=True)
            continue
        done.append(case)
        print(show(measured[-1]), flush=True)
    print(*verdicts(cost.Model(tuner.gpu), done, measured), *fitted(measured, tuner.gpu.sms), sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"machine": tuner.machine, "rows": measured}, indent=1))


if __name__ == "__main__":
    main()
