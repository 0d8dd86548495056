"""Calls of a captured or exported graph, read in one form: a name and arguments by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

aten = torch.ops.aten


@dataclass(frozen=True)
class Spelling:
    """An operator: its name here, the order of its arguments, and the targets that call it with this order.

    A target that is a text is a method of a tensor.
    """

    name: str
    parameters: str
    targets: tuple[Callable[..., object] | str, ...]


_PRODUCTS: tuple[Callable[..., object] | str, ...] = (
    *(torch.matmul, torch.bmm, torch.mm, operator.matmul, "matmul", "bmm", "mm", "__matmul__"),
    *(aten.matmul.default, aten.bmm.default, aten.mm.default),
)
SPELLINGS = (
    Spelling("matmul", "input other", _PRODUCTS),
    Spelling("baddbmm", "input batch1 batch2 beta alpha", (torch.baddbmm, "baddbmm", aten.baddbmm.default)),
    Spelling("einsum", "equation operands", (torch.einsum,)),
    Spelling("softmax", "input dim dtype", (torch.softmax, torch.special.softmax, "softmax", aten.softmax.int)),
    Spelling("softmax", "input dim _stacklevel dtype", (F.softmax,)),
    Spelling("softmax", "input dim half_to_float", (aten._softmax.default,)),
    Spelling("dropout", "input p training", (F.dropout, torch.dropout, aten.dropout.default)),
    Spelling(
        "add",
        "input other",
        (operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__radd__", "__iadd__", aten.add.Tensor),
    ),
    Spelling("sub", "input other", (operator.sub, operator.isub, torch.sub, "sub", "sub_", "__sub__", aten.sub.Tensor)),
    Spelling(
        "mul",
        "input other",
        *[
            (
                operator.mul,
                operator.imul,
                torch.mul,
                "mul",
                "mul_",
                "__mul__",
                "__rmul__",
                aten.mul.Tensor,
                aten.mul.Scalar,
            )
        ],
    ),
    Spelling(
        "div",
        "input other",
        *[
            (
                operator.truediv,
                operator.itruediv,
                torch.div,
                "div",
                "div_",
                "__truediv__",
                aten.div.Tensor,
                aten.div.Scalar,
            )
        ],
    ),
    Spelling("clamp", "input min max", (torch.clamp, torch.clip, "clamp", "clip", aten.clamp.default)),
    Spelling("clamp", "input min", (torch.clamp_min, "clamp_min", aten.clamp_min.default)),
    Spelling("maximum", "input other", (torch.max, torch.maximum, "max", "maximum", aten.maximum.default)),
    Spelling(
        "masked_fill",
        "input mask value",
        (torch.masked_fill, "masked_fill", "masked_fill_", aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    ),
    Spelling("where", "condition input other", (torch.where, aten.where.self, aten.where.ScalarOther)),
    Spelling("where", "input condition other", ("where",)),
    Spelling("cast", "input dtype", ("to", "type", "type_as", aten._to_copy.default, aten.to.dtype)),
    Spelling("cast", "input", ("float", "half", "bfloat16", "double")),
    Spelling("copy", "input", ("contiguous", "clone", torch.clone, aten.clone.default, aten.contiguous.default)),
    Spelling("view", "input", ("view", "reshape", torch.reshape, aten.view.default, aten.reshape.default)),
    Spelling("view", "input", (aten._unsafe_view.default, "unsqueeze", "squeeze", aten.unsqueeze.default)),
    Spelling("view", "input", (torch.unsqueeze, torch.squeeze, aten.squeeze.dim, "flatten", torch.flatten)),
    Spelling("transpose", "input dim0 dim1", (torch.transpose, "transpose", torch.swapaxes, aten.transpose.int)),
    Spelling("permute", "input", ("permute", torch.permute, aten.permute.default)),
    Spelling("permute", "input name", (getattr,)),
    Spelling("expand", "input", ("expand", "expand_as", aten.expand.default)),
    Spelling("repeat", "input repeats dim", (torch.repeat_interleave, "repeat_interleave")),
    Spelling("repeat", "input repeats dim", (aten.repeat_interleave.self_int,)),
    Spelling("full", "input number", (torch.full_like, aten.full_like.default)),
    Spelling("full", "input size number", ("new_full", aten.new_full.default)),
    Spelling("cat", "tensors dim", (torch.cat, torch.concat, torch.concatenate, aten.cat.default)),
    Spelling("detach", "input", ("detach", aten.detach.default)),
    Spelling("item", "input index", (operator.getitem,)),
    Spelling("slice", "input dim start end step", (aten.slice.Tensor,)),
    Spelling("narrow", "input dim start length", ("narrow", torch.narrow, aten.narrow.default)),
)
_BY_TARGET: Mapping[object, Spelling] = {target: row for row in SPELLINGS for target in row.targets}
SOFTMAXES = tuple(target for row in SPELLINGS if row.name == "softmax" for target in row.targets)
PRODUCTS = (*_PRODUCTS, torch.einsum)
Lead = tuple[int | torch.SymInt, ...]  # the sizes before the last two, rows and columns


@dataclass(frozen=True)
class Operand:
    """A node, and the order in which its dimensions must be taken; None means as they are, inside it a new one."""

    node: Node
    order: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Operation:
    """A call: its name and its arguments by name; arguments that the table does not name are in `more`."""

    name: str
    args: Mapping[str, Any]
    more: tuple[object, ...] = ()

    def get(self, name: str, default: object = None) -> Any:
        """Return an argument, or a default if the call does not give it."""
        return self.args.get(name, default)


def read(n: object) -> Operation:
    """Return a node's call in the form of the table; the name is "" for calls that it does not list."""
    if not isinstance(n, Node) or n.op not in ("call_function", "call_method"):
        return Operation("", {})
    row = _BY_TARGET.get(n.target)
    if row is None or (n.target is getattr and n.args[1] not in ("mT", "T")):
        return Operation("", {})
    names = row.parameters.split()
    if row.name == "einsum":
        operands = tuple(n.args[1]) if len(n.args) == 2 and isinstance(n.args[1], (list, tuple)) else n.args[1:]
        return Operation("einsum", {"equation": n.args[0], "operands": operands})
    args: dict[str, object] = dict(zip(names, n.args, strict=False))
    args.update({"input" if key in ("self", "tensor") else key: value for key, value in n.kwargs.items()})
    return Operation(row.name, args, tuple(n.args[len(names) :]))


