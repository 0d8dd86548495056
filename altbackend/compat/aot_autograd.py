"""AOTAutograd's private names. Separate from `torch_api`, since importing them takes longer than a warm start."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._decomp
import torch._functorch.config as functorch
import torch.fx.traceback
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._functorch.aot_autograd import _aot_export_function, aot_module_simplified
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_type
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols, statically_known_true
from torch.utils._pytree import tree_leaves

from .torch_api import untraced


def core_decompositions() -> dict[torch._ops.OpOverload, Callable[..., object]]:
    """Return torch's decompositions to core ATen, without operators that the dispatcher decomposes (CompositeImplicit).

    torch's public table also lists those, and takes 0.1 to 0.2 s per process to search all namespaces for them.
    """
    quick = getattr(torch._decomp, "_core_aten_decompositions_post_autograd", None)
    return dict(quick() if quick is not None else torch._decomp.core_aten_decompositions())


def joint_partition() -> Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]:
    """Return torch's min-cut partitioner for joint graphs."""
    return min_cut_rematerialization_partition


def merges_equal_calls() -> bool:
    """Return whether torch's settings allow common subexpression elimination in joint graphs."""
    return bool(functorch.cse)


def extract_halves(
    joint: torch.fx.GraphModule, saved: Iterable[torch.fx.Node], num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return (forward, backward) of a joint graph, with results and inputs in the order of AOTAutograd's runtime.

    `saved`: the forward's values that are saved.
    """
    values: list[torch.fx.Node] = []
    numbers: list[torch.fx.Node] = []
    objects: list[torch.fx.Node] = []
    for n in saved:
        val = n.meta.get("val")
        is_number = isinstance(val, (torch.SymInt, torch.SymFloat))
        apart = _TAKES_OBJECTS and not isinstance(val, BackwardState) and is_carried(val)
        (numbers if is_number else objects if apart else values).append(n)
    more: tuple[list[torch.fx.Node], ...] = (objects,) if objects else ()
    with _use_lazy_graph_module(True):  # the halves are not called, so their Python text is made only if it is printed
        return _extract_fwd_bwd_modules(joint, values, numbers, *more, num_fwd_outputs=num_fwd_outputs)


_TAKES_OBJECTS = "saved_opaque_nodes" in inspect.signature(_extract_fwd_bwd_modules).parameters


def is_carried(val: object) -> bool:
    """Return whether a traced value is an object without storage that AOTAutograd carries from forward to backward."""
    if val is None or isinstance(val, (torch.Tensor, torch.SymInt, int, float, tuple, list)):
        return False
    return isinstance(val, (BackwardState, FakeScriptObject, torch.ScriptObject)) or is_opaque_type(type(val))


def partition_settings() -> str:
    """Return the setting of torch that needs torch's own partitioner, as a reason; "" if there is none."""
    defaults = {"enable_activation_offloading": False, "_sync_decision_cross_ranks": False}
    changed = [name for name, default in defaults.items() if getattr(functorch, name, default) != default]
    solvers = ("activation_memory_budget_solver", "activation_memory_budget_runtime_estimator")
    changed += [name for name in solvers if not isinstance(getattr(functorch, name, ""), str)]  # the user's own
    return f"torch._functorch.config.{changed[0]} is set" if changed else ""


def recomputation_settings() -> dict[str, object]:
    """Return torch's settings of what a backward recomputes, by name, as far as this version has them."""
    names = (
        *("ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains", "ban_recompute_materialized_backward"),
        *("ban_recompute_not_in_allowlist", "ban_recompute_reductions", "aggressive_recomputation"),
        *("activation_memory_budget", "activation_memory_budget_solver"),
    )
    return {name: getattr(functorch, name) for name in names if hasattr(functorch, name)}


def region_budget(n: torch.fx.Node) -> object:
    """Return the memory budget that the user's code sets around a call, or None."""
    custom = n.meta.get("custom")
    named = custom.get(_BUDGET_KEY) if isinstance(custom, dict) and _BUDGET_KEY else None
    return n.meta.get("memory_budget") if named is None else named


_BUDGET_KEY = getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "")


