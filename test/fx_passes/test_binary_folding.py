"""Arithmetic with constants disappears into weights and biases; results stay those of eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import altbackend
from altbackend.fx_passes import binary_folding, onednn
from altbackend.fx_passes.graph import propagate
from altbackend.runtime import frozen
from test.graphs import trace

T = torch.Tensor
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "linear": (lambda bias: nn.Linear(6, 4, bias=bias), (3, 6)),
    "linear 3-d": (lambda bias: nn.Linear(6, 4, bias=bias), (2, 3, 6)),
    "conv1d": (lambda bias: nn.Conv1d(6, 4, 3, bias=bias), (2, 6, 9)),
    "conv2d": (lambda bias: nn.Conv2d(6, 4, 3, groups=2, bias=bias), (2, 6, 7, 8)),
    "conv3d": (lambda bias: nn.Conv3d(6, 4, 2, bias=bias), (2, 6, 4, 5, 3)),
    "transposed": (lambda bias: nn.ConvTranspose2d(6, 4, 3, stride=2, bias=bias), (2, 6, 5, 4)),
}
OPERATORS: dict[str, Callable[[T, Any], T]] = {
    "add": lambda y, c: y + c,
    "sub": lambda y, c: y - c,
    "flipped sub": lambda y, c: c - y,
    "mul": lambda y, c: c * y,
    "div": lambda y, c: y / c,
    "alpha": lambda y, c: torch.sub(y, c, alpha=2),
}


class After(nn.Module):
    """A layer, then an operator with one constant per channel, then one with a number."""

    def __init__(self, layer: nn.Module, operator: Callable[[T, Any], T], rank: int, axis: int) -> None:
        super().__init__()
        shape = [1] * rank
        shape[axis] = 4
        self.layer, self.operator = layer, operator
        self.register_buffer("c", torch.rand(shape) + 0.5)

    def forward(self, x: T) -> T:
        return self.operator(self.operator(self.layer(x), self.c), 1.5)


def decisions(folder: Path) -> str:
    return "\n".join(p.read_text() for p in sorted(folder.rglob("decisions.txt")))


def check(model: nn.Module, x: T, folder: Path, tolerance: float) -> str:
    compiled = torch.compile(
        model, backend="alt", options={"strict": True, "verify_ir": True, "debug_dir": str(folder), "freezing": True}
    )
    with torch.no_grad():
        want, got = model(x), compiled(x)
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    assert (got - want).float().norm() <= tolerance * want.float().norm()
    return decisions(folder)


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_operator(layer: str, bias: bool, tmp_path: Path) -> None:
    build, shape = LAYERS[layer]
    axis = -1 if "linear" in layer else 1
    torch.manual_seed(0)

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(After(build(bias), f, len(shape), axis) for f in OPERATORS.values())

        def forward(self, x: T) -> T:
            return torch.cat([part(x) for part in self.parts])

    text = check(All().eval(), torch.randn(shape), tmp_path, 1e-5)
    assert f"arithmetic with constants: folded ({2 * len(OPERATORS)} operators" in text


@pytest.mark.parametrize("dtype", [t for t in (torch.bfloat16, torch.float16) if onednn.computes(t)], ids=str)
def test_low_precision_with_float32_constants(dtype: torch.dtype, tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)
            self.register_buffer("c", torch.rand(8, 1, 1))

        def forward(self, x: T) -> T:
            return (self.conv(x).float() * self.c).to(x.dtype)

    model = Mixed().eval()
    model.conv.to(dtype)
    text = check(model, torch.randn(2, 8, 9, 9).to(dtype), tmp_path, 2**-7)
    assert "folded (1 operators" in text


def test_the_rule_fires_once_per_operator() -> None:
    x, w, b, c = torch.randn(2, 6, 7, 7), torch.randn(4, 6, 3, 3), torch.randn(4), torch.rand(4, 1, 1) + 0.5

    def fn(x: T, w: T, b: T, c: T) -> T:
        return (torch.conv2d(x, w, b) * c + c).relu()

    (gm,) = trace(fn, x, w, b, c)
    constant = set(list(gm.graph.nodes)[1:4])
    assert [binary_folding.fold(gm, constant) for _ in range(3)] == [1, 1, 0]
    propagate(gm)
    gm.recompile()
    torch.testing.assert_close(gm(x, w, b, c)[0], fn(x, w, b, c), rtol=1e-4, atol=1e-4)


class Kept(nn.Module):
    """Operands that are no constant per channel, and products with other readers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.register_buffer("image", torch.rand(5, 5))
        self.register_buffer("row", torch.rand(5))

    def forward(self, x: T, scale: T) -> list[T]:
        y = self.conv(x)
        return [self.conv(x) * self.image, self.conv(x) + self.row, self.conv(x) * scale, 1.0 / self.conv(x), y * 2, y]


