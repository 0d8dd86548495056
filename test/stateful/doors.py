"""The doors through which a program writes a parameter or buffer, each as a function of a model."""

from __future__ import annotations

import copy
import ctypes
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


class Small(nn.Module):
    """Weights of several pages and of a few bytes: convolution, batch normalisation, linears."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(24)
        self.wide = nn.Linear(24, 512)
        self.last = nn.Linear(512, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.last(torch.nn.functional.gelu(self.wide(y)))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


Door = Callable[[Small], None]
DOORS: dict[str, Door] = {}
# what neither torch counts nor Python sees
UNSEEN = frozenset({"memory by address", "batch statistics", "in the counter's absence"})


def door(name: str) -> Callable[[Door], Door]:
    def add(function: Door) -> Door:
        DOORS[name] = function
        return function

    return add


@door("in place")
def _(m: Small) -> None:
    with torch.no_grad():
        m.wide.weight.add_(0.1)
        m.norm.bias.mul_(2.0).add_(0.3)


@door("data.copy_")
def _(m: Small) -> None:
    m.conv.weight.data.copy_(torch.randn_like(m.conv.weight))


@door("data.add_")
def _(m: Small) -> None:
    m.last.weight.data.add_(0.2)


@door("data +=, as a merged adapter")
def _(m: Small) -> None:
    m.wide.weight.data += torch.randn(512, 4) @ torch.randn(4, 24)


@door("data of a small one")
def _(m: Small) -> None:
    m.norm.running_var.data.mul_(3.0)
    m.conv.bias.data.add_(1.0)


@door("data of one element")
def _(m: Small) -> None:
    m.last.weight.data[-1, -1] += 5.0


@door("data is another")
def _(m: Small) -> None:
    m.wide.weight.data = torch.randn(512, 24)


@door("foreach on data")
def _(m: Small) -> None:
    torch._foreach_mul_([p.data for p in m.parameters()], -0.7)


@door("detach")
def _(m: Small) -> None:
    m.last.weight.detach().mul_(-1.5)


@door("numpy")
def _(m: Small) -> None:
    m.conv.weight.detach().numpy()[3] = 0.25


@door("dlpack")
def _(m: Small) -> None:
    np.from_dlpack(m.wide.bias.detach())
    torch.utils.dlpack.from_dlpack(m.wide.weight.detach())[5:9].fill_(0.5)


@door("storage.copy_")
def _(m: Small) -> None:
    m.last.weight.untyped_storage().copy_(torch.randn_like(m.last.weight).untyped_storage())


@door("storage.fill_")
def _(m: Small) -> None:
    m.norm.weight.untyped_storage().fill_(60)  # type: ignore[attr-defined]


@door("set_")
def _(m: Small) -> None:
    with torch.no_grad():
        m.wide.weight.set_(torch.randn(512, 24))  # type: ignore[call-overload]


@door("resize_ of the storage and back")
def _(m: Small) -> None:
    storage, copy_ = m.last.weight.untyped_storage(), m.last.weight.detach().clone()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    m.last.weight.data.copy_(copy_ * 1.3)


@door("swap_tensors")
def _(m: Small) -> None:
    torch.utils.swap_tensors(m.wide.weight, nn.Parameter(torch.randn(512, 24)))


@door("a new parameter")
def _(m: Small) -> None:
    m.last.weight = nn.Parameter(torch.randn(48, 512))


@door("in the counter's absence")
def _(m: Small) -> None:
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter((m.conv.weight,)):
        m.conv.weight.mul_(1.7)


@door("load_state_dict")
def _(m: Small) -> None:
    m.load_state_dict(Small().state_dict())


@door("load_state_dict with assign")
def _(m: Small) -> None:
    m.load_state_dict({k: v.clone() for k, v in Small().state_dict().items()}, assign=True)


@door("batch statistics")
def _(m: Small) -> None:
    m.train()
    with torch.no_grad():
        m(image() * 3 + 1)
    m.eval()


@door("read from a file")
def _(m: Small) -> None:
    with tempfile.TemporaryFile() as copy_:
        copy_.write(torch.randn(48, 512).numpy().tobytes())
        copy_.seek(0)
        values: Any = m.last.weight.detach().numpy()
        copy_.readinto(memoryview(values).cast("B"))


@door("memory by address")
def _(m: Small) -> None:
    source = torch.randn_like(m.wide.weight)
    ctypes.memmove(m.wide.weight.data_ptr() + 4096, source.data_ptr(), 8192)


@door("to channels-last")
def _(m: Small) -> None:
    m.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@door("channels-last")
def _(m: Small) -> None:
    m.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    m.conv.weight.data.neg_()
    m.conv.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


@door("averaged")
def _(m: Small) -> None:
    other = copy.deepcopy(m)
    for p, q in zip(m.parameters(), other.parameters(), strict=True):
        p.data.mul_(0.9).add_(q.data.neg(), alpha=0.1)


def _by_optimizer(name: str, make: Callable[[Small], torch.optim.Optimizer]) -> None:
    def step(m: Small) -> None:
        optimizer = make(m)
        m(image()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    DOORS[name] = step


for _kind in ("SGD", "Adam", "AdamW", "Adagrad"):
    for _how in ("fused", "foreach"):
        _by_optimizer(
            f"{_kind}, {_how}",
            lambda m, kind=_kind, how=_how: getattr(torch.optim, kind)(m.parameters(), lr=0.05, **{how: True}),  # type: ignore[misc]
        )
_by_optimizer("RMSprop, one by one", lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, foreach=False))
