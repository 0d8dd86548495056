"""Implementations of `cond`, `while_loop`, `scan`, `map` and `invoke_subgraph` on callables for their subgraphs.

A subgraph takes its operands one by one and returns a tuple or one value. Its results are new tensors, except that
subgraphs of `invoke` may return operands and views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .boxed import Function, Values

Subgraph = Function


def unboxed(call: Callable[[list[object]], Values]) -> Subgraph:
    """Return a compiled graph, which takes one list, as a subgraph, which takes operands one by one."""

    def subgraph(*operands: object) -> Values:
        return call(list(operands))

    return subgraph


def choose(predicate: object, if_true: Subgraph, if_false: Subgraph, operands: Values = ()) -> tuple[object, ...]:
    """Return the results of one of two subgraphs. `predicate` is a bool, or a tensor of one element."""
    return _several((if_true if predicate else if_false)(*operands))


def loop(goes_on: Subgraph, body: Subgraph, carried: Sequence[object], more: Values = ()) -> tuple[object, ...]:
    """Repeat carried = body(*carried, *more) while goes_on(*carried, *more). Return copies if it never runs."""
    values = tuple(carried)
    turns = 0
    while _one(goes_on(*values, *more)):
        values = _several(body(*values, *more))
        turns += 1
    return values if turns else tuple(_copied(x) for x in values)


def loop_stacked(goes_on: Subgraph, body: Subgraph, carried: Sequence[object], more: Values = ()) -> tuple[object, ...]:
    """Run like `loop`.

    Return the results of all turns, stacked along a new first dimension; `carried` without a turn.
    """
    values = tuple(carried)
    turns: list[tuple[object, ...]] = []
    while _one(goes_on(*values, *more)):
        values = _several(body(*values, *more))
        turns.append(values)
    return _stacked(turns or [values])


def map_rows(body: Subgraph, rows: Sequence[torch.Tensor], more: Sequence[object] = ()) -> tuple[object, ...]:
    """Return the stacked results of body(*one row of each, *more). Raise ValueError if there are no rows."""
    return _stacked([_several(body(*row, *more)) for row in _rows(rows)])


def scan_rows(
    body: Subgraph, carried: Sequence[object], rows: Sequence[torch.Tensor], more: Values = ()
) -> tuple[object, ...]:
    """Repeat (*carried, *results) = body(*carried, *one row of each, *more) for each row.

    Return the last carried values, then the stacked results. Raise ValueError if there are no rows.
    """
    values, turns = tuple(carried), []
    for row in _rows(rows):
        out = _several(body(*values, *row, *more))
        values = out[: len(values)]
        turns.append(out[len(values) :])
    return (*values, *_stacked(turns))


def invoke(body: Subgraph, identifier: str, *operands: object) -> tuple[object, ...]:
    """Return the results of a subgraph. `identifier` is torch's name for it."""
    return _several(body(*operands))


def _rows(rows: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, ...]]:
    if not rows or not rows[0].shape[0]:
        raise ValueError("map or scan over a dimension of size 0: the shapes of its results are not known")
    return zip(*(x.unbind() for x in rows), strict=True)


def _stacked(turns: Sequence[tuple[object, ...]]) -> tuple[object, ...]:
    return tuple(torch.stack(xs) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*turns, strict=True))


def _copied(x: object) -> object:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _several(out: object) -> tuple[object, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _one(out: object) -> object:
    return out[0] if isinstance(out, (tuple, list)) else out


_HIGHER = torch.ops.higher_order
# Operators that take subgraphs, and the functions that replace them; names as in torch 2.11 to 2.13.
FUNCTIONS: dict[object, Callable[..., tuple[object, ...]]] = {
    _HIGHER.cond: choose,
    _HIGHER.while_loop: loop,
    _HIGHER.while_loop_stack_output: loop_stacked,
    _HIGHER.map_impl: map_rows,
    _HIGHER.scan: scan_rows,
    _HIGHER.invoke_subgraph: invoke,
}
# These read a number from a tensor to decide how to go on.
DATA_DECIDES = (choose, loop, loop_stacked)
