"""Call operators without results, such as checks, directly in place of through effect tokens.

An operator that returns nothing is ordered among the calls with effects anyway. `with_effects` is a Python function
that dispatches the operator once more, and that no C++ program can call.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..compat.effects import without_tokens
from .context import Context


def run(gm: GraphModule, ctx: Context) -> int:
    """Replace ordered calls of operators without results; return their number."""
    return without_tokens(gm, lambda op: not op._schema.returns)
