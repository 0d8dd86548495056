"""CPU inference passes: results, decisions, and folded parameters that never go stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import altbackend
from altbackend.fx_passes import shared_input
from altbackend.runtime import frozen
from test.graphs import trace
from test.small_layers import call_onednn

STRICT = {"strict": True, "verify_ir": True}


@pytest.fixture(autouse=True)
def _small_linears_too(monkeypatch: pytest.MonkeyPatch) -> None:
    call_onednn(monkeypatch.setattr)


def decisions(folder: Path) -> str:
    return "\n".join(p.read_text() for p in sorted(folder.rglob("decisions.txt")))


def compile_(model: nn.Module, folder: Path | None = None) -> nn.Module:
    options: dict[str, Any] = STRICT | ({"debug_dir": str(folder)} if folder else {})
    return torch.compile(model, backend="alt", options=options)  # type: ignore[return-value]


def close(model: nn.Module, compiled: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        want, got = model(x), compiled(x)
    assert got.stride() == want.stride()
    assert (got - want).norm() <= 1e-5 * want.norm()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.skip = nn.Conv2d(8, 8, 1)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                nn.init.normal_(m.running_mean)  # type: ignore[arg-type]
                nn.init.uniform_(m.running_var, 0.5, 2.0)  # type: ignore[arg-type]
                nn.init.normal_(m.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.b(self.a(x)) + self.skip(x))
        return torch.relu(self.b(y) + y)


def test_convolution_block(tmp_path: Path) -> None:
    model = Residual().eval()
    compiled = compile_(model, tmp_path)
    close(model, compiled, torch.randn(2, 8, 16, 16))
    text = decisions(tmp_path)
    assert "batch normalisation: folded (3 into" in text
    assert "convolutions: channels-last" in text
    assert "on oneDNN (4, 4 with packed weights)" in text


def test_residuals_of_one_pixel() -> None:
    # the library's convolution with an addition fails on them in torch 2.11, where their strides are channels-last
    model = nn.Sequential(nn.Conv2d(8, 8, 4, stride=4), Residual()).eval()
    close(model, compile_(model), torch.randn(2, 8, 4, 4))


class InPlaceResidual(nn.Module):
    """A convolution that is added to a value without later readers; the sum is a result of the graph."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.a, self.b, self.end = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = self.b(torch.relu(y)) + y
        return {"sum": z, "relu": torch.relu(z), "view": z.flatten(1), "twice": self.b(torch.relu(z)) + z}[self.end]


@pytest.mark.parametrize("end", ["sum", "relu", "view", "twice"])
def test_a_result_that_a_convolution_was_added_to_in_place(end: str, tmp_path: Path) -> None:
    model = InPlaceResidual(end).eval()
    compiled = compile_(model, tmp_path)
    x = torch.randn(2, 3, 16, 16)
    close(model, compiled, x)
    with torch.no_grad():
        result = compiled(x)
        want = result.clone()
        compiled(x + 1)
    assert torch.equal(result, want)
    programs = "\n".join(p.read_text() for p in tmp_path.rglob("*host*.py"))
    call = programs[programs.index("def call(") : programs.index("SOURCE")]
    assert "_convolution_pointwise_" in call
    assert "op__reorder" not in call, "a packed weight is made by every call"


def test_channels_last_input_and_output_strides() -> None:
    model = Residual().eval()
    close(model, compile_(model), torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_patch_convolution_is_a_matmul(kernel: int, bias: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, kernel, kernel, bias=bias), nn.Conv2d(10, 6, 2, 2, bias=bias)).eval()
    compiled = compile_(model, tmp_path)
    close(model, compiled, torch.randn(2, 3, 16, 24))
    assert "patch convolutions: as matmuls (2 with" in decisions(tmp_path)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, 4, d // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        return self.down(nn.functional.gelu(self.up(y)))


def test_linears_of_one_input_are_one_call(tmp_path: Path) -> None:
    model = Attention().eval()
    compiled = compile_(model, tmp_path)
    close(model, compiled, torch.randn(2, 5, 32))
    text = decisions(tmp_path)
    assert "concatenated (1 groups)" in text
    assert "on oneDNN (3, 3 with packed weights)" in text


