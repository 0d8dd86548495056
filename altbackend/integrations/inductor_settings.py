"""Settings that a program makes in TorchInductor's own configuration and that decide results."""

from __future__ import annotations

import sys
from typing import Any


def values() -> dict[str, Any]:
    """Return the options that those settings stand for: `fallback_random` where a program has switched it on.

    The module is read only where the program has imported it; settings of speed have no effect here.
    """
    held = sys.modules.get("torch._inductor.config")
    return {"fallback_random": True} if getattr(held, "fallback_random", False) else {}
