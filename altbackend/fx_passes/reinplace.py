"""Re-inplacing: an input that the graph updates in parts is written in those parts alone.

A functional graph computes a new tensor for each update and copies the last one back:

    y = index_put(x, [i], v); copy_(x, y)   ->   index_put_(x, [i], v)
    y = select_scatter(x, v, 1, 3); copy_(x, y)   ->   copy_(select(x, 1, 3), v)

The tensors between the input and the write-back are its versions. A write-back is rewritten if `reads_are_current`
holds: each call that reads a version, or a view of it, runs before the next version is written.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from altbackend.lazy_dataclass import dataclass

from ..aten.mutates import IN_PLACE, VIEW_REPLACED, is_write_back, writes
from ..aten.view import aliased_arguments, may_alias, storage_owner
from .context import Context
from .graph import aten, insert, is_call, only_user, val
from .simplify import same_layout

_FUNCTIONALISED = torch.ops.higher_order.auto_functionalized_v2
_SUMS = frozenset({aten.index_add.default, aten.scatter_add.default})
_REDUCES = frozenset({aten.scatter_reduce.two, aten.index_reduce.default})


@dataclass(frozen=True)
class Update:
    """An input, its later versions in order, and the write-back of the last one.

    `start`: the input, or another value that the first update reads.
    """

    into: Node
    start: Node
    versions: tuple[Node, ...]
    write_back: Node


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite the write-backs of updated inputs; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_write_back(n) and (update := _update(n)) is not None and reads_are_current(update):
            _rewrite(gm, update)
            count += 1
    if count:
        gm.graph.eliminate_dead_code(lambda n: bool(n.users) or _writes_bases(n) or n.is_impure())
    return count


def _writes_bases(n: Node) -> bool:
    return is_call(n, _FUNCTIONALISED) and "_only_clone_these_bases" in n.kwargs


def _update(n: Node) -> Update | None:
    """Return the update that a write-back ends, or None if no version of it can be written in place."""
    into, last = n.args[0], n.args[1]
    if not isinstance(into, Node) or into.op != "placeholder" or not isinstance(last, Node) or not _writable(into):
        return None
    if sum(writes(u) and into in aliased_arguments(u, written=True) for u in into.users) != 1:
        return None
    versions: list[Node] = []
    while last is not into and (base := _base(last)) is not None and same_layout(val(last), val(into)):
        versions.append(last)
        last = base
    if not versions or storage_owner(last).op == "get_attr" or not _same_values(last, into):
        return None
    return Update(into, last, tuple(reversed(versions)), n)


def _writable(into: Node) -> bool:
    """Return whether each element of an input has a place of its own, and its values are those in memory."""
    x = val(into)
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_neg() or x.is_conj():
        return False
    dims = [
        (step, size) for step, size in zip(x.stride(), x.shape, strict=True) if not statically_known_true(size == 1)
    ]
    try:
        dims.sort(key=lambda d: d[0] if isinstance(d[0], int) else d[0].node.hint)
    except TypeError:  # a stride without a hint
        return False
    inner: int | torch.SymInt = 1
    for step, size in dims:
        if not statically_known_true(step >= inner):
            return False
        inner = step * size
    return True


def _same_values(start: Node, into: Node) -> bool:
    """Return whether `start` can be copied into the input before the first update."""
    a, b = val(start), val(into)
    return start is into or (isinstance(a, torch.Tensor) and a.dtype == b.dtype and a.device == b.device)


def _base(n: Node) -> Node | None:
    """Return the version that `n` is an update of, or None if `n` is no update that can write in place."""
    if is_call(n, operator.getitem):
        return _written_base(n)
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return None
    if n.target in VIEW_REPLACED:
        return n.args[0]
    if n.target not in IN_PLACE:
        return None
    narrow = val(n).dtype in (torch.bfloat16, torch.float16)
    if n.target in _SUMS or (n.target is aten.index_put.default and _argument(n, 3, "accumulate", False)):
        return None if narrow else n.args[0]  # 16-bit floats are summed in float32
    if n.target in _REDUCES:
        exact = _argument(n, 5, "include_self", True) and _argument(n, 4, "reduce", "mean") != "mean"
        return n.args[0] if exact and not narrow else None
    return n.args[0]


def _argument(n: Node, position: int, name: str, default: object) -> object:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name, default)


def _written_base(n: Node) -> Node | None:
    """Return the base that a functionalised call of a custom operator returns as `n`, an element of its results."""
    call, position = n.args
    if not is_call(call, _FUNCTIONALISED) or not isinstance(call, Node):
        return None
    if any(name.endswith("_storage_offset") for name in call.kwargs):
        return None  # counted from the begin of the storage, which no guard fixes for an input
    bases = call.kwargs["_all_bases"]
    assert isinstance(bases, (tuple, list))
    assert isinstance(position, int)
    k = position - (len(val(call)) - len(bases))
    if k < 0 or not isinstance(base := bases[k], Node):
        return None
    uses: list[Node] = []
    torch.fx.node.map_arg((call.args, dict(call.kwargs)), uses.append)
    # the operator must see its other arguments as they were
    alone = sum(storage_owner(a) is storage_owner(base) for a in uses) == 1
    return base if alone else None


def _writer(version: Node) -> Node:
    """Return the call that writes a version."""
    return version.args[0] if is_call(version, operator.getitem) else version  # type: ignore[return-value]


def reads_are_current(update: Update) -> bool:
    """Return whether every read of a version runs while that version is in the input's memory.

    The walk follows the graph's order with the number of the version in memory; 0 is the input as the caller passed it.
    A result of the graph may be no version, since the next call may write the input. The write-back itself may be one,
    and so may results that AOTAutograd takes from the input after the call.
    """
    graph = update.into.graph
    writers = {_writer(v): k + 1 for k, v in enumerate(update.versions)}
    number = {update.into: 0} | {v: k + 1 for k, v in enumerate(update.versions)}
    copied_first = update.start is not update.into
    current = 0
    for n in graph.nodes:
        if n is update.write_back:
            continue
        read = {number[a] for a in n.all_input_nodes if a in number}
        if n.op == "output":
            return not any(r in number for r in _own_results(n))
        if is_call(n, operator.getitem) and n.args[0] in writers:
            continue
        if n in writers:
            if writers[n] != current + 1 or (copied_first and current == 0 and read):
                return False
        elif read and may_alias(n):
            number[n] = current
        if any(k != current for k in read):
            return False
        current = writers.get(n, current)
    return False


def _own_results(output: Node) -> list[Node]:
    """Return the results of the graph, without those that AOTAutograd takes from an input after the call."""
    rebuilt = output.meta.get("of_inputs") or {}
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    return [r for k, r in enumerate(results) if isinstance(r, Node) and k not in rebuilt]


def _rewrite(gm: GraphModule, update: Update) -> None:
    """Write every version into the input in place, and erase the write-back."""
    into = update.into
    if update.start is not into:
        with gm.graph.inserting_before(_writer(update.versions[0])):
            first = gm.graph.call_function(aten.copy_.default, (into, update.start))
        first.meta = {**update.write_back.meta}
    for version in update.versions:
        if is_call(version, operator.getitem):
            _write_base(version, into)
        else:
            _write(gm, version, version, into, nested=update.start is into)
    for version in update.versions:
        version.replace_all_uses_with(into)
    update.write_back.replace_all_uses_with(into)
    gm.graph.erase_node(update.write_back)
    for version in reversed(update.versions):
        if not version.users and not is_call(version, operator.getitem):
            gm.graph.erase_node(version)


def _write(gm: GraphModule, at: Node, update: Node, into: Node, nested: bool) -> None:
    """Insert before `at` the calls that write what `update` replaces of its base into the tensor `into`.

    `nested`: of a part that is itself updated in parts, write those parts alone.
    """
    if update.target in IN_PLACE:
        insert(gm.graph, at, IN_PLACE[update.target], (into, *update.args[1:]), dict(update.kwargs))
        return
    view_operator, source = VIEW_REPLACED[update.target], update.args[1]
    assert isinstance(source, Node)
    part = insert(gm.graph, at, view_operator, (into, *update.args[2:]), dict(update.kwargs))
    if nested and _base(source) is not None and only_user(source) is update and _is_part(_base(source), update):
        _write(gm, at, source, part, nested)
    else:
        value = source.args[1] if is_call(source, aten.copy.default) and not source.kwargs else source
        insert(gm.graph, at, aten.copy_.default, (part, value))


def _is_part(n: Node | None, update: Node) -> bool:
    """Return whether `n` is the part that `update` replaces, as it was before."""
    return (
        is_call(n, VIEW_REPLACED[update.target])
        and n is not None
        and (n.args == (update.args[0], *update.args[2:]) and n.kwargs == update.kwargs)
    )


def _write_base(version: Node, into: Node) -> None:
    """Let a functionalised call write the base that it returns as `version`; it still copies its other bases."""
    call, position = version.args
    assert isinstance(call, Node)
    assert isinstance(position, int)
    bases = call.kwargs["_all_bases"]
    assert isinstance(bases, (tuple, list))
    own = position - (len(val(call)) - len(bases))
    copied = call.kwargs.get("_only_clone_these_bases", tuple(range(len(bases))))
    assert isinstance(copied, (tuple, list))
    call.kwargs = {
        **call.kwargs,
        "_all_bases": [into if k == own else b for k, b in enumerate(bases)],
        "_only_clone_these_bases": tuple(k for k in copied if k != own),
    }
    call.meta["val"] = tuple(None if k == position else v for k, v in enumerate(val(call)))
