"""Passes over the functional ATen graph, in order."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..compat import torch_api
from ..config.options import Config, Passes
from ..debug.trace import DecisionKind, Trace
from . import (
    addcdiv,
    attention_mask,
    channels_last,
    constants,
    conv_bias,
    conv_bn,
    depthwise,
    onednn,
    output_layouts,
    pad_matmul,
    patchify,
    random,
    shared_input,
    simplify,
    statistics,
    verify,
    wide_products,
)
from .graph import complete, drop_dead


def pre_grad(gm: GraphModule, cfg: Config) -> None:
    """Passes over the graph as Dynamo captured it, in place."""
    for user_pass in cfg.pre_grad_custom_pass:
        user_pass(gm.graph)
    attention_mask.run(gm)
    if cfg.numerics == "eager":
        addcdiv.run(gm)


def run_users(passes: Passes, gm: GraphModule) -> None:
    """A user's passes over an ATen graph, which need not know about fake values."""
    for user_pass in passes:
        user_pass(gm.graph)
    if passes:
        complete(gm)


def on_gpu(gm: GraphModule) -> bool:
    """Whether an input of the graph is a tensor on a GPU."""
    held = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in held)


def joint_statistics(joint: GraphModule, trace: Trace) -> None:
    """What the partitioner should see in parts."""
    found = statistics.expose(joint)
    trace.decision(
        DecisionKind.PARTITION, "normalisations", "in parts", f"{found}: their statistics and what is pointwise"
    )
    drop_dead(joint.graph)


def joint_random(joint: GraphModule, cfg: Config, trace: Trace) -> None:
    """Dropouts in parts, and what checkpointed regions draw from seeds, unless eager's own numbers are wanted."""
    if not cfg.fallback_random:
        random.expose_dropout(joint)
        random.expose_checkpointed(joint, trace)


def cuda_joint(joint: GraphModule, cfg: Config, trace: Trace) -> None:
    """Layouts of a GPU's training graph, chosen before it is split, so that both halves agree on what is saved."""
    before = output_layouts.of(joint)
    padded = pad_matmul.run_joint(joint)
    trace.decision(DecisionKind.LAYOUT, "matmuls", "padded", f"{padded} with a side that is odd to the library")
    if cfg.numerics != "eager":
        biases = conv_bias.run_joint(joint)
        trace.decision(
            DecisionKind.LAYOUT, "convolution biases", "in kernels of ours", f"{biases} convolutions, both ways"
        )
    if cfg.channels_last and channels_last.run_joint(joint):
        trace.decision(
            DecisionKind.LAYOUT, "convolutions", "channels-last", "all are 4-D of 16 bits with static shapes"
        )
    if cfg.numerics != "eager":
        apart = depthwise.split_gradients(joint)
        trace.decision(DecisionKind.LAYOUT, "depthwise gradients", "apart", f"{apart}: of the image by kernels of ours")
    output_layouts.restore(joint, before)
    drop_dead(joint.graph)


def post_grad(gm: GraphModule, cfg: Config, trace: Trace) -> GraphModule:
    """Run the passes on a forward, backward or inference graph; the graph is changed in place."""
    run_users(cfg.post_grad_custom_pre_pass, gm)
    complete(gm)
    drop_dead(gm.graph)
    remember_output_strides(gm)
    if not cfg.fallback_random:
        with verified(gm, cfg, "random"):
            random.run(gm, trace)
    with verified(gm, cfg, "simplify"):
        for rule, count in simplify.run(gm, exact=cfg.numerics == "eager").items():
            trace.decision(DecisionKind.SIMPLIFY, rule, "applied", f"{count} times")
    if cfg.numerics != "eager" and (wide := wide_products.run(gm)):
        trace.decision(
            DecisionKind.SIMPLIFY, "casts of products", "done by the library", f"{wide} matmuls write float32"
        )
    return gm


def finish(gm: GraphModule, cfg: Config) -> GraphModule:
    run_users(cfg.post_grad_custom_post_pass, gm)
    if cfg.verify_ir:
        gm.graph.lint()
    return gm


@contextlib.contextmanager
def verified(gm: GraphModule, cfg: Config, what: str) -> Iterator[None]:
    """With `verify_ir`, passes inside must leave results, their storage and written inputs as they are."""
    before = verify.facts(gm) if cfg.verify_ir else None
    yield
    if before is not None:
        verify.check(before, gm, what)


