"""Attention sinks: each row of scores has one more column, a learned number, whose weight is dropped after the softmax.

    softmax([s, sink])[..., :-1] v  =  softmax(s) v * sigmoid(log(sum(exp(s))) - sink)

`sink_kernels` computes the right side. The column may stand in front of the scores too.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..simplify import same_sizes
from .operators import Operation, is_last, is_tensor, read, shape_of, value_of

FIRST, LAST = 0, -1  # the place of the sink in a row


def sink_of(call: Operation) -> tuple[Node, Node, int] | None:
    """Return (scores, sink, its place) of a concatenation with one column, or None."""
    tensors = call.get("tensors")
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2 or not all(map(is_tensor, tensors)):
        return None
    first, last = tensors
    if not is_last(call.get("dim", 0), first) or value_of(first).dtype != value_of(last).dtype:
        return None
    match _is_column(first), _is_column(last):
        case False, True:
            return first, last, LAST
        case True, False:
            return last, first, FIRST
    return None


def dropped_column(n: Node) -> tuple[Node, int] | None:
    """Return (source, place) of a slice that drops the first or the last column of its source, or None."""
    call = read(n)
    source = call.get("input")
    if not is_tensor(source) or not is_tensor(n) or not same_sizes(shape_of(n)[:-1], shape_of(source)[:-1]):
        return None
    bounds = _bounds(call, source)
    if bounds is None or any(isinstance(x, Node) for x in bounds):
        return None
    (start, end), columns = bounds, shape_of(source)[-1]
    are_numbers = isinstance(columns, int) and isinstance(end, int)
    if start == 1 and (end is None or (are_numbers and end == columns)):
        return source, FIRST
    drops_last = (isinstance(end, int) and end == -1) or (are_numbers and end == columns - 1)
    return (source, LAST) if drops_last and start in (None, 0) else None


def _bounds(call: Operation, source: Node) -> tuple[Any, Any] | None:
    """Return (start, end) of a slice of columns alone; None for other calls."""
    if call.name == "item":
        return _of_index(call.get("index"), value_of(source).dim())
    if not is_last(call.get("dim", 0), source):
        return None
    if call.name == "slice" and call.get("step", 1) == 1:
        end = call.get("end")
        return call.get("start"), None if isinstance(end, int) and end >= 1 << 62 else end
    if call.name == "narrow":
        start, length = call.get("start"), call.get("length")
        return (start, start + length) if isinstance(start, int) and isinstance(length, int) else None
    return None


def _of_index(index: object, dims: int) -> tuple[Any, Any] | None:
    """Return (start, end) of the last dimension of an index that takes all others whole."""
    *others, last = index if isinstance(index, tuple) else (index,)
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if any(x is not Ellipsis and not _is_whole(x) for x in others) or others.count(Ellipsis) > 1:
        return None
    return (last.start, last.stop) if Ellipsis in others or len(others) == dims - 1 else None


def _is_whole(x: object) -> bool:
    return isinstance(x, slice) and (x.start, x.stop, x.step) == (None, None, None)


def _is_column(x: Node) -> bool:
    columns = shape_of(x)[-1]
    return isinstance(columns, int) and columns == 1
