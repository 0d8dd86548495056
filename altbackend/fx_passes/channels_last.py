"""Run convolutions channels-last where that saves more than the copies into the layout cost.

An operator between two convolutions keeps the layout, so the convolutions of a region share the copies at its border.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import torch
from torch.fx import GraphModule, Node

from ..aten import transposed as transposed_images
from ..aten.name import operator_name, words
from ..aten.narrow_groups import (
    gains_channels_last,
    in_generated_kernel,
    in_plain_kernel,
    runs_fast,
    takes_any_layout,
    trains_as_it_lies,
    trains_fast,
)
from ..aten.pointwise import is_pointwise
from ..aten.reduction import is_normalisation, is_reduction
from ..compat import torch_api
from . import onednn
from .context import Context
from .graph import KEEPS_LAYOUT, aten, insert, is_call, propagate, replace, val
from .mixed_layouts import FORMATS, copy_operands, is_channels_last

LOW = (torch.bfloat16, torch.float16)
# Bytes that the library must save for each byte that is copied into a region or out of it. A lone convolution with a
# small weight saves as many as it copies: on a CPU, it took 1.0 to 1.25 times as long.
_LEAST_GAIN = {"cpu": 1.25, "gpu": 1.0}


def run(gm: GraphModule, ctx: Context) -> int:
    """Run convolutions of an inference graph channels-last; return the number of inputs that are copied into it."""
    return rearrange(gm, ctx.constant_nodes(gm), ctx.device)


def rearrange(gm: GraphModule, constant: set[Node], device: str) -> int:
    """Copy the inputs of the convolutions of each region that gains to channels-last; return the number of copies.

    Strides are propagated, so an operator between two convolutions keeps the layout. On a GPU constant weights are
    copied too, because the library would copy them in every call; on a CPU they are packed.
    """
    calls = [n for n in gm.graph.nodes if is_call(n, aten.convolution.default)]
    generated = {n for n in calls if device == "gpu" and is_generated(n)}
    following = [n for n in calls if device == "gpu" and n not in generated and _follows_layout(n)]
    for n in following:
        n.meta[KEEPS_LAYOUT] = True
    convolutions = {n for n in calls if n not in generated and _suits(n, device)}
    copies = 0
    _mark_any_layout(gm, convolutions, anywhere=device == "cpu" and bool(convolutions))
    library = [n for n in calls if n not in generated and not n.meta.get(KEEPS_LAYOUT)]
    plain = _read_plain_copies(gm, library, reads_plain if device == "gpu" else _reads_plain_on_cpu)
    for region in _regions(gm, convolutions):
        members = [n for n in region if n in convolutions]
        if device == "gpu" and all(map(_is_as_fast_plain, members)):
            continue
        if _saved_bytes(members, constant, device) <= _LEAST_GAIN[device] * _copied_bytes(region, members):
            continue
        copies += copy_operands(gm, region, members)
        for n in members:
            if device == "gpu":
                _rearrange_weight(gm, n, constant)
            copies += _rearrange_input(gm, n, set(region))
    for n in following:
        if is_channels_last(val(n.args[0])):
            _rearrange_weight(gm, n, constant)
        else:
            del n.meta[KEEPS_LAYOUT]
            plain += _read_plain_copies(gm, [n], reads_plain)
    if device == "gpu":
        _write_plain_results(gm, [n for n in calls if n in generated or _is_plain_depthwise(n)])
    return copies + sum(not _drop_if_plain(n) for n in plain)


def _write_plain_results(gm: GraphModule, convolutions: Iterable[Node]) -> None:
    """Let generated convolutions of plain images write plain results, whatever the layout of their weights.

    A softmax in a channels-last model gives a plain image. torch then takes the layout of a result from the weight. A
    kernel that turned over windows of 7x7 took 388 us, where one that does not takes 154.
    """
    changed: list[Node] = []
    for n in convolutions:
        x, w = n.args[:2]
        assert isinstance(x, Node)
        assert isinstance(w, Node)
        if is_channels_last(val(n)) and val(x).is_contiguous() and not is_channels_last(val(x)):
            plain = insert(gm.graph, n, aten.clone.default, (w,), {"memory_format": torch.contiguous_format})
            n.replace_input_with(w, plain)
            changed.append(plain)
    propagate(gm, changed)


def _is_plain_depthwise(n: Node) -> bool:
    """Return whether a generated kernel computes a depthwise convolution of plain images."""
    x, w = val(n.args[0]), val(n.args[1])
    return is_depthwise(n) and x.dim() == 4 and not n.args[6] and in_plain_kernel(w.shape, x.dtype)


def reads_plain(n: Node) -> bool:
    """Return whether the library has no channels-last kernel for a convolution or its gradient.

    It runs one convolution for each group of a volume: 260 calls for 128 channels. Of images in groups, it has
    channels-last kernels for some widths, which take 0.4 to 0.9 of the time that plain images take. Others it converts
    three times a call, by a slow kernel. Such widths are 12, 20, 24, 28, 36, 40, 48, 56 and 96 channels a group, which
    take 1.05 to 2.5 of the time of plain images. Two groups of 4 take 1.5 to 2 (2 to 16 groups of 3x3 on an H100).
    An image of one channel lies in both layouts at once, and the library takes it for plain.
    """
    backward = n.target is aten.convolution_backward.default
    x, groups = val(n.args[1 if backward else 0]), n.args[9 if backward else 8]
    if groups == 1 and _is_slow_transposed(n):
        return True
    if x.dim() not in FORMATS or not all(isinstance(s, int) for s in x.shape) or (groups == 1 and x.shape[1] != 1):
        return False
    if x.dim() == 5 or bool(x.shape[1] == 1):
        return True
    assert isinstance(groups, int)
    channels = int(x.shape[1])
    if channels == groups:
        return False
    if backward or _has_gradient(n):
        as_it_lies = trains_as_it_lies(channels, groups) and is_channels_last(x)
        return not (as_it_lies or trains_fast(channels, groups, x.dtype))
    return not runs_fast(channels, groups, math.prod(val(n.args[1]).shape[2:]), x.dtype)


def _follows_layout(n: Node) -> bool:
    """Return whether a convolution of images in groups runs in the layout that its image has."""
    x, w, groups = val(n.args[0]), val(n.args[1]), n.args[8]
    assert isinstance(groups, int)
    sizes = (*x.shape, *w.shape)
    if x.dim() != 4 or groups == 1 or n.args[6] or not all(isinstance(s, int) for s in sizes) or not reads_plain(n):
        return False
    return not _has_gradient(n) and takes_any_layout(int(x.shape[1]), groups, math.prod(w.shape[2:]), x.dtype)


def _is_slow_transposed(n: Node) -> bool:
    """Return whether a convolution, or the one of a gradient, is a transposed one that plain images suit better."""
    k = int(n.target is aten.convolution_backward.default)
    weight, stride, padding, transposed = val(n.args[1 + k]), n.args[3 + k], n.args[4 + k], n.args[6 + k]
    if not transposed or weight.dim() != 4:
        return False
    return not transposed_images.runs_fast(weight.shape, _integers(stride), _integers(padding), weight.dtype)


def _integers(numbers: object) -> tuple[int, ...]:
    assert isinstance(numbers, (list, tuple))
    return tuple(map(int, numbers))


def _has_gradient(n: Node) -> bool:
    """Return whether a graph computes the gradient of a convolution, too: both have operands in one layout."""
    operands = (a for a in n.args[:2] if isinstance(a, Node))
    return any(is_call(u, aten.convolution_backward.default) for a in operands for u in a.users)


def _reads_plain_on_cpu(n: Node) -> bool:
    """Return whether a convolution is a depthwise one of a dtype that oneDNN lacks on this processor.

    torch's channels-last kernel for it takes six times as long as the one for plain images.
    """
    x = val(n.args[0])
    return x.dim() in FORMATS and is_depthwise(n) and not onednn.computes(x.dtype)


def is_generated(n: Node) -> bool:
    """Return whether a generated kernel computes a convolution, in whichever layout its image has."""
    x, w = val(n.args[0]), val(n.args[1])
    if n.args[6] or not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
        return False
    return in_generated_kernel(x.shape[1], n.args[8], w.shape, x.dtype)  # type: ignore[arg-type]


def _is_as_fast_plain(n: Node) -> bool:
    """Return whether a generated kernel computes a depthwise convolution, and plain images are as fast alone."""
    x, w = val(n.args[0]), val(n.args[1])
    return is_depthwise(n) and x.dim() == 4 and x.shape[1] == w.shape[0] and not gains_channels_last(w.shape, x.dtype)


def _read_plain_copies(
    gm: GraphModule, convolutions: Iterable[Node], reads_plain: Callable[[Node], bool]
) -> list[Node]:
    """Let convolutions in groups read plain copies of their operands where `reads_plain` holds, and return the copies.

    The copies stand at the border of regions, so that what follows is not taken to be channels-last.
    """
    copies: dict[Node, Node] = {}
    for n in convolutions:
        if not reads_plain(n):
            continue
        for x in n.args[:2]:
            assert isinstance(x, Node)
            if x not in copies:
                copies[x] = insert(gm.graph, n, aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
            n.replace_input_with(x, copies[x])
    propagate(gm, copies.values())
    return list(copies.values())


def _drop_if_plain(copy: Node) -> bool:
    """Remove a copy of a tensor that is plain; return whether it is one."""
    source = copy.args[0]
    assert isinstance(source, Node)
    is_plain = bool(val(source).is_contiguous())
    if is_plain:
        replace(copy, source)
    return is_plain


# Operators whose kernels write a result in any layout, though torch's meta functions give a contiguous one.
_ANY_LAYOUT = words("_softmax _log_softmax native_group_norm")


def _mark_any_layout(gm: GraphModule, convolutions: set[Node], anywhere: bool) -> None:
    """Mark the calls of `_ANY_LAYOUT` from which a path of operators that keep the layout leads to a convolution.

    Their results take the layout of their images, which may be channels-last already. `anywhere`: mark all of them,
    since kernels of a CPU read images along their channels.
    """
    leading: set[Node] = set()
    images: set[Node] = set()
    for n in reversed(gm.graph.nodes):
        if anywhere or any(u in leading or (u in convolutions and u.args[0] is n) for u in n.users):
            marked = n.op == "call_function" and operator_name(n.target) in _ANY_LAYOUT
            if marked:
                n.meta[KEEPS_LAYOUT] = True
                images.update(n.all_input_nodes[:1])
            if marked or keeps_layout(n):
                leading.add(n)
    propagate(gm, images)


def _rearrange_input(gm: GraphModule, n: Node, region: set[Node]) -> bool:
    """Copy the image of a convolution to channels-last; return whether it was not. Others in the region read the copy.

    So do permutations to rows of points, which are views of the copy: products in place of convolutions read them.
    """
    x = n.args[0]
    assert isinstance(x, Node)
    if is_channels_last(val(x)):
        return False
    readers = {n, *(u for u in x.users if u in region or (region and _gives_rows_of_points(u)))}
    first = next(m for m in gm.graph.nodes if m in readers)
    source = _points_read(gm, n) if len(readers) == 1 else x
    moved = insert(gm.graph, first, aten.clone.default, (source,), {"memory_format": FORMATS[val(x).dim()]})
    for u in readers:
        u.replace_input_with(x, moved)
    propagate(gm, [moved])
    return True


def _points_read(gm: GraphModule, n: Node) -> Node:
    """Return the points of an image that a convolution with strided windows of one element reads; it then has no steps.

    The copy to another layout then leaves out the others.
    """
    x, stride = n.args[0], n.args[3]
    assert isinstance(x, Node)
    if _read_share(n) == 1:
        return x
    assert isinstance(stride, (list, tuple))
    for dim, step in enumerate(stride, 2):
        x = insert(gm.graph, n, aten.slice.Tensor, (x, dim, 0, val(x).shape[dim], step))
    n.update_arg(3, [1] * len(stride))
    return x


def _read_share(n: Node) -> float:
    """Return the share of an image's points that a convolution reads, which strided windows of one element lessen."""
    stride, padding = _integers(n.args[3]), _integers(n.args[4])
    sizes = (*val(n.args[0]).shape, *val(n.args[1]).shape)
    is_plain = not n.args[6] and len(stride) == len(padding) == val(n).dim() - 2 and not any(padding)
    if not is_plain or not all(isinstance(s, int) for s in sizes) or any(s != 1 for s in val(n.args[1]).shape[2:]):
        return 1
    return 1 / math.prod(stride)


