"""Split reductions and scans, then fuse: on a GPU, what is split depends on the kernels that fusion makes."""

from __future__ import annotations

from typing import NamedTuple

from ..config.options import Config
from ..debug.trace import DecisionKind
from ..ir.loops import Program
from .deps import Deps, analyse
from .device import Device
from .fusion import fuse
from .fusion.group import Decision, Group
from .fusion.predicted_totals import predicted_totals
from .loop_mapping import Kind
from .scan_terms import separate_terms
from .split import split_reductions
from .split_scans import split_scans
from .turned_scans import turn_readers


class Fused(NamedTuple):
    """A program whose reductions and scans are split where that pays, and its nodes in groups, one a kernel."""

    program: Program
    deps: Deps
    groups: list[Group]


def split_and_fuse(p: Program, config: Config, device: Device, decide: Decision) -> Fused:
    """Return `p` split and fused. Reductions that a kernel is predicted to total beside its other work stay whole.

    Where a kernel refuses a predicted total, the program is fused once more, with that total split.
    """
    predicted = predicted_totals(p, device) if config.fuse else frozenset[str]()
    decisions: list[tuple[DecisionKind, str, str, str]] = []
    fused = _fused(p, predicted, config, device, lambda *d: decisions.append(d))
    totals = frozenset(q.node.out for g in fused.groups for q in g.mapped if q.kind is Kind.CROSS_ROW)
    if not predicted <= totals:
        return _fused(p, predicted & totals, config, device, decide)
    for d in decisions:
        decide(*d)
    return fused


def _fused(p: Program, whole: frozenset[str], config: Config, device: Device, decide: Decision) -> Fused:
    """Return `p` split but for the reductions into the buffers `whole`, and fused."""
    program = turn_readers(split_reductions(p, device, whole), device)
    program = separate_terms(split_scans(program, device), device)
    deps = analyse(program)
    return Fused(program, deps, fuse.fuse(program, deps, config, device, decide))
