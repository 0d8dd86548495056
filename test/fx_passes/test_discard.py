"""Option `freezing_discard_parameters`: memory is freed, results stay, and other uses of parameters are errors."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from altbackend.errors import DiscardedParameter
from test.small_layers import call_onednn

DISCARD: dict[str, Any] = {"strict": True, "freezing_discard_parameters": True}


@pytest.fixture(autouse=True)
def _small_linears_too(monkeypatch: pytest.MonkeyPatch) -> None:
    call_onednn(monkeypatch.setattr)


class Net(nn.Module):
    """A model with packed weights, a parameter that kernels read as it is, and a buffer that the graph writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 512)
        self.scale = nn.Parameter(torch.randn(512))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.fc(self.conv(x).mean((2, 3)))) * self.scale


def frozen(model: nn.Module, x: torch.Tensor, **options: Any) -> Callable[..., torch.Tensor]:
    compiled = torch.compile(model, backend="alt", options={**DISCARD, **options})
    with torch.no_grad():
        compiled(x)
    return compiled


def test_memory_is_freed_and_results_stay(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    reference = copy.deepcopy(model)
    storages = {name: weakref.ref(p.untyped_storage()) for name, p in model.named_parameters()}
    compiled = frozen(model, x, debug_dir=str(tmp_path))
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            x = torch.randn(2, 3, 8, 8)
            torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-5)
    assert model.calls == 4  # a buffer that the graph writes stays
    freed = {name for name, storage in storages.items() if storage() is None}
    assert {"fc.weight", "conv.0.weight"} <= freed
    assert "scale" not in freed  # a kernel reads it
    decisions = "".join(p.read_text() for p in tmp_path.rglob("decisions.txt"))
    assert "parameters: discarded" in decisions


USES: list[Callable[[nn.Module, torch.Tensor], object]] = [
    lambda m, x: m(x),
    lambda m, x: m.fc.weight + 1,  # type: ignore[operator]
    lambda m, x: m.fc.weight.data.sum(),  # type: ignore[operator]
    lambda m, x: m.state_dict(),
    lambda m, x: m.half(),
    lambda m, x: copy.deepcopy(m),
    lambda m, x: m.scale.detach().numpy(),  # type: ignore[operator]
]


def test_other_uses_are_errors_that_say_so() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    compiled = frozen(model, x)
    for use in USES:
        with torch.no_grad(), pytest.raises(DiscardedParameter, match="freezing_discard_parameters"):
            use(model, x)
    with torch.no_grad(), pytest.raises(Exception, match="freezing_discard_parameters"):
        compiled(torch.randn(5, 3, 8, 8))  # other sizes need another compilation, which reads parameters
    assert isinstance(model.fc.weight, nn.Parameter)
    assert "fc.weight" in repr(model.fc.weight)


def test_new_weights_are_compiled_again() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    other = Net().eval()
    compiled = frozen(model, x)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(DiscardedParameter):
        model.state_dict()


def test_tied_weights_and_views_that_a_graph_returns() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.table = nn.Parameter(torch.randn(4, 64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.second(torch.relu(self.first(x))), self.table[1:]

    model, x = Tied().eval(), torch.randn(4, 64)
    with torch.no_grad():
        want = model(x)[0]
        compiled = torch.compile(model, backend="alt", options=DISCARD)
        for _ in range(2):
            got, view = compiled(x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert view.data_ptr() == model.table[1:].data_ptr()  # a returned parameter stays
    with pytest.raises(DiscardedParameter):
        model.first.weight.sum()


def test_training_keeps_parameters() -> None:
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    compiled = torch.compile(model, backend="alt", options=DISCARD)
    compiled(x).sum().backward()
    torch.testing.assert_close(model(x), compiled(x))


def test_needs_freezing() -> None:
    with pytest.raises(BackendCompilerFailed, match="only frozen graphs"), torch.no_grad():
        torch.compile(nn.Linear(4, 4), backend="alt", options={**DISCARD, "freezing": False})(torch.randn(2, 4))