def _gives_rows_of_points(n: Node) -> bool:
    """Return whether a call moves the channels of an image last."""
    rank = val(n.args[0]).dim() if is_call(n, aten.permute.default) else 0
    return rank in FORMATS and list(n.args[1]) == [0, *range(2, rank), 1]  # type: ignore[arg-type]


# --- regions ---------------------------------------------------------------------------------------------------------


def _regions(gm: GraphModule, convolutions: set[Node]) -> list[list[Node]]:
    """Return the groups of convolutions that operators which keep the layout connect, with these operators."""
    leader: dict[Node, Node] = {}

    def find(n: Node) -> Node:
        while leader[n] is not n:
            leader[n] = leader[leader[n]]
            n = leader[n]
        return n

    for n in gm.graph.nodes:
        if n in convolutions or keeps_layout(n):
            leader[n] = n
            for a in n.all_input_nodes if n not in convolutions else n.all_input_nodes[:1]:
                if a in leader:
                    leader[find(a)] = find(n)
    groups: dict[Node, list[Node]] = {}
    for n in leader:
        groups.setdefault(find(n), []).append(n)
    return [group for group in groups.values() if any(n in convolutions for n in group)]


_KEEPING = words(
    "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d",
    "upsample_nearest2d upsample_bilinear2d _native_batch_norm_legit_no_training _native_batch_norm_legit_functional",
    "native_batch_norm_backward native_group_norm cat constant_pad_nd squeeze unsqueeze slice _to_copy",
)


