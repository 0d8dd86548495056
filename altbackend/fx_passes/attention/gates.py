"""Decide if the fused operator computes an attention exactly, and faster."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from ...aten.mutates import is_mutable
from ...compat import torch_api
from .. import attention_mask
from ..context import Context
from ..simplify import same_sizes
from .form import Form
from .masks import Mask
from .operators import dtype_of, is_tensor, narrow_dtype, shape_of, value_of

TYPES = {
    "cpu": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}
# Sizes of the scores in bytes between which separate kernels are faster on a CPU, with both products in the caches.
# Measured on two cores of a server with AMX, which products of bfloat16 use and the fused kernel does not.
_SEPARATE: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1 << 16, 1 << 20),
    torch.float64: (1 << 16, 1 << 20),
    torch.bfloat16: (1 << 16, math.inf),
    torch.float16: (1 << 16, math.inf),
}

FEWEST_KEYS = 65  # keys from which products in TF32 are faster, but for a whole tile of 128
TILE, MANY_KEYS = 64, 256  # keys of a tile of the fused kernel of float32; keys from which products are always faster
FEW_KEYS = 32  # keys up to which separate kernels are faster: with 14, they take half of the time in training
MANY_FEATURES = 128  # features from which separate kernels are two to three times faster
MOST_PADDED = 1.25  # times the keys that whole tiles may have, where wide heads train
MOST_TILED_FEATURES = 64  # features for which the generated kernel's tiles of TF32 fit in registers
FLASH_FEATURES, MASKED_FEATURES = 256, 128  # most features that FlashAttention takes, and cuDNN with a mask
MOST_SCORES = 1 << 30  # bytes of scores that are stored for a smaller gain
STORED_BY_CPUS = 1 << 24  # bytes of scores that do not stay in the caches of a CPU


_ENTERS, _LEAVES = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_MAPS = (_ENTERS, _LEAVES, "_add_batch_dim", "_remove_batch_dim", "lazy_load_decompositions")


def mapped(graph: Graph) -> set[Node]:
    """Return the nodes inside of regions that `torch.vmap` maps over a dimension."""
    inside, depth = set[Node](), 0
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "")
        depth += (name == _ENTERS) - (name == _LEAVES)
        if depth:
            inside.add(n)
    return inside


def refused_graph(graph: Graph) -> str:
    """Return why no attention of a graph may be fused, or "".

    The gradient of the fused kernels has no gradient itself, and no forward mode. Masks are often mapped over
    positions: what such a region holds is not fused (`mapped`).
    """
    for n in graph.nodes:
        if n.op != "call_function":
            continue
        module = getattr(n.target, "__module__", "") or ""
        name = getattr(n.target, "__name__", "")
        if name in _MAPS:
            continue
        if "functorch" in module or "functorch" in name or "forward_ad" in module:
            return "the graph differentiates or maps a function itself"
        if n.target is torch.autograd.grad or "autograd.functional" in module:
            return "the graph computes gradients itself"
    return ""


def refused(form: Form, ctx: Context, mask_dtype: torch.dtype | None = None) -> str:
    """Return why the fused operator must not compute an attention, or ""."""
    operands = [form.query.node, form.key.node, form.value.node]
    devices = {value_of(n).device for n in (*operands, form.result)}
    dtype, device = dtype_of(form.result), value_of(form.result).device.type
    if len(devices) > 1 or device not in TYPES:
        return f"no fused kernel for operands on {', '.join(sorted(map(str, devices)))}"
    dtypes = {dtype_of(n) for n in operands}
    if (dtypes != {dtype} and not is_widened(form)) or dtype not in TYPES[device]:
        return "the operands differ in dtype, or the kernels do not take it"
    if dtype_of(form.scores) != dtype and not is_widened(form):
        return "autocast changes the dtype of the scores"
    sizes = [size for n in (*operands, form.scores) for size in shape_of(n)]
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return "an operand is empty"
    return _unequal(form, device) or _dropout(form, ctx, device) or _sink(form, ctx, device) or _writes_between(form)


def is_widened(form: Form) -> bool:
    """Return whether the first product is in float32 with operands of 16 bits, as the fused kernels compute it."""
    dtype, first = dtype_of(form.result), (form.query.node, form.key.node)
    wide = {dtype_of(n) for n in (*first, form.scores)} == {torch.float32} and dtype != torch.float32
    if not wide or dtype_of(form.value.node) != dtype or {narrow_dtype(n) for n in first} != {dtype}:
        return False
    return all(step.kind not in ("multiply", "divide") for step in form.steps)  # factors of the query would be rounded


def _unequal(form: Form, device: str) -> str:
    """Return why no fused kernel takes queries and values of different numbers of features, or "".

    On a GPU, the memory-efficient kernel reads both by 16 bytes. On a CPU, the narrower are padded.
    """
    features = [x for (x,) in _features(form)]
    if same_sizes(features[:1], features[1:]):
        return ""
    block = 16 // dtype_of(form.result).itemsize if device != "cpu" else 1
    if all(isinstance(x, int) and x % block == 0 for x in features):
        return ""
    return "queries and values differ in the number of features"


def missing_features(form: Form) -> tuple[int, int]:
    """Return how many features queries and keys, and values, have less than the others, for the kernel of a CPU."""
    query, value = (x for (x,) in _features(form))
    if not isinstance(query, int) or not isinstance(value, int):
        return 0, 0  # they are equal
    return max(value - query, 0), max(query - value, 0)


def _features(form: Form) -> tuple[tuple[object], tuple[object]]:
    """Return the number of features of the query and of the result, each as a tuple."""
    last = form.query.order[-1] if form.query.order is not None else -1
    assert last is not None, "both operands of the first product have the features"
    result = len(form.order) - 1 if form.order is not None else -1
    at = form.order.index(result) if form.order is not None else -1
    return (shape_of(form.query.node)[last],), (shape_of(form.result)[at],)


def _dropout(form: Form, ctx: Context, device: str) -> str:
    if not form.dropout:
        return ""
    if form.dropout >= 1 or device == "cpu":
        return "the fused kernel of a CPU has no dropout"
    return "dropout must draw eager's numbers" if ctx.config.fallback_random else ""


def _sink(form: Form, ctx: Context, device: str) -> str:
    """Return why the kernels, called as they are, cannot take a column of scores without a value, or ""."""
    if form.sink is None:
        return ""
    if form.dropout:
        return "an attention with a sink has no dropout here"
    if device == "cpu":
        return ""
    if value_of(form.result).requires_grad and _must_repeat(ctx):
        return "the gradient of the fused kernel varies from run to run"
    block, features = 16 // dtype_of(form.result).itemsize, [x for (x,) in _features(form)]
    whole = all(isinstance(x, int) and x % block == 0 and x <= FLASH_FEATURES for x in features)
    return "" if whole else "the kernels read features by 16 bytes"


def _must_repeat(ctx: Context) -> bool:
    return ctx.config.deterministic or torch.are_deterministic_algorithms_enabled()


def _writes_between(form: Form) -> str:
    """Return why operands may change before the last product, which takes the place of all others, or ""."""
    inside = set(form.interior)
    read_before: set[int | None] = set()  # storages that the fused call would read later than the calls so far
    n: Node = form.scores
    while n is not form.result:
        if n in inside:
            read_before.update(torch_api.storage_of(value_of(m)) for m in n.all_input_nodes if is_tensor(m))
        elif _may_write(n, read_before):
            return f"{n} may write to an operand before it is read"
        n = n.next
    return ""


def _may_write(n: Node, storages: Collection[int | None]) -> bool:
    """Return whether a call may write to one of the storages."""
    if n.op == "call_module" or isinstance(n.target, HigherOrderOperator):
        return True
    if n.op not in ("call_function", "call_method"):
        return False
    if attention_mask.writes_in_place(n) and "out" not in n.kwargs and is_tensor(n.args[0] if n.args else None):
        written = torch_api.storage_of(value_of(n.args[0]))
        return written is None or None in storages or written in storages
    return attention_mask.writes_in_place(n) or is_mutable(n.target)


def refused_mask(form: Form, mask: Mask, ctx: Context) -> str:
    """Return why the fused kernel does not take a mask, or ""."""
    device, training = value_of(form.result).device.type, value_of(form.result).requires_grad
    if mask.node is None:
        return ""
    if device == "cpu" and training and value_of(mask.node).requires_grad:
        return "the fused kernel of a CPU has no gradient of a mask"
    if dtype_of(mask.node) != dtype_of(form.result) and _autocast(form, device):
        return "autocast changes the dtype of the mask"
    if form.sink is not None and training and value_of(mask.node).requires_grad:
        return "a mask beside a sink has no gradient here"
    if device != "cpu" and training and _must_repeat(ctx):
        return "the gradient of the fused kernel varies from run to run"
    if device != "cpu" and training and ctx.config.attention != "on":
        return _exceeds_kernels(form, MASKED_FEATURES)
    return ""


def _autocast(form: Form, device: str) -> bool:
    entered = any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in form.result.graph.nodes)
    return entered or torch.is_autocast_enabled(device)


def _few_keys(form: Form) -> str:
    """Return why the fused kernel, whose tiles have 64 keys or more, wastes most of its work, or ""."""
    keys = shape_of(form.scores)[-1]
    return f"tiles of the fused kernel have more than {keys} keys" if isinstance(keys, int) and keys <= FEW_KEYS else ""


def _products_are_faster(form: Form) -> str:
    """Return why products in TF32 and a softmax beat the fused kernel of float32, which multiplies three times, or "".

    Measured on an H100 from 24 to 8,192 keys of 8 to 384 features; the scores are stored, as in eager. The fused
    kernel takes 1.2 to 2 times as long where its tiles are not full, and from 256 keys on. With up to 128 keys and 128
    features it takes 1.2 to 2.9 times as long in inference and 1.2 to 2.5 in training, full tiles or not. In training
    with more than 256 keys it is faster for 64 features, and takes 1.8 to 3 times as long from 128 features on.
    """
    if dtype_of(form.result) != torch.float32 or not torch_api.allows_tf32():
        return ""
    scores, (features,) = shape_of(form.scores), _features(form)[0]
    sizes = [n for n in scores if isinstance(n, int)]
    if len(sizes) < len(scores) or not isinstance(features, int):
        return ""
    trains, faster = value_of(form.result).requires_grad, "products in TF32 are faster than the fused kernel of float32"
    if trains and features >= MANY_FEATURES:
        return faster
    one_tile = features <= MANY_FEATURES and sizes[-1] <= 2 * TILE
    full_tile = sizes[-1] < FEWEST_KEYS or (sizes[-1] < MANY_KEYS and sizes[-1] % TILE == 0)
    if (full_tile and not one_tile) or (trains and sizes[-1] > MANY_KEYS):
        return ""
    return faster if 4 * math.prod(sizes) <= MOST_SCORES or features >= MANY_FEATURES else ""


def takes_tiles_of_tf32(form: Form) -> bool:
    """Return whether the generated kernel computes an attention in TF32, as the products do that it replaces.

    On an H100, for 256 to 9,824 keys of 16 to 64 features, it takes 0.2 to 0.5 of the time of products and a softmax;
    with 128 features it takes twice as long. In training, on an H200, it takes 0.4 to 1.0 of the time, and a 60th of
    the memory. The gradient of a mask would be added up element by element. From 40 keys on, on an H200, it takes 0.3
    to 0.9 of the time, in training 0.4 to 0.9. With 80 keys of 64 features, 1.3: two tiles of 64 keys are mostly empty.
    """
    if value_of(form.result).device.type == "cpu" or dtype_of(form.result) != torch.float32:
        return False
    is_plain = not form.dropout and form.sink is None and not has_learned_mask(form)
    (of_query,), (of_value,) = _features(form)
    *rest, keys = shape_of(form.scores)
    if not is_plain or not torch_api.allows_tf32() or not all(isinstance(n, int) for n in rest):
        return False
    features = [n for n in (of_query, of_value) if isinstance(n, int) and n <= MOST_TILED_FEATURES]
    if not isinstance(keys, int) or keys <= FEW_KEYS or len(features) < 2:
        return False
    if not value_of(form.result).requires_grad or max(features) <= MOST_TILED_FEATURES // 2:
        return True
    return keys <= TILE or -(-keys // TILE) * TILE <= MOST_PADDED * keys


def has_learned_mask(form: Form) -> bool:
    """Return whether a gradient reaches a tensor that is added to the scores."""
    masks = (step.mask for step in form.steps if step.mask is not None and is_tensor(step.mask))
    return any(value_of(mask).requires_grad for mask in masks)


def _exceeds_kernels(form: Form, most: int) -> str:
    """Return why separate kernels of 16 bits are faster, where FlashAttention and cuDNN take `most` features, or "".

    The memory-efficient kernel takes the rest. On an H100, with 320 and 384 features, it was compared with products and
    a softmax. Its forward and gradient take 1.9 to 3.4 times as long, its forward alone 1.0 to 1.2 times. Inference
    keeps it where the scores are large: it stores none.
    """
    (features,), scores = _features(form)[0], shape_of(form.scores)
    if dtype_of(form.result).itemsize != 2 or not isinstance(features, int) or features <= most:
        return ""
    sizes = [n for n in scores if isinstance(n, int)]
    is_large = len(sizes) < len(scores) or 2 * math.prod(sizes) > MOST_SCORES
    if is_large and not value_of(form.result).requires_grad:
        return ""
    return f"the fast kernels take at most {most} features"


def slower(form: Form, ctx: Context) -> str:
    """Return why separate kernels are faster than the fused one, or ""."""
    trains, on_gpu = value_of(form.result).requires_grad, value_of(form.result).device.type != "cpu"
    if ctx.config.attention == "on":
        return ""
    if not on_gpu and any(missing_features(form)):
        return _padding_is_slower(form)
    if trains and not on_gpu:
        return ""
    if on_gpu:
        fused_in_tf32 = takes_tiles_of_tf32(form)
        faster_products = "" if fused_in_tf32 else _products_are_faster(form)
        return _few_keys(form) or faster_products or _exceeds_kernels(form, FLASH_FEATURES)
    return separate_is_faster(shape_of(form.scores), dtype_of(form.scores))  # products in float32 are float32's


def _padding_is_slower(form: Form) -> str:
    """Return why products are faster than the fused kernel of a CPU with padded queries or values, or "".

    Measured on two cores of a server with AMX. From 32 MB of scores on, products and a softmax of eager take 1.6 to
    3.4 times as long in float32, and 1.2 to 2 times in training. With 8 MB they take 0.7 to 1.2 times as long. Training
    in 16 bits takes 0.3 to 1.3 times as long.
    """
    sizes = [size for size in shape_of(form.scores) if isinstance(size, int)]
    dtype, trains = dtype_of(form.scores), value_of(form.result).requires_grad
    stored = math.prod(sizes) * dtype.itemsize if len(sizes) == len(shape_of(form.scores)) else 0
    if stored < STORED_BY_CPUS or (trains and dtype.itemsize == 2):
        return "products are faster than the fused kernel with padded features"
    return separate_is_faster(sizes, dtype)


def separate_is_faster(sizes: Sequence[int | torch.SymInt], dtype: torch.dtype) -> str:
    """Return why separate kernels of a CPU are faster for scores of these sizes, or ""."""
    low, high = _SEPARATE[dtype]
    if not all(isinstance(size, int) for size in sizes):
        return "" if high < math.inf else "products of 16 bits are faster on this device"
    size = math.prod(sizes) * dtype.itemsize
    return f"separate kernels are faster for scores of {size} bytes" if low <= size < high else ""