@pytest.mark.parametrize("transposed", [True, False])
def test_parameters_of_linears_are_copied_as_they_lie(transposed: bool) -> None:
    x, a, b = torch.randn(5, 8), torch.randn(8, 8), torch.randn(8, 8)
    product = torch.nn.functional.linear if transposed else torch.mm

    def fn(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return product(x, a).view(1, 5, 8), product(x, b).view(1, 5, 8)

    (gm,) = trace(fn, x, a, b)
    inputs = list(gm.graph.nodes)[:3]
    constant = {n for n in gm.graph.nodes if n in inputs[1:] or n.target is torch.ops.aten.t.default}
    assert shared_input.join(gm, constant) == 1
    gm.recompile()
    torch.testing.assert_close(tuple(gm(x, a, b)), fn(x, a, b))
    (joined,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert joined.args == ((inputs[1:], 0) if transposed else (inputs[1:], 1))


class Turned(nn.Module):
    """A linear whose weight is stored as (in, out), as in GPT-2, followed by a GELU."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(torch.addmm(self.bias, x, self.weight))


@pytest.mark.parametrize(("out", "packed"), [(24, 0), (640, 0), (512, 1), (1536, 1)])
def test_weights_that_lie_turned_are_packed_only_where_that_pays(out: int, packed: int, tmp_path: Path) -> None:
    model = Turned(16, out).eval()
    compiled = compile_(model, tmp_path)
    x = torch.randn(5, 16)
    close(model, compiled, x)
    assert f"on oneDNN (1, {packed} with packed weights)" in decisions(tmp_path)
    with torch.no_grad():
        model.weight.mul_(-2.0)
        close(model, compiled, x)
        model.weight.data = torch.randn(16, out)
        close(model, compiled, x)


@pytest.mark.parametrize("change", ["add_", "data.copy_ and refresh", "data =", "load_state_dict", "new parameter"])
def test_changed_parameters_are_seen(change: str) -> None:
    model = Attention().eval()
    compiled = compile_(model)
    x = torch.randn(2, 5, 32)
    close(model, compiled, x)
    with torch.no_grad():
        match change:
            case "add_":
                model.q.weight.add_(1.0)
            case "data =":
                model.up.weight.data = torch.randn(64, 32)
            case "load_state_dict":
                model.load_state_dict(Attention().state_dict())
            case "new parameter":
                model.down.weight = nn.Parameter(torch.randn(32, 64))
            case _:
                model.q.bias.data.copy_(torch.randn(32))
                altbackend.refresh()
    close(model, compiled, x)


def test_inference_tensors_are_never_stale() -> None:
    with torch.inference_mode():
        model = Attention().eval()
        compiled = compile_(model)
        x = torch.randn(2, 5, 32)
        for _ in range(2):
            want, got = model(x), compiled(x)
            assert (got - want).norm() <= 1e-5 * want.norm()
            model.up.weight.mul_(-2.0)


def test_hoisting_can_be_switched_off() -> None:
    model = Attention().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": False})
    close(model, compiled, torch.randn(2, 5, 32))  # type: ignore[arg-type]


class Returned(nn.Module):
    """Results that depend only on a parameter, and a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = self.w * 2
        return x @ v, v, v.t(), (self.w + 1).split(3, 1)[1], self.w.exp().sum()


def test_results_made_of_parameters_are_the_users() -> None:
    """A write of the user to a result does not change the result of the next call."""
    model = Returned().eval()
    compiled, x = compile_(model), torch.eye(4)
    with torch.no_grad():
        for _ in range(3):
            results = compiled(x)
            torch.testing.assert_close(results, model(x))
            for r in results:
                r.fill_(100.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_eight_bits_are_not_kept_wider(dtype: torch.dtype) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(0, 9, (64, 32)).to(dtype))
            self.register_buffer("scale", torch.rand(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.get_buffer("w").to(x.dtype)) * self.get_buffer("scale")

    model, x = Quantised().eval(), torch.randn(4, 32)
    before = set(frozen._alive)
    close(model, compile_(model), x)
    folded = [t for f in set(frozen._alive) - before for s in f.sets.values() for t in s.results]
    assert all(t.numel() < 64 * 32 for t in folded)
