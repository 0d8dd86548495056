"""Find the parts of one attention: from its last product back to the operands of its first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from ..simplify import same_sizes
from .einsum import explicit, scores_order
from .maxima import shifted
from .operators import Lead, Operand, Operation, is_last, is_tensor, read, shape_of, value_of
from .sinks import sink_of
from .weights import keeps_rows, weighted

LOWEST = -1e30  # below it, adding a score does not change the number in float32
COLUMNS = (torch.float32, torch.float64, torch.bfloat16)
_VIEWS = ("view", "expand", "permute", "transpose", "detach", "item")


@dataclass(frozen=True)
class Step:
    """A call between the first product and the softmax, on scores of the leading sizes `lead`.

    `kind`: "scale" by `number`; "multiply" or "divide" by `mask`, a symbolic number or a tensor with one column; "add"
    or "subtract" the tensor `mask`; "fill" with `number` where `mask` is true, or where it is false if `keep`; "floor":
    the larger of a score and `number`, which is lower than any; "sink": a column `mask` at the place `number`. `dtype`:
    that of the scores.
    """

    kind: str
    lead: Lead
    dtype: torch.dtype
    number: float = 1.0
    mask: Node | None = None
    keep: bool = False


@dataclass(frozen=True)
class Form:
    """One attention: softmax(q k^T, changed by steps) v. `key` has its last two dimensions exchanged.

    `interior`: the calls that vanish, the last product included. `order`: how the result's dimensions are permuted.
    `sink`: a step whose mask is one more column of the scores, without a value. `zeroed`: columns that the only mask
    hides get a weight of 0, so that rows that it hides in full are 0.
    """

    query: Operand
    key: Operand
    value: Operand
    steps: tuple[Step, ...]
    dropout: float
    result: Node
    interior: tuple[Node, ...]
    scores: Node
    order: tuple[int, ...] | None = None
    sink: Step | None = None
    zeroed: bool = False


@dataclass(frozen=True)
class _Scores:
    """The calls found so far on the way to the softmax: operands of the first product, and steps in order."""

    product: Node
    query: Operand
    key: Operand
    steps: tuple[Step, ...]
    calls: tuple[Node, ...]


Constant = Callable[[Node], object]  # the value of a node that depends on no input, or None


def form_of(last: Node, constant: Constant) -> Form | None:
    """Return the attention whose last product is a node, or None. `constant` computes values known beforehand."""
    after = weighted(last)
    if after is None or not is_tensor(last):
        return None
    read_softmax = read(after.softmax)
    source = read_softmax.get("input")
    if not is_tensor(source) or not is_last(read_softmax.get("dim"), source):
        return None
    scores = _scores(source, constant)
    if scores is None:
        return None
    interior = _with_unread((*scores.calls, after.softmax, *after.calls))
    if any(u not in (*interior, last) for n in interior for u in n.users):
        return None
    steps, sink = scores.steps, None
    if steps and steps[-1].kind == "sink" and steps[-1].number == after.dropped:
        steps, sink = steps[:-1], steps[-1]
    if (after.dropped is not None and sink is None) or any(step.kind == "sink" for step in steps):
        return None  # a weight that is dropped is that of a sink, and is not changed
    if after.zeroed is not None and (sink is not None or not _hides_alone(steps, *after.zeroed)):
        return None
    results = (after.dropout, last, (*interior, last), scores.product)
    return Form(scores.query, scores.key, after.value, steps, *results, after.order, sink, after.zeroed is not None)


def _with_unread(calls: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return calls with the views of them that nothing reads, such as weights that a program may return."""
    unread = (m for n in calls for u in n.users if u not in calls for m in _unread(u))
    return (*calls, *dict.fromkeys(unread))


def _unread(n: Node) -> tuple[Node, ...]:
    """Return a view and the views of it if nothing else reads them, else nothing."""
    if read(n).name not in _VIEWS:
        return ()
    of_users = [_unread(u) for u in n.users]
    return (n, *(m for ms in of_users for m in ms)) if all(of_users) else ()


def _hides_alone(steps: Sequence[Step], mask: Node, keep: bool) -> bool:
    """Return whether one mask hides columns, and it is the one given."""
    masking = [step for step in steps if step.kind not in ("scale", "multiply", "divide")]
    return [(step.kind, step.mask, step.keep) for step in masking] == [("fill", mask, keep)]


