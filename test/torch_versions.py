"""Marks for tests of behaviour that older versions of torch do not have."""

from __future__ import annotations

import pytest

from altbackend.compat import torch_api


def since(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip on versions of torch before this one. `reason`: the limit of those versions, under every backend."""
    return pytest.mark.skipif(torch_api.version() < (major, minor), reason=f"torch before {major}.{minor}: {reason}")
