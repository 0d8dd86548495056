"""Names of torch.export and AOTAutograd for whole programs: traced signatures, ranges of sizes, guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sympy
import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from .effects import without_tokens

GUARDS = "_guards_fn"  # the submodule of `ExportedProgram.module()` that checks inputs in Python


def module_of(program: ExportedProgram) -> torch.fx.GraphModule:
    """Return an exported program as a module whose weights are attributes."""
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    return module


def without_guards(gm: torch.fx.GraphModule) -> torch.fx.Graph:
    """Return a copy of the graph without the call that checks inputs in Python."""
    graph = torch.fx.Graph()
    val_map: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(gm.graph, val_map)
    graph.output(output)
    new_output = graph.output_node()
    new_output.meta.update(gm.graph.output_node().meta)
    for old, new in val_map.items():
        new.meta.update(old.meta)
    for n in graph.find_nodes(op="call_module", target=GUARDS):
        graph.erase_node(n)
    return graph


def specs_of(gm: torch.fx.GraphModule) -> tuple[pytree.TreeSpec, pytree.TreeSpec] | None:
    """Return the trees of (args, kwargs) and of results that a module from export records; None for another one."""
    info = getattr(gm.graph._codegen, "pytree_info", None)
    if info is None or info.in_spec is None or info.out_spec is None:
        return None
    return info.in_spec, info.out_spec


def reordered(kwargs: Mapping[str, object], spec: pytree.TreeSpec) -> dict[str, object]:
    """Return keyword arguments in the order of the recorded tree."""
    order = spec.children()[1].context if spec.type is tuple and spec.num_children == 2 else None
    if isinstance(order, list) and set(order) == set(kwargs):
        return {k: kwargs[k] for k in order}
    return dict(kwargs)


def range_constraints(gm: object) -> Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]:
    """Return the ranges of dynamic sizes that a module from export records."""
    return dict(getattr(gm, "range_constraints", None) or {})


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """Return the mode in which a graph was traced, or a new one with static sizes."""
    for n in graph.find_nodes(op="placeholder"):
        for key in ("val", "example_value"):
            mode = getattr(n.meta.get(key), "fake_mode", None)
            if isinstance(mode, FakeTensorMode):
                return mode
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def traced(
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    decompositions: Mapping[torch._ops.OpOverload, Callable[..., object]],
) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
    """Return a functional graph, and the inputs that it writes: their new values are its first results."""
    graph, signature = aot_export_module(
        module, inputs, trace_joint=False, decompositions=dict(decompositions), dynamic_shapes=None
    )
    assert isinstance(graph, torch.fx.GraphModule)
    without_tokens(graph, lambda op: True)
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    written = tuple(names.index(name) for name in signature.user_inputs_to_mutate.values())
    return graph, written


def ranges_of(
    mode: FakeTensorMode, declared: Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]
) -> dict[str, tuple[int, int | None]]:
    """Return the range of each symbolic size, None for no upper limit, and let the mode prove no more than that.

    Tracing takes 2 as the least size. Where the user has not declared a size of at least 2, size 1 is in the range:
    a program that was traced for any number of rows computes one row, too.
    """
    env, out = mode.shape_env, dict[str, tuple[int, int | None]]()
    if env is None:
        return out
    for symbol, own in list(env.var_to_range.items()):
        if symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)):
            continue
        given = declared.get(symbol, own)
        least = int(given.lower) if given.lower.is_Integer else 0
        most = int(given.upper) if given.upper.is_Integer else None
        least = 1 if least == 2 and most is None else max(least, 1)
        out[str(symbol)] = (least, most)
        env.var_to_range[symbol] = ValueRanges(least, given.upper)
    return out


def guards_of(mode: FakeTensorMode, earlier_guards: int) -> list[sympy.Basic]:
    """Return the guards on sizes that follow the first `earlier_guards`, without those that ranges imply."""
    env = mode.shape_env
    if env is None:
        return []
    conditions = [env.simplify(g.expr) for g in env.guards[earlier_guards:]]
    return [c for c in dict.fromkeys(conditions) if c not in (sympy.true, True)]


def guard_count(mode: FakeTensorMode) -> int:
    """Return the number of conditions that were assumed so far."""
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0
