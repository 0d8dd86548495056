"""Eager against compiled: values, dtypes, shapes, strides, and what happens to the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from altbackend import alt
from altbackend.ir.ops import LOW_PRECISION

OPTIONS: Mapping[str, Any] = {"verify_ir": True, "strict": True}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}  # relative, of the norm of the difference


def compiled(fn: Callable[..., Any], *, dynamic: bool | None = False, **options: Any) -> Callable[..., Any]:
    """`fn` through the backend, with the IR verified after lowering."""
    return torch.compile(fn, backend=alt, dynamic=dynamic, fullgraph=True, options={**OPTIONS, **options})


def twin(xs: Sequence[Any]) -> list[Any]:
    """Copies of the inputs with the same strides; inputs that share storage share it in the copy too."""
    bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    out: list[Any] = []
    for x in xs:
        if not isinstance(x, torch.Tensor):
            out.append(x)
            continue
        held = x.detach().untyped_storage()
        key = (held.data_ptr() if held.nbytes() else id(x), x.dtype)
        if key not in bases:
            bases[key] = torch.empty(0, dtype=x.dtype).set_(held.clone())
        y = bases[key]
        out.append(y.as_strided(x.shape, x.stride(), x.storage_offset()).requires_grad_(x.requires_grad))
    return out


def wide(xs: Sequence[Any]) -> list[Any]:
    """The inputs with every float in float64."""
    return [x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in twin(xs)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| over the points where both are finite; infinite where they are not in the same places."""
    x, y = a.double(), b.double()
    special = ~(x.isfinite() & y.isfinite())
    if not torch.equal(x[special].nan_to_num(nan=0.125), y[special].nan_to_num(nan=0.125)):
        return float("inf")
    x, y = x[~special], y[~special]
    scale = y.abs().max() if y.numel() else torch.tensor(0.0)
    if scale == 0:
        return float((x - y).norm())
    return float(((x - y) / scale).norm() / (y / scale).norm())


def difference(
    got: Any, want: Any, exact_result: torch.Tensor | None = None, tolerance: float | None = None, strides: bool = True
) -> str:
    """Return what is wrong with `got`, or "". `exact_result`: the float64 answer that low precision is judged by."""
    if not isinstance(want, torch.Tensor):
        return "" if got == want and type(got) is type(want) else f"{got!r} instead of {want!r}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{tuple(got.shape)} instead of {want.dtype}{tuple(want.shape)}"
    if strides and _live_strides(got) != _live_strides(want):
        return f"strides {got.stride()} instead of {want.stride()}"
    if not want.is_floating_point() or tolerance == 0:
        wrong = int((got != want).sum() - (got.isnan() & want.isnan()).sum())
        return f"{wrong} of {want.numel()} elements differ" if wrong else ""
    if want.dtype in LOW_PRECISION and exact_result is not None:
        mine, eager = distance(got, exact_result), distance(want, exact_result)
        # one rounding to the dtype is what any answer may have
        bound = max(2 * eager, torch.finfo(want.dtype).eps)
        return f"error {mine:.3g}, eager's is {eager:.3g}" if not mine <= bound else ""
    limit = tolerance if tolerance is not None else TOLERANCE.get(want.dtype, 2 * torch.finfo(want.dtype).eps)
    far = distance(got, want)
    return f"relative difference {far:.3g} > {limit}" if not far <= limit else ""


def _live_strides(x: torch.Tensor) -> list[int]:
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else []


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def check(
    fn: Callable[..., Any],
    *inputs: Any,
    tolerance: float | None = None,
    names: Sequence[str] = (),
    run: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """`fn` compiled gives what eager gives: results, and the inputs afterwards.

    `names` label the results in the message. `run`: an already compiled `fn`.
    """
    mine, theirs = twin(inputs), twin(inputs)
    want = as_list(fn(*theirs))
    got = as_list((compiled(fn, **options) if run is None else run)(*mine))
    low = any(isinstance(x, torch.Tensor) and x.dtype in LOW_PRECISION for x in [*inputs, *want])
    exact = as_list(fn(*wide(inputs))) if low else [None] * len(want)
    assert len(got) == len(want)
    wrong = [
        f"{names[k] if k < len(names) else f'result {k}'}: {text}"
        for k, (g, w, e) in enumerate(zip(got, want, exact, strict=True))
        if (text := difference(g, w, e, tolerance))
    ]
    for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if text := difference(a, b, None, tolerance):
            wrong.append(f"input {k} afterwards: {text}")
    assert not wrong, "\n".join(wrong)


def check_gradients(fn: Callable[..., Any], *inputs: Any, tolerance: float | None = None, **options: Any) -> None:
    """Results and gradients; every float input gets a gradient, from one random cotangent per result."""

    def leaves(xs: Sequence[Any]) -> list[Any]:
        return [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in xs]

    def differentiate(f: Callable[..., Any], xs: list[Any]) -> list[Any]:
        outs = [o for o in as_list(f(*xs)) if isinstance(o, torch.Tensor)]
        live = [o for o in outs if o.requires_grad]
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in live]
        floats = [x for x in xs if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = torch.autograd.grad(live, floats, weights, allow_unused=True)
        return [*(o.detach() for o in outs), *grads]

    want = differentiate(fn, leaves(twin(inputs)))
    got = differentiate(compiled(fn, **options), leaves(twin(inputs)))
    low = any(isinstance(x, torch.Tensor) and x.dtype in LOW_PRECISION for x in inputs)
    exact = differentiate(fn, leaves(wide(inputs))) if low else [None] * len(want)
    wrong = [
        f"{k} of {len(want)} (results, then gradients): {text}"
        for k, (g, w, e) in enumerate(zip(got, want, exact, strict=True))
        if (text := difference(g, w, e, tolerance, strides=False))
    ]
    assert not wrong, "\n".join(wrong)
