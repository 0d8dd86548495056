"""The parts of random programs with checks: numbers that data decides, checks of them, positions of both signs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from altbackend.compat import torch_api

Tensor = torch.Tensor
Numbers = tuple[int, ...]


@dataclass
class State:
    """Values that a program has made so far, by kind; `results` in the order of its steps."""

    tensors: list[Tensor]
    positions: list[Tensor]  # int64, one dimension
    integers: list[Any]
    reals: list[Any]
    results: list[Any] = field(default_factory=list)

    def tensor(self, n: int) -> Tensor:
        return self.tensors[n % len(self.tensors)]

    def at(self, n: int) -> Tensor:
        return self.positions[n % len(self.positions)]

    def integer(self, n: int) -> Any:
        return self.integers[n % len(self.integers)]

    def real(self, n: int) -> Any:
        return self.reals[n % len(self.reals)]


MOST_ZEROS = 1 << 20  # a system that promises more memory than it has ends a process that writes 2^40 numbers
Operator = Callable[[State, Numbers], Any]


def _row(t: Tensor) -> Tensor:
    return t.reshape(-1) if t.dim() != 1 else t


def _check(s: State, n: Numbers, holds: Any) -> None:
    torch._check(holds)


def _split(s: State, n: Numbers) -> Tensor:
    x, k = s.tensor(n[0]), s.integer(n[1])
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    first, second = torch.split(x, [k, x.shape[0] - k])
    return first.sum(0) + second.sum(0)


def _set_in_place(s: State, n: Numbers) -> Tensor:
    x = s.tensor(n[0])
    x[s.integer(n[1])] = s.real(n[2])
    return x * 1


def _set(s: State, n: Numbers) -> Tensor:
    x = s.tensor(n[0]).clone()
    x[s.integer(n[1])] = -1.0
    return x


INTEGERS: dict[str, Operator] = {
    "item": lambda s, n: s.at(n[0]).sum().item(),
    "largest": lambda s, n: s.at(n[0]).max().item(),
    "one of": lambda s, n: s.at(n[0])[0].item(),
    "size": lambda s, n: s.tensor(n[0]).shape[0],
    "sum": lambda s, n: s.integer(n[0]) + s.integer(n[1]),
    "difference": lambda s, n: s.integer(n[0]) - n[1] % 5,
    "product": lambda s, n: s.integer(n[0]) * (n[1] % 4 - 1),
    "quotient": lambda s, n: s.integer(n[0]) // (n[1] % 4 + 1),
    "remainder": lambda s, n: s.integer(n[0]) % (n[1] % 5 + 1),
    "absolute": lambda s, n: abs(s.integer(n[0])),
    "least": lambda s, n: min(s.integer(n[0]), n[1] % 7),
    "most": lambda s, n: max(s.integer(n[0]), n[1] % 3),
    "scaled": lambda s, n: int(1.37 * s.integer(n[0])),
    "rounded": lambda s, n: round(s.real(n[0])),
}
REALS: dict[str, Operator] = {
    "float item": lambda s, n: s.tensor(n[0]).sum().item(),
    "element item": lambda s, n: _row(s.tensor(n[0]))[n[1] % 3].item(),
    "ratio": lambda s, n: s.integer(n[0]) / (n[1] % 5 + 1),
    "root": lambda s, n: math.sqrt(abs(s.integer(n[0])) + 1),
    "real sum": lambda s, n: s.real(n[0]) + n[1] / 8,
    "real product": lambda s, n: s.real(n[0]) * s.real(n[1]),
    "sine": lambda s, n: math.sin(s.real(n[0])),
}
CHECKS: dict[str, Operator] = {
    "check >=": lambda s, n: _check(s, n, s.integer(n[0]) >= n[1] % 4 - 3),
    "check <": lambda s, n: _check(s, n, s.integer(n[0]) < n[1] % 16),
    "check !=": lambda s, n: _check(s, n, s.integer(n[0]) != n[1] % 8),
    "check ==": lambda s, n: _check(s, n, s.integer(n[0]) == n[1] % 4),
    "check size": lambda s, n: _check(s, n, s.integer(n[0]) <= s.tensor(n[1]).shape[0]),
    "check even": lambda s, n: _check(s, n, s.integer(n[0]) % 2 == 0),
    "check real": lambda s, n: _check(s, n, s.real(n[0]) < 6.5),
    "assert": lambda s, n: torch.ops.aten._assert_async.msg((s.tensor(n[0]) > -3.5).all(), "above"),
    "assert scalar": lambda s, n: torch.ops.aten._assert_scalar(s.integer(n[0]) > -6, "above"),
}
POSITIONS: dict[str, Operator] = {
    "nonzero": lambda s, n: _row(s.tensor(n[0]) > 0).nonzero()[:, 0],
    "kept positions": lambda s, n: s.at(n[0])[s.at(n[0]) >= 0],
    "moved": lambda s, n: s.at(n[0]) + n[1] % 3 - 1,
    "divided": lambda s, n: s.at(n[0]) // s.at(n[0]).flip(0),
    "remaining": lambda s, n: s.at(n[0]) % (s.at(n[0]) - n[1] % 3),
    "one_hot": lambda s, n: F.one_hot(s.at(n[0]), 7).sum(1),
    "counted": lambda s, n: torch.arange(4) + s.integer(n[0]),
    "number": lambda s, n: torch.tensor([s.integer(n[0]), n[1] % 3]),
    "filled positions": lambda s, n: torch.full((2,), s.integer(n[0])),
}


def _least(n: int) -> int:
    """Return the least count: negative ones take all memory in eager before torch 2.12."""
    return n % 2 - 1 if torch_api.version() >= (2, 12) else 0


TENSORS: dict[str, Operator] = {
    "masked": lambda s, n: _row(s.tensor(n[0]))[_row(s.tensor(n[0])) > n[1] % 3 - 1],
    "masked_select": lambda s, n: torch.masked_select(s.tensor(n[0]), s.tensor(n[0]) < n[1] % 3),
    "repeat_interleave": lambda s, n: torch.repeat_interleave(s.at(n[0]).float(), s.at(n[0]).clamp(_least(n[1]), 999)),
    "zeros": lambda s, n: torch.zeros(min(s.integer(n[0]), MOST_ZEROS)) + s.real(n[1]),
    "head": lambda s, n: s.tensor(n[0])[: s.integer(n[1])] * 2,
    "tail": lambda s, n: s.tensor(n[0])[s.integer(n[1]) :] + 1,
    "narrow": lambda s, n: s.tensor(n[0]).narrow(0, s.integer(n[1]), 1) * 3,
    "element": lambda s, n: s.tensor(n[0])[s.integer(n[1])] - 1,
    "set": _set,
    "split": _split,
    "index": lambda s, n: s.tensor(n[0])[s.at(n[1])],
    "index_put": lambda s, n: s.tensor(n[0]).index_put((s.at(n[1]),), torch.tensor(2.0), accumulate=bool(n[2] % 2)),
    "gather": lambda s, n: _row(s.tensor(n[0])).gather(0, s.at(n[1])),
    "scatter": lambda s, n: _row(s.tensor(n[0])).scatter(0, s.at(n[1]), 3.0),
    "scatter_add": lambda s, n: _row(s.tensor(n[0])).scatter_add(0, s.at(n[1]), s.at(n[1]).float()),
    "scatter_reduce": lambda s, n: _row(s.tensor(n[0])).scatter_reduce(0, s.at(n[1]), s.at(n[1]).float(), "amax"),
    "index_select": lambda s, n: s.tensor(n[0]).index_select(0, s.at(n[1])),
    "index_add": lambda s, n: _row(s.tensor(n[0])).index_add(0, s.at(n[1]), s.at(n[1]).float()),
    "index_copy": lambda s, n: _row(s.tensor(n[0])).index_copy(0, s.at(n[1]), s.at(n[1]).float()),
    "index_fill": lambda s, n: s.tensor(n[0]).index_fill(0, s.at(n[1]), 1.5),
    "embedding": lambda s, n: F.embedding(s.at(n[1]), _row(s.tensor(n[0]))[:, None]),
    "take": lambda s, n: s.tensor(n[0]).take(s.at(n[1])),
    "take_along": lambda s, n: torch.take_along_dim(_row(s.tensor(n[0])), s.at(n[1]), 0),
    "times integer": lambda s, n: s.tensor(n[0]) * s.integer(n[1]),
    "plus real": lambda s, n: s.tensor(n[0]) + s.real(n[1]),
    "sin": lambda s, n: s.tensor(n[0]).sin(),
    "alike": lambda s, n: torch.full_like(s.tensor(n[0]), 0.5 * (n[1] % 3)),
    "expanded": lambda s, n: _row(s.tensor(n[0])).narrow(0, 0, 1).expand(n[1] % 5 + 2),
    "total": lambda s, n: s.tensor(n[0]).sum(0, keepdim=True),
    "running": lambda s, n: _row(s.tensor(n[0])).cumsum(0),
    "joined": lambda s, n: torch.cat([_row(s.tensor(n[0])), _row(s.tensor(n[1]))]),
    "flipped": lambda s, n: s.tensor(n[0]).flip(0) * 0.5,
    "largest element": lambda s, n: s.tensor(n[0]).max(),
    "written": lambda s, n: s.tensors[0].add_(s.real(n[0])) * 1,
    "scaled in place": lambda s, n: s.tensor(n[0]).mul_(s.real(n[1])) * 1,
    "part in place": lambda s, n: _row(s.tensor(n[0]))[n[1] % 3 :].add_(s.real(n[2])) * 1,
    "set in place": _set_in_place,
}
KINDS: dict[str, dict[str, Operator]] = {
    "integers": INTEGERS,
    "reals": REALS,
    "checks": CHECKS,
    "positions": POSITIONS,
    "tensors": TENSORS,
}
WEIGHTS = {"integers": 4, "reals": 2, "checks": 3, "positions": 3, "tensors": 9}


def step(s: State, kind: str, name: str, n: Numbers) -> None:
    """Append what an operator gives; tensors and numbers are results of the program, checks give none."""
    made = KINDS[kind][name](s, n)
    if kind == "checks":
        return
    getattr(s, kind).append(made)
    s.results.append(made)


def inputs(seed: int, call: int, any_size: bool) -> tuple[Any, ...]:
    """(vector, matrix, positions, integer, float) of a call; later ones have other data, positions out of range."""
    r = random.Random(f"{seed}-{call}")
    g = torch.Generator().manual_seed(seed * 16 + call)
    size = 6 + (call % 3 if any_size else 0)
    wild = 0 if call == 0 else r.choice((0, 0, 2, 9, 1 << 40))
    low, high = (0, size) if call == 0 else r.choice(((0, size), (-size, size), (0, 3)))
    at = torch.randint(low, high, (4,), generator=g)
    if wild:
        at[r.randrange(4)] = r.choice((wild + size, -wild - size))
    # eighths: whatever the order of additions, their sums are exact
    x, y = (torch.randint(-20, 21, shape, generator=g) / 8 for shape in ((size,), (size, 3)))
    return x, y, at, r.choice((1, 2, 3) if call == 0 else (4, -1, -3, 0, 5, -9, 12)), r.choice((0.5, 1.25, 3.0, -2.5))