def _scores(n: object, constant: Constant) -> _Scores | None:
    """Return what leads to scores, or None if they do not come from a product."""
    if not is_tensor(n) or value_of(n).dim() < 2 or not value_of(n).is_floating_point():
        return None
    call = read(n)
    match call.name:
        case "matmul" | "einsum" | "baddbmm":
            return _first_product(n, call)
        case "cast" | "copy" | "view" | "expand":
            inner = _scores(call.get("input"), constant) if keeps_rows(call, n) else None
            return None if inner is None else replace(inner, calls=(*inner.calls, n))
        case "mul" | "div":
            return _scaled(n, call, constant)
        case "add" | "sub":
            if call.get("alpha", 1) != 1 or call.more or call.get("out") is not None:
                return None
            return _shifted(n, call, constant) or _masked(n, call, constant)
        case "masked_fill" | "where":
            return _filled(n, call, constant)
        case "maximum":
            return _floored(n, call.get("input"), call.get("other"), constant)
        case "clamp":
            most = call.get("max")
            exceeds = most is None or ((number := _fill_number(most, constant)) is not None and number >= -LOWEST)
            return _floored(n, call.get("input"), call.get("min"), constant) if exceeds else None
        case "cat":
            return _with_sink(n, call, constant)
    return None


def _with_sink(n: Node, call: Operation, constant: Constant) -> _Scores | None:
    """Return the scores of a row that has one more column; its place is the step's number."""
    row = sink_of(call)
    if row is None or call.get("out") is not None:
        return None
    scores, sink, place = row
    return _behind(_scores(scores, constant), n, _step("sink", n, number=place, mask=sink))


def _shifted(n: Node, call: Operation, constant: Constant) -> _Scores | None:
    """Return the scores of a difference to the largest of each row."""
    difference = shifted(call)
    inner = None if difference is None else _scores(difference[0], constant)
    if difference is None or inner is None or value_of(difference[0]).dtype != value_of(n).dtype:
        return None
    return replace(inner, calls=(*inner.calls, *difference[1], n))


def _floored(n: Node, scores: object, lowest: object, constant: Constant) -> _Scores | None:
    """Return the scores of a maximum with a number that is lower than all scores without a mask."""
    number = _fill_number(lowest, constant)
    if read(n).more or read(n).get("out") is not None or number is None or number > LOWEST or not is_tensor(scores):
        return None
    if shape_of(scores) != shape_of(n) or value_of(scores).dtype != value_of(n).dtype:
        return None
    return _behind(_scores(scores, constant), n, _step("floor", n, number=number))


def _first_product(n: Node, call: Operation) -> _Scores | None:
    lead, dtype = shape_of(n)[:-2], value_of(n).dtype
    if call.name == "matmul" and is_tensor(call.get("input")) and is_tensor(call.get("other")):
        if min(value_of(call.args["input"]).dim(), value_of(call.args["other"]).dim()) < 2:
            return None
        return _Scores(n, Operand(call.args["input"]), Operand(call.args["other"]), (), (n,))
    if call.name == "einsum" and len(call.args["operands"]) == 2 and all(map(is_tensor, call.args["operands"])):
        orders = scores_order(explicit(call.args["equation"], *(value_of(x).dim() for x in call.args["operands"])))
        if orders is None:
            return None
        query, key = call.args["operands"]
        return _Scores(n, Operand(query, orders[0]), Operand(key, orders[1]), (), (n,))
    if call.name == "baddbmm" and all(is_tensor(call.get(k)) for k in ("input", "batch1", "batch2")):
        beta, alpha = call.get("beta", 1), call.get("alpha", 1)
        if type(beta) not in (int, float) or type(alpha) not in (int, float) or beta not in (0, 1):
            return None
        steps: tuple[Step, ...] = (Step("scale", lead, dtype, float(alpha)),)
        if beta:  # beta * input + alpha * batch1 batch2
            steps += (Step("add", lead, dtype, mask=call.args["input"]),)
        return _Scores(n, Operand(call.args["batch1"]), Operand(call.args["batch2"]), steps, (n,))
    return None


def _behind(inner: _Scores | None, n: Node, step: Step) -> _Scores | None:
    return None if inner is None else replace(inner, steps=(*inner.steps, step), calls=(*inner.calls, n))


def _step(kind: str, n: Node, number: float = 1.0, mask: Node | None = None, keep: bool = False) -> Step:
    return Step(kind, shape_of(n)[:-2], value_of(n).dtype, number, mask, keep)


def _scaled(n: Node, call: Operation, constant: Constant) -> _Scores | None:
    """Return the scores of a product with a number, or of a quotient by a number."""
    first, second = call.get("input"), call.get("other")
    if call.more or call.get("rounding_mode") is not None or call.get("out") is not None:
        return None
    if call.name == "mul" and _number(first, constant) is not None:
        first, second = second, first
    if _symbolic(first) and call.name == "mul":
        first, second = second, first
    if _symbolic(second) and is_tensor(first):
        kind = "multiply" if call.name == "mul" else "divide"
        return _behind(_scores(first, constant), n, _step(kind, n, mask=second))
    number = _number(second, constant)
    if number is None:
        return _by_column(n, call, constant)
    if number == 0 or not is_tensor(first):
        return None
    return _behind(_scores(first, constant), n, _step("scale", n, number=1 / number if call.name == "div" else number))