def remember_output_strides(gm: GraphModule) -> None:
    """Users see the strides that were traced, whatever layout passes choose later."""
    out = gm.graph.output_node()
    flat = out.args[0] if isinstance(out.args[0], (tuple, list)) else (out.args[0],)
    fakes = tuple(n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in flat)
    out.meta["fakes"] = fakes
    out.meta["roots"] = _roots(gm, fakes)


def _roots(gm: GraphModule, fakes: Sequence[Any]) -> tuple[tuple[str, torch.Tensor] | None, ...]:
    """For each result whose storage another result shares: name and value of the first node that has this storage.

    The node has its name as `root` in its meta, and so has what a pass replaces it with.
    """
    storages = [torch_api.storage_of(x) for x in fakes]
    shared = {s for s, count in Counter(storages).items() if s is not None and count > 1}
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for n in gm.graph.nodes if shared else ():
        if (s := torch_api.storage_of(n.meta.get("val"))) is not None and s in shared and s not in first:
            first[s] = n.name, n.meta["val"]
            n.meta["root"] = n.name
    return tuple(None if s is None else first.get(s) for s in storages)


def cpu_inference(gm: GraphModule, static: Sequence[int], cfg: Config, trace: Trace) -> constants.Split | None:
    """Inference on a CPU: fold, choose layouts, call oneDNN, with packed weights if results of parameters are kept;
    those are then split off."""
    keep = cfg.keeps_constants
    constant = constants.constant_nodes(gm, static)
    folded = conv_bn.run(gm, constant, conv_bn.always if keep else conv_bn.smaller_than_image)
    trace.decision(DecisionKind.FREEZING, "batch normalisation", "folded", f"{folded} into convolutions")
    patches = patchify.run(gm)
    trace.decision(
        DecisionKind.LAYOUT, "patch convolutions", "as matmuls", f"{patches} with kernel = stride and no padding"
    )
    constant = constants.constant_nodes(gm, static)
    if cfg.channels_last and channels_last.run(gm):
        trace.decision(DecisionKind.LAYOUT, "convolutions", "channels-last", "all are 4-D float32 with static shapes")
    if onednn.available():
        constants.move_up(gm, constant)
        if keep:
            joined = shared_input.run(gm, constant)
            trace.decision(DecisionKind.FREEZING, "linears of one input", "concatenated", f"{joined} groups")
        found = onednn.run(gm, constant, pack=keep)
        packed = sum(bool(n.meta.get("opaque")) for n in gm.graph.nodes)
        trace.decision(
            DecisionKind.FREEZING, "linears and convolutions", "on oneDNN", f"{found}, {packed} with packed weights"
        )
    drop_dead(gm.graph)
    return constants.split(gm, static) if keep else None


def cuda_inference(gm: GraphModule, static: Sequence[int], cfg: Config, trace: Trace) -> constants.Split | None:
    """Inference on a GPU: fold, choose layouts; then split off what depends only on parameters, if it is kept."""
    keep = cfg.keeps_constants
    constant = constants.constant_nodes(gm, static)
    if keep:  # else the scale is part of the kernel that reads the convolution's result
        folded = conv_bn.run(gm, constant)
        trace.decision(DecisionKind.FREEZING, "batch normalisation", "folded", f"{folded} into convolutions")
    patches = patchify.run(gm)
    trace.decision(
        DecisionKind.LAYOUT, "patch convolutions", "as matmuls", f"{patches} with kernel = stride and no padding"
    )
    constant = constants.constant_nodes(gm, static)
    if cfg.channels_last and channels_last.run(gm, constant):
        trace.decision(DecisionKind.LAYOUT, "convolutions", "channels-last", "all are 4-D floats with static shapes")
    if cfg.numerics != "eager":
        turned = depthwise.turn_weights(gm, constant)
        trace.decision(DecisionKind.LAYOUT, "depthwise weights", "by tap", f"{turned} for kernels of ours")
    constants.move_up(gm, constant)
    padded = pad_matmul.run(gm, constant, each_call=not keep)
    trace.decision(DecisionKind.LAYOUT, "matmuls", "padded", f"{padded} whose width is odd to the library")
    biases = conv_bias.run(gm)
    trace.decision(DecisionKind.LAYOUT, "convolution biases", "in kernels of ours", f"{biases} convolutions")
    drop_dead(gm.graph)
    return constants.split(gm, static) if keep else None
