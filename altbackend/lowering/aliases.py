"""The nodes of a graph that are views of another node's storage."""

from __future__ import annotations

import operator

import torch

from .context import target_name

_VIEWS = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "_reshape_alias",
        "permute",
        "t",
        "transpose",
        "expand",
        "unsqueeze",
        "squeeze",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "diagonal",
        "unfold",
        "as_strided",
        "alias",
        "detach",
        "getitem",
        "copy_",
        "view_as_real",
        "view_as_complex",
        "_conj",
        "_neg_view",
    ]
)


def is_view(node: torch.fx.Node) -> bool:
    return target_name(node.target).split(".")[0] in _VIEWS


def alias_root(n: torch.fx.Node) -> torch.fx.Node:
    """Return the node that owns the storage of `n`. A tensor among several results of a call owns its storage."""
    while n.op == "call_function" and is_view(n) and n.args:
        source = n.args[0]
        if not isinstance(source, torch.fx.Node) or (n.target is operator.getitem and not is_view(source)):
            break
        n = source
    return n
