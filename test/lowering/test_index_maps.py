"""Interpolation, padding and rearrangement: values moved by a computed index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.compat import torch_api
from test.compare import check, check_gradients

pytestmark = pytest.mark.sample(3)


def interpolations(x: torch.Tensor) -> list[torch.Tensor]:
    """`x` [n, c, h, w]"""
    out = []
    for how in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        out += [F.interpolate(x, scale_factor=s, mode=how) for s in (2, 0.6)]
        out += [F.interpolate(x, size=(5, 13), mode=how)]
    out += [F.interpolate(x, size=(7, 1), mode=how, align_corners=True) for how in ("bilinear", "bicubic")]
    return [*out, F.interpolate(x, size=(4, 3), mode="area")]


def other_ranks(x: torch.Tensor) -> list[torch.Tensor]:
    """`x` [n, c, h, w]"""
    line, volume = x.flatten(2), x[:, :, None] * torch.arange(1.0, 4.0)[:, None, None]
    out = [F.interpolate(line, scale_factor=1.3, mode=how) for how in ("nearest", "nearest-exact", "linear")]
    return out + [F.interpolate(volume, size=(5, 4, 9), mode=how) for how in ("nearest", "nearest-exact", "trilinear")]


PADS = [(2, 1), (1, 2, 3, 1), (0, 3, 0, 1), (-1, 2, 1, -2), (1, -1), (-2, 2, 1, -1)]  # the last two shift


def pads(x: torch.Tensor) -> list[torch.Tensor]:
    out = [F.pad(x, pad, mode=how) for how in ("reflect", "replicate", "circular") for pad in PADS[1:3]]
    out += [F.pad(x, pad, value=v) for pad in PADS for v in (0.0, 1.5)]
    return [*out, F.pad(x[0], (1, 2), mode="reflect"), F.pad(x[:, :, None], (1, 1, 2, 1, 0, 0), mode="replicate")]


def rearranged(x: torch.Tensor) -> list[torch.Tensor]:
    out = [x.flip(0), x.flip(1, 3), x.repeat(1, 2, 1, 3), x.repeat(2, 1, 1, 1, 1), x.tile(2, 1), x.unfold(3, 3, 2)]
    # the traced strides of the result of roll differ from eager's
    out += [x.roll(*how).contiguous() for how in ((3,), ((1, -2), (0, 3)), (100, 2))]
    out += [x.repeat_interleave(3, 1), x.repeat_interleave(2), x.rot90(1, (2, 3)), x.diagonal(1, 2, 3)]
    out += [
        x.diagonal_scatter(x[:, :, 0, :k], o, 2, 3)
        for o, k in ((0, min(x.shape[2:])), (-1, min(x.shape[2] - 1, x.shape[3])))
    ]
    return [*out, F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2)]


IMAGES: dict[str, Callable[[], torch.Tensor]] = {
    "batch": lambda: torch.randn(2, 3, 6, 7),
    "channels last": lambda: torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(2, 3, 7, 14)[:, :, 1:, ::2],
    "thin": lambda: torch.randn(1, 1, 4, 4),
}
FAMILIES = {"interpolation": interpolations, "pads": pads, "rearranged": rearranged, "other ranks": other_ranks}


CASES = [(f, i) for f in FAMILIES for i in IMAGES if f != "interpolation" or i in ("batch", "channels last")]
if torch_api.version() < (2, 13):  # traced padding has no channels-last strides
    CASES.remove(("pads", "channels last"))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("family", "image"), CASES)
def test_equal_to_eager(family: str, image: str) -> None:
    check(FAMILIES[family], IMAGES[image](), tolerance=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    check_gradients(FAMILIES[family], IMAGES["batch"]())


def test_low_precision() -> None:
    check(lambda x: [*pads(x), *rearranged(x), F.unfold(x, 3, padding=1)], IMAGES["batch"]().bfloat16())


def test_integers() -> None:
    check(lambda x: [F.pad(x, (1, 2, 3, 1), value=3), *rearranged(x)], torch.randint(0, 9, (2, 3, 6, 7)))
