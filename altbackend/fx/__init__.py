"""Graph optimisation as a library: for FX graphs and exported programs, without compilation."""

from __future__ import annotations

from ..fx_passes.pattern.match import Match
from ..fx_passes.pattern.register import register_replacement
from ..fx_passes.pattern.rules import Rules
from ..fx_passes.pattern.trace import fwd_only, joint_fwd_bwd
from .freeze import freeze_module
from .inline import inline
from .optimize import optimize
from .peephole import peephole
from .quantised import finalize_quantized

__all__ = [
    "Match",
    "Rules",
    "finalize_quantized",
    "freeze_module",
    "fwd_only",
    "inline",
    "joint_fwd_bwd",
    "optimize",
    "peephole",
    "register_replacement",
]
