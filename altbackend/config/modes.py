"""The modes of torch.compile, and the options that each one sets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from altbackend.errors import UnknownMode

MODES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "default": {},
        "reduce-overhead": {"cudagraphs": True},
        "max-autotune": {"cudagraphs": True, "max_autotune": True},
        "max-autotune-no-cudagraphs": {"max_autotune": True},
    }
)


def mode_values(mode: str | None) -> Mapping[str, object]:
    """Return the options that a mode sets. Raise UnknownMode."""
    if mode is None:
        return {}
    if mode not in MODES:
        raise UnknownMode(str(mode), tuple(MODES))
    return MODES[mode]