def value_of(n: object) -> Any:
    """Return the traced value of a node of a captured or of an ATen graph; other arguments unchanged."""
    if not isinstance(n, Node):
        return n
    return n.meta["example_value"] if "example_value" in n.meta else n.meta.get("val")


def is_tensor(n: object) -> TypeGuard[Node]:
    """Return whether an argument is a node with a traced tensor."""
    return isinstance(n, Node) and isinstance(value_of(n), torch.Tensor)


def shape_of(n: Node) -> tuple[int | torch.SymInt, ...]:
    """Return the traced sizes of a node's tensor."""
    return tuple(value_of(n).shape)


def dtype_of(n: Node) -> torch.dtype:
    """Return the dtype of a node's tensor."""
    dtype: torch.dtype = value_of(n).dtype
    return dtype


def is_last(dim: object, x: Node) -> bool:
    """Return whether a dimension is the last one of a tensor."""
    dims = value_of(x).dim()
    return isinstance(dim, int) and dims > 0 and dim % dims == dims - 1


def narrow_dtype(n: Node) -> torch.dtype:
    """Return the dtype of 16 bits whose numbers a float32 tensor holds, since it was cast from it; else its own."""
    own, source = dtype_of(n), n
    while read(source).name in ("view", "expand", "permute", "transpose", "copy", "repeat"):
        source = read(source).get("input")
        if not is_tensor(source):
            return own
    before = read(source).get("input") if read(source).name == "cast" else None
    if own != torch.float32 or dtype_of(source) != own or not is_tensor(before):
        return own
    return dtype_of(before) if dtype_of(before) in (torch.bfloat16, torch.float16) else own
