"""Fixture of the tests of state."""

from __future__ import annotations

import pytest

from test.small_layers import call_onednn


@pytest.fixture(autouse=True)
def _small_linears_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of small linears are packed too, since these tests write them."""
    call_onednn(monkeypatch.setattr)
