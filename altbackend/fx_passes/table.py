"""The table of graph passes, in the order in which they run. `python -m altbackend passes` prints it."""

from __future__ import annotations

from ..debug.trace import DecisionKind
from . import (
    addcdiv,
    attention_mask,
    batch_linears,
    binary_folding,
    block_masks,
    channels_last,
    channels_last_joint,
    conv1d,
    conv_bias,
    conv_bn,
    depthwise,
    disjoint_windows,
    disjoint_windows_joint,
    effects,
    embedding_bags,
    enlarged_gradients,
    extremum_gradients,
    few_filters,
    few_keys,
    group_gradients,
    housekeeping,
    instance_norm,
    late_waits,
    loss_chunks,
    onednn,
    onednn_epilogues,
    output_layouts,
    pad_matmul,
    padded_groups,
    patchify,
    permutations,
    pointwise_convolutions,
    product_operands,
    random,
    reinplace,
    shared_input,
    simplify,
    small_images,
    small_products,
    statistics,
    strided_gradients,
    user,
    wide_products,
    write_backs,
)
from .attention import layouts as attention_layouts
from .attention import rewrite as attention
from .attention import strides as attention_strides
from .context import Context, Pass, Phase
from .quantised import convolutions as quantised_convolutions
from .quantised import linears as quantised_linears
from .quantised import products as quantised_products
from .quantised import report as quantised_report
from .quantised import sums as quantised_sums
from .quantised import weight_only
from .traced import rewrite as traced

CPU, GPU, BOTH = ("cpu",), ("gpu",), ("cpu", "gpu")
FAST, EAGER, ANY = ("fast",), ("eager",), ("fast", "eager")


def draws_from_seeds(ctx: Context) -> bool:
    """Return whether random numbers come from generated kernels instead of eager's generator."""
    return not ctx.config.fallback_random


def chunks_losses(ctx: Context) -> bool:
    """Return whether the option `loss_chunks` asks for several chunks."""
    return ctx.config.loss_chunks > 1


def prefers_channels_last(ctx: Context) -> bool:
    """Return whether the option `channels_last` is on."""
    return ctx.config.channels_last


def trains_channels_last(ctx: Context) -> bool:
    """Return whether that option is on and oneDNN computes the convolutions."""
    return prefers_channels_last(ctx) and has_onednn(ctx)


def freezes(ctx: Context) -> bool:
    """Return whether the results of calls on parameters are computed once."""
    return ctx.freezes


def has_onednn(ctx: Context) -> bool:
    """Return whether library calls of the CPU can use oneDNN."""
    return ctx.device == "gpu" or onednn.available()


def freezes_with_onednn(ctx: Context) -> bool:
    """Return whether oneDNN is available and weights can be joined or packed once."""
    return has_onednn(ctx) and freezes(ctx)


# Passes that other stages rely on: the option `disabled_passes` cannot name them.
REQUIRED = frozenset(
    (
        *("fake values", "record result strides", "record result layouts", "restore result layouts"),
        *("random", "dropout", "checkpointed random", "dead code", "constants first", "embedding bags"),
        "strided gradients",
    )
)

P = Phase
_BIASES = (DecisionKind.LAYOUT, "convolution biases", "in generated kernels", "{} convolutions")
_OPERANDS = (DecisionKind.LAYOUT, "transposed operands", "copied as they lie", "{} operands of batched products")
_SMALL_PRODUCTS = (DecisionKind.SIMPLIFY, "small matmuls", "in generated kernels", "{}")
_FEW_KEYS = (DecisionKind.LAYOUT, "attentions of few keys", "by the memory-efficient kernel", "{}")
_GROUPS = (DecisionKind.LAYOUT, "channels of convolutions", "padded", "{} of widths without a fast kernel")
_WINDOWS = (DecisionKind.LAYOUT, "transposed convolutions", "as matmuls", "{} with kernel = stride")
_SMALL_IMAGES = (DecisionKind.LAYOUT, "convolutions of small images", "as matmuls", "{} whose windows cover them")
_STRIDED = (DecisionKind.LAYOUT, "gradients of strided 1x1 convolutions", "over the points taken", "{} split in two")
_FOLDED = (DecisionKind.FREEZING, "batch normalisation", "folded", "{} into convolutions")

