"""A captured graph compiled once more for each way in which its inputs overlap that its first form was not made for."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ..errors import FallbackWarning
from .sharing import in_one_storage, relation_of

Call = Callable[..., Any]
MOST = 8  # forms of one graph; with further ones it runs operator by operator


class Variants:
    """Calls the form of a captured graph for inputs as they are given, sizes included; makes it where there is none.

    `graph` gives the graph as it was captured, `compile_` compiles it for real inputs. Where torch does not know that
    inputs overlap (two tensors on one array), or a form cannot be compiled, the graph runs operator by operator, which
    is right for all inputs; with one warning, or under `strict` the error of the compilation.
    """

    def __init__(
        self, graph: Callable[[], GraphModule], compile_: Callable[[GraphModule, Sequence[Any]], Call], strict: bool
    ) -> None:
        self.graph, self.compile, self.strict = graph, compile_, strict
        self.forms: dict[Any, Call] = {}
        self.lock = threading.Lock()
        self.plain: GraphModule | None = None

    def __call__(self, *args: Any) -> Any:
        key = self._key(args)
        form = self.forms.get(key)
        if form is None:
            with self.lock:
                form = self.forms.get(key) or self._made(key, args)
        return form(*args)

    def _key(self, args: Sequence[Any]) -> Any:
        held = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) if _dense(x) else _other(x) for x in args)
        return held, relation_of(args), torch.is_grad_enabled()

    def _made(self, key: Any, args: Sequence[Any]) -> Call:
        why = "" if in_one_storage(args) else "torch does not know that they share it"
        if not why and len(self.forms) >= MOST:
            why = f"it has been compiled for {MOST} other ways"
        if why:
            return self._by_operators(why)
        try:
            form = self.compile(self.graph(), args)
        except Exception as cause:
            if self.strict:
                raise
            form = self._by_operators(f"it cannot be compiled for that way ({type(cause).__name__}: {cause})")
        self.forms[key] = form
        return form

    def _by_operators(self, why: str) -> Call:
        return self.by_operators(
            f"a compiled graph writes inputs that share memory in another way than it was compiled for, and {why}",
            "give it tensors of their own, or always the same views",
        )

    def by_operators(self, what: str, todo: str) -> GraphModule:
        """The graph as it was captured; the first time with a warning of what makes that necessary."""
        if self.plain is None:
            self.plain = self.graph()
            warnings.warn(f"{what}: it runs operator by operator; {todo}", FallbackWarning, stacklevel=3)
        return self.plain


_TEXTS = frozenset({"stack_trace", "nn_module_stack", "source_fn_stack", "tensor_dict", "custom"})


@dataclass(frozen=True)
class _Result:
    """Stands for what node `number` of a graph gives."""

    number: int


def without_values(gm: GraphModule) -> Callable[[], GraphModule]:
    """What makes a captured graph again. Nothing of its traced values is held: those hold on to all of its inputs.

    Takes about 4 us a node.
    """
    numbers: dict[Node, Any] = {n: _Result(k) for k, n in enumerate(gm.graph.nodes)}
    held = [
        (n.op, n.target, map_arg((n.args, n.kwargs), numbers.__getitem__), n.name, n.type, _texts(n))
        for n in gm.graph.nodes
    ]
    named = {str(n.target) for n in numbers if n.op in ("get_attr", "call_module")}
    root = {name: functools.reduce(getattr, name.split("."), gm) for name in sorted(named)}
    codegen = gm.graph._codegen

    def again() -> GraphModule:
        graph, made = Graph(), list[Node]()
        for op, target, inputs, name, kind, meta in held:
            args, kwargs = map_aggregate(inputs, lambda x: made[x.number] if isinstance(x, _Result) else x)
            made.append(graph.create_node(op, target, args, kwargs, name, kind))
            made[-1].meta = dict(meta)
        graph.set_codegen(codegen)
        return GraphModule(root, graph)

    return again


def _texts(n: Node) -> dict[str, Any]:
    return {name: n.meta[name] for name in _TEXTS & n.meta.keys()}


def transformed(call: Call, variants: Variants) -> Call:
    """`call`, or the graph operator by operator for inputs with forward-mode tangents, or under a functorch transform.

    Compiled code sees neither. Costs a call an eighth of a microsecond.
    """
    stack = torch._C._functorch.peek_interpreter_stack

    def run(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and _has_tangent(args):
            what, todo = "inputs of a compiled graph have forward-mode tangents", "compile what makes them dual as well"
            return variants.by_operators(what, todo)(*args)
        if stack() is not None:
            what, todo = (
                "a compiled graph is called under a transform of torch.func",
                "compile the transformed function",
            )
            return variants.by_operators(what, todo)(*args)
        return call(*args)

    return run


def _has_tangent(args: Sequence[Any]) -> bool:
    unpack: Any = forward_ad.unpack_dual
    duals = (unpack(x) for x in args if isinstance(x, torch.Tensor) and not x.is_inference())
    return any(d.tangent is not None for d in duals)


def _dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def _other(x: Any) -> Any:
    return id(x) if isinstance(x, torch.Tensor) else x
