"""`python -m altbackend aot compare`: names the first operator, or the weight, at which a package differs."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import altbackend
from altbackend.aot import compare
from altbackend.cli.main import main
from altbackend.ir import ops

from .models import Dim, Mlp, batched


def test_a_wrong_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, other = tmp_path / "mlp.pt2", tmp_path / "other.pt2"
    altbackend.aot_package(package, batched())
    changed = Mlp()
    with torch.no_grad():
        changed.second.weight[0] += 1
    rows = ({0: Dim("rows", max=64)},)
    altbackend.aot_package(other, torch.export.export(changed, (torch.randn(4, 16),), dynamic_shapes=rows))
    assert main(["aot", "compare", str(package)]) == 0
    assert "output 0: equal within rounding" in capsys.readouterr().out
    with (
        zipfile.ZipFile(other) as theirs,
        zipfile.ZipFile(package) as ours,
        zipfile.ZipFile(tmp_path / "mixed.pt2", "w") as mixed,
    ):
        program = next(n for n in theirs.namelist() if n.endswith("programs/model.pt2"))
        for name in ours.namelist():  # the library of one program beside the other program
            source, read = (theirs, program) if name.endswith("programs/model.pt2") else (ours, name)
            mixed.writestr(zipfile.ZipInfo(name), source.read(read))
    assert main(["aot", "compare", str(tmp_path / "mixed.pt2")]) == 1
    out = capsys.readouterr().out
    assert "first difference: weight second.weight, which linear_1 (aten.linear.default; " in out
    assert "F.linear(input, self.weight, self.bias)" in out


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x).exp()
        y = y.softmax(-1)
        return torch.atan(y) + y.sum()


def test_a_wrong_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(ops.OPS["atan"], cpp="({0} * 1.5f)")
    monkeypatch.setitem(ops.OPS, "atan", wrong)
    package = tmp_path / "chain.pt2"
    altbackend.aot_package(package, torch.export.export(Chain(), (torch.randn(4, 8),)))
    assert main(["aot", "compare", str(package)]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: relative difference" in out
    assert "first difference: atan (aten.atan.default; " in out


def test_a_kernel_that_is_wrong_together_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the results of single operators do not show is found by halving. Nothing is compiled here."""
    program = torch.export.export(Chain(), (torch.randn(4, 8),))
    asked = list[int]()

    def faulty(module: torch.fx.GraphModule, nodes: list[torch.fx.Node], inputs: list[torch.Tensor]) -> object:
        asked.append(len(nodes))
        want = compare._probe(module, nodes)(*inputs)
        order = [n.name for n in module.graph.nodes]
        late = len(nodes) == 1 and order.index(nodes[0].name) >= order.index("softmax")
        return [t * 2 for t in want] if late else want, want

    monkeypatch.setattr(compare, "_results", faulty)
    found = compare._of_operators(program, [torch.randn(4, 8)])
    assert found.startswith("softmax (aten.softmax.int; ")
    assert asked[0] == 6
    assert len(asked) <= 4
