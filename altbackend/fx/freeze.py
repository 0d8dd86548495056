"""Freeze a module: its parameters and buffers become constants of its graph, and what depends on them is folded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from ..fx_passes.aliases import Aliases
from .inline import inline
from .module import Program, attribute, graph_module
from .optimize import fixed_point


def freeze_module(
    module: Program,
    preserved_attrs: Sequence[str] = (),
    freeze_interfaces: bool = True,
    preserve_parameters: bool = False,
) -> GraphModule:
    """Return a copy of a module whose attributes are constants, with everything folded that depends on them alone.

    `preserved_attrs`: dotted names of attributes and methods that the copy keeps, and that may still change.
    `freeze_interfaces`: also freeze submodules, by inlining them. `preserve_parameters`: keep parameters as they are
    and freeze only buffers. Attributes that the graph writes stay attributes; their names are the copy's
    `mutable_attributes`. Raise TypeError for an object without a graph. Raise ValueError for a module in training
    mode, for an unknown name, and for a module that returns itself or one of its modules.
    """
    source = graph_module(module)
    _check(source, preserved_attrs, exported=source is not module)
    gm = clone(source)
    if freeze_interfaces:
        inline(gm)
    mutable = mutable_attributes(gm)
    constants = _constants(gm, {*preserved_attrs, *mutable}, preserve_parameters)
    fixed_point(gm, constants)
    _detach(gm, constants)
    remove_unread(gm, preserved_attrs)
    gm.graph.lint()
    gm.recompile()
    gm.mutable_attributes = mutable  # type: ignore[assignment]
    return gm


def clone(gm: GraphModule) -> GraphModule:
    """Return a copy of a module with parameters and buffers of its own; only packed weights are shared.

    torch cannot copy a tensor in oneDNN's layout, and no operator writes one.
    """
    memo: dict[int, object] = {id(b): b for b in gm.buffers() if b.is_mkldnn}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own code, about the trees of exported programs
        return copy.deepcopy(gm, memo)


def _check(gm: GraphModule, preserved: Sequence[str], exported: bool) -> None:
    if gm.training and not exported:
        raise ValueError("the module is in training mode; call eval() before it is traced, then freeze it")
    for name in preserved:
        if not _has(gm, name):
            raise ValueError(f"preserved_attrs names {name!r}, which the module does not have")
    for n in gm.graph.output_node().all_input_nodes:
        if n.op == "get_attr" and isinstance(attribute(gm, str(n.target)), torch.nn.Module):
            raise ValueError(f"the module returns itself or its module {n.target!r}; return tensors instead")
    for name, value in vars(gm).items():
        if value is gm:
            raise ValueError(f"the module holds itself as {name!r}; remove this attribute before freezing")


def _has(gm: GraphModule, name: str) -> bool:
    try:
        attribute(gm, name)
    except AttributeError:
        return False
    return True


def mutable_attributes(gm: GraphModule) -> tuple[str, ...]:
    """Return the names of the attributes that the graph may write."""
    aliases = Aliases(gm.graph)
    names = [str(n.target) for n in gm.graph.find_nodes(op="get_attr") if aliases.written(n)]
    return tuple(dict.fromkeys(names))


def _constants(gm: GraphModule, preserved: set[str], preserve_parameters: bool) -> dict[str, torch.Tensor]:
    """Return the values of the attributes that become constants, by the target of their nodes."""
    storages = {_storage(attribute(gm, name)) for name in preserved if _storage(attribute(gm, name))}
    constants: dict[str, torch.Tensor] = {}
    for n in gm.graph.find_nodes(op="get_attr"):
        name, value = str(n.target), attribute(gm, str(n.target))
        if name in preserved or isinstance(value, torch.nn.Module) or _storage(value) in storages:
            continue
        if preserve_parameters and isinstance(value, torch.nn.Parameter):
            continue
        constants[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return constants


def _storage(x: object) -> int:
    """Return the address of a tensor's memory; 0 for other values, and for tensors in oneDNN's layout."""
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) and not x.is_mkldnn else 0


def _detach(gm: GraphModule, constants: dict[str, torch.Tensor]) -> None:
    """Turn the parameters that the graph still reads, and that are constants, into buffers."""
    for name in {str(n.target) for n in gm.graph.find_nodes(op="get_attr")} & set(constants):
        path, _, last = name.rpartition(".")
        owner = gm.get_submodule(path)
        if last in owner._parameters:
            del owner._parameters[last]
            owner.register_buffer(last, constants[name])


def remove_unread(gm: GraphModule, preserved: Sequence[str]) -> None:
    """Remove parameters, buffers and submodules that the graph does not read and that are not preserved."""
    read = {str(n.target) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")} | set(preserved)

    def is_read(name: str) -> bool:
        return any(name == r or name.startswith(f"{r}.") or r.startswith(f"{name}.") for r in read)

    for path, owner in list(gm.named_modules()):
        for tensors in (owner._parameters, owner._buffers):
            for name in [name for name in tensors if not is_read(f"{path}.{name}".lstrip("."))]:
                del tensors[name]
    for path in [path for path, _ in gm.named_modules() if path and not is_read(path)]:
        parent, _, last = path.rpartition(".")
        try:
            owner = gm.get_submodule(parent)
        except AttributeError:  # removed with its parent
            continue
        owner._modules.pop(last, None)