def keeps_layout(n: Node) -> bool:
    """Return whether a call on channels-last images gives channels-last images: it is pointwise, pools or joins."""
    if is_call(n, operator.getitem):
        return isinstance(n.args[0], Node) and keeps_layout(n.args[0])
    fake = val(n)
    first = fake[0] if isinstance(fake, (tuple, list)) and fake else fake
    if n.op != "call_function" or not isinstance(first, torch.Tensor) or first.dim() not in (3, *FORMATS):
        return False
    return is_pointwise(n.target) or operator_name(n.target) in _KEEPING or n.meta.get(KEEPS_LAYOUT, False)


FEW_CHANNELS = 4  # of 16 bits, for which the library's channels-last kernels are no faster
FEW_FLOATS = 8  # channels of float32, read and written: 32 images of 256x256 take 666 us channels-last, 332 plain
# Elements of a window from which few channels of float32 gain channels-last, at stride 1 and at other strides.
WIDE_WINDOW, WIDEST_WINDOW = 25, 49


def _gain_on_gpu(n: Node) -> int:
    """Return how many times the bytes of its images a convolution saves channels-last.

    Measured on an H100. With TF32, windows of one element gain nothing, nor do few channels. Convolutions in groups
    take 0.5 to 0.75 of the time of plain images, depthwise ones of few channels 0.2 to 0.6. Transposed ones write most
    of what they move: 3 channels that become 24 took 256 us plain for 129 in bfloat16.
    """
    w, groups, channels = val(n.args[1]), n.args[8], val(n.args[0]).shape[1]
    most = max(channels, val(n).shape[1])
    if groups != 1:
        return 1
    if val(n).dtype != torch.float32:
        return int((most if n.args[6] else channels) > FEW_CHANNELS)
    return int(any(k != 1 for k in w.shape[2:]) and (most > FEW_FLOATS or _gains_with_few_floats(n)))


