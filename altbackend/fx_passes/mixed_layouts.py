"""Copy plain images to channels-last where they meet channels-last images.

A concatenation or a sum of images in two layouts gives a plain image, which the next convolution copies again. A dense
block, or a chain of residual blocks, over a plain image would copy all that it has computed in each of its layers. One
copy of the plain operand, which all readers share, ends this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..aten.pointwise import is_pointwise
from ..aten.reduction import is_normalisation
from ..aten.view import storage_owner
from .graph import TAKES_LAYOUT, aten, insert, like_argument, propagate, val

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: torch.Tensor) -> bool:
    """Return whether the channels of a traced image are next to each other in dense memory, for all sizes."""
    if x.dim() not in FORMATS:
        return False
    expected: int | torch.SymInt = 1
    for k in (1, *range(x.dim() - 1, 1, -1), 0):
        if not statically_known_true(x.stride(k) == expected) and not statically_known_true(x.shape[k] == 1):
            return False
        expected = expected * x.shape[k]
    return statically_known_true(x.stride(1) == 1)


def copy_operands(gm: GraphModule, region: Sequence[Node], convolutions: Collection[Node]) -> int:
    """Copy operands of a region, in graph order, that meet results of its convolutions on a way to another one.

    `convolutions`, gradients among them, run channels-last, and the other calls of the region keep the layout. Return
    the number of copies.
    """
    members, copies = set(region), 0
    before = _reached(region, convolutions)
    behind = _leading(region, convolutions)
    for n in region:
        if n in convolutions or n not in behind or n not in before:
            continue
        for x in n.all_input_nodes:
            if x in before or not _is_plain_operand(x, n):
                continue
            if _is_stored(x) or is_normalisation(n.target):  # which reads its operands in each of several passes
                _copy(gm, x, members)
                copies += 1
            elif not n.meta.get(TAKES_LAYOUT):
                n.meta[TAKES_LAYOUT] = True
                n.meta["val"] = like_argument(n, val(n))
                propagate(gm, [n])
    return copies


def share_copies(gm: GraphModule, copies: Mapping[Node, Node]) -> None:
    """Let pointwise calls that read an image beside channels-last images read its channels-last copy.

    `copies`: the copy of each image, made for a convolution. A kernel that reads both layouts, as that of a sum over a
    residual connection, takes several times as long. Calls whose results the graph returns stay as they are.
    """
    number = {n: k for k, n in enumerate(gm.graph.nodes)}
    changed: set[Node] = set()
    for x, moved in copies.items():
        for u in list(x.users):
            is_read = any(reader.op != "output" for reader in u.users)
            if is_read and number[u] > number[moved] and is_pointwise(u.target) and _meets_channels_last(u, x):
                u.replace_input_with(x, moved)
                changed.add(moved)
    if changed:
        propagate(gm, changed)


def _meets_channels_last(u: Node, x: Node) -> bool:
    """Return whether a call reads a channels-last image of the size of `x` besides `x`."""
    others = (val(a) for a in u.all_input_nodes if a is not x)
    return any(
        isinstance(other, torch.Tensor) and other.shape == val(x).shape and is_channels_last(other) for other in others
    )


def _reached(region: Sequence[Node], convolutions: Collection[Node]) -> set[Node]:
    """Return the nodes of a region that depend on a convolution's result along images."""
    reached: set[Node] = set()
    for n in region:
        if n in convolutions or any(a in reached for a in n.all_input_nodes):
            reached.add(n)
    return reached


def _leading(region: Sequence[Node], convolutions: Collection[Node]) -> set[Node]:
    """Return the nodes of a region on whose results the image of a convolution depends."""
    leading: set[Node] = set()
    for n in reversed(region):
        if n not in convolutions and any(u in leading or (u in convolutions and n in _images(u)) for u in n.users):
            leading.add(n)
    return leading


def _images(n: Node) -> Sequence[object]:
    """Return the images that a convolution, or its gradient, reads."""
    return n.args[:2] if n.target is aten.convolution_backward.default else n.args[:1]


_STORING = frozenset(
    {aten.cat.default, aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default}
)


def _is_stored(x: Node) -> bool:
    """Return whether a tensor lies in memory. What kernels compute where they read it has no layout to change."""
    owner = storage_owner(x)
    return (owner.op == "placeholder" or owner.target in _STORING) and 0 not in val(x).stride()


def _is_plain_operand(x: Node, n: Node) -> bool:
    """Return whether `x` is a plain image, as large as the result of `n` except for channels that `n` joins."""
    image, result = val(x), val(n)
    result = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(image, torch.Tensor) or not isinstance(result, torch.Tensor) or image.dim() not in FORMATS:
        return False
    joined = (1,) if n.target is aten.cat.default else ()
    same = all(k in joined or image.shape[k] == result.shape[k] for k in range(image.dim()))
    return same and image.dim() == result.dim() and not is_channels_last(image)


def _copy(gm: GraphModule, x: Node, members: Collection[Node]) -> None:
    """Copy an image to channels-last for all its readers in a region."""
    readers = {u for u in x.users if u in members}
    first = next(m for m in gm.graph.nodes if m in readers)
    moved = insert(gm.graph, first, aten.clone.default, (x,), {"memory_format": FORMATS[val(x).dim()]})
    for u in readers:
        u.replace_input_with(x, moved)
    propagate(gm, [moved])
