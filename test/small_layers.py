"""Let tests of small layers meet oneDNN, which compiled programs leave to large ones."""

from __future__ import annotations

from collections.abc import Callable

from altbackend.fx_passes import onednn_small


def call_onednn(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Call oneDNN for layers of any size. `set_attribute`: `monkeypatch.setattr` of a test."""
    for name in ("SMALL_LINEAR", "SMALL_LINEAR_BY_ROW", "SMALL_CONVOLUTION", "SMALL_CONVOLUTION_3D"):
        set_attribute(onednn_small, name, 0)
