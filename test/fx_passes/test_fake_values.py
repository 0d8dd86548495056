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
    return rng.choice(calls)


def geometry(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return sizes, strides, offset and dtype of eager's result; None if eager raises an error."""
    try:
        out: torch.Tensor = target(*args)
    except (RuntimeError, ValueError, IndexError):
        return None
    return out.shape, out.stride(), out.storage_offset(), out.dtype


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


@pytest.mark.parametrize("seed", range(4))
def test_values_have_the_geometry_of_results(seed: int) -> None:
    rng, direct = random.Random(seed), 0
    mode = FakeTensorMode()
    for _ in range(150):
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
        assert (known.shape, known.stride(), known.storage_offset(), known.dtype) == want
        if target in fake_values.VIEWS:
            assert shares_memory(known, args[0]) == is_view
            assert is_view or target is aten.reshape.default
    assert direct > 100


def test_other_values_are_left_to_the_mode() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(3, 4))
    assert isinstance(x, FakeTensor)
    symbolic = mode.from_tensor(torch.empty(5, 6), static_shapes=False)
    for args in ((symbolic,), (x.conj().to(torch.complex64).conj(),), (torch.empty(2, 2),)):
        assert fake_values.of_call(aten.t.default, args) is None
    assert fake_values.of_call(aten.mm.default, (x, mode.from_tensor(torch.empty(4, 2, dtype=torch.float64)))) is None
    assert fake_values.of_call(aten.sin.default, (x,)) is None
