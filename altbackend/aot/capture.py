"""A module or exported program as one functional graph whose inputs are its weights and the caller's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx import traceback as fx_traceback
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from altbackend.lazy_dataclass import dataclass

from .. import decomp
from ..compat import aot_autograd, export
from ..config.options import Config
from ..errors import BadGraph, Unsupported
from ..ir import expr as ex
from ..lowering.python_text import python_text

PARAMETER, BUFFER, CONSTANT = 1, 2, 3


@dataclass(frozen=True)
class Weight:
    """A tensor attribute of the module, by its full name. `kind`: as loaders number them. `written`: by the graph."""

    name: str
    tensor: torch.Tensor
    kind: int
    written: bool


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree of arguments: the tensor input of this number, or None with the value it was traced with.

    `form`: dtype, sizes and strides of a tensor as text.
    """

    name: str
    number: int | None
    value: object = None
    form: tuple[str, tuple[str, ...], tuple[str, ...]] = ("", (), ())


@dataclass(frozen=True)
class Captured:
    """A functional graph: its inputs are `weights`, then the tensors among `leaves`.

    `ranges`: (least, greatest) of each symbolic size. `conditions`: what tracing has assumed of sizes, as Python text.
    """

    graph: GraphModule
    weights: tuple[Weight, ...]
    leaves: tuple[Leaf, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    ranges: Mapping[str, tuple[int, int]]
    conditions: tuple[str, ...]

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """Return the leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if leaf.number is not None)


def capture(
    program: GraphModule | ExportedProgram, args: Sequence[object], kwargs: Mapping[str, object], cfg: Config
) -> Captured:
    """Trace a program into one functional graph. Raise BadGraph or Unsupported."""
    exported = isinstance(program, ExportedProgram)
    gm = export.module_of(program) if isinstance(program, ExportedProgram) else program
    if not isinstance(gm, GraphModule):
        raise BadGraph(
            type(gm).__name__, "it is no GraphModule and no ExportedProgram", "export it: torch.export.export"
        )
    declared = export.range_constraints(gm)
    graph = export.without_guards(gm)
    values, in_spec, out_spec = _trees(gm, graph, args, kwargs)
    mode = export.fake_mode_of(graph)
    earlier_guards = export.guard_count(mode) if exported or declared else 0
    leaves, fakes = _leaves(graph, values, mode)
    names = _weight_names(gm, graph)
    module = _Flat(gm, graph, names, values)
    with mode:
        fake_weights = [mode.from_tensor(_attribute(gm, n), static_shapes=True) for n in names]
    composite = aot_autograd.undecomposed(decomp.taken_apart(cfg.numerics))
    with aot_autograd.functorch_settings(), composite, torch.no_grad(), fx_traceback.preserve_node_meta():
        traced, written = export.traced(module, [*fake_weights, *fakes], decomp.table(cfg.numerics))
    _write_back(traced, written)
    _without_own_frames(traced)
    weights = tuple(_weight(gm, n, k in written) for k, n in enumerate(names))
    conditions = tuple(python_text(c) for c in export.guards_of(mode, earlier_guards))
    ranges = {s: (lo, ex.UNBOUNDED if hi is None else hi) for s, (lo, hi) in export.ranges_of(mode, declared).items()}
    return Captured(traced, weights, leaves, in_spec, out_spec, ranges, conditions)


# --- trees -----------------------------------------------------------------------------------------------------------


def _trees(
    gm: GraphModule, graph: Graph, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], pytree.TreeSpec, pytree.TreeSpec]:
    """Return the leaves of the arguments, one for each placeholder, and the trees of arguments and results."""
    placeholders = graph.find_nodes(op="placeholder")
    recorded = export.specs_of(gm)
    if recorded is not None:
        in_spec, out_spec = recorded
        given = (tuple(args), export.reordered(kwargs, in_spec))
        leaves, spec = pytree.tree_flatten(given)
        if spec != in_spec and (args or kwargs):
            raise BadGraph(
                "the example inputs", f"their tree is {spec} and the program's is {in_spec}", "pass matching ones"
            )
        return (leaves if args or kwargs else [None] * len(placeholders)), in_spec, out_spec
    result = graph.output_node().args[0]
    if not isinstance(result, (tuple, list)):
        raise BadGraph(f"the output {result}", "it is no tuple", "let the graph return a tuple, also of one tensor")
    ordered = [*args, *(kwargs[str(n.target)] for n in placeholders[len(args) :] if str(n.target) in kwargs)]
    if len(ordered) != len(placeholders):
        raise BadGraph(
            "the example inputs", f"there are {len(ordered)} for {len(placeholders)} inputs", "pass one each"
        )
    _, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    _, out_spec = pytree.tree_flatten(pytree.tree_map(lambda _: None, result))
    return ordered, in_spec, out_spec


def _leaves(
    graph: Graph, values: Sequence[object], mode: FakeTensorMode
) -> tuple[tuple[Leaf, ...], list[torch.Tensor]]:
    """Return every leaf of the arguments, and the traced values of the tensors among them."""
    leaves: list[Leaf] = []
    fakes: list[torch.Tensor] = []
    for n, value in zip(graph.find_nodes(op="placeholder"), values, strict=True):
        fake = n.meta.get("val", n.meta.get("example_value", value))
        if isinstance(fake, torch.SymInt) or isinstance(value, torch.SymInt):
            raise Unsupported(
                n, f"the number {n.target}, which changes between calls", todo="pass it as a tensor of one element"
            )
        if isinstance(fake, torch.Tensor):
            with mode:
                fakes.append(
                    fake if getattr(fake, "fake_mode", None) is mode else mode.from_tensor(fake, static_shapes=True)
                )
            form = (str(fake.dtype), tuple(map(str, fake.shape)), tuple(map(str, fake.stride())))
            leaves.append(Leaf(str(n.target), len(fakes) - 1, form=form))
        else:
            leaves.append(Leaf(str(n.target), None, fake))
    return tuple(leaves), fakes


# --- weights ---------------------------------------------------------------------------------------------------------


def _attribute(gm: GraphModule, name: str) -> Any:
    value: object = gm
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _weight_names(gm: GraphModule, graph: Graph) -> list[str]:
    """Return the tensor attributes that a graph reads, in the order of first use."""
    names = dict.fromkeys(str(n.target) for n in graph.find_nodes(op="get_attr"))
    return [name for name in names if isinstance(_attribute(gm, name), torch.Tensor)]


def _weight(gm: GraphModule, name: str, written: bool) -> Weight:
    tensor = _attribute(gm, name)
    owner = _attribute(gm, name.rpartition(".")[0]) if "." in name else gm
    is_buffer = name.rpartition(".")[2] in getattr(owner, "_buffers", {})
    kind = PARAMETER if isinstance(tensor, torch.nn.Parameter) else BUFFER if is_buffer else CONSTANT
    return Weight(name, tensor.detach(), kind, written)


class _Flat(torch.nn.Module):
    """Runs a graph on its weights and tensor inputs, and returns the flat tuple of results."""

    def __init__(self, gm: GraphModule, graph: Graph, names: Sequence[str], values: Sequence[object]) -> None:
        super().__init__()
        # in a tuple, so that the weights are no parameters of this module
        self.module_and_graph = (gm, graph)
        self.names, self.values = names, values

    def forward(self, *tensors: torch.Tensor) -> tuple[object, ...]:
        """Interpret the graph. `tensors`: the weights, then the tensor inputs."""
        gm, graph = self.module_and_graph
        weights = dict(zip(self.names, tensors, strict=False))
        rest = iter(tensors[len(self.names) :])
        interpreter = _Interpreter(gm, weights)
        inputs = [next(rest) if _is_tensor(n, v) else n.meta.get("val", v) for n, v in self._placeholders(graph)]
        result = interpreter.run(*inputs)
        flat: list[object] = pytree.tree_leaves(result)
        return tuple(flat)

    def _placeholders(self, graph: Graph) -> list[tuple[Node, object]]:
        return list(zip(graph.find_nodes(op="placeholder"), self.values, strict=True))


def _is_tensor(n: Node, value: object) -> bool:
    return isinstance(n.meta.get("val", n.meta.get("example_value", value)), torch.Tensor)


class _Interpreter(torch.fx.Interpreter):
    """Interprets a graph with tensors in the place of the module's attributes."""

    def __init__(self, gm: GraphModule, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.graph = export.without_guards(gm)
        self.weights = weights

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> object:
        """Return the traced weight of an attribute."""
        return (
            self.weights[target]
            if isinstance(target, str) and target in self.weights
            else super().get_attr(target, args, kwargs)
        )


def _without_own_frames(gm: GraphModule) -> None:
    """Forget stack traces that tracing itself has recorded: they name no line of the user."""
    for n in gm.graph.nodes:
        if __file__ in str(n.meta.get("stack_trace", "")):
            n.meta["stack_trace"] = None


def _write_back(gm: GraphModule, written: Sequence[int]) -> None:
    """Turn the first results, new values of inputs, into writes of these inputs."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    results: Any = output.args[0]
    with gm.graph.inserting_before(output):
        for k, new in zip(written, results, strict=False):
            copy = gm.graph.call_function(torch.ops.aten.copy_.default, (placeholders[k], new))
            copy.meta["val"] = placeholders[k].meta["val"]
    output.args = (tuple(results[len(written) :]),)
    gm.recompile()