def _gains_with_few_floats(n: Node) -> bool:
    """Return whether up to 8 channels of float32 run faster channels-last, with the copy of the image.

    Measured on an H200 with 5 sizes of images, in parts of the time of plain ones. At stride 1, 3 and 4 channels that
    become 8 took 0.24 to 1.2. With windows of 3x3 at stride 2 they took 1.1 to 1.8. Windows of 7x7 took 0.35 to 1.2 for
    3 to 8 channels. Windows of 5x5 took 0.55 to 0.87, but 1.1 for 4 channels that become 8 and 1.4 for 6 channels of
    28x28; at stride 2 they took 0.8 to 1.9. 8 channels that become 8 with windows of 3x3 took 0.7 to 2.0.
    """
    w, strides = val(n.args[1]), _integers(n.args[3])
    if n.args[6] or min(w.shape[:2]) < 3:
        return False
    is_dense = all(s == 1 for s in strides)
    widens = w.shape[1] < w.shape[0] == FEW_FLOATS and is_dense
    return bool(widens or math.prod(w.shape[2:]) >= (WIDE_WINDOW if is_dense else WIDEST_WINDOW))


def _gain_on_cpu(n: Node) -> float:
    """Return how many times the bytes of its images a convolution saves channels-last.

    The library copies plain images of 16 bits more slowly than kernels do. With a window of one element, 8 images of
    28x28 and 64 to 128 channels it took 299 us for 124, and 306 for 217 in float32.

    On a CPU with AVX2, the library reads plain images of depthwise convolutions as they lie. Channels-last, a lone one
    of 8x64x56x56 took 4.7 ms for 2.7, and 31.8 for 6.6 of 8x64x28x28 in bfloat16. With AVX-512 it copies them as it
    copies others: 0.31 to 0.67 of the time of plain images at 8 to 256 channels, windows of 3 to 7.
    """
    if is_depthwise(n) and not torch_api.has_avx512():
        return 0
    return 1.5 if val(n).dtype in LOW else 1


