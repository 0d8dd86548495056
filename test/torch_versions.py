"""Marks for tests of behaviour that older versions of torch do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch._functorch.config as functorch

from altbackend.compat import torch_api


def since(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip on versions of torch before this one. `reason`: the limit of those versions, under every backend."""
    return pytest.mark.skipif(torch_api.version() < (major, minor), reason=f"torch before {major}.{minor}: {reason}")


@contextlib.contextmanager
def no_check_of_custom_operators() -> Iterator[None]:
    """Leave out the check of custom operators, which runs in the first call of a graph and is a dispatch mode."""
    name = "check_custom_op_aliasing"
    if not hasattr(functorch, name):
        yield
        return
    with functorch.patch({name: False}):  # pytest's monkeypatch would delete the setting afterwards
        yield
