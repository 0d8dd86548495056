"""Programs as text, drawn from a seed: `float32 inference plain 16x64x56x56 | conv 128 3 1 1 | activation 1`.

The head names dtype, mode ("inference" or "training"), memory layout ("plain" or "channels_last") and the input's
shape. `float32` allows TF32. The steps are those of steps.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.rivals.steps import STEPS, Family, Parameters, Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_FLOPS = {"cuda": 1e12, "cpu": 2e9}
ELEMENTS = {"cuda": (12, 27), "cpu": (10, 22)}  # exponents of 2 of an input's smallest and largest number of elements
TRIES = 50


@dataclass(frozen=True)
class Program:
    """A drawn program; `steps` are names with parameters."""

    dtype: str
    mode: str
    layout: str
    shape: Shape
    steps: tuple[tuple[str, Parameters], ...]

    @property
    def text(self) -> str:
        head = f"{self.dtype} {self.mode} {self.layout} {'x'.join(map(str, self.shape))}"
        return " | ".join([head, *(" ".join([name, *map(str, p)]) for name, p in self.steps)])


class Chain(nn.Module):
    """The steps of a program, one after the other."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.functions = []
        shapes, _ = shapes_of(program)
        for (name, parameters), shape in zip(program.steps, shapes, strict=False):
            self.functions.append(STEPS[name].build(parameters, shape))
        self.layers = nn.ModuleList([f for f in self.functions if isinstance(f, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def parse(text: str) -> Program:
    """Return the program of a text. ValueError names what the text has in place of a known word."""
    head, *steps = (part.split() for part in text.split("|"))
    if len(head) != 4 or head[0] not in DTYPES or head[1] not in ("inference", "training"):
        raise ValueError(f"{' '.join(head)!r}: write dtype, inference or training, plain or channels_last, and a shape")
    if unknown := [name for name, *_ in steps if name not in STEPS]:
        raise ValueError(f"unknown step {unknown[0]!r}: the steps are {', '.join(STEPS)}")
    shape = tuple(int(n) for n in head[3].split("x"))
    dtype, mode, layout, _ = head
    return Program(dtype, mode, layout, shape, tuple((name, tuple(map(int, p))) for name, *p in steps))


def shapes_of(program: Program) -> tuple[list[Shape], bool]:
    """Return the input's and every result's shape, and whether the last one is a float, computed without data.

    Raises what a step raises for a shape that it refuses.
    """
    with torch.device("meta"), torch.no_grad():
        x = torch.empty(program.shape)
        shapes = [program.shape]
        for name, parameters in program.steps:
            x = STEPS[name].build(parameters, shapes[-1])(x)
            shapes.append(tuple(x.shape))
    return shapes, x.dtype.is_floating_point


def checked(program: Program, device: str) -> Shape | None:
    """Return the shape of a program's result; None where a step refuses its input or the program is too large."""
    try:
        with FlopCounterMode(display=False) as counter:
            shapes, floating = shapes_of(program)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    sizes = [math.prod(s) for s in shapes]
    fits = min(sizes) > 0 and max(sizes) <= 2 ** ELEMENTS[device][1]
    allowed = floating or program.mode == "inference"
    return shapes[-1] if fits and allowed and counter.get_total_flops() <= LARGEST_FLOPS[device] else None


def draw(rng: random.Random, dtype: str, mode: str, device: str) -> Program:
    """Return a program that runs: one step, an anchor with two to five others around it, or a small network."""
    while True:
        families = _families(rng)
        program = Program(dtype, mode, "plain", _input_shape(rng, device), ())
        shape = checked(program, device)
        for family in families:
            if program.steps and program.steps[-1][0].startswith("arg"):
                break  # what follows would be of integers
            longer = _with_step(rng, program, shape, family, device) if shape is not None else None
            if longer is not None:
                program, shape = longer
        if len(program.steps) >= max(len(families) - 1, 1):
            last = rng.random() < 0.3 and len(program.shape) == 4
            return replace(program, layout="channels_last" if last else "plain")


def _with_step(
    rng: random.Random, program: Program, shape: Shape, family: Sequence[Family], device: str
) -> tuple[Program, Shape] | None:
    names = [name for name, step in STEPS.items() if step.family in family]
    for _ in range(TRIES):
        name = rng.choice(names)
        parameters = STEPS[name].draw(rng, shape)
        if parameters is not None:
            longer = replace(program, steps=(*program.steps, (name, parameters)))
            if (after := checked(longer, device)) is not None:
                return longer, after
    return None


def _families(rng: random.Random) -> list[list[Family]]:
    """Return the families to draw each step from."""
    a, p, n, r, m, loss = Family
    kind = rng.random()
    if kind < 0.3:
        return [[rng.choice([a, p, n, n, r, r, m, loss])]]
    after = [[p], [p], [p, m], [n], [n, r], [r]]
    if kind < 0.75:
        steps = [[a], *rng.sample(after, rng.randint(2, 5))]
        return [*steps, [loss]] if rng.random() < 0.1 else steps
    return [f for _ in range(rng.randint(2, 4)) for f in ([a], [n], [p])] + ([[r]] if rng.random() < 0.5 else [])


def _input_shape(rng: random.Random, device: str) -> Shape:
    """Return a shape of two to five dimensions; a third of them have odd sizes."""
    low, high = ELEMENTS[device]
    elements = 2 ** rng.uniform(low, high)
    rank = rng.choice((2, 3, 3, 4, 4, 4, 5))
    if rank == 2:
        width = 2 ** rng.uniform(4, min(14, math.log2(elements) - 1))
        sizes = [elements / width, width]
    elif rank == 3:
        width = rng.choice((32, 64, 128, 256, 512, 768, 1024))
        length = 2 ** rng.uniform(3, max(math.log2(elements / width) - 1, 3.5))
        sizes = [elements / width / length, length, width]
    else:
        channels = rng.choice((3, 8, 16, 32, 64, 64, 96, 128, 192, 256))
        side = 2 ** rng.uniform(2, max(min(math.log2(elements / channels) / (rank - 2), 9), 2.5))
        sizes = [elements / channels / side ** (rank - 2), channels, *[side] * (rank - 2)]
    odd = rng.random() < 0.33
    return tuple(max(int(s) if odd else _round(s), 1) for s in sizes)


def _round(size: float) -> int:
    """Return a size of the kind that people choose: a multiple of 8 from 16 on."""
    return round(size / 8) * 8 if size >= 16 else max(round(size), 1)
