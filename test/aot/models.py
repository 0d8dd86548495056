"""Modules of the tests of ahead-of-time libraries, and one function that compiles and runs them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import altbackend
from altbackend.compat.pt2 import Runner

Dim = torch.export.Dim


class Mlp(nn.Module):
    """Two linears. Its weights are folded into packed ones."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class State(nn.Module):
    """Writes a buffer and returns weights, inputs, views, numbers and nothing."""

    count: torch.Tensor
    plain: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.linear = nn.Linear(3, 3)
        self.plain = torch.arange(12.0).view(3, 4).t()

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return {"y": self.linear(x) + self.count, "z": self.plain @ x}, self.linear.weight, x, x[0], None, 2.5


def module(f: Callable[..., Any]) -> nn.Module:
    """Return a function as a module with the same argument names, which torch.export reads."""
    names = list(inspect.signature(f).parameters)
    space: dict[str, Any] = {"f": f}
    exec(f"def forward(self, {', '.join(names)}): return f({', '.join(names)})", space)
    made: nn.Module = type("Made", (nn.Module,), {"forward": space["forward"]})()
    return made


def batched(limit: int = 64) -> torch.export.ExportedProgram:
    """Return `Mlp` with a dynamic number of rows."""
    return torch.export.export(Mlp(), (torch.randn(4, 16),), dynamic_shapes=({0: Dim("rows", max=limit)},))


def flat(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def check(m: nn.Module, args: tuple[Any, ...], dynamic: Any = None, more: tuple[Any, ...] = ()) -> Path:
    """Compile a module; compare results and written inputs with eager, for `args` and for `more` of other sizes."""
    eager = copy.deepcopy(m)
    program = torch.export.export(m, copy.deepcopy(args), dynamic_shapes=dynamic)
    path = Path(altbackend.aot_compile(program))
    runner = Runner(path)
    for given in (args, *more):
        ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
        expected, actual = pytree.tree_leaves(eager(*theirs)), runner.run(flat(ours))
        assert len(expected) == len(actual)
        for want, got in zip(expected, actual, strict=True):
            compare(want, got)
        torch.testing.assert_close(flat(ours), flat(theirs))
    return path


def compare(want: Any, got: Any) -> None:
    """Compare a result with eager's; a number is a tensor of one element, None an undefined one."""
    if want is None:
        assert got is None
    elif isinstance(want, torch.Tensor):
        assert got.stride() == want.stride() or want.numel() == 0
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)
    else:
        assert got.item() == want
