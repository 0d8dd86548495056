"""Compute a linear layer over a vocabulary and its cross-entropy in chunks of rows.

The logits of a language model are often a step's largest tensor, and their gradient is as large. With the option
`loss_chunks` only one chunk of rows has logits at a time: the chunks are tagged like checkpointed regions, so that the
backward computes a chunk's logits again, its gradient, and goes on to the next.

    cross_entropy(linear(h, w, b), t)  =  sum over chunks of cross_entropy(linear(h_i, w, b), t_i, "sum") / rows counted

The pass runs over the graph that Dynamo captured, before AOTAutograd differentiates it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from torch.utils.checkpoint import CheckpointPolicy

from altbackend.lazy_dataclass import dataclass

from ..aten.name import words
from ..debug.trace import DecisionKind
from .context import Context
from .graph import only_user

FIRST_REGION = 1 << 40  # numbers of regions that no checkpoint of the program has
_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
_ROWS_KEPT = ("view", "reshape", "flatten", "contiguous")
_REGROUPED = ("view", "reshape", "flatten")
_CASTS = ("float", "double", "to")
_WRITES = words("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul setitem")
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


@dataclass(frozen=True)
class Site:
    """A loss that can be chunked: the linear call, the steps from its result to the loss, and the loss's arguments."""

    loss: Node
    linear: Node
    steps: tuple[Node, ...]
    arguments: dict[str, Argument]


def run(gm: GraphModule, ctx: Context) -> int:
    """Chunk the losses of a captured graph; return their number. The decision log has the reason for each refusal."""
    count = 0
    for n in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.cross_entropy):
        site = _site(n)
        refused = isinstance(site, str)
        verdict = "whole" if refused else f"in {ctx.config.loss_chunks} chunks"
        ctx.trace.decision(DecisionKind.SIMPLIFY, n.name, verdict, str(site) if refused else "option loss_chunks")
        if not isinstance(site, str):
            _rewrite(site, ctx.config.loss_chunks, FIRST_REGION + count * ctx.config.loss_chunks)
            count += 1
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _site(loss: Node) -> Site | str:
    """Return the site of a loss, or the reason why it stays whole."""
    given = {**dict(zip(_LOSS, loss.args, strict=False)), **loss.kwargs}
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return "its rows have weights"
    if given.get("reduction", "mean") not in ("mean", "sum"):
        return "it is not reduced"
    logits, target = given["input"], given["target"]
    are_tensors = all(isinstance(_value(x), torch.Tensor) for x in (logits, target))
    if not are_tensors or not isinstance(logits, Node) or not isinstance(target, Node):
        return "its operands are unknown"
    if _value(logits).dim() != 2 or _value(target).dim() != 1 or _value(target).is_floating_point():
        return "it is not a loss of rows of logits and of class numbers"
    steps: list[Node] = []
    n = logits
    while n.target not in _LINEAR:
        source = _rows_before(n)
        if only_user(n) is None or source is None:
            return "its logits are no result of a linear call alone"
        steps.append(n)
        n = source
    if only_user(n) is None:
        return "the logits have other readers"
    if any(
        s.target is operator.getitem and any(t.target in _REGROUPED for t in steps[k:]) for k, s in enumerate(steps)
    ):
        return "rows are chosen after they are regrouped"
    if reason := _between(n, loss, steps):
        return reason
    return Site(loss, n, tuple(reversed(steps)), given)


def _value(n: object) -> Any:
    return n.meta.get("example_value") if isinstance(n, Node) else n


def _rows_before(n: Node) -> Node | None:
    """Return what a step reads if it chooses, casts or regroups rows of logits and keeps each row whole and in order.

    Return None for other steps.
    """
    source = n.args[0] if n.args else None
    return source if isinstance(source, Node) and _keeps_rows(n, source) else None


def _keeps_rows(n: Node, source: Node) -> bool:
    before, after = _value(source), _value(n)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if after.dim() == 0 or after.shape[-1] != before.shape[-1]:
        return False
    if n.op == "call_method":
        is_cast = n.target in _CASTS and all(isinstance(a, torch.dtype) for a in (*n.args[1:], *n.kwargs.values()))
        return is_cast or n.target in _ROWS_KEPT
    return n.target is operator.getitem and _is_whole_rows(n.args[1], before.dim())


