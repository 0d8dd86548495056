"""Find the first operator at which a library and its ExportedProgram differ beyond rounding.

The library itself has no intermediate results. Its weights are compared first. Then the program is compiled again with
the results of all operators as results. If none differs, the cause is a kernel of several operators: the shortest
beginning of the program that differs is searched by halving.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from ..errors import user_location
from ..fx_passes.check import differences
from ..fx_passes.graph import snapshot, val
from .compile import aot_compile
from .load import AotModel, aot_load

_SEED = 2147483647


def first_difference(program: ExportedProgram, model: AotModel, inputs: Sequence[torch.Tensor]) -> str:
    """Return the weight or the operator at which `model` leaves `program`, with the user's line; "" if none does.

    `inputs`: those of a call whose results differ. Compiles the program up to 1 + log2(operators) times.
    """
    return _of_weights(program, model) or _of_operators(program, inputs)


def _of_weights(program: ExportedProgram, model: AotModel) -> str:
    """Return which weight of the library is not that of the program, and the first operator that reads it."""
    weights, state = model.current_weights(), {**program.constants, **program.state_dict}
    names = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
    for n in program.graph.find_nodes(op="placeholder"):
        name = names.get(n.name, "")
        if name not in weights or name not in state or not n.users:
            continue
        reason = differences([weights[name]], [state[name].detach()])
        if reason:
            return f"weight {name}, which {_described(next(iter(n.users)))} reads: {reason.removeprefix('result 0: ')}"
    return ""


def _of_operators(program: ExportedProgram, inputs: Sequence[torch.Tensor]) -> str:
    module = program.module()
    assert isinstance(module, GraphModule)
    graph = module.graph
    for n in graph.find_nodes(op="call_module"):  # checks of inputs, which the library makes itself
        graph.erase_node(n)
    nodes = [n for n in graph.nodes if n.op == "call_function" and isinstance(val(n), torch.Tensor)]
    got, want = _results(module, nodes, inputs)
    for n, a, b in zip(nodes, got, want, strict=True):
        if reason := differences([a], [b]):
            return f"{_described(n)}: {reason.removeprefix('result 0: ')}"
    low, high, first_difference = 0, len(nodes) - 1, ""
    while low <= high:
        middle = (low + high) // 2
        reason = differences(*_results(module, [nodes[middle]], inputs))
        if reason:
            reason = reason.removeprefix("result 0: ")
            first_difference = f"{_described(nodes[middle])}, in one kernel with others: {reason}"
            high = middle - 1
        else:
            low = middle + 1
    return first_difference


def _described(n: Node) -> str:
    line = user_location(n)
    return f"{n.name} ({n.target}{'; ' + line if line else ''})"


def _results(
    module: GraphModule, nodes: Sequence[Node], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of operators from a library that is compiled for these inputs, and from eager."""
    probe = _probe(module, nodes)
    with tempfile.TemporaryDirectory(prefix="altbackend-compare-") as folder:
        options = {"aot_output_path": str(Path(folder) / "probe.so")}
        model = aot_load(aot_compile(probe, tuple(t.clone() for t in inputs), options=options))
        torch.manual_seed(_SEED)
        got = model(*(t.clone() for t in inputs))
    torch.manual_seed(_SEED)
    with torch.no_grad():
        want = probe(*(t.clone() for t in inputs))
    return list(got), list(want)


def _probe(module: GraphModule, nodes: Sequence[Node]) -> GraphModule:
    """Return the beginning of a program up to the last of `nodes`, whose results it returns."""
    originals = list(module.graph.nodes)
    places = [originals.index(n) for n in nodes]
    graph = snapshot(module.graph)()
    graph.set_codegen(CodeGen())  # flat arguments and results
    copies = list(graph.nodes)
    output = graph.output_node()
    output.args = (tuple(copies[k] for k in places),)
    for n in reversed(copies[max(places) + 1 :]):
        if n is not output and n.op != "placeholder":
            graph.erase_node(n)
    graph.lint()
    return GraphModule(module, graph)