def is_depthwise(n: Node) -> bool:
    return bool(n.args[8] == val(n.args[0]).shape[1] != 1)


def _bytes(x: torch.Tensor) -> int:
    total = x.element_size()
    for s in x.shape:
        total *= s if isinstance(s, int) else s.node.hint or 1
    return total


def _saved_bytes(convolutions: Iterable[Node], constant: set[Node], device: str) -> float:
    """Return the bytes that the library copies in each call unless the convolutions run channels-last.

    It copies images into a layout of its own and back, and weights too.
    """
    saved = 0.0
    for n in convolutions:
        moved = _bytes(val(n.args[0])) * _read_share(n) + _bytes(val(n))
        saved += (_gain_on_gpu(n) if device == "gpu" else _gain_on_cpu(n)) * moved
        saved += _bytes(val(n.args[1])) * (n.args[1] in constant)
    return saved


def _copied_bytes(region: list[Node], convolutions: Collection[Node]) -> float:
    """Return the bytes of the images that are copied when they enter or leave a region."""
    inside = set(region)
    entering = Counter(n.args[0] for n in convolutions if n.args[0] not in inside)
    shares = {n.args[0]: _read_share(n) if entering[n.args[0]] == 1 else 1 for n in convolutions}
    copied = sum(_bytes(val(x)) * shares[x] for x in entering if not is_channels_last(val(x)))
    for n in region:
        if isinstance(val(n), torch.Tensor) and _is_copied(n, inside, n in convolutions):
            copied += _bytes(val(n))
    return copied


def _is_copied(n: Node, inside: set[Node], is_convolution: bool) -> bool:
    """Return whether an image is copied on its way out of a region.

    Reductions and normalisations read any layout, and the kernel of the last pointwise operator writes any.
    """
    outside = [u for u in n.users if u not in inside]
    reread = is_convolution or len(outside) < len(n.users)
    return reread and any(not is_reduction(u.target) and not is_normalisation(u.target) for u in outside)


def _suits(n: Node, device: str) -> bool:
    x, w, transposed = val(n.args[0]), val(n.args[1]), bool(n.args[6])
    if x.dtype not in (torch.float32, *LOW) or x.dtype != w.dtype:
        return False
    if any(not isinstance(s, int) and s.node.hint is None for s in x.shape):  # data decides it
        return False
    if device == "gpu":
        faster = not reads_plain(n) and faster_on_gpu(x, transposed, bool(n.args[8] == 1))
        return faster and all(isinstance(s, int) for s in x.shape)
    return x.dim() in FORMATS and not _reads_plain_on_cpu(n)


def faster_on_gpu(x: torch.Tensor, transposed: bool, whole: bool) -> bool:
    """Return whether convolutions of an operand like `x` have a channels-last kernel that is faster.

    `whole`: the channels are one group. Volumes of float32 have such a kernel for transposed convolutions alone.
    Volumes in groups have none: on an H100 a depthwise one of bfloat16 took five times as long.
    """
    return x.dim() == 4 or (x.dim() == 5 and whole and (transposed or x.dtype in LOW))


def _rearrange_weight(gm: GraphModule, n: Node, constant: set[Node]) -> None:
    w = n.args[1]
    memory_format = FORMATS[val(w).dim()]
    if not isinstance(w, Node) or w not in constant or val(w).is_contiguous(memory_format=memory_format):
        return
    moved = insert(gm.graph, n, aten.clone.default, (w,), {"memory_format": memory_format})
    n.replace_input_with(w, moved)
    constant.add(moved)
