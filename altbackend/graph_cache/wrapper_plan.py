"""Plans read from AOTAutograd's metadata, for graphs that need no more of it than a plan can express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..compat import torch_api
from ..runtime.aot_wrapper import Alias, Plan, Tangent
from ..runtime.views import OPERATORS, Step
from .json_values import NotCacheable

_NONE: tuple[object, ...] = (0, None, False, (), [], {})
# Attributes of AOTAutograd's metadata that must be empty, with the property of the graph that each one means.
_REFUSED = {
    "tokens": "effects that are ordered by tokens",
    "num_backward_tokens": "effects that are ordered by tokens",
    "is_rng_op_functionalized": "random states among its inputs",
    "num_graphsafe_rng_states": "random states among its inputs",
    "num_mutated_inp_runtime_indices": "an input that is written after the graph",
    "num_intermediate_bases": "results that share memory",
    "grad_enabled_mutation": "a call that leaves grad mode changed",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw": "an input that its backward writes",
    "num_opaque_objects_saved_for_bw": "objects that are saved for its backward",
}
_PLAIN, _UNVIEWED, _INPUT, _VIEW = "non_alias", "unsafe_view_alias", "is_input", "alias_of_input"


def plan_of(meta: torch_api.ViewAndMutationMeta, gm: GraphModule, training: bool) -> Plan:
    """Return the plan of an inference or forward graph from AOTAutograd's metadata, before its backward is known.

    Raise NotCacheable.
    """
    for name, what in _REFUSED.items():
        if getattr(meta, name, None) not in _NONE:
            raise NotCacheable(f"the graph has {what}")
    kinds = [info.output_type.name for info in meta.output_info]
    if unknown := set(kinds) - {_PLAIN, _UNVIEWED, _INPUT, _VIEW}:
        raise NotCacheable(f"the graph has a result that is {' and '.join(sorted(unknown))}")
    if any(info.mutates_metadata or info.mutates_storage_metadata for info in meta.input_info):
        raise NotCacheable("the graph changes the geometry of an input")
    _refuse_subclasses(meta)
    plan = Plan(
        tuple(_base(info) if kind == _INPUT else -1 for kind, info in zip(kinds, meta.output_info, strict=True)),
        tuple(tuple(sorted(info.dynamic_dims or ())) for info in meta.output_info),
        tuple(meta.mutated_graph_handled_indices_seen_by_autograd),
        views=tuple(_alias(k, info, gm) for k, info in enumerate(meta.output_info) if kinds[k] == _VIEW),
        changed=tuple(k for k, info in enumerate(meta.input_info) if info.mutates_data),
    )
    return _with_backward(plan, meta, kinds) if training else plan


def _alias(k: int, info: torch_api.OutputAliasInfo, gm: GraphModule) -> Alias:
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    results: Any = gm.graph.output_node().args[0]
    view, base = results[k].meta["val"], inputs[_base(info)].meta["val"]
    steps = torch_api.view_steps(info)
    if steps is not None:
        if unknown := {name for name, _, _ in steps} - {*OPERATORS}:
            raise NotCacheable(f"the graph has a result that is a view by {' and '.join(sorted(unknown))}")
        steps_ = tuple(Step(name, _arguments(args), part) for name, args, part in steps)
        return Alias(k, _base(info), bool(info.requires_grad), steps_)
    if view.dtype != base.dtype or any(x.is_conj() or x.is_neg() for x in (view, base)):
        raise NotCacheable("the graph has a result of symbolic sizes that is an input read as another dtype")
    return Alias(k, _base(info), bool(info.requires_grad))


def _base(info: torch_api.OutputAliasInfo) -> int:
    assert info.base_idx is not None, "a result that is an input or a view of one"
    return info.base_idx


def _arguments(args: Sequence[object]) -> tuple[object, ...]:
    """Return the arguments of a view operator as `Step` stores them. Raise NotCacheable."""
    out: list[object] = []
    for a in args:
        if isinstance(a, torch.dtype):
            out.append(str(a).removeprefix("torch."))
        elif a is None or type(a) in (int, bool):
            out.append(a)
        elif isinstance(a, (list, tuple)) and all(type(n) is int for n in a):
            out.append(tuple(a))
        else:
            raise NotCacheable(f"a view by {a!r:.40}")
    return tuple(out)


def negative_inputs(gm: GraphModule) -> frozenset[int]:
    """Return the indices of a graph's real inputs that were traced with torch's negative bit."""
    values = enumerate(n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder"))
    return frozenset(k for k, x in values if isinstance(x, torch.Tensor) and x.is_neg() and not x.is_complex())


def detached(meta: torch_api.ViewAndMutationMeta, backward: GraphModule) -> tuple[int, ...]:
    """Return the indices of inputs that other calls computed and that a backward gives no gradient.

    Raise NotCacheable.
    """
    names = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    if any(names[k].startswith("tangents_") for k in negative_inputs(backward)):
        raise NotCacheable("a gradient that was traced with a negative bit")
    (gradients,) = next(n for n in reversed(backward.graph.nodes) if n.op == "output").args
    pairs = zip(meta.input_info, gradients, strict=True)
    return tuple(k for k, (info, g) in enumerate(pairs) if g is None and info.requires_grad and not info.is_leaf)


def _with_backward(plan: Plan, meta: torch_api.ViewAndMutationMeta, kinds: list[str]) -> Plan:
    with_gradient = [
        k
        for k, info in enumerate(meta.output_info)
        if kinds[k] in (_PLAIN, _UNVIEWED)
        and getattr(info, "requires_grad_for_backward", info.requires_grad)
        and issubclass(info.raw_type, torch.Tensor)
    ]
    formats = meta.subclass_tangent_meta
    if len(with_gradient) != len(formats):
        raise NotCacheable("the graph's backward takes more than the gradients of its results")
    return Plan(
        plan.same,
        plan.dynamic,
        plan.written,
        tuple(
            k for k, info in enumerate(meta.output_info) if not info.requires_grad and kinds[k] in (_PLAIN, _UNVIEWED)
        ),
        tuple(k for k, kind in enumerate(kinds) if kind == _UNVIEWED),
        (),
        int(meta.num_tensors_saved_with_no_vc_check or 0),
        int(meta.num_symints_saved_for_bw or 0),
        tuple(_tangent(k, f.memory_format) for k, f in zip(with_gradient, formats, strict=True)),
        plan.views,
        plan.changed,
    )


def _tangent(result: int, layout: torch_api.MemoryFormatMeta | None) -> Tangent:
    if layout is None:
        raise NotCacheable("a gradient of unknown layout")
    if layout.memory_format is not None:
        return Tangent(result, str(layout.memory_format).removeprefix("torch."))
    size, stride = layout.size, layout.stride
    if size is None or stride is None or any(type(n) is not int for n in (*size, *stride)):
        raise NotCacheable("a gradient whose strides vary")
    return Tangent(result, "", tuple(size), tuple(stride))


def _refuse_subclasses(meta: torch_api.ViewAndMutationMeta) -> None:
    kinds = [*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta, *(meta.subclass_tangent_meta or ())]
    if any(type(x).__name__ not in ("int", "PlainTensorMeta") for x in kinds):
        raise NotCacheable("the graph has a tensor subclass among its inputs or results")
