"""Products and a softmax replace the fused kernels of a GPU where they are faster. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.fx_passes.attention import gates
from altbackend.fx_passes.attention.form import Form
from altbackend.fx_passes.attention.operators import value_of
from altbackend.fx_passes.attention.tiled_kernel import attention_in_tf32
from test.fx_passes.test_attention import CASES, IDS, Case, Fuse, captured, gradients, same
from tools.translated import Backend, codes

T = torch.Tensor
HALF = torch.bfloat16


def plain(q: T, k: T, v: T) -> T:
    return (q @ k.transpose(-2, -1) * 0.1).softmax(-1) @ v


def causal(q: T, k: T, v: T) -> T:
    hidden = torch.ones(q.shape[-2], k.shape[-2], device=q.device).triu(1).bool()
    return (q @ k.transpose(-2, -1) * 0.1).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def relative(q: T, k: T, v: T) -> T:
    rows, columns = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    bias = (columns[None, :] - rows[:, None]).to(q.dtype) * 0.1
    return (q @ k.transpose(-2, -1) * 0.1 + bias).softmax(-1) @ v


class WithGradient:
    """A traced value on a GPU, which a build for CPUs lets no gradient flow through."""

    def __init__(self, value: T, trains: bool) -> None:
        self.value, self.requires_grad = value, trains

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


@pytest.mark.parametrize(("fn", "dtype", "keys", "features", "trains", "fused"), [
    (plain, torch.float32, 512, 64, True, True),
    (plain, torch.float32, 512, 128, True, False),  # in TF32
    (plain, torch.float32, 64, 384, True, False),
    (plain, torch.float32, 64, 384, False, True),  # whole tiles
    (plain, torch.float32, 64, 64, False, True),
    (plain, torch.float32, 64, 64, True, True),
    (plain, torch.float32, 32, 8, True, False),
    (plain, torch.float32, 192, 64, True, True),
    (plain, HALF, 512, 256, True, True),
    (plain, HALF, 512, 320, True, False),
    (plain, HALF, 512, 320, False, False),
    (causal, HALF, 128, 192, True, True),  # a flag, not a mask
    (relative, HALF, 128, 192, True, False),  # a mask: neither FlashAttention nor cuDNN
    (relative, HALF, 128, 192, False, True),
    (relative, HALF, 128, 128, True, True),
])  # fmt: skip
def test_kernels(
    fn: Callable[[T, T, T], T], dtype: torch.dtype, keys: int, features: int, trains: bool, fused: bool
) -> None:
    inputs = [torch.randn(1, 2, keys, features).to(dtype) for _ in range(3)]
    with (
        patch.object(torch_api, "allows_tf32", lambda: True),
        patch.object(gates, "value_of", lambda n: WithGradient(value_of(n), trains)),
    ):
        backend = captured(fn, inputs, on="cuda", attention="auto")
    assert backend.fused == fused, backend.kept()


def test_large_scores_are_not_stored_in_inference() -> None:
    inputs = [torch.zeros(1, 1, 40_000, 320, dtype=HALF, device="meta") for _ in range(3)]
    with patch.object(torch_api, "allows_tf32", lambda: True):
        backend = captured(plain, inputs, on="cuda", attention="auto")
    assert backend.fused == 1, backend.kept()


def tiled(backend: Fuse) -> int:
    """Return the number of calls of the generated kernel for TF32."""
    graphs = (gm.graph for gm in backend.graph.modules() if isinstance(gm, torch.fx.GraphModule))
    return sum(n.target is attention_in_tf32 for graph in graphs for n in graph.nodes)


@pytest.mark.parametrize(("dtype", "keys", "features", "trains", "tf32", "calls"), [
    (torch.float32, 512, 64, False, True, 1),
    (torch.float32, 512, 64, False, False, 0),  # float32 stays exact
    (torch.float32, 512, 128, False, True, 0),  # more features than registers hold
    (torch.float32, 512, 64, True, True, 1),
    (torch.float32, 512, 128, True, True, 0),
    (torch.float32, 128, 64, False, True, 1),
    (torch.float32, 32, 64, False, True, 0),  # a fraction of a tile
    (torch.float32, 80, 64, False, True, 1),
    (torch.float32, 80, 64, True, True, 0),  # two tiles, mostly empty
    (torch.float32, 80, 32, True, True, 1),
    (HALF, 512, 64, False, True, 0),
])  # fmt: skip
def test_tiles_of_tf32(dtype: torch.dtype, keys: int, features: int, trains: bool, tf32: bool, calls: int) -> None:
    inputs = [torch.randn(1, 2, keys, features).to(dtype) for _ in range(3)]
    with (
        patch.object(torch_api, "allows_tf32", lambda: tf32),
        patch.object(gates, "value_of", lambda n: WithGradient(value_of(n), trains)),
    ):
        fn = plain if trains else relative  # the mask would have a gradient, too
        assert tiled(captured(fn, inputs, on="cuda", attention="auto")) == calls


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_tiles_of_tf32_compute_every_form(case: Case) -> None:
    """The operator of the generated kernel runs on a CPU too: each form of an attention gives eager's results."""
    torch.manual_seed(0)
    inputs = [x.float() if x.is_floating_point() else x for x in case.inputs()]
    with patch.object(gates, "takes_tiles_of_tf32", lambda form: not form.dropout and form.sink is None):
        backend = captured(case.fn, inputs)
    assert backend.fused == 1, backend.kept()
    with torch.no_grad():
        same(backend.result, case.fn(*inputs))


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_tiles_of_tf32_give_the_gradients_of_every_form(case: Case) -> None:
    """Masks that are learned stay with the other kernels."""

    def takes(form: Form) -> bool:
        return not form.dropout and form.sink is None and not gates.has_learned_mask(form)

    with patch.object(gates, "takes_tiles_of_tf32", takes):
        for got, want in gradients(case, lambda x: x.float() if x.is_floating_point() else x):
            same(got, want)


@pytest.mark.parametrize("learned", [False, True])
def test_a_learned_mask_has_no_tiles(learned: bool) -> None:
    def attend(q: T, k: T, v: T, bias: T) -> T:
        return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v

    inputs = [*(torch.randn(1, 2, 512, 32) for _ in range(3)), torch.randn(2, 512, 512, requires_grad=learned)]
    with patch.object(torch_api, "allows_tf32", lambda: True):
        assert tiled(captured(attend, inputs, on="cuda", attention="auto")) == (not learned)


def test_training_in_tf32_adds_no_kernels_for_blocks() -> None:
    """The lists of the one block are constants; torch would compute those of the gradient in four kernels."""
    q, k, v = (torch.randn(1, 2, 512, 32, requires_grad=True) for _ in range(3))
    attend = torch._dynamo.allow_in_graph(attention_in_tf32)

    def run(backend: Backend) -> None:
        torch.compile(lambda q, k, v: attend(q, k, v, None, False, 1.0), backend=backend, dynamic=False)(q, k, v)

    with patch.object(torch_api, "allows_tf32", lambda: True):
        names = [job.name for code in codes(run, "cuda", resolve(None, {})) for job in code.jobs]
    assert "attention_by_keys" in names
    assert all("attention" in name for name in names), names
