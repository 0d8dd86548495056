"""One mask of all masks of an attention, and eager's results in rows that are masked in full.

A row that only holds -inf gives NaN in eager, but the fused kernels give 0; such rows are multiplied by NaN. A row that
only holds the lowest finite number gives the mean of the values in both. In float32, adding a score to this number does
not change it. The kernels' gradients are wrong for such rows (`hidden_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from .. import attention_mask
from ..simplify import same_sizes
from .builder import Builder
from .form import Form, Step
from .hidden_rows import LOW as LOW_ROW
from .hidden_rows import Hiding, hiding_of
from .operators import aten, dtype_of, is_tensor, read, shape_of, value_of
from .shapes import Lead, with_lead

LOW = -1e9  # a number that masks write: exp(score + LOW - largest score) is 0 for all scores a model can have


@dataclass(frozen=True)
class Mask:
    """The mask of the fused operator. `node` is None if nothing is hidden, or only what is behind the diagonal.

    `factors`: numbers or columns by which the query is multiplied or divided first, and whether it is a division.
    `hidden_rows`: the number by which each row of the result is multiplied: NaN for rows with no visible column.
    """

    scale: float
    node: Node | None = None
    causal: bool = False
    hidden_rows: Node | None = None
    factors: tuple[tuple[Node, bool], ...] = ()


def working_dtype(form: Form, device: str) -> torch.dtype:
    """Return the dtype of the mask. On a CPU, the kernels add a float32 mask to scores of 16 bits."""
    dtype = dtype_of(form.result)
    mixed = any(step.dtype != dtype for step in form.steps)
    wide = dtype in (torch.float16, torch.bfloat16) and (mixed or dtype == torch.float16)
    return torch.float32 if device == "cpu" and wide else dtype


def mask_of(build: Builder, form: Form, lead: Lead, device: str, values: dict[Node, object]) -> Mask | str:
    """Return the mask and the scale of an attention, or why the fused operator cannot have them."""
    work, scale = working_dtype(form, device), 1.0
    total: Node | None = None
    factors: list[tuple[Node, bool]] = []
    for step in form.steps:
        if step.kind in ("multiply", "divide"):
            factor = _factor(build, step, lead)
            if total is not None or factor is None:
                return "masked scores are scaled by a symbolic number or a tensor"
            factors.append((factor, step.kind == "divide"))
            continue
        if step.kind == "floor":
            lowest = max(step.number, torch.finfo(work).min)
            total = total if total is None else build.call(aten.clamp_min.default, total, lowest)
            continue
        if step.kind == "scale":
            scale *= step.number
            if total is not None and not 0 < step.number <= 1:
                return "masked scores are scaled up"
            total = total if total is None or step.number == 1 else build.call(aten.mul.Tensor, total, step.number)
            continue
        if form.zeroed and step.number == -math.inf:
            step = replace(step, number=torch.finfo(step.dtype).min)  # rows that are hidden in full stay numbers
        combine = _filled if step.kind == "fill" else _added
        combined = combine(build, step, total, work, lead)
        if isinstance(combined, str):
            return combined
        total = combined
    mask = Mask(scale) if total is None else _finished(build, form, total, scale, device, values)
    if isinstance(mask, str):
        return mask
    if form.zeroed and mask.node is not None:
        mask = replace(mask, hidden_rows=_zero_rows(build, form, lead, mask.node))
    return replace(mask, factors=(*factors, *mask.factors))


def _factor(build: Builder, step: Step, lead: Lead) -> Node | None:
    """Return a factor of scores as one of the query; None if its symbolic sizes must be reshaped."""
    assert step.mask is not None
    return _placed(build, step.mask, step, lead) if is_tensor(step.mask) else step.mask


def _finished(
    build: Builder, form: Form, total: Node, scale: float, device: str, values: dict[Node, object]
) -> Mask | str:
    mask = attention_mask.known_value(total, values)
    meaning = attention_mask.meaning_of(mask)
    if meaning:
        return Mask(scale, causal=meaning == "causal")
    if device != "cpu" and any(step.dtype != dtype_of(form.result) for step in form.steps):
        return "the fused kernels of the GPU take masks of the dtype of the query"
    if device != "cpu" and form.sink is None and dtype_of(total) == torch.float16 and not _visible_everywhere(mask):
        return "a row may be masked in full, which in float16 depends on the rounding of its scores"
    hides = bool((mask.amax(-1) == -math.inf).any()) if isinstance(mask, torch.Tensor) else not finite(total)
    wide = build.call(aten.unsqueeze.default, total, 0) if value_of(total).dim() == 3 else total
    finished = Mask(scale, wide, False, _hidden_rows(build, wide) if hides else None)
    if form.sink is not None or not value_of(form.result).requires_grad:
        return finished  # the weights of hidden rows are 0 beside a sink
    hiding = hiding_of(form.steps, mask, values)
    if hiding is Hiding.WITH_GRADIENT:
        return "a row may be masked in full by finite numbers, and the fused kernels' gradients are wrong there"
    return finished if hiding is Hiding.NONE else _without_hidden_rows(build, form, finished)


def _without_hidden_rows(build: Builder, form: Form, mask: Mask) -> Mask:
    """Return a mask of which the rows that only hold low finite numbers are 0; the query is multiplied by 0 there."""
    assert mask.node is not None
    best = build.call(aten.amax.default, build.call(aten.detach.default, mask.node), [-1], True)
    lowest = build.call(aten.eq.Scalar, best, -math.inf)
    visible = build.call(aten.logical_or.default, build.call(aten.gt.Scalar, best, LOW_ROW), lowest)
    one, zero = _numbers(build, mask.node, 1.0, 0.0)
    shown = build.call(aten.where.self, visible, mask.node, zero)
    factor, dtype = build.call(aten.where.self, visible, one, zero), dtype_of(form.result)
    column = build.call(aten._to_copy.default, factor, dtype=dtype)
    return replace(mask, node=shown, factors=((column, False),))


def _visible_everywhere(mask: object) -> bool:
    """Return whether every row of a known mask has a column that is not hidden."""
    return isinstance(mask, torch.Tensor) and bool((mask.amax(-1) > torch.finfo(mask.dtype).min / 2).all())


def _hidden_rows(build: Builder, total: Node) -> Node:
    """Return NaN for rows of a mask that only hold -inf, and 1 for the others."""
    best = build.call(aten.amax.default, build.call(aten.detach.default, total), [-1], True)
    hidden = build.call(aten.eq.Scalar, best, -math.inf)
    return build.call(aten.where.self, hidden, *_numbers(build, best, math.nan, 1.0))


def placed_sink(build: Builder, sink: Step, lead: Lead) -> Node | None:
    """Return the column of a sink for the leading sizes `lead`; None if its symbolic sizes must be reshaped."""
    assert sink.mask is not None
    return with_lead(build, sink.mask, sink.lead, lead)


def beside_sink(build: Builder, mask: Mask, sink: Node) -> Mask:
    """Return a mask whose rows of -inf alone give NaN only where the sink is -inf too."""
    if mask.hidden_rows is None:
        return mask
    absent = build.call(aten.eq.Scalar, build.call(aten.detach.default, sink), -math.inf)
    (one,) = _numbers(build, mask.hidden_rows, 1.0)
    return replace(mask, hidden_rows=build.call(aten.where.self, absent, mask.hidden_rows, one))


def _numbers(build: Builder, like: Node, *numbers: float) -> list[Node]:
    kind = {"dtype": dtype_of(like), "device": value_of(like).device}
    return [build.call(aten.full.default, [], number, **kind) for number in numbers]


def _placed(build: Builder, n: Node, step: Step, lead: Lead) -> Node | None:
    """Return a mask that is added to scores of the leading sizes `step.lead` as one for the leading sizes `lead`.

    It stays as it is where `lead` only prepends ones, since masks are broadcast from the last dimension on.
    """
    own = step.lead
    if value_of(n).dim() == 0:
        return n
    if len(own) <= 2 and same_sizes((1,) * (2 - len(own)) + own, lead):
        return n if value_of(n).dim() > 1 else build.call(aten.unsqueeze.default, n, 0)
    rows = shape_of(n)[-2:] if value_of(n).dim() > 1 else (1, *shape_of(n))
    sizes = (*own, *rows)
    if not all(isinstance(s, int) for s in (*sizes, *lead)):
        return None
    return with_lead(build, build.call(aten.expand.default, n, list(sizes)), own, lead)


def _added(build: Builder, step: Step, total: Node | None, work: torch.dtype, lead: Lead) -> Node | str:
    assert step.mask is not None
    mask = _placed(build, step.mask, step, lead)
    if mask is None:
        return "a mask has symbolic sizes that must be reshaped"
    if step.kind == "subtract":
        mask = build.call(aten.neg.default, mask)
    mask = _in(build, mask, work)
    return mask if total is None else build.call(aten.add.Tensor, total, mask)


def _in(build: Builder, mask: Node, work: torch.dtype) -> Node:
    """Return an additive mask in another dtype; the lowest number stays the lowest."""
    own = dtype_of(mask)
    if own == work:
        return mask
    cast = build.call(aten._to_copy.default, mask, dtype=work)
    if torch.finfo(own).max >= torch.finfo(torch.bfloat16).max:
        return cast
    lowest = build.call(aten.eq.Scalar, mask, torch.finfo(own).min)
    return build.call(aten.where.self, lowest, *_numbers(build, cast, torch.finfo(work).min), cast)


def _zero_rows(build: Builder, form: Form, lead: Lead, total: Node) -> Node:
    """Return 0 for rows of which the only mask hides every column, and 1 for the others."""
    (step,) = (step for step in form.steps if step.kind == "fill")
    assert step.mask is not None
    mask = _placed(build, step.mask, step, lead)
    assert mask is not None, "`_filled` has placed it"
    reduce = aten.any.dim if step.keep else aten.all.dim
    rows, (one, zero) = build.call(reduce, mask, -1, True), _numbers(build, total, 1.0, 0.0)
    return build.call(aten.where.self, rows, *((one, zero) if step.keep else (zero, one)))


def _filled(build: Builder, step: Step, total: Node | None, work: torch.dtype, lead: Lead) -> Node | str:
    number = fill_number(step, work)
    if number is None:
        return f"a mask writes {step.number:g}, which scores may come near to"
    assert step.mask is not None
    mask = _placed(build, step.mask, step, lead)
    if mask is None:
        return "a mask has symbolic sizes that must be reshaped"
    kind = {"dtype": work, "device": value_of(mask).device}
    fill, zero = (build.call(aten.full.default, [], x, **kind) for x in (number, 0.0))
    other = zero if total is None else total
    return build.call(aten.where.self, mask, *((other, fill) if step.keep else (fill, other)))


def fill_number(step: Step, work: torch.dtype) -> float | None:
    """Return what a mask writes, as a number of the working dtype: -inf, or the lowest; None if it is not low."""
    if step.number == -math.inf:
        return -math.inf
    low = step.number <= LOW or step.number <= torch.finfo(step.dtype).min / 2
    return torch.finfo(work).min if low else None


_VIEWS = ("view", "expand", "copy", "getitem")
_TRANSPARENT: Mapping[object, Callable[[Node], object]] = {
    aten.unsqueeze.default: lambda n: n.args[0],
    aten.expand.default: lambda n: n.args[0],
    aten.reshape.default: lambda n: n.args[0],
}


def finite(n: object) -> bool:
    """Return whether a mask provably holds no -inf: a choice between finite numbers, or a view of such a mask."""
    if type(n) is int or type(n) is float:
        return math.isfinite(n)
    if not is_tensor(n):
        return False
    if not value_of(n).is_floating_point():
        return True
    if n.target in (aten.full.default, torch.full):
        return finite(n.args[1] if len(n.args) > 1 else n.kwargs.get("fill_value"))
    if n.target is aten.clamp_min.default:
        return True
    if n.target in (torch.zeros, torch.ones, aten.zeros.default, aten.ones.default):
        return True
    call = read(n)
    if call.name == "where":
        return finite(call.get("input")) and finite(call.get("other"))
    if call.name == "masked_fill":
        return finite(call.get("input")) and finite(call.get("value"))
    if call.name == "cast":
        source = call.get("input")
        wider = is_tensor(source) and torch.finfo(dtype_of(n)).max >= _largest(dtype_of(source))
        return wider and finite(source)
    if call.name in _VIEWS or getattr(n.target, "__name__", "") == "getitem" or n.target in _TRANSPARENT:
        return bool(n.args) and finite(n.args[0])
    return False


def _largest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else float(torch.iinfo(torch.int64).max)
