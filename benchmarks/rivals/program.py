"""A drawn program with its input: the calls that are measured, and the exact results."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.measure import output_error
from benchmarks.rivals.grammar import DTYPES, Chain, Program, parse

SEED = 7
Call = Callable[[], list[Tensor]]


@dataclass
class Upstream:
    """The gradient of a program's result: random numbers, the same for every compiler."""

    value: Tensor | None = None

    def get(self, y: Tensor) -> Tensor:
        """Return a gradient like `y`."""
        if self.value is None:
            generator = torch.Generator(y.device).manual_seed(SEED)
            self.value = torch.empty_like(y, requires_grad=False).normal_(generator=generator)
        return self.value.to(y.dtype)


@dataclass
class Subject:
    """A program's module, its input, and the gradient of its result."""

    program: Program
    model: Chain
    x: Tensor
    upstream: Upstream = field(default_factory=Upstream)

    def call(self, function: Callable[[Tensor], Tensor]) -> Call:
        """Return a call of `function`, which has the model's parameters: its result, with gradients in training."""
        return _call(function, self.model, self.x, self.upstream)

    def reference(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the results and gradients of eager in `dtype`, without TF32."""
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            exact = copy.deepcopy(self.model).to(dtype)
            x = self.x.detach().to(dtype).requires_grad_(self.x.requires_grad)
            return _call(exact, exact, x, self.upstream)()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


def largest_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error over the tensors, converted to the dtypes expected; infinite for any NaN."""
    converted = tuple(a.to(b.dtype) for a, b in zip(got, expected, strict=True))
    error = output_error(converted, tuple(expected))
    return math.inf if math.isnan(error) else error


def prepare(text: str, device: torch.device) -> Subject:
    """Return the program of `text` with random weights and input on `device`, the same in every process."""
    program = parse(text)
    torch.manual_seed(SEED)
    training = program.mode == "training"
    with torch.device(device):
        model = Chain(program).to(DTYPES[program.dtype]).train(training)
        x = torch.randn(program.shape, dtype=DTYPES[program.dtype])
    if program.layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Subject(program, model, x.requires_grad_(training))


def _call(function: Callable[[Tensor], Tensor], model: Chain, x: Tensor, upstream: Upstream) -> Call:
    leaves = [x, *model.parameters()]

    def infer() -> list[Tensor]:
        with torch.no_grad():
            return [function(x)]

    def train() -> list[Tensor]:
        y = function(x)
        gradients = torch.autograd.grad(y, leaves, upstream.get(y), allow_unused=True)
        return [y, *(g for g in gradients if g is not None)]

    return train if x.requires_grad else infer