def _by_column(n: Node, call: Operation, constant: Constant) -> _Scores | None:
    """Return the scores of a product with a column of factors, or of a quotient by one."""
    first, second = call.get("input"), call.get("other")
    for scores, column in ((first, second), (second, first))[: 2 if call.name == "mul" else 1]:
        if is_tensor(scores) and _is_column(column, scores, n):
            kind = "multiply" if call.name == "mul" else "divide"
            return _behind(_scores(scores, constant), n, _step(kind, n, mask=column))
    return None


def _is_column(x: object, scores: Node, n: Node) -> bool:
    """Return whether a tensor has one column and no more rows than the scores: it can scale the query instead.

    Not in float16, where the scaled query may be out of range although the scores are not.
    """
    if (
        not is_tensor(x)
        or value_of(x).dtype not in COLUMNS
        or not same_sizes(shape_of(x)[-1:], (1,)[: value_of(x).dim()])
    ):
        return False
    return value_of(x).dtype == value_of(scores).dtype and same_sizes(shape_of(scores), shape_of(n))


def _symbolic(x: object) -> bool:
    return isinstance(x, Node) and isinstance(value_of(x), (torch.SymFloat, torch.SymInt))


def _number(x: object, constant: Constant) -> float | None:
    """Return a finite number: itself, or the value of a tensor with one element that is known beforehand."""
    if isinstance(x, Node) and is_tensor(x) and value_of(x).dim() == 0:
        constant_value = constant(x)
        x = constant_value.item() if isinstance(constant_value, torch.Tensor) else None
    return float(x) if (type(x) is int or type(x) is float) and abs(x) < float("inf") else None


def _masked(n: Node, call: Operation, constant: Constant) -> _Scores | None:
    """Return the scores of a sum with a mask, which may stand on either side, or of a difference."""
    sides = (call.get("input"), call.get("other"))
    if _number(sides[1], constant) == 0 and is_tensor(sides[0]) and value_of(sides[0]).dtype == value_of(n).dtype:
        inner = _scores(sides[0], constant)  # + 0 and - 0, which change no softmax
        return None if inner is None else replace(inner, calls=(*inner.calls, n))
    for scores, mask in (sides, sides[::-1])[: 1 if call.name == "sub" else 2]:
        if not is_tensor(scores) or not is_tensor(mask) or not same_sizes(shape_of(scores)[-2:], shape_of(n)[-2:]):
            continue
        inner = _scores(scores, constant)
        if inner is not None and value_of(mask).is_floating_point() and value_of(mask).dim() > 0:
            return _behind(inner, n, _step("add" if call.name == "add" else "subtract", n, mask=mask))
    return None


def _filled(n: Node, call: Operation, constant: Constant) -> _Scores | None:
    """Return the scores of `masked_fill` or of `where` with a number on one side."""
    if call.name == "masked_fill":
        scores, number, mask, keep = call.get("input"), call.get("value"), call.get("mask"), False
    else:
        mask, scores, number, keep = call.get("condition"), call.get("input"), call.get("other"), True
        if _fill_number(number, constant) is None:
            scores, number, keep = number, scores, False
    fill = _fill_number(number, constant)
    alike = (number,) if isinstance(number, Node) and read(number).name == "full" else ()
    if fill is None or not is_tensor(mask) or value_of(mask).dtype != torch.bool or not is_tensor(scores):
        return None
    if value_of(scores).dtype != value_of(n).dtype or not same_sizes(shape_of(scores)[-2:], shape_of(n)[-2:]):
        return None
    inner = _scores(scores, constant)
    if inner is not None and alike and value_of(alike[0]).dtype == value_of(n).dtype:
        inner = replace(inner, calls=(*inner.calls, *alike))
    return _behind(inner, n, _step("fill", n, number=fill, mask=mask, keep=keep))


def _fill_number(x: object, constant: Constant) -> float | None:
    """Return a number that a mask writes, -inf included."""
    call = read(x)
    if call.name == "full":
        x = call.get("number", call.get("fill_value"))
    if isinstance(x, Node) and is_tensor(x) and value_of(x).numel() == 1:
        constant_value = constant(x)
        x = constant_value.item() if isinstance(constant_value, torch.Tensor) else None
    return float(x) if type(x) is int or type(x) is float else None
