"""Programs as libraries: kernels, library calls through the stable interface, sizes and numbers, state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import altbackend
from altbackend.compat.pt2 import Runner
from altbackend.errors import BadGraph, Unsupported

from .models import Dim, Mlp, State, check, module


def library_calls(x: torch.Tensor) -> Any:
    """Operators with and without a function in the stable interface, with lists, options and several results."""
    sorted_x, order = x.sort(1)
    return (
        *(x.topk(3)[0], order, x.median(), torch.histc(x, 4), torch.fft.rfft(x).abs(), torch.searchsorted(sorted_x, x)),
        *torch.tensor_split(x, 3),
        *torch.unbind(x * 2)[:2],
        *(torch.cat([x, x], 1), torch.stack([x, x]), torch.linalg.inv(x @ x.T + 5 * torch.eye(5))),
        *(x.unfold(1, 3, 2), torch.complex(x, x) * 2, x.view(torch.int32) + 1, x.to(torch.float8_e4m3fn).float()),
        *(torch.full((2,), float("nan")), x.masked_fill(x > 0, float("-inf")).softmax(-1), torch.rand_like(x) * 0),
    )


def test_library_calls() -> None:
    check(module(library_calls), (torch.randn(5, 8),))


def positions(x: torch.Tensor, i: torch.Tensor) -> Any:
    """Checked positions in kernels and in library calls."""
    rows = i[:, None].expand(4, 8)
    return x[i], x.index_put((i,), x[:4]), x.scatter(0, rows, 1.5), x.gather(0, rows), x.index_add(0, i, x[:4])


def test_positions_and_their_error() -> None:
    x, i = torch.randn(5, 8), torch.tensor([0, 2, 1, 4])
    runner = Runner(check(module(positions), (x, i)))
    with pytest.raises(RuntimeError, match=r"out of bounds|out of range"):
        runner.run([x, i + 1])
    assert len(runner.run([x, i])) == 5  # the error is gone


def from_data(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Sizes and numbers that only data decides."""
    k = n.item()
    torch._check(k >= 1)
    torch._check(k <= 4)
    return x.nonzero(), x.unique() * 2, x[:, :k] * 2, k, n.float().item() + 1.5, x[x > 0].sum()


def test_sizes_that_data_decides() -> None:
    x = torch.randint(-3, 3, (5, 8)).float()
    runner = Runner(check(module(from_data), (x, torch.tensor(3)), more=((x * 0, torch.tensor(1)),)))
    with pytest.raises(RuntimeError, match=r"u\d+ <= 4"):
        runner.run([x, torch.tensor(5)])


def with_sizes(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Symbolic sizes in kernels, views, allocations, library calls and results."""
    n = x.shape[0]
    return x @ y.T, x.view(-1) + 1, n * 2, n / 4, n > 3, x.new_ones(n), x.repeat(2, 1), torch.arange(n) + 1.0, x.flip(0)


def test_dynamic_sizes() -> None:
    more = ((torch.randn(1, 8), torch.randn(1, 8)), (torch.randn(50, 8), torch.randn(9, 8)))
    check(module(with_sizes), (torch.randn(5, 8), torch.randn(4, 8)), ({0: Dim("a", max=99)}, {0: Dim("b")}), more)


def test_a_size_that_follows_from_another() -> None:
    n = Dim("n", min=2, max=30)
    m = module(lambda x, y: x[::2] + y)
    runner = Runner(
        check(
            m, (torch.randn(8, 3), torch.randn(4, 3)), ({0: 2 * n}, {0: n}), ((torch.randn(20, 3), torch.randn(10, 3)),)
        )
    )
    with pytest.raises(RuntimeError, match="dimension 0 of input 0"):
        runner.run([torch.randn(7, 3), torch.randn(4, 3)])


def test_state_and_results_of_all_kinds() -> None:
    check(State(), (torch.randn(3, 3),), more=((torch.randn(3, 3),),))


def written(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Writes both inputs."""
    x.add_(1)
    y[0].mul_(2)
    return x * 2, y.sum()


def test_inputs_are_written_in_place() -> None:
    check(module(written), (torch.randn(3, 3), torch.randn(2, 4)))


def test_a_convolution_network() -> None:
    block = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    net = nn.Sequential(block, nn.Conv2d(8, 4, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    images = [torch.randn(n, 3, 16, 16) for n in (2, 1, 7)]
    check(net.eval(), (images[0],), ({0: Dim("n", max=8)},), ((images[1],), (images[2],)))


class Attention(nn.Module):
    """A block of a transformer with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_a_transformer_of_any_batch_and_length() -> None:
    ids = [torch.randint(0, 11, n) for n in ((2, 6), (1, 2), (3, 17))]
    check(Attention().eval(), (ids[0],), ({0: Dim("b", max=9), 1: Dim("l", max=99)},), ((ids[1],), (ids[2],)))


def test_a_graph_module_of_make_fx() -> None:

    x = torch.randn(4, 5)
    gm = make_fx(lambda x: (x.exp().sum(0), x @ x.T), tracing_mode="symbolic")(x)
    runner = Runner(Path(altbackend.aot_compile(gm, (x,))))
    for rows in (4, 7):
        given = torch.randn(rows, 5)
        torch.testing.assert_close(runner.run([given]), [given.exp().sum(0), given @ given.T])


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_output_that_is_no_tuple_is_named() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(BadGraph, match="the output add"):
        altbackend.aot_compile(gm, (torch.randn(3),))


def test_control_flow_is_refused_by_name() -> None:
    m = module(lambda x: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)))
    with pytest.raises(Unsupported, match="cond"):
        altbackend.aot_compile(torch.export.export(m, (torch.randn(3),)))


def test_an_operator_in_python_is_called_through_the_dispatcher() -> None:
    with torch.library._scoped_library("aot_test", "FRAGMENT") as library:
        library.define("twice(Tensor x, float by, str? note=None, int[]? dims=None) -> Tensor")
        library.impl("twice", lambda x, by, note=None, dims=None: x * 2 * by + len(dims), "CPU")
        library.impl("twice", lambda x, by, note=None, dims=None: torch.empty_like(x), "Meta")
        m = module(lambda x: torch.ops.aot_test.twice(x + 1, 0.5, 'a\n"?\\', [1, 2]))
        check(m, (torch.randn(3, 4),))


def test_an_exported_program_needs_no_example_inputs_and_equal_ones_give_equal_bytes() -> None:
    def compiled() -> bytes:
        return Path(altbackend.aot_compile(torch.export.export(Mlp(), (torch.randn(4, 16),)))).read_bytes()

    assert compiled() == compiled()
