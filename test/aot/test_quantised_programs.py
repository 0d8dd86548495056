"""Quantised programs in packages: linears compute with integers, convolutions with floats, results as eager's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import altbackend
from test.fx_passes.test_quantised import Convolutions, Linears


@pytest.mark.parametrize(
    ("model", "sizes"), [(Linears(), (2, 5, 64)), (Convolutions(), (2, 3, 12, 10))], ids=["linears", "convolutions"]
)
def test_package(model: nn.Module, sizes: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(sizes)
    program = torch.export.export(model.eval(), (x,))
    path = altbackend.aot_package(str(tmp_path / "model.pt2"), program)
    with torch.no_grad():
        torch.testing.assert_close(altbackend.aot_load(path)(x), model(x), rtol=1e-3, atol=1e-3)
