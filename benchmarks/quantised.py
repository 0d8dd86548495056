"""Time quantised models on this CPU: eager, this backend and inductor in turns, and the same model in floats.

    python -m benchmarks.quantised [--rounds 15] [--threads 1] [--cases static,int8_weight] [--no-inductor]

A row is one model: milliseconds of eager, of this backend and of inductor (medians of rounds in turns), eager's time of
the float model, and the relative error of this backend against eager, both of the quantised model. The last column
counts the products that compute with bytes. The cases of torchao need `torchao` 0.18; without it, only the handwritten
graph runs.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

T = torch.Tensor
SLICE = 0.02  # seconds of one measurement
_INTEGER_CALLS = re.compile(r"^library call: .*(_int_mm|pack_mm|qlinear|qconv|quantised_|convolution_added)", re.M)


@dataclass(frozen=True)
class Case:
    """A quantised model, its float model and an input."""

    quantised: nn.Module
    plain: nn.Module
    x: T


class Image(nn.Module):
    """Four convolutions with a residual connection, and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 1)
        self.inner, self.outer = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.hidden, self.head = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: T) -> T:
        x = F.relu(self.first(x))
        x = F.relu(self.outer(F.relu(self.inner(x))) + x)
        x = F.relu(self.last(x)).mean((2, 3))
        return self.head(F.relu(self.hidden(x)))


def perceptron(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(dtype).eval()


class Handwritten(nn.Module):
    """Two linears of dequantised bytes, as quantisation leaves them."""

    def __init__(self, plain: nn.Sequential) -> None:
        super().__init__()
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # defines the operators
        for k in range(2):
            weight, bias = (plain.get_parameter(f"{2 * k}.{name}").detach() for name in ("weight", "bias"))
            scale = weight.abs().amax(1) / 127
            self.register_buffer(f"w{k}", (weight / scale[:, None]).round().to(torch.int8))
            self.register_buffer(f"s{k}", scale)
            self.register_buffer(f"z{k}", torch.zeros(len(scale), dtype=torch.int64))
            self.register_buffer(f"b{k}", bias)

    def forward(self, x: T) -> T:
        ops = torch.ops.quantized_decomposed
        for k in range(2):
            q = ops.quantize_per_tensor(x, 0.05, 128, 0, 255, torch.uint8)
            x = ops.dequantize_per_tensor(q, 0.05, 128, 0, 255, torch.uint8)
            w, s, z, b = (self.get_buffer(f"{name}{k}") for name in "wszb")
            x = F.linear(x, ops.dequantize_per_channel(w, s, z, 0, -128, 127, torch.int8), b)
            x = F.relu(x) if k == 0 else x
        return x


def handwritten() -> Case:
    plain = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).eval()
    return Case(Handwritten(plain).eval(), plain, torch.randn(32, 1024))


def pt2e(dynamic: bool) -> Case:
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    flow = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    plain, x = Image().eval(), torch.randn(4, 3, 56, 56)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = flow.prepare_pt2e(torch.export.export(plain, (x,)).module(), quantizer)
    prepared(x)
    return Case(flow.convert_pt2e(prepared), plain, x)


def by_torchao(config: Callable[[Any], object], rows: int) -> Case:
    q: Any = importlib.import_module("torchao.quantization")
    plain = perceptron(torch.bfloat16)
    model = copy.deepcopy(plain)
    q.quantize_(model, config(q))
    return Case(model, plain, torch.randn(rows, 1024).bfloat16())


def int4(q: Any) -> object:
    dtype: Any = vars(torch).get("int4")  # type checkers do not know it
    return q.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=q.PerGroup(32))


def int8_rows(q: Any) -> object:
    return q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=q.PerAxis(0))


CASES: dict[str, Callable[[], Case]] = {"handwritten": handwritten}
TORCHAO: dict[str, Callable[[], Case]] = {
    "static": lambda: pt2e(dynamic=False),
    "dynamic": lambda: pt2e(dynamic=True),
    **{
        f"{name}, {rows} rows": lambda config=config, rows=rows: by_torchao(config, rows)  # type: ignore[misc]
        for name, config in {
            "int8 weight": lambda q: q.Int8WeightOnlyConfig(),
            "int8 both": lambda q: q.Int8DynamicActivationInt8WeightConfig(),
            "float8 weight": lambda q: q.Float8WeightOnlyConfig(),
            "int4 weight": int4,
            "int8 rows": int8_rows,
        }.items()
        for rows in (1, 64)
    },
}


def milliseconds(call: Callable[[], object]) -> float:
    count, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < SLICE or count == 0:
        call()
        count += 1
    return (now - begin) / count * 1e3


def row(name: str, case: Case, rounds: int, inductor: bool) -> str:
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        ours = torch.compile(case.quantised, backend="alt", options={"strict": True, "debug_dir": folder})
        ours(case.x)
        bytes_ = sum(len(_INTEGER_CALLS.findall(p.read_text())) for p in Path(folder).rglob("*kernels.txt"))
    want = case.quantised(case.x).double()
    error = float((ours(case.x).double() - want).norm() / want.norm())
    sides: dict[str, Callable[[T], T]] = {"eager": case.quantised, "alt": ours, "float": case.plain}
    if inductor:
        sides["inductor"] = torch.compile(copy.deepcopy(case.quantised), backend="inductor")
    times: dict[str, list[float]] = {side: [] for side in sides}
    for call in sides.values():
        call(case.x), call(case.x)
    for _ in range(rounds):
        for side, call in sides.items():
            times[side].append(milliseconds(lambda call=call: call(case.x)))  # type: ignore[misc]
    t = {side: statistics.median(values) for side, values in times.items()}
    text = f"{t['inductor']:.2f} | {t['inductor'] / t['alt']:.2f}" if inductor else "- | -"
    return f"| {name} | {t['eager']:.2f} | {t['alt']:.2f} | {text} | {t['float']:.2f} | {error:.1e} | {bytes_} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", default="", help="parts of names, separated by commas")
    parser.add_argument("--no-inductor", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    present = importlib.util.find_spec("torchao") is not None
    cases = CASES | (TORCHAO if present else {})
    if not present:
        print("torchao is not installed; install torchao 0.18 for the other cases")
    if not args.no_inductor:
        torch._inductor.config.freezing = True  # else inductor does not match quantised patterns
    print("| model | eager ms | alt | inductor | inductor/alt | float eager | error | of bytes |")
    print("|---|---|---|---|---|---|---|---|")
    wanted = [part.strip() for part in args.cases.split(",") if part.strip()]
    with torch.no_grad():
        for name, make in cases.items():
            if not wanted or any(part in name for part in wanted):
                print(row(name, make(), args.rounds, not args.no_inductor), flush=True)


if __name__ == "__main__":
    main()
