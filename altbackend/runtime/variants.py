"""Variants of a captured graph: it is compiled once more for each new way in which its inputs overlap."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from altbackend.lazy_dataclass import dataclass

from ..compat.torch_api import untraced
from ..errors import FallbackWarning
from .boxed import Function, Values
from .sharing import in_one_storage, relation_of

Call = Function
MOST = 8  # variants of one graph; beyond them it runs operator by operator


class Variants:
    """Calls the variant of a captured graph for the inputs at hand, and compiles it if there is none.

    `graph` returns the graph as it was captured; `compile_` compiles it for real inputs. The graph runs operator by
    operator, which is right for all inputs, in two cases. Either torch does not know that inputs overlap (two tensors
    on one array), or a variant cannot be compiled. One warning says so; under `strict`, the compilation error is
    raised.
    """

    def __init__(
        self, graph: Callable[[], GraphModule], compile_: Callable[[GraphModule, Sequence[object]], Call], strict: bool
    ) -> None:
        self.graph, self.compile, self.strict = graph, compile_, strict
        self.variants: dict[object, Call] = {}
        self.lock = threading.Lock()
        self.plain: GraphModule | None = None

    def __call__(self, *args: object) -> object:
        key = self._key(args)
        variant = self.variants.get(key)
        if variant is None:
            with self.lock:
                variant = self.variants.get(key) or self._new(key, args)
        return variant(*args)

    def _key(self, args: Values) -> object:
        geometry = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) if _dense(x) else _other(x) for x in args)
        return geometry, relation_of(args), torch.is_grad_enabled()

    def _new(self, key: object, args: Values) -> Call:
        reason = "" if in_one_storage(args) else "torch does not know that they share it"
        if not reason and len(self.variants) >= MOST:
            reason = f"it has been compiled for {MOST} other ways"
        if reason:
            return self._by_operators(reason)
        try:
            variant = self.compile(self.graph(), args)
        except Exception as cause:
            if self.strict:
                raise
            variant = self._by_operators(f"it cannot be compiled for that way ({type(cause).__name__}: {cause})")
        self.variants[key] = variant
        return variant

    def _by_operators(self, reason: str) -> Call:
        return self.by_operators(
            f"a compiled graph writes inputs that share memory in another way than it was compiled for, and {reason}",
            "give it tensors of their own, or always the same views",
        )

    def by_operators(self, what: str, todo: str) -> GraphModule:
        """Return the graph as it was captured. The first time, warn with the reason."""
        if self.plain is None:
            self.plain = self.graph()
            warnings.warn(f"{what}: it runs operator by operator; {todo}", FallbackWarning, stacklevel=3)
        return self.plain


_TEXTS = frozenset({"stack_trace", "nn_module_stack", "source_fn_stack", "tensor_dict", "custom"})


@dataclass(frozen=True)
class _Result:
    """Stands for the result of node `number` of a graph."""

    number: int


def without_values(gm: GraphModule) -> Callable[[], GraphModule]:
    """Return a function that rebuilds a captured graph.

    It keeps no traced values, since those keep all inputs of the graph alive. Building it takes about 4 us per
    node.
    """
    numbers: dict[Node, Any] = {n: _Result(k) for k, n in enumerate(gm.graph.nodes)}
    rows = [
        (n.op, n.target, map_arg((n.args, n.kwargs), numbers.__getitem__), n.name, n.type, _texts(n))
        for n in gm.graph.nodes
    ]
    named = {str(n.target) for n in numbers if n.op in ("get_attr", "call_module")}
    root = {name: functools.reduce(getattr, name.split("."), gm) for name in sorted(named)}
    codegen = gm.graph._codegen

    def rebuild() -> GraphModule:
        graph, nodes = Graph(), list[Node]()
        for op, target, inputs, name, kind, meta in rows:
            args, kwargs = map_aggregate(inputs, lambda x: nodes[x.number] if isinstance(x, _Result) else x)
            nodes.append(graph.create_node(op, target, args, kwargs, name, kind))
            nodes[-1].meta = dict(meta)
        graph.set_codegen(codegen)
        return GraphModule(root, graph)

    return rebuild


def _texts(n: Node) -> dict[str, object]:
    return {name: n.meta[name] for name in _TEXTS & n.meta.keys()}


def transformed(call: Call, variants: Variants) -> Call:
    """Return `call`, which runs operator by operator under functorch transforms and for inputs with tangents.

    Compiled code supports neither. The check costs an eighth of a microsecond per call. Dynamo does not trace the
    result; it removes the mark that says so where it calls the result itself, so that nothing below needs a mark.
    """
    transforms = torch._C._functorch.peek_interpreter_stack

    def otherwise(args: Values) -> Call | None:
        if forward_ad._current_level >= 0 and _has_tangent(args):
            what, todo = "inputs of a compiled graph have forward-mode tangents", "compile what makes them dual as well"
            return variants.by_operators(what, todo)
        if transforms() is not None:
            what, todo = (
                "a compiled graph is called under a transform of torch.func",
                "compile the transformed function",
            )
            return variants.by_operators(what, todo)
        return None

    with_check: Callable[..., Call] | None = getattr(call, "with_check", None)
    if with_check is not None:
        return untraced(with_check(transforms, otherwise))

    def run(*args: object) -> object:
        if forward_ad._current_level >= 0 or transforms() is not None:
            other = otherwise(args)
            if other is not None:
                return other(*args)
        return call(*args)

    return untraced(run)


def _has_tangent(args: Sequence[object]) -> bool:
    unpack: Callable[..., forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual
    duals = (unpack(x) for x in args if isinstance(x, torch.Tensor) and not x.is_inference())
    return any(d.tangent is not None for d in duals)


def _dense(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def _other(x: object) -> object:
    return id(x) if isinstance(x, torch.Tensor) else x
