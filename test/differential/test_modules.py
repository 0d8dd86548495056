"""Normalisations, activations, convolution and small blocks, forward and backward, train and eval."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from altbackend import alt
from test.compare import OPTIONS, check, check_gradients, compiled, difference

pytestmark = pytest.mark.sample(3)

ACTIVATIONS: list[Callable[..., Any]] = [
    *(F.relu, F.relu6, F.gelu, F.silu, F.elu, F.selu, F.celu, F.leaky_relu, F.hardtanh, F.hardswish, F.hardsigmoid),
    *(F.mish, F.softplus, F.softsign, F.tanhshrink, F.logsigmoid, F.hardshrink, F.softshrink, torch.tanh),
    *(torch.sigmoid, lambda x: F.gelu(x, approximate="tanh"), lambda x: F.glu(x, -1), lambda x: F.threshold(x, 0.1, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_activations(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 12) * 3).to(dtype)
    # eager's gradients of hardsigmoid and hardswish hold 1/6 in float32 also for float64
    check_gradients(lambda x: [f(x) for f in ACTIVATIONS], x, tolerance=1e-7 if dtype == torch.float64 else None)


def norms(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    return [
        F.layer_norm(x, (6,), w, b),
        F.layer_norm(x, (6,)),
        F.layer_norm(x, (5, 6)),
        F.rms_norm(x, (6,), w),
        F.group_norm(x, 2, c, c),
        F.group_norm(x, 4),
        F.instance_norm(x),
        F.normalize(x, dim=1),
        F.layer_norm(x.transpose(1, 3), (4,)),
        F.softmax(F.layer_norm(x, (6,), w, b), -1),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_norms(dtype: torch.dtype) -> None:
    x, w, b, c = (torch.randn(s).to(dtype) for s in ((3, 4, 5, 6), (6,), (6,), (4,)))
    check(norms, x, w, b, c)


def test_gradients_of_norms() -> None:
    x, w, b, c = (torch.randn(s) for s in ((3, 4, 5, 6), (6,), (6,), (4,)))
    check_gradients(norms, x, w, b, c)


def test_norms_of_far_off_means() -> None:
    """E[x^2] - mean^2 would lose everything here; two passes do not."""
    x = torch.randn(8, 64) + 1000
    check(lambda x: [F.layer_norm(x, (64,)), x.var(1), x.std(0), *torch.var_mean(x, 1)], x, tolerance=2e-4)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5)), (7, 12)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 3, 8, 8),
    ),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (10, 6)),
    "batch norm without affine": (lambda: nn.BatchNorm2d(4, affine=False), (3, 4, 5, 5)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1)), (3, 4, 5, 5)),
    "pools": (
        lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (2, 4, 11, 11),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
    "lstm cell": (lambda: Recurrent(), (3, 8)),
    "upsample": (lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 3, 3)), (1, 2, 4, 4)),
}


class Recurrent(nn.Module):
    """Two steps of an LSTM cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x)
        return self.cell(x * 2, h)[0]


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("training", [True, False])
def test_module(name: str, training: bool) -> None:
    """Result, gradient of the input and of every parameter, and every buffer afterwards."""
    make, shape = MODULES[name]
    eager = make().train(training)
    mine = copy.deepcopy(eager)
    x = torch.randn(shape)
    states = []
    for module, run in ((eager, eager), (mine, torch.compile(mine, backend=alt, options=dict(OPTIONS)))):
        state: dict[str, Any] = {}
        for step in range(2):
            leaf = x.clone().requires_grad_()
            out = run(leaf)
            weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
            (out * weight).sum().backward()
            state |= {f"out {step}": out.detach(), f"grad {step}": leaf.grad}
        state |= {f"grad of {n}": p.grad for n, p in module.named_parameters()}
        states.append(state | {n: b.clone() for n, b in module.named_buffers()})
    want, got = states
    # the second step sums gradients of 1/std, which eager and we round differently
    wrong = [f"{n}: {t}" for n in want if (t := difference(got[n], want[n], tolerance=3e-5, strides=False))]
    assert not wrong, "\n".join(wrong)


def test_inference_without_gradients() -> None:
    for make, shape in MODULES.values():
        module, x = make().eval(), torch.randn(shape)
        with torch.no_grad():
            check(module, x, run=torch.compile(module, backend=alt, options=dict(OPTIONS)))


def test_attention() -> None:
    q, k, v = (torch.randn(2, 3, 7, 8) for _ in range(3))

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        mask = torch.ones(7, 7, dtype=torch.bool).tril()
        masked = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return [
            masked,
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v),
        ]

    check(fn, q, k, v)
    check_gradients(fn, q, k, v, tolerance=2e-5)  # eager's own fused attention sums in another order


def test_matrix_products() -> None:
    a, b, c = torch.randn(4, 5), torch.randn(5, 6), torch.randn(3, 4, 5)

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        plain = [a @ b, a @ b + 1, F.linear(a, b.t(), b[0]), c @ b, torch.bmm(c, c.transpose(1, 2)), a.t() @ a]
        shaped = [(c @ b).relu().sum(1), a[::2] @ b[:, ::3], torch.einsum("bij,jk->bik", c, b), a[0] @ b, a @ b[:, 0]]
        return [*plain, *shaped, torch.baddbmm(c @ c.mT, c, c.mT, beta=0.5), torch.outer(a[0], b[0])]

    check(fn, a, b, c)
    check_gradients(fn, a, b, c)


def test_library_calls_between_kernels() -> None:
    x = torch.randn(6, 8)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        s = torch.sort(x * 2, dim=1)
        return [s.values + 1, s.indices, x.topk(3).values * 2, torch.linalg.inv(x[:, :6] + 4 * torch.eye(6)) + 1]

    check(fn, x, tolerance=1e-4)  # the inverse amplifies rounding by its condition number


def test_dropout_keeps_what_it_should() -> None:
    """Random streams differ from eager's: the kept share, the scale and the gradient's mask are checked."""
    x = torch.ones(200, 200, requires_grad=True)
    y = compiled(lambda x: F.dropout(x, 0.25))(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.75))
    assert 0.72 < kept.float().mean() < 0.78
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, kept)


def test_random_numbers_follow_the_seed() -> None:
    run = compiled(lambda x: [torch.rand_like(x), torch.randn_like(x), torch.randint(0, 9, (50,)), F.dropout(x)])
    x, results = torch.ones(50), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(x))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))
    assert len(set(results[0][0].tolist())) > 40
