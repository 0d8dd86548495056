"""Policies of activation checkpointing: the values that a user's policy saves, recomputes or moves to the CPU.

MUST_SAVE, MUST_RECOMPUTE and MUST_CPU_OFFLOAD bind the cut. PREFER_RECOMPUTE does too, since it is what a checkpoint
without a policy function gives every value. PREFER_SAVE and PREFER_CPU_OFFLOAD leave the choice to the cut.
"""

from __future__ import annotations

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

SAVE = CheckpointPolicy.MUST_SAVE
RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
OFFLOAD: CheckpointPolicy | None = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)  # not in every version of torch
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def tagged(n: Node) -> CheckpointPolicy | None:
    """Return the policy that binds the cut at a node: SAVE, RECOMPUTE or OFFLOAD; None if the cut decides.

    A value between two checkpointed regions is saved, and so is the result of a region that has a backward hook.
    """
    policy = n.meta.get("recompute")
    if policy not in _RECOMPUTED:
        return policy if policy is SAVE or (policy is not None and policy is OFFLOAD) else None
    recomputed_users = [u for u in n.users if u.meta.get("recompute") in _RECOMPUTED]
    region = n.meta.get("ac_graph_id")
    if region is not None and any(u.meta.get("ac_graph_id", region) > region for u in recomputed_users):
        return SAVE
    return SAVE if n.meta.get("has_backward_hook") and not recomputed_users else RECOMPUTE