# fmt: off
PASSES: tuple[Pass, ...] = (
    # --- the graph as Dynamo captured it
    Pass("user: pre_grad", P.CAPTURED, BOTH, ANY, user.pre_grad, preserves=False),
    Pass("attention", P.CAPTURED, BOTH, FAST, attention.run, preserves=False, draws=True),
    Pass(
        "attention masks", P.CAPTURED, BOTH, ANY, attention_mask.run, preserves=False,
        decision=(DecisionKind.SIMPLIFY, "attention masks", "removed", "{} that mask nothing or are causal"),
    ),
    Pass(
        "attention operands", P.CAPTURED, BOTH, FAST, attention_strides.run, preserves=False, draws=True,
        decision=(DecisionKind.LAYOUT, "attention operands", "as fused kernels take them", "{} attentions"),
    ),
    Pass(
        "instance norms", P.CAPTURED, BOTH, FAST, instance_norm.run, preserves=False,
        decision=(DecisionKind.SIMPLIFY, "instance norms", "as group norms", "{}: the image is read as it lies"),
    ),
    Pass("loss chunks", P.CAPTURED, BOTH, ANY, loss_chunks.run, when=chunks_losses, preserves=False),
    Pass("addcdiv", P.CAPTURED, BOTH, EAGER, addcdiv.run, preserves=False),
    # --- the joint graph, or an inference graph, before all other passes
    Pass("normalise", P.BEFORE_JOINT, BOTH, ANY, simplify.run_normalise),
    Pass("embedding bags", P.BEFORE_JOINT, CPU, ANY, embedding_bags.run),
    Pass(
        "block masks", P.BEFORE_JOINT, BOTH, ANY, block_masks.run,
        decision=(DecisionKind.SIMPLIFY, "block masks", "without unread lists", "{} attentions"),
    ),
    Pass("user: joint, pre", P.BEFORE_JOINT, BOTH, ANY, user.joint_pre, preserves=False),
    # --- the joint graph
    Pass(
        "normalisations", P.JOINT, BOTH, ANY, statistics.run,
        decision=(DecisionKind.PARTITION, "normalisations", "in parts", "{}: their statistics and pointwise operators"),
    ),
    Pass("dead code", P.JOINT, BOTH, ANY, housekeeping.eliminate_dead_code),
    Pass("traced patterns", P.JOINT, BOTH, FAST, traced.run),
    Pass("dropout", P.JOINT, BOTH, ANY, random.run_dropout, when=draws_from_seeds, draws=True),
    Pass(
        "checkpointed random", P.JOINT, BOTH, ANY, random.run_checkpointed, when=draws_from_seeds, draws=True,
    ),
    Pass("record result layouts", P.JOINT, BOTH, ANY, output_layouts.record),
    Pass(
        "gradients of extrema", P.JOINT, BOTH, ANY, extremum_gradients.run,
        decision=(DecisionKind.SIMPLIFY, "gradients of extrema", "compared", "{} scatters at positions of extrema"),
    ),
    Pass(
        "gradients of enlarged images", P.JOINT, BOTH, FAST, enlarged_gradients.run,
        decision=(DecisionKind.SIMPLIFY, "gradients of enlarged images", "summed", "{} scatters of whole windows"),
    ),
    Pass("few keys", P.JOINT, GPU, FAST, few_keys.run_joint, decision=_FEW_KEYS),
    Pass("product operands", P.JOINT, BOTH, FAST, product_operands.run, decision=_OPERANDS),
    Pass("convolution biases", P.JOINT, BOTH, FAST, conv_bias.run_joint, decision=_BIASES),
    Pass("small images", P.JOINT, GPU, FAST, small_images.run, decision=_SMALL_IMAGES),
    Pass(
        "pad matmuls", P.JOINT, GPU, ANY, pad_matmul.run_joint,
        decision=(DecisionKind.LAYOUT, "matmuls", "padded", "{} whose rows the library does not align"),
    ),
    Pass(
        "group gradients", P.JOINT, GPU, FAST, group_gradients.run,
        decision=(DecisionKind.LAYOUT, "gradients of images", "convolved", "{} in narrow groups or of few filters"),
    ),
    Pass("disjoint windows", P.JOINT, GPU, FAST, disjoint_windows_joint.run, decision=_WINDOWS),
    Pass("padded groups", P.JOINT, GPU, FAST, padded_groups.run_joint, when=prefers_channels_last, decision=_GROUPS),
    Pass(
        "channels last", P.JOINT, GPU, ANY, channels_last_joint.run, when=prefers_channels_last,
        decision=(DecisionKind.LAYOUT, "convolutions", "channels-last", "images of static shapes"),
    ),
    Pass(
        "weights of small images", P.JOINT, GPU, FAST, small_images.run_weight_gradients,
        decision=(DecisionKind.LAYOUT, "gradients of weights", "as matmuls", "{} of small images"),
    ),
    Pass(
        "few filters", P.JOINT, GPU, FAST, few_filters.run,
        decision=(DecisionKind.LAYOUT, "gradients of weights", "padded", "{} volumes of few filters"),
    ),
    Pass("strided gradients", P.JOINT, CPU, ANY, strided_gradients.run, decision=_STRIDED),
    Pass(
        "channels last", P.JOINT, CPU, FAST, channels_last_joint.run, when=trains_channels_last,
        decision=(DecisionKind.LAYOUT, "convolutions", "channels-last", "images of static shapes"),
    ),
    Pass(
        "depthwise gradients", P.JOINT, GPU, FAST, depthwise.run_joint,
        decision=(DecisionKind.LAYOUT, "depthwise gradients", "split", "{} convolutions: a kernel per gradient"),
    ),
    Pass("restore result layouts", P.JOINT, BOTH, ANY, output_layouts.restore_recorded),
    Pass("dead code", P.JOINT, GPU, ANY, housekeeping.eliminate_dead_code),
    # --- the joint graph, or an inference graph
    Pass("user: joint, post", P.AFTER_JOINT, BOTH, ANY, user.joint_post, preserves=False),
    # --- every graph after the split
    Pass("user: post_grad, pre", P.POST_GRAD, BOTH, ANY, user.post_grad_pre, preserves=False),
    Pass("fake values", P.POST_GRAD, BOTH, ANY, housekeeping.complete_fake_values),
    Pass("effects", P.POST_GRAD, BOTH, ANY, effects.run),
    Pass("dead code", P.POST_GRAD, BOTH, ANY, housekeeping.eliminate_dead_code),
    Pass("quantised sums", P.POST_GRAD, CPU, ANY, quantised_sums.run),
    Pass("strided gradients", P.POST_GRAD, CPU, ANY, strided_gradients.run, decision=_STRIDED),
    Pass("record result strides", P.POST_GRAD, BOTH, ANY, housekeeping.record_result_strides),
    Pass("traced patterns", P.POST_GRAD, BOTH, FAST, traced.run),
    Pass("random", P.POST_GRAD, BOTH, ANY, random.run, when=draws_from_seeds, draws=True),
    Pass("product operands", P.POST_GRAD, BOTH, FAST, product_operands.run, decision=_OPERANDS),
    Pass("simplify", P.POST_GRAD, BOTH, ANY, simplify.run),
    Pass(
        "permutations", P.POST_GRAD, BOTH, ANY, permutations.run,
        decision=(DecisionKind.SIMPLIFY, "random permutations", "as unchecked positions", "{} reads and updates"),
    ),
    Pass("quantised linears", P.POST_GRAD, CPU, FAST, quantised_linears.run, when=freezes_with_onednn),
    Pass("quantised products", P.POST_GRAD, BOTH, FAST, quantised_products.run),
    Pass("weights in bytes", P.POST_GRAD, BOTH, FAST, weight_only.run),
    Pass("small products", P.POST_GRAD, BOTH, FAST, small_products.run, decision=_SMALL_PRODUCTS),
    Pass("few keys", P.POST_GRAD, GPU, FAST, few_keys.run, decision=_FEW_KEYS),
    Pass(
        "wide products", P.POST_GRAD, BOTH, FAST, wide_products.run,
        decision=(DecisionKind.SIMPLIFY, "casts of products", "done by the library", "{} matmuls write float32"),
    ),
    # --- inference graphs; on a CPU, those with parameters
    Pass("quantised convolutions", P.INFERENCE, CPU, FAST, quantised_convolutions.run, when=has_onednn),
    Pass("batch norm folding", P.INFERENCE, CPU, ANY, conv_bn.run, decision=_FOLDED),
    # without freezing, a GPU applies the scale in the kernel that reads the result of the convolution
    Pass("batch norm folding", P.INFERENCE, GPU, ANY, conv_bn.run, when=freezes, decision=_FOLDED),
    Pass(
        "binary folding", P.INFERENCE, BOTH, FAST, binary_folding.run, when=freezes,
        decision=(DecisionKind.FREEZING, "arithmetic with constants", "folded", "{} operators into products"),
    ),
    Pass(
        "patch convolutions", P.INFERENCE, BOTH, ANY, patchify.run,
        decision=(DecisionKind.LAYOUT, "patch convolutions", "as matmuls", "{} with kernel = stride and no padding"),
    ),
    Pass("small images", P.INFERENCE, GPU, FAST, small_images.run, decision=_SMALL_IMAGES),
    Pass("disjoint windows", P.INFERENCE, GPU, FAST, disjoint_windows.run, decision=_WINDOWS),
    Pass("padded groups", P.INFERENCE, GPU, FAST, padded_groups.run, when=prefers_channels_last, decision=_GROUPS),
    Pass(
        "sequence convolutions", P.INFERENCE, CPU, ANY, conv1d.run, when=has_onednn,
        decision=(DecisionKind.LAYOUT, "convolutions of sequences", "as images of one row", "{}"),
    ),
    Pass(
        "channels last", P.INFERENCE, BOTH, ANY, channels_last.run, when=prefers_channels_last,
        decision=(DecisionKind.LAYOUT, "convolutions", "channels-last", "{} copies of inputs"),
    ),
    Pass(
        "pointwise convolutions", P.INFERENCE, BOTH, FAST, pointwise_convolutions.run,
        decision=(DecisionKind.LAYOUT, "1x1 convolutions", "as matmuls", "{} whose pixels are rows"),
    ),
    Pass("small products", P.INFERENCE, GPU, FAST, small_products.run, decision=_SMALL_PRODUCTS),
    Pass(
        "depthwise weights", P.INFERENCE, GPU, FAST, depthwise.run,
        decision=(DecisionKind.LAYOUT, "depthwise weights", "channel fastest", "{} for generated kernels"),
    ),
    Pass("constants first", P.INFERENCE, BOTH, ANY, housekeeping.move_constants_up, when=has_onednn),
    Pass(
        "linears of one input", P.INFERENCE, CPU, ANY, shared_input.run, when=freezes_with_onednn,
        decision=(DecisionKind.FREEZING, "linears of one input", "concatenated", "{} groups"),
    ),
    Pass(
        "linears of one input", P.INFERENCE, GPU, ANY, shared_input.run, when=freezes,
        decision=(DecisionKind.FREEZING, "linears of one input", "concatenated", "{} groups"),
    ),
    Pass(
        "batches of linears", P.INFERENCE, GPU, FAST, batch_linears.run, when=freezes,
        decision=(DecisionKind.FREEZING, "linears of equal sizes", "as one batch", "{} batches"),
    ),
    Pass("oneDNN", P.INFERENCE, CPU, ANY, onednn.run, when=has_onednn),
    Pass(
        "oneDNN epilogues", P.INFERENCE, CPU, FAST, onednn_epilogues.run, when=has_onednn,
        decision=(DecisionKind.FUSION, "oneDNN calls", "with epilogues", "{} operators after them"),
    ),
    Pass(
        "pad matmuls", P.INFERENCE, GPU, ANY, pad_matmul.run,
        decision=(DecisionKind.LAYOUT, "matmuls", "padded", "{} whose rows the library does not align"),
    ),
    Pass("convolution biases", P.INFERENCE, GPU, ANY, conv_bias.run, decision=_BIASES),
    Pass("dead code", P.INFERENCE, BOTH, ANY, housekeeping.eliminate_dead_code),
    Pass("constants late", P.INFERENCE, BOTH, ANY, housekeeping.move_constants_down, when=has_onednn),
    # --- every graph, after all other passes
    Pass("quantised graphs", P.LAST, BOTH, ANY, quantised_report.run),
    Pass(
        "attention layouts", P.LAST, BOTH, ANY, attention_layouts.run,
        decision=(DecisionKind.LAYOUT, "attentions", "contiguous heads", "{} operands copied"),
    ),
    Pass("user: post_grad, post", P.LAST, BOTH, ANY, user.post_grad_post, preserves=False),
    Pass(
        "concatenated results", P.LAST, GPU, ANY, output_layouts.store_concatenations,
        decision=(DecisionKind.LAYOUT, "concatenations", "stored as the caller reads them", "{}"),
    ),
    # after it, inputs are written where the graph updates them
    Pass(
        "re-inplacing", P.LAST, BOTH, ANY, reinplace.run, preserves=False,
        decision=(DecisionKind.LAYOUT, "updated inputs", "written in place", "{}"),
    ),
    Pass(
        "early write-backs", P.LAST, BOTH, ANY, write_backs.run, preserves=False,
        decision=(DecisionKind.LAYOUT, "updated inputs", "written early", "{}, behind their last readers"),
    ),
    Pass(
        "late waits", P.LAST, BOTH, ANY, late_waits.run, preserves=False,
        decision=(DecisionKind.LAYOUT, "collectives", "waited for late", "{}"),
    ),
)
# fmt: on