def aot_autograd(
    *,
    fw_compiler: Callable[..., Callable[..., object]],
    bw_compiler: Callable[..., Callable[..., object]] | None = None,
    **kwargs: object,
) -> Callable[..., Callable[..., Any]]:
    """Return a backend in which AOTAutograd traces a captured graph and calls the given compilers on its parts.

    `fw_compiler` replaces missing compilers. torch's helper of the same name imports another compiler for its debug
    log, which takes 0.08 s per process. Dynamo traces neither the backward's compiler nor its results.
    """
    compilers = {"inference_compiler": fw_compiler, "fw_compiler": fw_compiler, **kwargs}

    def compile_backward(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> object:
        return untraced(untraced(bw_compiler or fw_compiler)(gm, inputs))

    def build(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        if any(isinstance(x, (list, tuple, dict)) for x in inputs):
            return flatten_graph_inputs(gm, inputs, build)
        counters["aot_autograd"]["total"] += 1
        trace: Callable[..., Callable[..., object]] = aot_module_simplified
        with _without_recomputing(gm):
            call = trace(gm, inputs, bw_compiler=compile_backward, **compilers)
        counters["aot_autograd"]["ok"] += 1
        return call

    return build


_RECOMPUTES = "remat_using_tags_for_fwd_loss_bwd_graph"


def _without_recomputing(gm: torch.fx.GraphModule) -> contextlib.AbstractContextManager[object]:
    """Return a context without torch's pass that recomputes checkpointed calls in a graph that differentiates itself.

    Other graphs have nothing to recompute, but the pass raises for checkpointed calls of random operators there. It
    counts attention as one.
    """
    if not hasattr(functorch, _RECOMPUTES) or any(map(_is_backward, _calls(gm))):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = functorch.patch({_RECOMPUTES: False})
    return patched


def _calls(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph and of the graphs inside it."""
    return itertools.chain.from_iterable(m.graph.nodes for m in gm.modules() if isinstance(m, torch.fx.GraphModule))


def _is_backward(n: torch.fx.Node) -> bool:
    custom = n.meta.get("custom") or {}
    return bool(n.meta.get("autograd_backward")) or custom.get("phase") == "backward" or n.target is torch.autograd.grad


def joint_graph(
    fn: Callable[..., object],
    args: Sequence[object],
    decompositions: dict[torch._ops.OpOverload, Callable[..., object]],
) -> torch.fx.GraphModule:
    """Return the graph of a function and of the gradients of its inputs that require them.

    `args`: tensors and numbers. The inputs of the graph are these, the numbers without users, and the gradients of the
    function's results; its results are those of the function and the gradients of its tensors.
    """

    def of_tensors(*tensors: object) -> object:
        given = iter(tensors)
        return as_tuple(fn(*(next(given) if isinstance(x, torch.Tensor) else x for x in args)))

    export: Callable[..., Any] = (
        _aot_export_function  # the public function refuses results of unsafe views, for example of a matmul
    )
    tensors = tuple(x for x in args if isinstance(x, torch.Tensor))
    with torch.enable_grad():
        exported = export(of_tensors, tensors, decompositions=decompositions, trace_joint=True)
    gm: torch.fx.GraphModule = exported[0]
    for k, x in enumerate(args):
        if not isinstance(x, torch.Tensor):
            with gm.graph.inserting_before(gm.graph.find_nodes(op="placeholder")[k]):
                gm.graph.placeholder(f"number_{k}").meta["val"] = x
    out = gm.graph.output_node()
    out.args = (tuple(tree_leaves(out.args)),)
    gm.graph.set_codegen(torch.fx.graph.CodeGen())  # the exported one takes two tuples
    gm.recompile()
    return gm


def as_tuple(results: object) -> tuple[object, ...]:
    """Return the results of a function as a tuple, also if it returns one."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def is_about_sharing(cause: AssertionError) -> bool:
    """Return whether AOTAutograd has refused inputs that share memory, of which one is written."""
    return "aot_autograd() does not yet handle" in str(cause)


def written_afterwards(joint: torch.fx.GraphModule) -> list[int]:
    """Return the indices of a joint graph's inputs that AOTAutograd writes after the forward has run.

    Their new values are results of the forward, marked in their descriptions.
    """
    described = tree_leaves(joint.graph.output_node().meta.get("desc") or ())
    written = [d.mutated_input for d in described if type(d).__name__ == "InputMutationAOTOutput"]
    inputs = joint.graph.find_nodes(op="placeholder")
    return [k for k, n in enumerate(inputs) if n.meta.get("desc") in written]


def merged_views(meta: ViewAndMutationMeta | None, inputs: Sequence[object]) -> bool:
    """Return whether AOTAutograd merged overlapping inputs into one and rebuilds results as views of it.

    It rebuilds them with the view operators that lead from one of the separate inputs, which gives other views.
    """
    if meta is None or len(meta.input_info) == len(inputs):
        return False
    return any(info.output_type is OutputType.alias_of_input for info in meta.output_info)


@contextlib.contextmanager
def new_tracing_context() -> Iterator[None]:
    """Trace in a new context, for a graph that is compiled for real inputs after Dynamo has ended."""
    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        yield


def views_of_inputs(
    gm: torch.fx.GraphModule, meta: ViewAndMutationMeta | None
) -> dict[int, tuple[torch.fx.Node, torch.Tensor]]:
    """Return the results of a graph that AOTAutograd rebuilds from an input: by index, that input and the view.

    `meta` is AOTAutograd's metadata of a forward or inference graph, or None. Only views of the input's dtype
    without negative or conjugate bits are included: with symbolic sizes, AOTAutograd asks the graph for their
    geometry. Views whose offset only data decides are excluded, since replaying them creates a new symbol.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    views: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
    results: Any = gm.graph.output_node().args[0]
    for number, info in enumerate(
        meta.output_info if meta else (), meta.num_mutated_inp_runtime_indices if meta else 0
    ):
        steps = getattr(info.view_meta_sequence, "sequence", None)
        if info.output_type is not OutputType.alias_of_input or steps is None:
            continue
        assert info.base_idx is not None, "such a result has an input"
        base = inputs[info.base_idx]
        base_value = base.meta["val"]
        view = torch._C._functionalization.apply_view_meta_sequence(base_value, steps)
        same_geometry = view.dtype == base_value.dtype and _same_sizes(view.shape, results[number].meta["val"].shape)
        unbacked = free_unbacked_symbols((view.storage_offset(), *view.shape, *view.stride()))
        if same_geometry and not unbacked and not any(x.is_conj() or x.is_neg() for x in (view, base_value)):
            views[number] = base, view
    return views


def _same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Return whether two shapes are known to be equal, without a guard."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


@contextlib.contextmanager
def functorch_settings() -> Iterator[None]:
    """Set AOTAutograd's options while it traces: effect tokens stay out of the graph's signature."""
    with functorch.patch(unlift_effect_tokens=True):
        yield


@contextlib.contextmanager
def undecomposed(ops: Iterable[torch._ops.OpOverload]) -> Iterator[None]:
    """Remove the Python kernels that decompose these operators during tracing, whatever the decomposition table
    says.
    """
    key = torch._C.DispatchKey.Autograd
    kernels = [(op, op.py_kernels.pop(key)) for op in ops if key in op.py_kernels]
    for op, _ in kernels:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in kernels:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def traced_size(shape_env: ShapeEnv, symbol: sympy.Symbol) -> int:
    """Return the value of a size that tracing saw; for an unbacked one, a value in its range."""
    seen = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    if symbol in seen:
        return int(seen[symbol])
    least = shape_env.bound_sympy(symbol).lower
    return max(2, int(least)) if least.is_Integer else 2


def new_size(shape_env: ShapeEnv, seen: int) -> int | torch.SymInt:
    """Return a new symbolic size that has the value `seen`."""
    source = ConstantSource(f"size{next(_sizes)}")
    symbol = shape_env.create_symbol(seen, source, DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=seen, source=source)


_sizes = itertools.count()
