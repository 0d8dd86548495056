"""Run the fusion rules: the one place where the tables are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...loop_mapping import Refusal
from ..group import Fusion, Group
from . import common, cpu, gpu
from .rule import Proposal, Rule, Subject


def refuse_nodes(fusion: Fusion, group: Group) -> Refusal | None:
    """Return the first refusal of a group before its nodes are mapped."""
    device = gpu.GPU if fusion.on_gpu else cpu.CPU
    return _first(fusion, (*common.COMMON.nodes, *device.nodes), (group,))


def refuse_mapping(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Return the first refusal of a mapped group, or of one of its reads."""
    device = gpu.GPU if fusion.on_gpu else cpu.CPU
    refusal = _first(fusion, (*common.COMMON.mapping, *device.mapping), (proposal,))
    return refusal or _first(fusion, (*common.COMMON.edges, *device.edges), proposal.edges())


def _first(fusion: Fusion, rules: Sequence[Rule[Subject]], subjects: Iterable[Subject]) -> Refusal | None:
    for subject in subjects:
        for rule in rules:
            if (refusal := rule.check(fusion, subject)) is not None:
                return refusal
    return None
