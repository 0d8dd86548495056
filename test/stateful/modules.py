"""Small modules with state, and the writes that a program makes to it."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

T = torch.Tensor


class Images(nn.Module):
    """Convolutions, batch normalisation, a depthwise convolution and a linear of some pages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.deep = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.last = nn.Linear(24, 512)

    def forward(self, x: T) -> T:
        y = F.relu(self.norm(self.stem(x)))
        return self.last(F.silu(self.deep(y)).mean((2, 3)))

    @staticmethod
    def sample(batch: int) -> T:
        return torch.randn(batch, 3, 6, 6)


class Tokens(nn.Module):
    """Embedding, attention, layer normalisation, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(90, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 90, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: T) -> T:
        y = self.words(x)
        q, k, v = (p.view(*p.shape[:2], 4, 8).transpose(1, 2) for p in self.qkv(y).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.norm(y + self.out(mixed)))

    @staticmethod
    def sample(batch: int) -> T:
        return torch.randint(0, 90, (batch, 7))


class Adapted(nn.Module):
    """A linear with a low-rank adapter, one with weight normalisation, one that is pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(48, 96), nn.Linear(48, 4, bias=False), nn.Linear(4, 96, bias=False)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(96, 64))
        self.pruned = nn.Parameter(torch.randn(32, 64) * 0.1)
        self.register_buffer("mask", (torch.rand(32, 64) > 0.5).float())

    def forward(self, x: T) -> T:
        y = F.gelu(self.base(x) + 0.5 * self.up(self.down(x)))
        return F.linear(torch.tanh(self.scaled(y)), self.pruned * self.get_buffer("mask"))

    @staticmethod
    def sample(batch: int) -> T:
        return torch.randn(batch, 48)


MODULES: tuple[type[nn.Module], ...] = (Images, Tokens, Adapted)


@dataclass(frozen=True)
class Place:
    """One tensor of a model's state, by its number among parameters and buffers of floats; `seed` of the values."""

    number: int
    seed: int

    def of(self, m: nn.Module) -> T:
        buffer = [*m.parameters(), *(b for b in m.buffers() if b.is_floating_point())]
        return buffer[self.number % len(buffer)]

    def value(self, like: T) -> T:
        drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(self.seed))
        return (drawn.abs() * 0.5 + 0.1).to(like)  # positive, for variances too


def _no_grad(write: Callable[[T, T], object]) -> Callable[[T, T], object]:
    return lambda p, v: torch.no_grad()(write)(p, v)


def _one_element(p: T, v: T) -> None:
    p.data[(-1,) * p.dim()] = 3.0


def _by_numpy(p: T, v: T) -> None:
    p.detach().numpy()[...] = v.numpy()


def _by_dlpack(p: T, v: T) -> None:
    torch.utils.dlpack.from_dlpack(p.detach()).copy_(v)
    np.from_dlpack(p.detach())


def _by_storage(p: T, v: T) -> None:
    buffer = v.clone() if v.stride() == p.stride() else torch.empty_like(p).copy_(v)
    p.untyped_storage().copy_(buffer.untyped_storage()[: p.untyped_storage().nbytes()])


def _another(p: T, v: T) -> None:
    p.data = v.clone()


def _swapped(p: T, v: T) -> None:
    same = nn.Parameter(v.clone(), requires_grad=p.requires_grad) if isinstance(p, nn.Parameter) else v.clone()
    torch.utils.swap_tensors(p, same)


def _by_address(p: T, v: T) -> None:
    buffer = torch.empty_like(p).copy_(v)
    ctypes.memmove(p.data_ptr(), buffer.data_ptr(), p.numel() * p.element_size())


def _uncounted(p: T, v: T) -> None:
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter((p,)):
        p.copy_(v)


WRITES: dict[str, Callable[[T, T], object]] = {
    "copy_": _no_grad(lambda p, v: p.copy_(v)),
    "mul_": _no_grad(lambda p, v: p.mul_(1.1).add_(v, alpha=0.1)),
    "data.copy_": lambda p, v: p.data.copy_(v),
    "data.mul_": lambda p, v: p.data.mul_(0.9),
    "data[-1] =": _one_element,
    "data =": _another,
    "detach": lambda p, v: p.detach().copy_(v),
    "foreach": lambda p, v: torch._foreach_add_([p.data], 0.05),
    "numpy": _by_numpy,
    "dlpack": _by_dlpack,
    "storage": _by_storage,
    "set_": _no_grad(lambda p, v: p.set_(v.clone())),  # type: ignore[call-overload]
    "swap_tensors": _swapped,
    "address": _by_address,
    "uncounted": _uncounted,
}
CPU_WRITES = frozenset({"numpy", "dlpack", "address"})  # these need memory of a CPU
UNSEEN_WRITES = frozenset({"address", "uncounted"})  # what neither torch counts nor Python sees


def reloaded(m: nn.Module, assign: bool) -> None:
    """Through a file: what is loaded is a little larger than what was saved."""
    buffer = io.BytesIO()
    torch.save(m.state_dict(), buffer)
    buffer.seek(0)
    state = {k: v * 1.01 if v.is_floating_point() else v for k, v in torch.load(buffer).items()}
    m.load_state_dict(state, assign=assign)


def renewed(m: nn.Module, seed: int) -> None:
    """One of its modules is replaced by another of the same kind."""
    torch.manual_seed(seed)
    fresh = type(m)().to(next(m.parameters()).device)
    names = [n for n, c in m.named_children() if n not in ("words", "head")]
    name = names[seed % len(names)]
    setattr(m, name, copy.deepcopy(getattr(fresh, name)).train(getattr(m, name).training))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.02, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
}
