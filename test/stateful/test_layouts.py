"""Parameters that get other strides after a graph was compiled, also on a torch that does not guard them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from altbackend.compat import torch_api
from altbackend.runtime import layouts, page_guard


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6, 5))
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x * self.p), self.conv(image).relu()


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose guards do not know parameters' strides; the graph is given whatever comes."""
    monkeypatch.setattr(torch_api, "guards_layouts", lambda: False)


@pytest.mark.sample(2, every_value=True)
@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("freezing", ["auto", True, False])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_other_strides_are_copied(freezing: Any, guarded: bool, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guarded:
        monkeypatch.setattr(page_guard, "pages", lambda: "refused by a test")
    model = Scaled().eval()
    compiled = torch.compile(model, backend="alt", options={"strict": True, "freezing": freezing})
    x, image = torch.randn(6, 5), torch.randn(2, 3, 8, 8)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(compiled(x, image), model(x, image), rtol=1e-4, atol=1e-5)
            model.p.data = torch.randn(5, 6).t()
            model.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_a_call_gets_inputs_in_its_strides() -> None:
    def call(args: list[torch.Tensor]) -> list[torch.Tensor]:
        assert [a.stride() for a in args] == [(5, 1), (1,)]
        return [args[0] + 1]

    run = layouts.with_traced_strides(call, ((0, (5, 1), False), (1, (1,), True)))
    w, b = torch.randn(5, 6).t(), torch.randn(3)
    torch.testing.assert_close(run([w, b])[0], w + 1)
    with pytest.raises(RuntimeError, match=r"input 1 .* that it writes"):
        run([w, torch.randn(6)[::2]])
