"""Helper functions on FX graphs that all passes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from ..aten.mutates import is_mutable
from ..aten.random import is_random
from ..compat import fake_values, torch_api

aten = torch.ops.aten


def val(n: object) -> Any:
    """Return the traced fake value of a node; an argument that is not a node is returned unchanged."""
    return n.meta.get("val") if isinstance(n, Node) else n


def is_call(n: object, *targets: object) -> bool:
    """Return whether `n` is a call of one of `targets`."""
    return isinstance(n, Node) and n.op == "call_function" and n.target in targets


class Convolution(NamedTuple):
    """The arguments of a call of `aten.convolution`."""

    x: Node
    weight: Node
    bias: Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def convolution_of(n: Node) -> Convolution:
    """Return the arguments of a call of `aten.convolution`."""
    arguments: tuple[Any, ...] = n.args
    return Convolution(*arguments)


def function_of(n: Node) -> Callable[..., object]:
    """Return the function that a node calls."""
    assert callable(n.target), f"{n.format_node()} calls no function"
    return n.target


def only_user(n: Node) -> Node | None:
    """Return the single user of a node, or None."""
    return next(iter(n.users)) if len(n.users) == 1 else None


def snapshot(graph: Graph) -> Callable[[], Graph]:
    """Return a function that builds the graph again as it is now, for use after a pass has failed.

    A snapshot takes a fiftieth of the time of a copy, which is only made after a failure. Objects that nodes refer to
    are shared.
    """
    nodes = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes]
    tracer, codegen = graph._tracer_cls, graph._codegen

    def restore() -> Graph:
        out, copies = Graph(tracer_cls=tracer), dict[Node, Node]()
        for n, op, target, args, kwargs, name, kind, meta in nodes:
            arguments = torch.fx.node.map_arg((args, kwargs), copies.__getitem__)
            copies[n] = out.create_node(op, target, *arguments, name, kind)
            copies[n].meta = dict(meta)
        out.set_codegen(codegen)
        return out

    return restore


def drop_dead(graph: Graph) -> None:
    """Eliminate dead code in place: calls without users and without effects."""
    random = torch_api.keeps_unread_random()
    # is_impure is slow, so it is only asked for calls without users
    graph.eliminate_dead_code(lambda n: bool(n.users) or n.is_impure(random))


class Purity:
    """A predicate: whether equal calls may be merged, i.e. have no effect and draw no random numbers.

    It caches its answer for every operator; a pass makes one instance.
    """

    def __init__(self) -> None:
        self._answers: dict[object, bool] = {}

    def __call__(self, n: Node) -> bool:
        if not isinstance(n.target, torch._ops.OpOverload):
            return self._look_up(n)
        if n.target not in self._answers:
            self._answers[n.target] = self._look_up(n)
        return self._answers[n.target]

    @staticmethod
    def _look_up(n: Node) -> bool:
        return not is_mutable(n.target) and not is_random(n.target) and not n.is_impure()


def insert(
    graph: Graph,
    before: Node,
    target: Callable[..., object],
    args: tuple[Argument, ...],
    kwargs: Mapping[str, Argument] | None = None,
) -> Node:
    """Insert a call before a node and compute its fake value from those of its arguments."""
    with graph.inserting_before(before):
        new = graph.call_function(target, args, dict(kwargs or {}))
    new.meta["val"] = fake_call(new)
    if "stack_trace" in before.meta:
        new.meta["stack_trace"] = before.meta["stack_trace"]
    return new


def fake_call(n: Node) -> Any:
    """Return the fake value of a call, computed from those of its arguments."""
    args = torch.fx.node.map_arg(n.args, val)
    fake_value = None if n.kwargs else fake_values.of_call(n.target, args)
    if fake_value is not None:
        return fake_value
    kwargs = torch.fx.node.map_arg(n.kwargs, val)
    mode = fake_mode(n.graph)
    with torch.no_grad():
        if mode is None:
            return function_of(n)(*args, **kwargs)
        with mode:
            return function_of(n)(*args, **kwargs)


def complete(gm: GraphModule) -> None:
    """Compute the fake value of every node that has none; torch's partitioner and users' passes add such nodes."""
    mode = fake_mode(gm.graph)
    for n in gm.graph.nodes:
        value = val(n)
        if n.op == "get_attr" and "val" not in n.meta:
            value = attribute(gm, str(n.target))
        if n.op == "call_function" and "val" not in n.meta:
            # an element of a tuple is taken from the tuple's fake value, so that it is the same tensor
            n.meta["val"] = val(n.args[0])[n.args[1]] if n.target is operator.getitem else fake_call(n)
        elif mode is not None and isinstance(value, torch.Tensor) and not hasattr(value, "fake_mode"):
            n.meta["val"] = mode.from_tensor(value)


def attribute(gm: GraphModule, path: str) -> Any:
    """Return the attribute that a `get_attr` node with target `path` reads."""
    value: object = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


def fake_mode(graph: Graph) -> FakeTensorMode | None:
    """Return the fake-tensor mode that traced the graph, or None."""
    for n in graph.nodes:
        value = val(n)
        mode = getattr(value, "fake_mode", None) if isinstance(value, torch.Tensor) else None
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def replace(old: Node, new: Node, keep_meta: bool = False) -> None:
    """Replace `old` by `new` in all its users, and erase `old`."""
    if keep_meta:
        new.meta = dict(old.meta)
    if "root" in old.meta:  # results of the graph are views of it
        new.meta["root"] = old.meta["root"]
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def propagate(gm: GraphModule, nodes: Iterable[Node] | None = None) -> None:
    """Recompute the fake values of all calls that depend on `nodes`, whose strides have changed."""
    changed: set[Node] = set(nodes or ())
    for n in gm.graph.nodes:
        update(n, changed)


def update(n: Node, changed: set[Node]) -> None:
    """Recompute the fake value of one call if an argument is in `changed`; add the call if its layout has changed."""
    if n.op != "call_function" or n.meta.get("fixed_val") or not any(a in changed for a in n.all_input_nodes):
        return
    new = _recomputed(n)
    if layout(new) != layout(n.meta.get("val")):
        changed.add(n)
    n.meta["val"] = new


def _recomputed(n: Node) -> object:
    """Return the fake value of a call for its arguments' new strides; a view they do not allow becomes a reshape."""
    if n.target not in (aten.view.default, aten._unsafe_view.default):
        return like_argument(n, fake_call(n))
    try:
        return fake_call(n)
    except (RuntimeError, ValueError):
        n.target = aten.reshape.default
        return fake_call(n)


