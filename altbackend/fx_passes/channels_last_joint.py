"""Run the convolutions of a joint graph channels-last, forward and backward.

Images between two convolutions stay channels-last. What a graph reads and returns keeps its layout.
"""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..aten.depthwise import WIDEST, WIDEST_GRADIENT
from ..aten.name import operator_name
from ..aten.narrow_groups import sums_weight_gradient
from ..compat import torch_api
from . import onednn
from .channels_last import FEW_FLOATS, LOW, faster_on_gpu, is_generated, keeps_layout, reads_plain
from .context import Context
from .gradient_call import gradient_of
from .graph import aten, insert, is_call, propagate, update, val
from .mixed_layouts import FORMATS, copy_operands, is_channels_last, share_copies

_ALIGNED = 8  # channels of a group for which the library has channels-last kernels of gradients of 16 bits


@dataclass(frozen=True)
class Operands:
    """The image, the weight and the groups of a convolution or of its gradient."""

    image: torch.Tensor
    weight: torch.Tensor
    groups: int
    transposed: bool
    dilated: bool


def operands(n: Node) -> Operands:
    """Return the operands of a convolution or of its gradient, whose first argument is the gradient of the result."""
    k = int(n.target is aten.convolution_backward.default)
    groups, dilation = n.args[8 + k], n.args[5 + k]
    assert isinstance(groups, int)
    assert isinstance(dilation, (list, tuple))
    return Operands(val(n.args[k]), val(n.args[1 + k]), groups, bool(n.args[6 + k]), any(d != 1 for d in dilation))


def run(gm: GraphModule, ctx: Context) -> int:
    """Run the convolutions of a joint graph channels-last where that gains; return 1 if the graph changed."""
    convolutions = [n for n in gm.graph.nodes if is_call(n, *_CONVOLUTIONS)]
    if ctx.device == "gpu":
        convolutions = [n for n in convolutions if not _is_generated(n)]
        if not all(map(_suits_gpu, convolutions)):
            return 0
        plain = {n for n in convolutions if reads_plain(n) or _trains_plain(n)}
    else:
        convolutions = [n for n in convolutions if _suits_cpu(n)]
        plain = set[Node]()
        if not _gains_on_cpu(convolutions):
            return 0
    return int(bool(convolutions) and rearrange(gm, convolutions, plain, ctx.device))


def _is_generated(n: Node) -> bool:
    """Return whether a generated kernel computes a convolution, or the gradient of its weight, in either layout."""
    if n.target is aten.convolution.default:
        return is_generated(n)
    call = gradient_of(n)
    sizes = val(call.w).shape
    is_plain = not call.transposed and {*call.dilation} == {1} and list(call.mask) == [False, True, False]
    static = all(isinstance(k, int) for k in (*val(call.grad).shape, *sizes))
    return is_plain and static and sums_weight_gradient(call.groups, sizes, val(call.grad).dtype)


_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def rearrange(gm: GraphModule, convolutions: list[Node], plain: set[Node], device: str) -> bool:
    """Give convolutions channels-last operands, those in `plain` plain ones; return whether the graph changed.

    Pools of the same image read the copy too, if they gain.
    """
    fast = {n for n in convolutions if n not in plain}
    copies = copy_operands(gm, [n for n in gm.graph.nodes if n in fast or _is_gradient(n) or keeps_layout(n)], fast)
    members = set(convolutions)
    moved: dict[tuple[Node, torch.memory_format], Node] = {}
    changed: set[Node] = set()
    order = {n: k for k, n in enumerate(gm.graph.nodes)}
    for n in list(gm.graph.nodes):
        if n in members:
            for k in range(2 if n.target is aten.convolution.default else 3):
                x = n.args[k]
                assert isinstance(x, Node)
                memory_format = torch.contiguous_format if n in plain else FORMATS[val(x).dim()]
                if val(x).is_contiguous(memory_format=memory_format):
                    continue
                key = x, memory_format
                if key not in moved:
                    pools = [u for u in x.users if _is_pool(u) and _gains(u, fast, device)] if n not in plain else []
                    first = min((n, *pools), key=order.__getitem__)
                    moved[key] = insert(gm.graph, first, aten.clone.default, (x,), {"memory_format": memory_format})
                    changed.add(moved[key])
                    for u in pools:
                        u.replace_input_with(x, moved[key])
                    if first is not n:  # the loop has passed it; calls behind `n` are updated below
                        propagate(gm, [moved[key]])
                n.update_arg(k, moved[key])
        update(n, changed)  # in graph order, so that the next convolution sees inputs that are channels-last already
    share_copies(gm, {x: copy for (x, layout), copy in moved.items() if layout is not torch.contiguous_format})
    return bool(moved) or copies > 0


