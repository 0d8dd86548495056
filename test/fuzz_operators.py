"""The parts of random programs: inputs that follow from a seed, and a table of operators."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Operator = Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SIZES = (1, 2, 3, 4, 6)
OTHER_SIZES = (1, 5, 4, 7, 9)  # of the second call of a program compiled for any size


def make_input(seed: int, sizes: Sequence[int] = SIZES) -> Tensor:
    """A tensor whose shape, dtype, layout and contents follow from the seed; values stay small."""
    r = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    shape = [r.choice(sizes) for _ in range(r.choice((0, 1, 2, 2, 3, 3)))]
    dtype = r.choice(DTYPES)
    order = list(range(len(shape)))
    if r.random() < 0.3:
        r.shuffle(order)
    stored = [shape[k] for k in order]
    step = 2 if shape and r.random() < 0.2 else 1
    if step == 2:
        stored[-1] *= 2
    x = torch.randint(-4, 5, stored, generator=g) if not dtype.is_floating_point else torch.randn(stored, generator=g)
    x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
    if step == 2:
        x = x[..., ::2]
    return x.permute([order.index(k) for k in range(len(shape))])


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def _pair(ts: Sequence[Tensor], n: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A tensor and another that broadcasts with it (at worst its own flip)."""
    a = _pick(ts, n[0])
    fits = [t for t in ts if _broadcasts(a, t)]
    return a, _pick(fits, n[1])


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _pick(ts: Sequence[Tensor], n: int) -> Tensor:
    return ts[n % len(ts)]


def _ranked(ts: Sequence[Tensor], n: int) -> Tensor:
    return _pick([t for t in ts if t.dim() and t.numel()] or [torch.arange(6.0).view(2, 3)], n)


def _signed(x: Tensor) -> Tensor:
    return x.int() if x.dtype in (torch.bool, torch.uint8) else x


