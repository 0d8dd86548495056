"""Control flow over bodies: what runs in place of `cond`, `while_loop`, `scan`, `map` and `invoke_subgraph`.

A body takes its operands one by one and gives a tuple, or one value. Its results are new tensors, but that `invoke`d
bodies may give back operands and views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Body = Callable[..., Any]


def unboxed(call: Callable[[list[Any]], Sequence[Any]]) -> Body:
    """A compiled graph, which empties a list of inputs, as a body."""

    def body(*operands: Any) -> Sequence[Any]:
        return call(list(operands))

    return body


def choose(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """The results of one of two bodies. `predicate`: a bool, or a tensor of one element."""
    return _several((if_true if predicate else if_false)(*operands))


def loop(goes_on: Body, body: Body, carried: Sequence[Any], more: Sequence[Any] = ()) -> tuple[Any, ...]:
    """carried = body(*carried, *more) while goes_on(*carried, *more); copies of `carried` where it never does."""
    held = tuple(carried)
    turns = 0
    while _one(goes_on(*held, *more)):
        held = _several(body(*held, *more))
        turns += 1
    return held if turns else tuple(_copied(x) for x in held)


def loop_stacked(goes_on: Body, body: Body, carried: Sequence[Any], more: Sequence[Any] = ()) -> tuple[Any, ...]:
    """As `loop`, and what every turn gave, stacked along a new first dimension; `carried` itself without a turn."""
    held = tuple(carried)
    turns: list[tuple[Any, ...]] = []
    while _one(goes_on(*held, *more)):
        held = _several(body(*held, *more))
        turns.append(held)
    return _stacked(turns or [held])


def map_rows(body: Body, rows: Sequence[torch.Tensor], more: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Results of body(*one row of each, *more), stacked. Raises ValueError without a row."""
    return _stacked([_several(body(*row, *more)) for row in _rows(rows)])


def scan_rows(
    body: Body, carried: Sequence[Any], rows: Sequence[torch.Tensor], more: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """(*carried, *results) = body(*carried, *one row of each, *more), row after row.

    Gives what is carried in the end, then the other results stacked. Raises ValueError without a row.
    """
    held, turns = tuple(carried), []
    for row in _rows(rows):
        out = _several(body(*held, *row, *more))
        held = out[: len(held)]
        turns.append(out[len(held) :])
    return (*held, *_stacked(turns))


def invoke(body: Body, identifier: str, *operands: Any) -> tuple[Any, ...]:
    """The results of a body. `identifier`: torch's name of it."""
    return _several(body(*operands))


def _rows(rows: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, ...]]:
    if not rows or not rows[0].shape[0]:
        raise ValueError("map or scan over a dimension of size 0: the shapes of its results are not known")
    return zip(*(x.unbind() for x in rows), strict=True)


def _stacked(turns: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(torch.stack(xs) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*turns, strict=True))


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _several(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _one(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


_HIGHER = torch.ops.higher_order
# Operators with bodies, and what runs in their place; under the names of torch 2.11 to 2.13.
FUNCTIONS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    _HIGHER.cond: choose,
    _HIGHER.while_loop: loop,
    _HIGHER.while_loop_stack_output: loop_stacked,
    _HIGHER.map_impl: map_rows,
    _HIGHER.scan: scan_rows,
    _HIGHER.invoke_subgraph: invoke,
}
# What reads a number from a tensor to go on.
DATA_DECIDES = (choose, loop, loop_stacked)
