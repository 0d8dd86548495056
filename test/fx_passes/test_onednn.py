"""oneDNN calls with epilogues: every combination fires and equals eager, also as a result of the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from altbackend.fx_passes import onednn, onednn_epilogues
from test.small_layers import call_onednn

T = torch.Tensor
OPTIONS: dict[str, Any] = {"strict": True, "verify_ir": True}
pytestmark = [
    pytest.mark.skipif(not onednn.available(), reason="this build of torch has no oneDNN"),
    pytest.mark.sample(2),
]


@pytest.fixture(autouse=True)
def _small_calls_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "small" not in request.node.name:
        call_onednn(monkeypatch.setattr)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 16), (6, 24)),
    "linear 3-d": (lambda: nn.Linear(24, 16, bias=False), (2, 3, 24)),
    "conv1d": (lambda: nn.Conv1d(8, 16, 3, padding=1), (2, 8, 12)),
    "conv2d": (lambda: nn.Conv2d(8, 16, 3, padding=1), (2, 8, 9, 7)),
    "conv2d groups": (lambda: nn.Conv2d(8, 16, 3, stride=2, groups=4, bias=False), (2, 8, 9, 7)),
    "conv3d": (lambda: nn.Conv3d(8, 16, 3, padding=1), (2, 8, 5, 6, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 16, 3, stride=2), (2, 8, 12)),
    "transposed2d": (lambda: nn.ConvTranspose2d(8, 16, 3, stride=2, output_padding=1), (2, 8, 5, 7)),
    "transposed3d": (lambda: nn.ConvTranspose3d(8, 16, 2, stride=2), (2, 8, 3, 4, 3)),
}
UNARY: dict[str, Callable[[T], T]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
BINARY: dict[str, Callable[[T, T], T]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
DTYPES = [t for t in (torch.float32, torch.bfloat16, torch.float16) if onednn.computes(t)]
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Model(nn.Module):
    """A layer with what follows it; `graph_result`: it is itself a result, else its negative is."""

    def __init__(self, layer: nn.Module, unary: Callable[[T], T], graph_result: bool) -> None:
        super().__init__()
        self.layer, self.unary, self.graph_result = layer, unary, graph_result

    def forward(self, x: T) -> T:
        y = self.unary(self.layer(x))
        return y if self.graph_result else -y


class Joined(nn.Module):
    """Two layers, whose results a binary operator joins."""

    def __init__(self, first: nn.Module, second: nn.Module, join: Callable[[T, T], T], relu: bool) -> None:
        super().__init__()
        self.first, self.second, self.join, self.relu = first, second, join, relu

    def forward(self, x: T) -> T:
        y = self.join(self.first(x), torch.sin(self.second(x + 1)))
        return torch.relu(y) if self.relu else y


def check(model: nn.Module, folder: Path, *xs: T) -> str:
    """Compare with float64 as precisely as eager's single rounding; return the decisions and the host program."""
    dtype = xs[0].dtype
    options = {**OPTIONS, "debug_dir": str(folder)}
    compiled = torch.compile(model, backend="alt", dynamic=False, options=options, fullgraph=True)
    with torch.no_grad():
        results, eagers = compiled(*xs), model(*xs)
        exacts = model.double()(*(x.double() for x in xs))
        model.to(dtype)
        repeated = compiled(*xs)
    every = [[t] if isinstance(t, T) else t for t in (results, eagers, exacts, repeated)]
    for got, eager, exact, again in zip(*every, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
        scale = exact.abs().max()
        error = (got.double() - exact).abs().max() / scale
        assert error <= max(2 * EPSILON[dtype], 1.01 * float((eager.double() - exact).abs().max() / scale)), error
        assert torch.equal(got, again)
    return "\n".join(p.read_text() for p in sorted(folder.rglob("*")) if p.suffix in (".txt", ".py"))


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_activations(layer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """All activations of one layer in one graph: half of them are results of the graph."""
    build, shape = LAYERS[layer]

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Model(build(), f, k % 2 == 0) for k, f in enumerate(UNARY.values()))

        def forward(self, x: T) -> T:
            return torch.cat([part(x + k) for k, part in enumerate(self.parts)])  # not linears of one input

    torch.manual_seed(0)
    text = check(All().eval().to(dtype), tmp_path, torch.randn(shape).to(dtype))
    assert f"oneDNN calls: with epilogues ({len(UNARY)} operators" in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_are_graph_results(dtype: torch.dtype, tmp_path: Path) -> None:
    """One activation of every layer, each with an input of its own."""

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(build() for build, _ in LAYERS.values())

        def forward(self, *xs: T) -> list[T]:
            return [F.silu(part(x)) for part, x in zip(self.parts, xs, strict=True)]

    torch.manual_seed(0)
    text = check(All().eval().to(dtype), tmp_path, *(torch.randn(shape).to(dtype) for _, shape in LAYERS.values()))
    assert f"oneDNN calls: with epilogues ({len(LAYERS)} operators" in text
    assert text.count("'swish'") >= len(LAYERS)


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["conv1d", "conv2d", "conv3d", "linear", "linear 3-d"])
def test_binary(layer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two layers that an operator joins, all operators in one graph.

    For linears the table says that it does not pay, so it is emptied.
    """
    build, shape = LAYERS[layer]

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = itertools.product(BINARY.values(), (False, True))
            self.parts = nn.ModuleList(Joined(build(), build(), join, relu) for join, relu in kinds)

        def forward(self, x: T) -> list[T]:
            return [part(x * 2.0**-k) for k, part in enumerate(self.parts)]  # exact, and not linears of one input

    torch.manual_seed(0)
    with patch.object(onednn_epilogues, "UNPROFITABLE", frozenset()):
        text = check(All().eval().to(dtype), tmp_path, torch.randn(shape).to(dtype))
    fused = len(BINARY) * (3 if "conv" in layer else 2)  # an activation behind the operator too, for convolutions
    assert f"oneDNN calls: with epilogues ({fused} operators" in text


class Residual(nn.Module):
    def __init__(self, conv: Callable[..., nn.Module], relu: bool) -> None:
        super().__init__()
        self.a, self.b, self.relu = conv(8, 8, 3, padding=1), conv(8, 8, 3, padding=1), relu

    def forward(self, x: T) -> T:
        y = self.a(x)
        z = self.b(torch.cos(y)) + y
        return torch.relu(z) if self.relu else z


@pytest.mark.parametrize(("nd", "relu", "dtype"), list(itertools.product((2, 3), (False, True), DTYPES)), ids=str)
def test_addition_in_place(nd: int, relu: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Residual((nn.Conv2d, nn.Conv3d)[nd - 2], relu).eval().to(dtype)
    text = check(model, tmp_path, torch.randn(2, 8, *[6] * nd).to(dtype))
    call = text[text.index("def call(") :]
    assert "_convolution_pointwise_" in call


def test_a_sum_in_place_is_a_result_beside_its_operand(tmp_path: Path) -> None:
    """A call that writes one of its operands counts as a view of it, and not of its packed weight."""

    class Twice(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.both = both

        def forward(self, a: T) -> T | tuple[T, T]:
            y = self.conv1(a)
            z = self.conv2(torch.relu(y)) + self.conv1(a)
            return (z, y) if self.both else z

    for both in (False, True):
        torch._dynamo.reset()
        text = check(Twice(both).eval(), tmp_path / str(both), torch.randn(2, 8, 9, 9))
        assert "_convolution_pointwise" in text[text.index("def call(") :]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d", "conv3d", "transposed2d"])
def test_batches_of_any_size(layer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build, shape = LAYERS[layer]
    torch.manual_seed(0)
    model = Model(build(), F.gelu, True).eval().to(dtype)
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="alt", options={**OPTIONS, "debug_dir": str(tmp_path)}, fullgraph=True, dynamic=True
    )
    for batch in (3, 2, 9):
        x = torch.randn(batch, *shape[1:]).to(dtype)
        with torch.no_grad():
            want, got = model(x), compiled(x)
        assert got.stride() == want.stride()
        assert (got - want).float().norm() <= 2 * EPSILON[dtype] * want.float().norm()
    assert len(list(tmp_path.iterdir())) == 1, "compiled again for another batch"
    text = "\n".join(p.read_text() for p in tmp_path.rglob("*.txt"))
    assert "oneDNN calls: with epilogues (1 operators" in text


def test_eager_numerics_fuse_nothing(tmp_path: Path) -> None:
    model = Model(nn.Conv2d(8, 8, 3), F.relu, True).eval()
    compiled = torch.compile(model, backend="alt", options={**OPTIONS, "numerics": "eager"})
    x = torch.randn(2, 8, 9, 9)
    x[0, 0, 4, 4] = float("nan")  # oneDNN's activation would drop it
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), equal_nan=True)


def test_operands_that_do_not_fit_are_left() -> None:
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2)

        def forward(self, x: T) -> T:
            y = self.conv(x)
            return (
                y
                + y
                + torch.relu(self.groups(x) + y.sin())
                + (self.conv(x) + x[:, :, :1])
                + (x - self.conv(x))
                + torch.sub(self.conv(x), x, alpha=2)
            )

    model, x = Broadcast().eval(), torch.randn(2, 8, 6, 6)
    for dtype in DTYPES:
        model, x = model.to(dtype), x.to(dtype)
        with torch.no_grad():
            got, want = torch.compile(model, backend="alt", options=OPTIONS)(x), model(x)
        assert (got - want).float().norm() <= 2 * EPSILON[dtype] * want.float().norm()


def test_small_float32_linears_stay_with_aten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    small, large = nn.Linear(64, 64), nn.Linear(1024, 1024)
    text = check(small.eval(), tmp_path / "small", torch.randn(4, 64))
    assert "_linear_pointwise" not in text
    text = check(large.eval(), tmp_path / "large", torch.randn(4, 1024))
    assert "_linear_pointwise" in text


@pytest.mark.parametrize(
    ("layer", "shape", "small"),
    [
        (lambda: nn.Linear(128, 160), (32, 128), True),
        (lambda: nn.Linear(1024, 1024), (1, 1024), False),
        (lambda: nn.Linear(512, 512), (64, 512), False),
        (lambda: nn.Conv2d(4, 8, 3), (1, 4, 12, 12), True),
        (lambda: nn.Conv2d(4, 8, 3), (2, 4, 12, 12), False),
        (lambda: nn.Conv2d(64, 64, 3), (1, 64, 28, 28), False),
        (lambda: nn.Conv3d(4, 8, 3), (1, 4, 10, 10, 10), False),
        (lambda: nn.ConvTranspose3d(4, 8, 3), (1, 4, 5, 5, 5), True),
    ],
)
def test_small_calls_stay_with_aten(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], small: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, x = layer().eval(), torch.randn(shape)
    run = torch.compile(module, backend="alt", options={**OPTIONS, "debug_dir": str(tmp_path), "cache_graphs": False})
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
    (host,) = tmp_path.glob("*/*host.py")
    assert ("mkldnn" not in host.read_text()) == small
