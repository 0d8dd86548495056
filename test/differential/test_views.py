"""Data movement: views, concatenation, slices, indexing; results equal eager's exactly, strides included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test.compare import check, check_gradients, compiled

pytestmark = pytest.mark.sample(2)

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.reshape(8, 15) + 1,
    "view of permuted": lambda x: x.permute(2, 0, 1).reshape(30, 4) * 2,
    "flatten": lambda x: x.flatten(1).sum(1),
    "unflatten": lambda x: x.unflatten(2, (2, 3)) * 2,
    "permute": lambda x: x.permute(1, 2, 0) + 0,
    "permute copied": lambda x: x.permute(1, 2, 0).contiguous(),
    "transpose": lambda x: x.transpose(0, 2) * x.transpose(0, 2),
    "expand": lambda x: x[:1].expand(3, 5, 6) * 2,
    "broadcast": lambda x: x + x[:, :1] + x[0, 0],
    "squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1) + 1,
    "select": lambda x: x.select(1, -2) + x[:, 0],
    "slice": lambda x: x[1:3, ::2, -4:-1] * 3,
    "slice past the end": lambda x: x[2:100, :, -100:4] * 3,
    "slice empty": lambda x: x[3:3] + 1,
    "split": lambda x: [t * 2 for t in x.split((1, 4), 1)],
    "chunk": lambda x: [t + 1 for t in x.chunk(3, 2)],
    "unbind": lambda x: sum(x.unbind(2)),
    "diagonal": lambda x: x.diagonal(1, 1, 2) * 2 + x.diagonal(0, 1, 2)[:, :5],
    "unfold": lambda x: x.unfold(2, 3, 2) * 1,
    "as_strided": lambda x: (x * 1).as_strided((3, 4), (2, 7), 5) + 1,
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -2), (0, 2)),
    "roll flat": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(2, 1, 1, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "tile": lambda x: x[0].tile(2, 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=7),
    "pad negative": lambda x: F.pad(x, (-1, 2)),
    "pad then sum": lambda x: F.pad(x, (2, 2)).sum(-1),
    "cat 0": lambda x: torch.cat([x, x * 2, x[:1]]),
    "cat -1": lambda x: torch.cat([x[..., :2], x, x + 1], -1),
    "cat empty": lambda x: torch.cat([x[:, :0], x], 1),
    "cat of dtypes": lambda x: torch.cat([x.int(), x.double()], 1),
    "cat then reduce": lambda x: torch.cat([x, x * 2], 2).sum(2),
    "stack": lambda x: torch.stack([x, x * 3], 1),
    "tril": lambda x: x.tril() + x.triu(2) + x.tril(-1),
    "arange": lambda x: x + torch.arange(6) + torch.arange(0, 5)[:, None],
    "full": lambda x: x + torch.full((6,), 3) - torch.ones_like(x) + torch.zeros(5, 1),
    "where": lambda x: torch.where(x > x[:1], x, -x),
    "masked_fill": lambda x: x.masked_fill(x < 3, 9).masked_fill(x[:, :1] > 40, 0),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, 1:4] * 2, 1, 1, 4),
    "slice_scatter step": lambda x: torch.slice_scatter(x, x[..., :3] * 2, 2, 0, 6, 2),
    "select_scatter": lambda x: torch.select_scatter(x, x[0] * 2, 0, 2),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0] + 0, x[0, :, 0] + 0, indexing="ij")[1] * 2,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 5, 6), 2) + 1,
}


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    flat = torch.arange(120) if dtype != torch.int8 else torch.arange(120) % 50
    return {
        "contiguous": flat.reshape(4, 5, 6).to(dtype),
        "permuted": flat.reshape(6, 4, 5).permute(1, 2, 0).to(dtype),
        "strided": torch.stack([flat, -flat], -1).reshape(4, 5, 6, 2).to(dtype)[..., 0],
    }


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", list(inputs(torch.float32)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_views(layout: str, dtype: torch.dtype) -> None:
    names = list(VIEWS)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        labels = [n for n in part for _ in flat(VIEWS[n](inputs(dtype)[layout]))]
        check(lambda x, part=part: [r for n in part for r in flat(VIEWS[n](x))], inputs(dtype)[layout], names=labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_as_strided_scatter_counts_from_the_storage_of_each_input(dtype: torch.dtype) -> None:
    """A window may begin before the input, and one graph serves inputs that begin at different places."""
    storage, src = torch.randn(24).to(dtype), torch.randn(2, 2).to(dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, src, (2, 2), (1, 2), storage_offset=1)

    compiled = torch.compile(fn, backend="alt", options={"strict": True})
    for offset in (1, 0, 3):
        x = storage.as_strided((3, 3), (6, 2), offset)
        assert torch.equal(compiled(x), fn(x)), offset


def flat(x: Any) -> list[torch.Tensor]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool], ids=str)
def test_data_movement_in_other_dtypes(dtype: torch.dtype) -> None:
    moving = ["permute copied", "flip", "roll", "repeat", "cat empty", "stack", "select", "split"]
    x = inputs(torch.int8)["contiguous"].to(dtype)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        moved = [x.permute(1, 2, 0).contiguous(), x.flip(0, 2), x.roll(1, 2), x.repeat(2, 1, 1), torch.stack([x, x], 1)]
        return [*moved, torch.cat([x, x], 1), x[1:, ::2].clone(), F.pad(x, (1, 1)), x.tril(), torch.where(x > 0, x, x)]

    check(fn, x, tolerance=0, names=moving)


def test_gradients_of_views() -> None:
    differentiable = [n for n in VIEWS if n not in ("cat of dtypes", "full", "arange", "roll flat", "slice empty")]
    for k in range(0, len(differentiable), 20):
        part = differentiable[k : k + 20]
        x = torch.randn(4, 5, 6)
        check_gradients(lambda x, part=part: [r for n in part for r in flat(VIEWS[n](x))], x)


INDEXING: dict[str, Callable[..., torch.Tensor]] = {
    "index": lambda x, i, j: x[i],
    "index pair": lambda x, i, j: x[i, j],
    "index last": lambda x, i, j: x[:, :, j],
    "index apart": lambda x, i, j: x[i, :, j],
    "index 2-d": lambda x, i, j: x[:, i.view(2, 2)],
    "index broadcast": lambda x, i, j: x[i[:, None], j],
    "index_select": lambda x, i, j: x.index_select(1, i),
    "gather": lambda x, i, j: x.gather(1, i.view(4, 1, 1).expand(4, 3, 6)),
    "take_along": lambda x, i, j: torch.take_along_dim(x, x.argsort(1), 1),
    "embedding": lambda x, i, j: F.embedding(i, x[:, :, 0]),
    "mask": lambda x, i, j: x * (x > 2),
    "index then reduce": lambda x, i, j: x[i].sum(-1),
    "index of computed": lambda x, i, j: (x * 2)[(i + 1) % 4],
    "index_put": lambda x, i, j: x.index_put((i[:2],), x[:2] * 2),
    "index_put accumulate": lambda x, i, j: x.index_put((i,), x, accumulate=True),
    "scatter": lambda x, i, j: x.scatter(1, i.view(4, 1, 1), x[:, :1, :1] * 3),
    "scatter_add": lambda x, i, j: x.scatter_add(0, i.view(4, 1, 1).expand(4, 5, 6), x),
    "index_add": lambda x, i, j: x.index_add(0, i, x),
    "index_copy": lambda x, i, j: x.index_copy(0, i[:1], x[1:2] * 5),
    "index_fill": lambda x, i, j: x.index_fill(1, i, 4.0),
    "one_hot": lambda x, i, j: F.one_hot(i, 5).to(x.dtype) * 2,
    "nearest": lambda x, i, j: F.interpolate(x[None], scale_factor=2),
}


def test_indexing() -> None:
    x, i, j = torch.randn(4, 5, 6), torch.tensor([3, -1, 0, 2]), torch.tensor([0, 2, -5, 1])
    names = list(INDEXING)
    # gather and scatter take no negative positions
    positive = [n for n in names if "scatter" in n or n in ("gather", "embedding", "one_hot", "index_select")]
    positive += ["index_add", "index_copy", "index_fill"]
    check(lambda *a: [INDEXING[n](*a) for n in names if n not in positive], x, i, j)
    check(lambda *a: [INDEXING[n](*a) for n in positive], x, i % 4, j, names=positive)
    check(lambda x, i: [x[i], x.long()[i.int()], x[i.int()]], x, i)


def test_gradients_of_indexing() -> None:
    x, i, j = torch.randn(4, 5, 6), torch.tensor([3, 1, 0, 1]), torch.tensor([0, 2, 4, 1])
    names = [n for n in INDEXING if n not in ("one_hot", "index_put")]
    check_gradients(lambda *a: [INDEXING[n](*a) for n in names], x, i, j)


def test_reads_of_other_rows_in_one_kernel() -> None:
    """A row reads elements that another row has not stored yet."""
    x = torch.randn(3, 4)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clamp(-1, 1)
        z = x[:, ::2].clone()
        z[2] += 1
        z.t().mul_(2)
        return [y, y.roll(1, 0), (y + y.flip(0)).tanh(), z, y + y[2], (y * 2).repeat(2, 1)]

    check(fn, x)
    check(fn, torch.randn(200, 300), threads=2)


def test_a_gather_in_the_padding_is_not_checked() -> None:
    x = torch.randn(4, 5)
    check(
        lambda x: [
            F.pad(x.gather(1, torch.arange(5).flip(0).expand(4, 5)), (3, 2)),
            F.pad(x[torch.tensor([3, 1])], (0, 1, 1, 1)),
        ],
        x,
    )


def test_writing_a_number_into_a_slice() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[..., 1:] = 2
        x[0] = -1.5
        return x

    check(fn, torch.randn(3, 4))


OUT_OF_RANGE: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "index": (lambda x, i: x[i] * 2, 4),
    "index negative": (lambda x, i: x[i] * 2, -5),
    "index_select": (lambda x, i: x.index_select(0, i).sum(), 4),
    "index_select negative": (lambda x, i: x.index_select(0, i).sum(), -1),
    "gather": (lambda x, i: x.gather(0, i[:, None].expand(2, 3)), 7),
    "gather negative": (lambda x, i: x.gather(0, i[:, None].expand(2, 3)), -1),
    "embedding": (lambda x, i: F.embedding(i, x) + 1, -1),
}


@pytest.mark.parametrize("name", list(OUT_OF_RANGE))
def test_an_index_out_of_range_raises(name: str) -> None:
    fn, bad = OUT_OF_RANGE[name]
    x, good = torch.randn(4, 3), torch.tensor([0, 3])
    run = compiled(fn)
    torch.testing.assert_close(run(x, good), fn(x, good))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        fn(x, torch.tensor([0, bad]))
    with pytest.raises(eager.type, match=f"index {bad} is out of bounds"):
        run(x, torch.tensor([0, bad]))
    torch.testing.assert_close(run(x, good), fn(x, good))  # the error does not stick


CHANNELS = torch.channels_last


def test_channels_last_and_other_output_strides() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=CHANNELS)
    y = torch.randn(2, 3, 4, 5)

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        point = [x * 2, x + y, y + x, x.relu() * x, x.to(torch.float64), torch.where(x > 0, x, y), x.clone()]
        copied = [x.contiguous(), y.contiguous(memory_format=CHANNELS), x.permute(0, 2, 3, 1) + 1, torch.zeros_like(x)]
        reduced = [x.sum(1), x.sum(1, keepdim=True), x.mean((2, 3)), x.amax(0), F.softmax(x, 1), torch.cat([x, x], 1)]
        pooled = [F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1), F.interpolate(x, scale_factor=2)]
        return [*point, *copied, *reduced, *pooled, F.conv2d(x, torch.ones(4, 3, 1, 1)), x.flip(1), F.pad(x, (1, 1))]

    check(fn, x, y)


def test_output_strides_of_odd_inputs() -> None:
    a, b, c = torch.randn(4, 6).t(), torch.randn(1, 6).expand(4, 6), torch.randn(4, 12)[:, ::2]
    check(lambda a, b, c: [a + 1, b * 2, c - 1, a.t() + b, b + c, c.t() * a, (a * 2).t(), a.exp().sum(0)], a, b, c)


T = torch.Tensor


def expanded(x: T) -> tuple[T, ...]:
    y = (x + 1)[:, None].expand(3, 4)
    return y, y * 2, x.expand(4, 3)


def overlapping(x: T) -> tuple[T, ...]:
    return x.sin().unfold(0, 2, 1), x.unfold(0, 2, 1)


@pytest.mark.parametrize("fn", [expanded, overlapping], ids=lambda f: f.__name__)
def test_results_whose_points_share_elements_keep_their_strides(fn: Callable[..., Any]) -> None:
    check(fn, torch.randn(3))


def test_a_saved_overlapping_window_is_read_back_right() -> None:
    """The gradient of the factor reads the windows, which the forward saved with their overlapping strides."""
    check_gradients(lambda x, w: x.sin().unfold(0, 4, 2) * w, torch.randn(20), torch.randn(4))


def doubled(x: T, z: T) -> tuple[T, ...]:
    z.mul_(2)
    return z.real + x, z.transpose(0, 1)


def passed_on(x: T, z: T) -> tuple[T, ...]:
    return z, z.t().contiguous(), x + 1, z[0:0]


@pytest.mark.parametrize("fn", [doubled, passed_on], ids=lambda f: f.__name__)
def test_complex_tensors_beside_kernels(fn: Callable[..., Any]) -> None:
    x, z = torch.randn(4, 4), torch.randn(4, 4, dtype=torch.complex64)
    other = z.clone()
    torch.testing.assert_close(compiled(fn)(x, z), fn(x, other))
    torch.testing.assert_close(z, other)
