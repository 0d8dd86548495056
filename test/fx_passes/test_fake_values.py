"""Fake values that are computed without the fake-tensor mode have the geometry of eager's results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from altbackend.compat import fake_values

aten = torch.ops.aten


def some(rng: random.Random, sizes: list[int]) -> torch.Tensor:
    """Return a tensor of these sizes with permuted or sliced memory."""
    order = rng.sample(range(len(sizes)), len(sizes))
    base = torch.empty([sizes[k] + rng.choice((0, 0, 2)) for k in order])
    back = base.permute([order.index(k) for k in range(len(sizes))])
    return back[tuple(slice(0, n) for n in sizes)]


def call_of(rng: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """Return an operator and arguments; some do not fit."""
    a, b, c = (rng.randint(1, 4) for _ in range(3))
    x = some(rng, [a, b, c])
    dim = rng.randint(-3, 2)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.view.default, (x, [a, b * c])),
        (aten.view.default, (x, [-1, c])),
        (aten.reshape.default, (x, [a, b * c])),
        (aten.reshape.default, (x, [-1, b])),
        (aten.t.default, (some(rng, [a, b]),)),
        (aten.transpose.int, (x, dim, rng.randint(-3, 2))),
        (aten.permute.default, (x, rng.sample(range(3), 3))),
        (aten.slice.Tensor, (x, dim, rng.randint(0, 2), rng.randint(1, 5))),
        (aten.slice.Tensor, (x, dim, None, None, 2)),
        (aten.select.int, (x, dim, 0)),
        (aten.unsqueeze.default, (x, dim)),
        (aten.squeeze.dim, (x, dim)),
        (aten.expand.default, (some(rng, [a, 1, c]), [a, b, -1])),
        (aten.mm.default, (some(rng, [a, b]), some(rng, [b, c]))),
        (aten.bmm.default, (x, some(rng, [a, c, b]))),
        (aten.addmm.default, (some(rng, [c]), some(rng, [a, b]), some(rng, [b, c]))),
        (aten.addmm.default, (some(rng, [a, 1]), some(rng, [a, b]), some(rng, [b, c]))),
        (aten.mm.default, (some(rng, [a, b]), some(rng, [c, b]))),
        (aten.cat.default, ([torch.empty(a, b), torch.empty(c, b)],)),
        (aten.cat.default, ([x, some(rng, [a, b, c])], dim)),
    ]
    formats = (torch.contiguous_format, torch.channels_last)
    images = [torch.empty(a, n, b, c, memory_format=rng.choice(formats)) for n in (c, b)]
    calls.append((aten.cat.default, (images, 1)))
    image = torch.empty(a, b, c, a, memory_format=rng.choice(formats))
    channels = torch.empty(1, b, 1, 1, memory_format=rng.choice(formats))
    scalars = ((aten.add.Scalar, (x, 0.5)), (aten.mul.Tensor, (x, 2)), (aten.clamp.default, (image, None, 6)))
    unary = (rng.choice(UNARY), (rng.choice((x, image, channels)),))
    operands = rng.choice(((x, some(rng, [a, b, c])), (x, some(rng, [b, c])), (image, channels), (channels, image)))
    binary = (rng.choice(BINARY), operands)
    if rng.random() < 0.5:
        return rng.choice((unary, binary, rng.choice(scalars), convolution_of(rng, a, b, c)))
    return rng.choice(calls)


BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
WITH_NUMBERS = (aten.add.Scalar, aten.mul.Scalar, aten.clamp.default)
UNARY = tuple(sorted(fake_values.POINTWISE - {*BINARY, *WITH_NUMBERS}, key=str))


def convolution_of(rng: random.Random, a: int, b: int, c: int) -> tuple[Any, tuple[Any, ...]]:
    """Return a convolution of an image or a volume, perhaps channels-last; some windows do not fit."""
    rank, groups = rng.choice((2, 3)), rng.choice((1, b))
    last = torch.channels_last if rank == 2 else torch.channels_last_3d
    x = some(rng, [a, b, *(rng.randint(1, 6) for _ in range(rank))])
    w = torch.empty(c * groups, b // groups, *(rng.randint(1, 3) for _ in range(rank)))
    x, w = (t.contiguous(memory_format=last) if rng.random() < 0.4 else t for t in (x, w))
    bias = rng.choice((None, torch.empty(c * groups)))
    lists = [[rng.randint(*ends)] * rank for ends in ((1, 2), (0, 1), (1, 2))]
    return aten.convolution.default, (x, w, bias, *lists, False, [0] * rank, groups)


def geometry(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return sizes, strides, offset and dtype of eager's result; None if eager raises an error."""
    try:
        out: torch.Tensor = target(*args)
    except (RuntimeError, ValueError, IndexError):
        return None
    return out.shape, out.stride(), out.storage_offset(), out.dtype


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_values_have_the_geometry_of_results(seed: int) -> None:
    rng, direct = random.Random(seed), 0
    mode = FakeTensorMode()
    for _ in range(400):
        target, args = call_of(rng)
        want = geometry(target, args)
        is_view = want is not None and target in fake_values.VIEWS and shares_memory(target(*args), args[0])
        args = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        try:
            known = fake_values.of_call(target, args)
        except (RuntimeError, IndexError):
            assert want is None
            continue
        if known is None:  # the mode is asked, which raises errors of its own
            continue
        direct += 1
        assert type(known) is FakeTensor
        assert known.fake_mode is mode
        assert known.device == torch.device("cpu")
        if target in fake_values.POINTWISE:  # torch gives dimensions of one element other strides than eager
            with mode:
                want = geometry(target, args)
        assert (known.shape, known.stride(), known.storage_offset(), known.dtype) == want
        if target in fake_values.VIEWS:
            assert shares_memory(known, args[0]) == is_view
            assert is_view or target is aten.reshape.default
    assert direct > 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_norms_have_the_values_of_the_mode(device: str, dtype: torch.dtype) -> None:
    rng, mode, direct = random.Random(5), FakeTensorMode(allow_non_fake_inputs=True), 0
    for _ in range(60):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(2, 5))]
        with mode:
            x = torch.empty(sizes, dtype=dtype, device=device).permute(rng.sample(range(len(sizes)), len(sizes)))
            channels = [torch.empty(x.shape[1], dtype=dtype, device=device) for _ in range(4)]
            weight, bias = ((None, None), channels[:2])[rng.randint(0, 1)]
            args = (x, weight, bias, *channels[2:], 0.1, 1e-5)
            want = fake_values.BATCH_NORM(*args)
        got = fake_values.of_call(fake_values.BATCH_NORM, args)
        if got is not None:
            direct += 1
            assert isinstance(got, tuple)
            facts = [[(t.shape, t.stride(), t.dtype, t.device.type) for t in results] for results in (got, want)]
            assert facts[0] == facts[1]
    assert direct > 10


def test_other_values_are_left_to_the_mode() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(3, 4))
    assert isinstance(x, FakeTensor)
    symbolic = mode.from_tensor(torch.empty(5, 6), static_shapes=False)
    for args in ((symbolic,), (x.conj().to(torch.complex64).conj(),), (torch.empty(2, 2),)):
        assert fake_values.of_call(aten.t.default, args) is None
    assert fake_values.of_call(aten.mm.default, (x, mode.from_tensor(torch.empty(4, 2, dtype=torch.float64)))) is None
    assert fake_values.of_call(aten.sin.default, (x,)) is None
