"""Matrix products with fused epilogues on a real GPU: results, the measuring process, and max_autotune as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend import alt
from altbackend.autotune import measure, products, trial
from altbackend.autotune.measure import TrialFailed
from altbackend.config.resolve import resolve
from altbackend.schedule.device import ScheduleContext, read_device
from altbackend.schedule.products import cost
from altbackend.schedule.products.matmul import Tiles
from benchmarks import matmul_fit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
T = torch.Tensor


def build(fn: Callable[..., Any], tmp_path: Path, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    settings = {"strict": True, "debug_dir": str(tmp_path / "debug"), **options}
    return torch.compile(fn, backend=alt, options=settings)


def decisions(tmp_path: Path) -> str:
    return "".join(f.read_text() for f in (tmp_path / "debug").rglob("decisions.txt"))


def check(got: T, want: T, exact: T) -> None:
    """No further from the float64 answer than eager and one rounding of the largest value."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    size = float(exact.abs().max())
    mine, eager = float((got.double() - exact).abs().max()), float((want.double() - exact).abs().max())
    assert mine <= eager + torch.finfo(got.dtype).eps * size, (mine, eager, size)


FUNCTIONS: dict[str, tuple[Callable[..., T], list[tuple[int, ...]]]] = {
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(1000, 768), (3072, 768), (3072,)]),
    "odd rows": (lambda x, w, b: F.silu(F.linear(x, w, b)), [(777, 512), (1000, 512), (1000,)]),
    "odd depth": (lambda x, w: (x @ w).relu(), [(300, 520), (520, 264)]),
    "residual": (lambda x, w, b, y: F.linear(x, w, b) + y, [(512, 1024), (1024, 1024), (1024,), (512, 1024)]),
    "gate": (lambda x, g, u: F.silu(x @ g) * (x @ u), [(512, 1024), (1024, 2048), (1024, 2048)]),
    "batched": (lambda x, y: (x @ y) * 0.125 + 1, [(12, 200, 64), (12, 64, 200)]),
    "columns": (lambda x, w: torch.sigmoid(x.t() @ w), [(256, 640), (256, 384)]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", cost.SEARCH, ids=str)
def test_every_choice_of_tiles(tiles: Tiles, dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cost, "TEMPLATES", {tiles: cost.LIBRARY})
    for fn, shapes in FUNCTIONS.values():
        inputs = [(torch.randn(s, device="cuda") / s[-1] ** 0.25).to(dtype) for s in shapes]
        got = build(fn, tmp_path, matmul_templates="on")(*inputs)
        check(got, fn(*inputs), fn(*(x.double() for x in inputs)))
    assert decisions(tmp_path).count(f"one kernel of {tiles}") >= 1


def test_training_of_an_mlp(tmp_path: Path) -> None:
    def fn(x: T, w: T, b: T, v: T) -> T:
        return F.linear(F.gelu(F.linear(x, w, b)), v).square().mean()

    def gradients(run: Callable[..., T], dtype: torch.dtype) -> tuple[T, ...]:
        torch.manual_seed(0)
        shapes = [(512, 256), (1024, 256), (1024,), (256, 1024)]
        leaves = [(torch.randn(s, device="cuda") / 8).bfloat16().to(dtype).requires_grad_() for s in shapes]
        run(*leaves).backward()
        return tuple(x.grad for x in leaves)  # type: ignore[misc]

    got = gradients(build(fn, tmp_path, matmul_templates="on"), torch.bfloat16)
    for g, w, e in zip(got, gradients(fn, torch.bfloat16), gradients(fn, torch.float64), strict=True):
        check(g, w, e)
    assert "one kernel of" in decisions(tmp_path)


def test_float32_as_tf32(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    x, w = torch.randn(512, 768, device="cuda"), torch.randn(768, 1024, device="cuda")
    try:
        torch.set_float32_matmul_precision("high")
        got, want = build(lambda x, w: (x @ w).relu(), tmp_path, matmul_templates="on")(x, w), (x @ w).relu()
    finally:
        torch.set_float32_matmul_precision(before)
    exact = (x.double() @ w.double()).relu()
    assert float((got - exact).norm()) <= 1.5 * float((want - exact).norm())
    assert "one kernel of" in decisions(tmp_path)


def test_max_autotune_measures_once_and_is_right(tmp_path: Path) -> None:
    fn = FUNCTIONS["gelu"][0]
    inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) / 4 for s in ((4096, 768), (3072, 768), (3072,))]
    cache = str(tmp_path / "cache")
    for _ in range(2):
        got = build(fn, tmp_path, max_autotune=True, cache_dir=cache)(*inputs)
        check(got, fn(*inputs), fn(*(x.double() for x in inputs)))
    assert "us measured" in decisions(tmp_path)
    found = (tmp_path / "cache" / "autotune").rglob("*.json")
    (entry,) = (f for f in found if "library" in json.loads(f.read_text())["microseconds"])  # others are of tiles
    text = entry.read_text()
    assert '"library"' in text
    assert text.count("stages") >= len(cost.TEMPLATES)


def test_a_candidate_that_crashes_the_device_is_only_left_out(tmp_path: Path) -> None:
    """A grid that reads and writes far outside its buffers; the next trial runs in a new process."""
    device = torch.device("cuda", 0)
    context = ScheduleContext(read_device(device))
    tuner = products.product_tuner(resolve(None, {"cache_dir": str(tmp_path)}), context, device)
    plain = Tiles(64, 64, 64, 4, 4)  # every program reads where its number says
    case = matmul_fit.make_case((512, 512, 256), "relu", tuner, (plain,))
    kernel, buffers = case.emitted[str(plain)]
    launch = (kernel, buffers, tuner.compiled(kernel).result())
    good = trial.of(case.program, [launch])
    bad = {**good, "steps": [{**good["steps"][0], "grid": 1 << 24}]}
    measurer = measure.Measurer(measure.on_device(0).command)
    try:
        before = measurer(good)
        with pytest.raises(TrialFailed, match="CUDA"):
            measurer(bad)
        assert measurer(good) < 10 * before
    finally:
        measurer.stop()


class Projections(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(256, 512), torch.nn.Linear(512, 64, bias=False)

    def forward(self, x: T) -> T:
        return self.two(F.relu(self.one(x)))


def test_gradients_of_autocast_weights_are_written_as_float32_by_the_library(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Projections().cuda()
    x = torch.randn(1024, 256, device="cuda")
    compiled = build(model, tmp_path)
    with torch.autocast("cuda", torch.bfloat16):
        compiled(x).float().square().mean().backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        model(x).float().square().mean().backward()
    exact = Projections().cuda().double()
    exact.load_state_dict(model.state_dict())
    exact(x.double()).square().mean().backward()
    for g, p, e in zip(got, model.parameters(), exact.parameters(), strict=True):
        want: Any = p.grad
        reference: Any = e.grad
        assert (g.dtype, g.stride()) == (want.dtype, want.stride())
        mine, eager = float((g - reference).norm()), float((want - reference).norm())
        assert mine <= 2 * eager, (mine, eager)
    assert "2 matmuls write float32" in decisions(tmp_path)
