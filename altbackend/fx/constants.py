"""Constant propagation: calls on only constants are computed once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..aten.random import is_uninitialised
from ..compat import torch_api
from ..fx_passes.aliases import Aliases, written_by
from ..fx_passes.graph import Purity, ancestors, function_of
from ..fx_passes.idioms import substitute
from .module import set_constant

LARGEST_GROWTH = 1 << 16  # bytes by which a folded result may be larger than the constants that it replaces
_MODULES = ("_operator", "math", "torch", "torch._C._nn", "torch.nn.functional", "torch._C._VariableFunctions")
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "empty", "seed", "set_", "load", "save", "manual")
_BUILTINS: frozenset[object] = frozenset(
    (len, int, float, bool, complex, str, abs, min, max, sum, round, list, tuple, dict, range, getattr, isinstance)
)
_LITERALS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass
class Propagation:
    """One walk over a graph. `attributes`: values of the `get_attr` nodes that are constant, by target."""

    gm: GraphModule
    attributes: Mapping[str, object]
    user_classes: bool = False
    values: dict[Node, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Fold all constant calls; return their number."""
        aliases, pure = Aliases(self.gm.graph), Purity()
        with torch_api.real_tensors(), torch.no_grad():
            for n in self.gm.graph.nodes:
                if n.op == "get_attr" and n.target in self.attributes:
                    self.values[n] = self.attributes[str(n.target)]
                elif self._foldable(n, pure):
                    self._compute(n)
        folded = [n for n in self.values if n.op != "get_attr" and self._is_read(n)]
        return sum(self._replace(n, aliases) for n in folded)

    def _is_read(self, n: Node) -> bool:
        return any(user not in self.values for user in n.users)

    def _foldable(self, n: Node, pure: Purity) -> bool:
        if not all(a in self.values for a in n.all_input_nodes) or any(
            a.op == "placeholder" for a in n.all_input_nodes
        ):
            return False
        if written_by(n) or any(n in written_by(user) for user in n.users):
            return False
        if n.op == "call_method":
            return bool(n.all_input_nodes) and not any(word in str(n.target) for word in _RANDOM)
        return n.op == "call_function" and self._takes(n, pure)

    def _takes(self, n: Node, pure: Purity) -> bool:
        target: object = n.target
        if isinstance(target, torch._ops.OpOverload):
            return pure(n) and not is_uninitialised(target)
        if target in _BUILTINS:
            return True
        if isinstance(target, type):
            return self.user_classes
        name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or "torch"
        return module in _MODULES and not any(word in name for word in _RANDOM)

    def _compute(self, n: Node) -> None:
        args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), self.values.__getitem__)
        try:
            if n.op == "call_method":
                self.values[n] = getattr(args[0], str(n.target))(*args[1:], **kwargs)
            else:
                self.values[n] = function_of(n)(*args, **kwargs)
        except Exception:  # the call raises when the program runs
            self.values.pop(n, None)

    def _replace(self, n: Node, aliases: Aliases) -> int:
        """Replace a call by its value if nobody can write to it or keep it; return the number of replaced calls."""
        value = self.values[n]
        if _is_literal(value):
            if isinstance(value, float) and math.isnan(value):
                return 0
            substitute(n, value)
        elif isinstance(value, torch.Tensor) and not aliases.written(n) and not aliases.returned(n) and self._pays(n):
            with self.gm.graph.inserting_before(n):
                constant = self.gm.graph.get_attr(set_constant(self.gm, value.detach()))
            constant.meta = dict(n.meta)
            n.replace_all_uses_with(constant)
        else:
            return 0
        if not n.users:
            self.gm.graph.erase_node(n)
        return 1

    def _pays(self, n: Node) -> bool:
        """Return whether the value takes little more memory than the constants from which it is computed."""
        sources = {a for a in ancestors(n) if a.op == "get_attr"}
        before = sum(_bytes(self.values[a]) for a in sources if a in self.values)
        return _bytes(self.values[n]) <= before + LARGEST_GROWTH


def _bytes(x: object) -> int:
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0


def _is_literal(x: object) -> bool:
    if isinstance(x, (list, tuple)):
        return all(map(_is_literal, x))
    return isinstance(x, _LITERALS)
