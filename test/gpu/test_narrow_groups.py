"""Convolutions in narrow groups on a real GPU: results and gradients against eager in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altbackend import alt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CASES = {
    "channels in a loop": ((12, 12, 5, 1, 2, 2), (3, 12, 33, 30)),
    "rows of windows in a loop": ((8, 16, 9, 2, 4, 8), (3, 8, 30, 33)),
    "slices in a loop": ((6, 6, 5, 1, 2, 6), (2, 6, 9, 12, 11)),
    "channels and slices in a loop": ((8, 12, 5, 1, 1, 4), (2, 8, 9, 8, 11)),
    "depthwise images": ((8, 8, 3, 2, 1, 8), (3, 8, 33, 30)),
    "wide depthwise windows": ((6, 6, 7, 1, 3, 6), (2, 6, 30, 31)),
    "strided volumes": ((16, 16, 5, 2, 2, 2), (2, 16, 11, 9, 10)),
    "padded groups": ((48, 48, 3, 1, 1, 2), (3, 48, 17, 30)),
    "padded groups with steps": ((96, 96, 3, 2, 1, 8), (3, 96, 17, 30)),
    "padded groups of wide windows": ((48, 48, 5, 1, 2, 2), (3, 48, 17, 30)),
}


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_eager(name: str, dtype: torch.dtype, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    (channels, written, kernel, stride, padding, groups), sizes = CASES[name]
    kind = LAYERS[len(sizes) - 2]
    layer: nn.Module = kind(channels, written, kernel, stride, padding, groups=groups).to("cuda", dtype)
    exact: nn.Module = kind(channels, written, kernel, stride, padding, groups=groups).to("cuda", torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(sizes, device="cuda", dtype=dtype)
    if last:
        memory_format = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
        x = x.to(memory_format=memory_format)
    compiled = torch.compile(lambda y: layer(y).tanh(), backend=alt, dynamic=False)
    wanted = gradients(lambda y: exact(y).tanh(), x.double(), exact)
    for got, eager, want in zip(
        gradients(compiled, x, layer), gradients(lambda y: layer(y).tanh(), x, layer), wanted, strict=True
    ):
        errors = [float((y.double() - want).norm() / want.norm()) for y in (got, eager)]
        assert errors[0] <= 1.5 * errors[1] + torch.finfo(dtype).eps


def gradients(fn: object, x: torch.Tensor, layer: nn.Module) -> list[torch.Tensor]:
    """Return the result in inference, the result in training, and the gradients of the image and of the parameters."""
    assert callable(fn)
    with torch.no_grad():
        inferred = fn(x)
    leaf = x.detach().requires_grad_()
    y = fn(leaf)
    return [inferred, y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]