def _binary(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda ts, n: fn(*_pair(ts, n))


def _unary(fn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda ts, n: fn(_pick(ts, n[0]))


def _along(fn: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def apply(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
        x = _ranked(ts, n[0])
        return fn(x, n[1] % x.dim())

    return apply


def _slice(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    d = n[1] % x.dim()
    at = n[2] % x.shape[d]
    return x[(slice(None),) * d + (slice(at, at + 1 + n[3] % 4, 1 + n[3] % 2),)]


def _reshape(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    divisors = [k for k in range(1, x.numel() + 1) if x.numel() % k == 0]
    k = divisors[n[1] % len(divisors)]
    return x.reshape(k, -1) if n[2] % 2 else x.reshape(-1, 1, k)


def _pad(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    """Pad or cut each end of the last dimension; both at once shift."""
    x = _ranked(ts, n[0])
    least = -1 if x.shape[-1] > 2 else 0
    return F.pad(x, (max(n[1] % 4 - 1, least), max(n[2] % 4 - 1, least)))


def _permute(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _pick(ts, n[0])
    left, order = list(range(x.dim())), []
    while left:
        order.append(left.pop(n[1] % len(left)))
    return x.permute(order)


def _cat(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    d = n[1] % x.dim()
    fits = [t for t in ts if t.dim() == x.dim() and all(t.shape[k] == x.shape[k] for k in range(x.dim()) if k != d)]
    return torch.cat([x, _pick(fits or [x], n[2]), x][: 2 + n[3] % 2], d)


def _index(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    fits = [t for t in ts if t.dtype == torch.int64 and t.numel() and t.dim()]
    at = _pick(fits, n[2]) if fits else torch.arange(4)
    return x[at % x.shape[0]] if n[3] % 2 else x[..., at % x.shape[-1]]


def _gather(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    d = n[1] % x.dim()
    return x.gather(
        d, (torch.arange(x.shape[d]).flip(0)).view([-1 if k == d else 1 for k in range(x.dim())]).expand_as(x)
    )


def _put(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    at = torch.arange(1 + n[1] % x.shape[0])
    return x.index_put((at,), x[:1] + x[:1], accumulate=bool(n[2] % 2) and x.dtype != torch.bool)


def _set_slice(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0]).clone()
    at = n[1] % x.shape[-1]
    # of a copy onto itself eager gives what the order of its loop makes of it
    x[..., at:] = x[..., : x.shape[-1] - at].clone() if n[2] % 2 else 2
    return x


def _add_to_slice(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _signed(_ranked(ts, n[0])).clone()
    x[n[1] % x.shape[0]] += 1
    x.t().mul_(2) if x.dim() == 2 else x.neg_()
    return x


def _cool(x: Tensor) -> bool:
    """Return whether a conversion to a smaller dtype is defined for the numbers that x may have."""
    return x.dtype != torch.float64


def _scatter(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    at = (torch.arange(x.shape[0]) * (1 + n[1] % 3)) % x.shape[0]
    index = at.view([-1] + [1] * (x.dim() - 1)).expand_as(x)
    if n[2] % 2 or x.dtype == torch.bool:
        return torch.zeros_like(x).scatter(0, at.flip(0).view(index[:, :1].shape if x.dim() > 1 else [-1])[:1], x[:1])
    return torch.zeros_like(x).scatter_add(0, index, x)


def _index_add(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _signed(_ranked(ts, n[0]))
    return x.index_add(0, torch.arange(x.shape[0]) % (1 + n[1] % x.shape[0]), x)


def _linear(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0]).float()
    weight = torch.linspace(-1, 1, 3 * x.shape[-1]).view(3, x.shape[-1])
    return F.linear(x, weight, torch.ones(3) if n[1] % 2 else None).relu()


def _in_place(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _floating(_pick(ts, n[0])).clone()
    y = x.view(-1) if x.is_contiguous() else x
    y.mul_(0.5).add_(1)
    if x.dim():
        x[0].clamp_(-1, 1)
    return x


def _cast(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _pick(ts, n[0])
    x = x.clamp(0, 100) if x.dtype != torch.bool else x
    return x.nan_to_num(nan=1.0).to(_pick(DTYPES, n[1])) if x.is_floating_point() else x.to(_pick(DTYPES, n[1]))  # type: ignore[arg-type]


OPERATORS: dict[str, Operator] = {
    "add": _binary(lambda a, b: a + b),
    "sub": _binary(lambda a, b: _signed(a) - _signed(b)),
    "mul": _binary(torch.mul),
    "div": _binary(lambda a, b: a / (b.abs() + 1 if b.dtype != torch.bool else b + 1)),
    "floor": _binary(lambda a, b: _signed(a) // (_signed(b).abs() + 1)),
    "mod": _binary(lambda a, b: _signed(a) % (_signed(b).abs() + 2)),
    "maximum": _binary(torch.maximum),
    "less": _binary(torch.lt),
    "where": _binary(lambda a, b: torch.where(a > 0, a, b)),
    "fill": _binary(lambda a, b: torch.where(a > b, 1, a)),
    "and": _binary(lambda a, b: (a > 0) & (b < 1)),
    "scale": lambda ts, n: _pick(ts, n[0]) * ((n[1] % 7) - 3),
    "shift": lambda ts, n: _pick(ts, n[0]) + (n[1] % 7) / 2,
    "neg": _unary(lambda x: -_signed(x)),
    "tanh": _unary(lambda x: torch.tanh(_floating(x))),
    "exp": _unary(lambda x: torch.exp(-_floating(x).abs())),
    "sqrt": _unary(lambda x: torch.sqrt(_floating(x).abs() + 1)),
    "gelu": _unary(lambda x: F.gelu(_floating(x))),
    "clamp": _unary(lambda x: _signed(x).clamp(-1, 2)),
    "cast": _cast,
    "sum": _along(lambda x, d: x.sum(d)),
    "sum kept": _along(lambda x, d: x.sum(d, keepdim=True)),
    "mean": _along(lambda x, d: _floating(x).mean(d, keepdim=True)),
    "sum all": _unary(lambda x: x.sum()),
    "amax": _along(lambda x, d: x.amax(d)),
    "amin all": _unary(lambda x: x.amin()),
    "argmax": _along(lambda x, d: _signed(x).round().argmax(d) if x.is_floating_point() else _signed(x).argmax(d)),
    "any": _along(lambda x, d: (x > 1).any(d, keepdim=True)),
    "softmax": _along(lambda x, d: _floating(x).softmax(d)),
    "log_softmax": _along(lambda x, d: _floating(x).log_softmax(d)),
    "norm": _along(lambda x, d: F.layer_norm(_floating(x), x.shape[d:])),
    "var": _along(lambda x, d: _floating(x).var(d, correction=0, keepdim=True)),
    "cumsum": _along(lambda x, d: x.cumsum(d)),
    "slice": _slice,
    "select": _along(lambda x, d: x.select(d, -1)),
    "reshape": _reshape,
    "permute": _permute,
    "expand": lambda ts, n: _pick(ts, n[0]).unsqueeze(0).expand(1 + n[1] % 3, *_pick(ts, n[0]).shape),
    "flip": _along(lambda x, d: x.flip(d)),
    "roll": _along(lambda x, d: x.roll(1, d)),
    "pad": _pad,
    "repeat": _along(lambda x, d: x.repeat(*[2 if k == d else 1 for k in range(x.dim())])),
    "cat": _cat,
    "copy": _unary(lambda x: x.contiguous()),
    "tril": lambda ts, n: torch.tril(x) if (x := _ranked(ts, n[0])).dim() > 1 else x + 0,
    "index": _index,
    "gather": _gather,
    "put": _put,
    "set slice": _set_slice,
    "add to slice": _add_to_slice,
    "matmul": _unary(lambda x: x.float() @ x.float().t() if x.dim() == 2 else x + 0),
    "sigmoid": _unary(lambda x: torch.sigmoid(_floating(x))),
    "log": _unary(lambda x: torch.log1p(_floating(x).abs())),
    "silu": _unary(lambda x: F.silu(_floating(x))),
    "leaky": _unary(lambda x: F.leaky_relu(_floating(x), 0.1)),
    "minimum": _binary(lambda a, b: torch.minimum(a, b * 2)),
    "lerp": _binary(lambda a, b: torch.lerp(_floating(a).float(), _floating(b).float(), 0.3)),
    "addcmul": _binary(lambda a, b: torch.addcmul(_floating(a), _floating(a), _floating(a), value=0.5) + b),
    "half": _unary(
        lambda x: (x.clamp(-50, 50) if x.is_floating_point() else x % 5).half() * 0.3 if _cool(x) else x + 0
    ),
    "prod": _along(lambda x, d: _floating(x).clamp(-2, 2).prod(d)),
    "sort": _along(lambda x, d: x.sort(d).values),
    "topk": _along(lambda x, d: x.int().topk(1, d).values if _cool(x) else x.flip(d)),
    "logsumexp": _along(lambda x, d: torch.logsumexp(_floating(x), d)),
    "max with place": _along(lambda x, d: x.max(d).values),
    "square sum": _along(lambda x, d: (_floating(x) * _floating(x)).sum(d, keepdim=True)),
    "diagonal": lambda ts, n: x.diagonal() if (x := _ranked(ts, n[0])).dim() > 1 else x.unsqueeze(0),
    "unfold": _along(lambda x, d: x.unfold(d, min(2, x.shape[d]), 1)),
    "chunk": lambda ts, n: _ranked(ts, n[0]).chunk(2, 0)[-1],
    "stack": lambda ts, n: torch.stack([_pick(ts, n[0]), _pick(ts, n[0]) * 2], n[1] % (_pick(ts, n[0]).dim() + 1)),
    "scatter": _scatter,
    "index add": _index_add,
    "select rows": lambda ts, n: _ranked(ts, n[0]).index_select(0, torch.arange(_ranked(ts, n[0]).shape[0]).flip(0)),
    "masked": lambda ts, n: _pick(ts, n[0]).masked_fill(_pick(ts, n[0]) > n[1] % 3, 1),
    "linear": _linear,
    "batched": lambda ts, n: torch.bmm(x, x.transpose(1, 2)) if (x := _floating(_pick(ts, n[0]))).dim() == 3 else x * 2,
    "in place": _in_place,
    "long chain": _unary(lambda x: ((_floating(x) * 0.5 + 1).abs().sqrt() - 0.25).clamp(-1, 3) * 2),
}
