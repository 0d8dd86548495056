"""Settings in TorchInductor's own configuration that affect results."""

from __future__ import annotations

import sys


def values() -> dict[str, object]:
    """Return the options that these settings imply: `fallback_random` if the program has switched it on.

    The module is read only if the program has imported it. Its settings of speed have no effect here.
    """
    config = sys.modules.get("torch._inductor.config")
    return {"fallback_random": True} if getattr(config, "fallback_random", False) else {}
