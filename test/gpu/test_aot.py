"""Ahead-of-time libraries and host programs in C++ on a real GPU: `python -m pytest test/gpu/test_aot.py`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import altbackend
from altbackend.compiled import hosts
from altbackend.errors import BadCall, BadOptionValue, BadPackage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Dim = torch.export.Dim


class Convolutions(nn.Module):
    """A small image model with static shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Block(nn.Module):
    """A transformer block with a dynamic batch and length; it also writes a counter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


def package(tmp_path: Path, **options: Any) -> tuple[dict[str, nn.Module], Path]:
    models: dict[str, nn.Module] = {"static": Convolutions().cuda().eval(), "dynamic": Block().cuda().eval()}
    shapes = ({0: Dim("batch", min=1, max=16), 1: Dim("length", min=2, max=128)},)
    programs = {
        "static": torch.export.export(models["static"], (torch.randn(2, 3, 32, 32, device="cuda"),)),
        "dynamic": torch.export.export(
            models["dynamic"], (torch.randn(2, 24, 64, device="cuda"),), dynamic_shapes=shapes
        ),
    }
    return models, Path(altbackend.aot_package(tmp_path / "models.pt2", programs, options=options))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


INPUTS: dict[str, list[tuple[int, ...]]] = {
    "static": [(2, 3, 32, 32)],
    "dynamic": [(2, 24, 64), (7, 100, 64), (1, 2, 64)],
}


def test_packages_run_under_both_loaders_and_on_any_stream(tmp_path: Path) -> None:
    models, path = package(tmp_path)
    assert not altbackend.check_package(path)
    for name, model in models.items():
        ours = altbackend.aot_load(path, name)
        torchs = torch._C._aoti.AOTIModelPackageLoader(str(path), name, False, 1, -1)
        for sizes in INPUTS[name]:
            x = torch.randn(sizes, device="cuda")
            want = model(x)
            close(ours(x), want)
            close(torchs.boxed_run([x])[0], want)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got = ours(x)
            side.synchronize()
            close(got, want)
    with pytest.raises(BadCall, match=r"dimension 1 of input 0 \(x\) is 129; .* from 2 to 128"):
        altbackend.aot_load(path, "dynamic")(torch.randn(2, 129, 64, device="cuda"))
    with pytest.raises(BadCall, match=r"input 0 \(x\) is not on GPU 0"):
        altbackend.aot_load(path, "dynamic")(torch.randn(2, 24, 64))


def test_weights_are_updated_and_swapped_while_threads_run(tmp_path: Path) -> None:
    models, path = package(tmp_path)
    loaded, model = altbackend.aot_load(path, "static"), models["static"]
    x = torch.randn(2, 3, 32, 32, device="cuda")
    old = model(x)
    fresh = {k: v * 1.5 if v.is_floating_point() else v for k, v in model.state_dict().items() if k in loaded.weights}
    model.load_state_dict(fresh, strict=False)
    new = model(x)
    wrong: list[float] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                got = loaded(x)
                torch.cuda.current_stream().synchronize()
                if not any(torch.allclose(got, want, atol=1e-3, rtol=1e-3) for want in (old, new)):
                    wrong.append(float((got - new).abs().max()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    loaded.update_weights(fresh, inactive=True)
    loaded.swap_weights()
    for t in threads:
        t.join()
    assert not wrong
    close(loaded(x), new)


def test_other_architectures_are_refused_and_ptx_runs(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    other = "8.0" if major != 8 else "9.0"
    models, path = package(tmp_path, aot_architectures=other)
    here = f"{major}.{minor}"
    (misfit, _) = altbackend.check_package(path)
    assert other in misfit.reason
    assert here in misfit.reason
    with pytest.raises(BadPackage, match=rf"{other}.*{here}"):
        altbackend.aot_load(path, "static")
    if major >= 9:
        models, path = package(tmp_path, aot_architectures="8.0+PTX")
        x = torch.randn(2, 3, 32, 32, device="cuda")
        close(altbackend.aot_load(path, "static")(x), models["static"](x))
    with pytest.raises(BadOptionValue):
        package(tmp_path, aot_architectures="sm_90")


def test_the_jits_host_in_cpp_gives_the_same(tmp_path: Path) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(F.gelu(x @ w) @ w, -1)
        return torch.relu(y[at] @ w).sum(-1)

    x, w = torch.randn(64, 32, device="cuda"), torch.randn(32, 32, device="cuda")
    at = torch.arange(8, device="cuda")
    results = []
    for host in ("python", "cpp"):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="alt", options={"host": host, "strict": True})
        compiled(x, w, at)
        results.append(compiled(x, w, at))
    assert torch.equal(*results)
    compiled(x, w, at + 60)  # out of range: the next call says so
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="an earlier call met an index out of range"):
        compiled(x, w, at)


def test_training_with_the_host_in_cpp() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)).cuda()
    x = torch.randn(16, 32, device="cuda")
    gradients = []
    for host in ("python", "cpp"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        compiled = torch.compile(model, backend="alt", options={"host": host})
        parameters = list(model.parameters())
        gradients += [torch.autograd.grad(compiled(x).square().sum(), parameters) for _ in range(2)]
    for a, b in ((0, 2), (1, 3)):
        torch.testing.assert_close(gradients[a], gradients[b])


def test_auto_switches_on_a_gpu() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.relu(x @ x) / 7
        return x

    x = torch.rand(16, 16, device="cuda")
    compiled = torch.compile(f, backend="alt", options={"host": "auto"})
    for _ in range(hosts.CALLS_BEFORE_BUILD + 1):
        close(compiled(x), f(x))
    assert hosts.wait_until_built(60)
    close(compiled(x), f(x))