def _is_pool(n: Node) -> bool:
    return n.op == "call_function" and operator_name(n.target) in ("max_pool2d_with_indices", "avg_pool2d")


def _gains(pool: Node, fast: set[Node], device: str) -> bool:
    """Return whether a pool of an image of which there is a channels-last copy reads the copy.

    On a CPU, kernels compute windows of plain rows, and the positions of their maxima, in as many steps as a row has
    elements. On a GPU, a pool whose result convolutions read computes positions and values in one kernel so, and its
    gradient reads both operands as they lie.
    """
    values = [u for u in pool.users if u.target is operator.getitem and u.args[1] == 0] or [pool]
    return device == "cpu" or any(u in fast for v in values for u in v.users)


def _is_gradient(n: Node) -> bool:
    """Return whether `n` is the gradient of the image of a convolution."""
    if not is_call(n, operator.getitem) or not is_call(n.args[0], aten.convolution_backward.default):
        return False
    return bool(n.args[1] == 0)


# --- GPU -------------------------------------------------------------------------------------------------------------


def _suits_gpu(n: Node) -> bool:
    """Return whether a convolution is one of images or volumes with static shapes, in 16 bits or in TF32."""
    x = operands(n).image
    fast = x.dtype in LOW or (x.dtype == torch.float32 and torch_api.allows_tf32_convolutions())
    whole = operands(n).groups == 1
    return fast and faster_on_gpu(x, operands(n).transposed, whole) and all(isinstance(s, int) for s in x.shape)


def _trains_plain(n: Node) -> bool:
    """Return whether the library's channels-last kernels for the gradients of a convolution are slower than plain ones.

    Depthwise windows of float32 that are too wide for our channels-last kernel have a generated one for plain images.
    Gradients of still wider and of dilated ones are the library's: 7x7 windows over 64 images of 96x56x56 took 6.1 ms a
    step, plain ones 3.1, on an H100. In 16 bits, such are groups of less than 16 bytes: 876 us for 348. Of few channels
    of float32, the convolution itself is: 2.3 ms for 0.5 with 30 images of 8x505x505. Images that are channels-last
    already stay so: in 100 cases on an H200 a step took 0.4 to 1.3 (median 0.76) of the time of plain images and the
    copies around them.
    """
    x, w, groups = operands(n).image, operands(n).weight, operands(n).groups
    lies_plain = not is_channels_last(val(n.args[int(n.target is aten.convolution_backward.default)]))
    if groups == x.shape[1] == w.shape[0]:
        taps = math.prod(w.shape[2:])
        has_kernels = taps <= WIDEST_GRADIENT and not operands(n).dilated  # for both gradients, channels-last
        return bool(x.dtype == torch.float32 and taps > WIDEST and (lies_plain or not has_kernels))
    if groups == 1 and x.dim() == 4:
        few = x.dtype == torch.float32 and max(x.shape[1], w.shape[0], w.shape[1]) <= FEW_FLOATS
        return few and lies_plain
    return bool(groups != 1 and x.dtype in LOW and x.shape[1] // groups < _ALIGNED)


# --- CPU -------------------------------------------------------------------------------------------------------------


def _suits_cpu(n: Node) -> bool:
    """Return whether oneDNN computes a convolution of images of static shape, in both directions."""
    x, w = operands(n).image, operands(n).weight
    is_static = x.dim() == 4 and not operands(n).transposed and all(isinstance(s, int) for s in x.shape)
    return is_static and x.dtype == w.dtype and x.dtype in (torch.float32, *LOW) and onednn.computes(x.dtype)


def _gains_on_cpu(convolutions: list[Node]) -> bool:
    """Return whether the library saves more than the copies of images at the border of the graph.

    Times of a step on two cores with AVX-512, as parts of the time of plain images: 0.25 to 0.7 for convolutions in
    groups, 0.3 to 0.5 for depthwise ones, 0.5 to 0.7 for windows of one element, 0.75 to 0.92 for others. A lone one of
    the last kind gains less than its copies take.
    """
    forward = [n for n in convolutions if n.target is aten.convolution.default]
    return len(forward) > 1 or any(operands(n).groups != 1 for n in forward)
