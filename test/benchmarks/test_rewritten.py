"""The tables of rewritten calls have a line for each case, and call what they name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import rewritten


@pytest.mark.parametrize(
    ("table", "cases", "columns"),
    [
        ("images", rewritten.IMAGES, 3),
        ("channels", rewritten.CHANNELS[2:], 3),
        ("filters", rewritten.FILTERS[:1], 4),
        ("products", rewritten.PRODUCTS, 2),
    ],
    ids=["images", "channels", "filters", "products"],
)
def test_each_case_has_a_line(
    table: str, cases: tuple[object, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def timer(call: Callable[[], object]) -> float:
        call()
        calls.append(call)
        return len(calls)

    monkeypatch.setattr(rewritten, "CHANNELS", rewritten.CHANNELS[2:])  # images of 224x224 take a CPU long
    monkeypatch.setattr(rewritten, "FILTERS", rewritten.FILTERS[:1])
    lines = list(rewritten.TABLES[table](rewritten.Setting("cpu", torch.float32, 1, timer)))
    assert len(lines) == len(cases)
    assert all(len(line.split(" | ")) == 1 + columns for line in lines)
    assert len(calls) == len(cases) * columns * (1 if table == "products" else 3)
