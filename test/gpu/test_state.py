"""Random programs with state on a GPU: calls, training steps and writes of parameters in any order agree with eager."""

from __future__ import annotations

import pytest
import torch

from test.stateful import machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["auto", "counters", "graphs"])
def test_random_programs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert machine.run(way, 30, 8, 1, shrink=False, device="cuda") > 5
