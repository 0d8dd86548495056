"""AOTAutograd's private names. Apart from `compat`, since importing them takes longer than binding a kept graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._decomp
import torch._functorch.config as functorch
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, free_unbacked_symbols
from torch.utils._pytree import tree_leaves


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's steps to core ATen, without operators that every dispatch takes apart by itself (CompositeImplicit).

    Naming those, as the public table does, takes 0.1 to 0.2 s of each process: all namespaces are searched for them.
    """
    quick = getattr(torch._decomp, "_core_aten_decompositions_post_autograd", None)
    return dict(quick() if quick is not None else torch._decomp.core_aten_decompositions())


def joint_partition() -> Callable[..., Any]:
    """torch's min-cut split of the joint graph."""
    return min_cut_rematerialization_partition


def wants_equal_calls_once() -> bool:
    """Whether torch's settings let equal calls of a joint graph be made once."""
    return bool(functorch.cse)


def extract_halves(
    joint: torch.fx.GraphModule, tensors: list[torch.fx.Node], numbers: list[torch.fx.Node], num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward, backward) of a joint graph, with results and inputs in the order that AOTAutograd's runtime expects.

    `tensors`, `numbers` (of sizes): values of the forward that are saved; the lists are left as they are.
    """
    with _use_lazy_graph_module(True):  # nobody calls the halves: their Python text is only made where it is shown
        return _extract_fwd_bwd_modules(joint, list(tensors), list(numbers), num_fwd_outputs=num_fwd_outputs)


def partition_settings() -> str:
    """The setting of torch that asks for what only its own partitioner does, "" without one."""
    wanted = {
        "activation_memory_budget": 1.0,
        "enable_activation_offloading": False,
        "_sync_decision_cross_ranks": False,
    }
    found = [name for name, usual in wanted.items() if getattr(functorch, name, usual) != usual]
    return f"torch._functorch.config.{found[0]} is set" if found else ""


def aot_autograd(*, bw_compiler: Callable[..., Any] | None = None, **kwargs: Any) -> Callable[..., Any]:
    """A backend that has AOTAutograd trace a captured graph and hands the parts to the compilers given.

    `fw_compiler` stands for those that are not. This is what torch's helper of this name does, which imports another
    compiler for its own debug log: 0.08 s of each process. Neither the backward's compiler nor any code that comes of
    this is traced by Dynamo.
    """
    forward = kwargs["fw_compiler"]
    compilers = {"inference_compiler": forward, **kwargs}

    def compile_backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return untraced(untraced(bw_compiler or forward)(gm, inputs))

    def build(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        if any(isinstance(x, (list, tuple, dict)) for x in inputs):
            return flatten_graph_inputs(gm, inputs, build)
        counters["aot_autograd"]["total"] += 1
        trace: Any = aot_module_simplified
        call = trace(gm, inputs, bw_compiler=compile_backward, **compilers)
        counters["aot_autograd"]["ok"] += 1
        return untraced(call)

    return build


def untraced(fn: Any) -> Any:
    """`fn`, which Dynamo then calls and does not trace."""
    disable: Any = torch._dynamo.disable
    return disable(fn, reason="compilers and what they return are not traced")


def is_about_sharing(cause: AssertionError) -> bool:
    """Whether AOTAutograd has refused inputs that share memory, of which one is written."""
    return "aot_autograd() does not yet handle" in str(cause)


def written_afterwards(joint: torch.fx.GraphModule) -> list[int]:
    """Numbers of the inputs of a joint graph that AOTAutograd writes when the forward has run.

    Their new values are results of the forward, described as such.
    """
    described = tree_leaves(joint.graph.output_node().meta.get("desc") or ())
    written = [d.mutated_input for d in described if type(d).__name__ == "InputMutationAOTOutput"]
    inputs = joint.graph.find_nodes(op="placeholder")
    return [k for k, n in enumerate(inputs) if n.meta.get("desc") in written]


def merged_views(meta: Any, inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd has made one input of several that overlap, and makes results again as views of it.

    It does so by the operators that lead there from one of the several inputs, which gives other views.
    """
    if meta is None or len(meta.input_info) == len(inputs):
        return False
    return any(info.output_type is OutputType.alias_of_input for info in meta.output_info)


@contextlib.contextmanager
def tracing_anew() -> Iterator[None]:
    """Traces of its own, for a graph that is compiled for real inputs after Dynamo has ended."""
    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        yield


def views_of_inputs(gm: torch.fx.GraphModule, meta: Any) -> dict[int, tuple[torch.fx.Node, torch.Tensor]]:
    """Per result of a forward or inference graph that AOTAutograd makes again of an input: that input, and the view.

    `meta`: what AOTAutograd found out about the graph, or None. Only views of the input's own dtype, without bits that
    negate or conjugate: AOTAutograd asks the graph for the geometry of such a view, and only where sizes are symbolic.
    Not one whose place only data decides: replaying the view gives that place a symbol of its own.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    found: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
    results: Any = gm.graph.output_node().args[0]
    for number, info in enumerate(
        meta.output_info if meta else (), meta.num_mutated_inp_runtime_indices if meta else 0
    ):
        steps = getattr(info.view_meta_sequence, "sequence", None)
        if info.output_type is not OutputType.alias_of_input or steps is None:
            continue
        base = inputs[info.base_idx]
        whole = base.meta["val"]
        view = torch._C._functionalization.apply_view_meta_sequence(whole, steps)
        same = view.dtype == whole.dtype and view.shape == results[number].meta["val"].shape
        late = free_unbacked_symbols((view.storage_offset(), *view.shape, *view.stride()))
        if same and not late and not any(x.is_conj() or x.is_neg() for x in (view, whole)):
            found[number] = base, view
    return found


@contextlib.contextmanager
def functorch_settings() -> Iterator[None]:
    """AOTAutograd settings that hold while it traces: effect tokens stay out of the graph's signature."""
    with functorch.patch(unlift_effect_tokens=True):
        yield


@contextlib.contextmanager
def left_whole(ops: Iterable[torch._ops.OpOverload]) -> Iterator[None]:
    """Without the Python kernels by which tracing takes these operators apart, whatever the table of decompositions."""
    key = torch._C.DispatchKey.Autograd
    held = [(op, op.py_kernels.pop(key)) for op in ops if key in op.py_kernels]
    for op, _ in held:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in held:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def size_seen(shape_env: Any, symbol: sympy.Symbol) -> int:
    """The value of a size that tracing saw; for one that only data decides, one that its range allows."""
    seen = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    if symbol in seen:
        return int(seen[symbol])
    least = shape_env.bound_sympy(symbol).lower
    return max(2, int(least)) if least.is_Integer else 2


def new_size(shape_env: Any, seen: int) -> Any:
    """A symbolic size of its own that has the value `seen`."""
    source = ConstantSource(f"size{next(_sizes)}")
    symbol = shape_env.create_symbol(seen, source, DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=seen, source=source)


_sizes = itertools.count()