def test_other_operands_stay(tmp_path: Path) -> None:
    model, x, scale = Kept().eval(), torch.randn(2, 4, 7, 7), torch.rand(4, 1, 1)
    compiled = torch.compile(model, backend="alt", options={"strict": True, "debug_dir": str(tmp_path)})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, scale), model(x, scale), rtol=1e-4, atol=1e-4)
    assert "arithmetic with constants" not in decisions(tmp_path)


def test_written_constants_are_seen() -> None:
    model, x = After(nn.Conv2d(6, 4, 3), torch.mul, 4, 1).eval(), torch.randn(2, 6, 7, 8)
    compiled = torch.compile(model, backend="alt", options={"strict": True, "freezing": True})
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            model.get_buffer("c").mul_(-2.0)
            model.get_parameter("layer.weight").data.add_(0.1)
            altbackend.refresh()


@pytest.mark.parametrize("kind", ["transposed", "linear"])
def test_batch_normalisation_of_transposed_convolutions_and_linears(kind: str, tmp_path: Path) -> None:
    layer, norm, shape = {
        "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2), nn.BatchNorm2d(4), (2, 6, 5, 5)),
        "linear": (nn.Linear(6, 4), nn.BatchNorm1d(4), (5, 6)),
    }[kind]
    nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    nn.init.normal_(norm.weight)
    text = check(nn.Sequential(layer, norm, nn.ReLU()).eval(), torch.randn(shape), tmp_path, 1e-5)
    assert "batch normalisation: folded (1 into" in text
    assert "6 of 6 parameters: folded (inputs that remain: none)" in text
    (frozen_graph,) = tmp_path.rglob("*frozen_graph.txt")
    assert "rsqrt" in frozen_graph.read_text()


def test_packed_weights_stay_packed() -> None:
    """Four-bit weights in int32 words are unpacked in every call: kept, they would take eight times the memory."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("words", torch.randint(0, 2**31 - 1, (64, 256), dtype=torch.int32))
            self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32))

        def forward(self, x: T) -> T:
            nibbles = (self.words[:, None, :] >> self.shifts[None, :, None]) & 15  # type: ignore[index]
            return x @ (nibbles.reshape(512, 256).to(x.dtype) - 8)

    model, x = Packed().eval(), torch.randn(3, 512)
    before = set(frozen._alive)
    compiled = torch.compile(model, backend="alt", options={"strict": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-2)
    kept = [t for f in set(frozen._alive) - before for s in f.sets.values() for t in s.results]
    assert all(t.numel() < 512 * 256 for t in kept)


@pytest.mark.parametrize("freezing", ["auto", True, False])
def test_a_constant_that_is_computed_behind_the_product(freezing: str | bool) -> None:
    """Layer scales of ConvNeXt and PoolFormer are reshaped where they are read."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Conv2d(6, 4, 1), nn.Parameter(torch.rand(4))

        def forward(self, x: T) -> T:
            return self.layer(x) * (self.scale * 2).reshape(1, -1, 1, 1) + (self.scale - 3).view(-1, 1, 1)

    model, x = Scaled().eval(), torch.randn(2, 6, 5, 5)
    compiled = torch.compile(model, backend="alt", options={"strict": True, "freezing": freezing})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