KEEPS_LAYOUT = "keeps_layout"  # metadata of a call whose result is channels-last if its first argument is
READ_THROUGH = "read_through"  # metadata of a reshape that is not stored: its readers compute where elements are
TAKES_LAYOUT = "takes_layout"  # metadata of a call whose result is channels-last if any argument is


def like_argument(n: Node, fake: object) -> object:
    """Return the fake value of a call, channels-last where an argument is and a pass has marked the call so.

    The image then stays channels-last until a convolution after the call.
    """
    arguments = n.all_input_nodes if n.meta.get(TAKES_LAYOUT) else n.args[: bool(n.meta.get(KEEPS_LAYOUT))]
    first, *rest = fake if isinstance(fake, (tuple, list)) else (fake,)
    if not any(_is_channels_last(val(x), first) for x in arguments):
        return fake
    restrided = first.contiguous(memory_format=_FORMATS[first.dim()])
    return (restrided, *rest) if isinstance(fake, (tuple, list)) else restrided


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(x: object, result: torch.Tensor) -> bool:
    """Return whether `x` is a channels-last tensor of static sizes, those of `result` but for its channels."""
    if not isinstance(x, torch.Tensor) or x.dim() not in _FORMATS or torch_api.has_symbolic_geometry(x):
        return False
    same = x.dim() == result.dim() and x.shape[0] == result.shape[0] and x.shape[2:] == result.shape[2:]
    return same and x.is_contiguous(memory_format=_FORMATS[x.dim()])


def layout(x: object) -> object:
    """Return shape, strides and dtype of a fake value, or of each of several."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), tuple(x.stride()) if x.layout == torch.strided else None, x.dtype
    return tuple(layout(y) for y in x) if isinstance(x, (tuple, list)) else x


def dtype_of(n: Node) -> torch.dtype:
    """Return the dtype of a node's tensor."""
    dtype: torch.dtype = n.meta["val"].dtype
    return dtype


def stable_sort(gm: GraphModule) -> None:
    """Move nodes behind their arguments, in place, and keep their order otherwise.

    Only calls without effects may be out of order. Raises RuntimeError for a cycle.
    """
    graph, placed = gm.graph, set[Node]()
    waiting: dict[Node, list[Node]] = {}
    last: Node | None = None

    def place(n: Node) -> Node:
        if last is not None and last.next is not n:
            last.append(n)
        placed.add(n)
        return n

    for n in list(graph.nodes):
        ready = [n]
        while ready:
            m = ready.pop(0)
            missing = next((a for a in m.all_input_nodes if a not in placed), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(m)
                continue
            last = place(m)
            ready.extend(waiting.pop(m, ()))
    if waiting:
        raise RuntimeError(f"{next(iter(waiting))} is needed before it is computed")


def ancestors(*nodes: Node) -> set[Node]:
    """Return nodes and all nodes that they depend on."""
    seen: set[Node] = set()
    stack = [*nodes]
    while stack:
        m = stack.pop()
        if m not in seen:
            seen.add(m)
            stack.extend(m.all_input_nodes)
    return seen