def _is_whole_rows(index: object, dims: int) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    if not all(x is Ellipsis or isinstance(x, slice) for x in items):
        return False
    ends_whole = Ellipsis in items and items[-1] in (Ellipsis, slice(None))
    return ends_whole or (Ellipsis not in items and len(items) < dims) or items[-1] == slice(None)


def _between(linear: Node, loss: Node, steps: list[Node]) -> str:
    """Return the reason why a linear call cannot move to its loss, or "": a call between them may change its operands.

    A graph that Dynamo captured writes in place, and switches autocast and gradients on and off.
    """
    n = linear.next
    while n is not loss:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITES or "out" in n.kwargs
        if n not in steps and (writes or name.startswith(("_enter", "_exit", "_set_grad"))):
            return f"{n.name} stands between the logits and the loss"
        n = n.next
    return ""


def _rewrite(site: Site, chunks: int, region: int) -> None:
    loss, graph = site.loss, site.loss.graph
    names = ("input", "weight", "bias")
    operands = {**dict(zip(names, site.linear.args, strict=False)), **site.linear.kwargs}
    x, *weights = (operands.get(name) for name in names)
    with graph.inserting_before(loss):
        for step in site.steps:
            if step.target is operator.getitem:
                x = graph.call_function(operator.getitem, (x, step.args[1]))
        rows = graph.call_method("reshape", (x, -1, graph.call_method("size", (x, -1))))
        target = site.arguments["target"]
        assert isinstance(target, Node), "`_site` has checked it"
        parts, targets = (_split(rows, rows, chunks), _split(target, rows, chunks))
        sums = [
            _chunk(site, (part, *weights), t, region + k)
            for k, (part, t) in enumerate(zip(parts, targets, strict=True))
        ]
        total = sums[0]
        for more in sums[1:]:
            total = graph.call_function(operator.add, (total, more))
        if site.arguments.get("reduction", "mean") == "mean":
            counted = graph.call_function(operator.ne, (target, site.arguments.get("ignore_index", -100)))
            total = graph.call_function(operator.truediv, (total, graph.call_method("sum", (counted,))))
        result = graph.call_method("to", (total, _value(loss).dtype))
    result.meta.update(loss.meta)
    loss.replace_all_uses_with(result)
    for n in (loss, *reversed(site.steps), site.linear):
        graph.erase_node(n)


def _split(x: Node, rows: Node, chunks: int) -> list[Node]:
    """Return the chunks of a tensor that has as many rows as `rows`; the last takes what is left."""
    graph = x.graph
    count = graph.call_method("size", (rows, 0))
    each = graph.call_function(operator.floordiv, (count, chunks))
    last = graph.call_function(operator.sub, (count, graph.call_function(operator.mul, (each, chunks - 1))))
    split = graph.call_function(torch.split, (x, [each] * (chunks - 1) + [last]))
    return [graph.call_function(operator.getitem, (split, k)) for k in range(chunks)]


def _chunk(site: Site, operands: Sequence[Argument], target: Node, region: int) -> Node:
    """Insert the sum of the losses of one chunk, in float32 or wider, as a region that the backward recomputes.

    `operands`: the chunk's rows, the weight and the bias of its linear call.
    """
    graph = target.graph
    given: dict[str, Argument] = {k: v for k, v in site.arguments.items() if k in ("ignore_index", "label_smoothing")}
    nodes: list[Node] = [graph.call_function(torch.nn.functional.linear, tuple(operands))]
    for step in site.steps:
        if step.op == "call_method" and step.target in _CASTS:
            nodes.append(graph.call_method(str(step.target), (nodes[-1], *step.args[1:]), dict(step.kwargs)))
    given["reduction"] = "none"
    losses = graph.call_function(torch.nn.functional.cross_entropy, (nodes[-1], target), given)
    wide = torch.promote_types(_value(site.loss).dtype, torch.float32)
    nodes += [losses, graph.call_method("sum", (losses,), {"dtype": wide})]
    copied = {k: v for k, v in site.loss.meta.items() if k in ("stack_trace", "nn_module_stack")}
    for n in nodes:
        n.meta.update(copied, recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=region)
    return nodes[-1]
