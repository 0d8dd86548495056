"""Call operators without results, such as checks, directly in place of through effect tokens.

The scheduler keeps the order of all calls without results, so that these need no token. `with_effects` is a Python
function: it dispatches the operator once more, and no C++ program can call it.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..compat.effects import without_tokens
from .context import Context


def run(gm: GraphModule, ctx: Context) -> int:
    """Replace ordered calls of operators without results; return their number."""
    return without_tokens(gm, lambda op: not op._schema.returns)
