"""Short rows on a CPU run side by side in the lanes of vectors; results equal eager's whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from test.compare import check, check_gradients, compiled

T = torch.Tensor


def rotated(x: T) -> T:
    """A row's number decides an operand, and another one is the same for all rows."""
    return torch.softmax(x.double() * torch.arange(x.shape[-1]) + torch.arange(x.shape[0])[:, None] * 0.01, -1)


PROGRAMS: dict[str, Callable[[T], object]] = {
    "log-softmax": lambda x: torch.log_softmax(x, -1),
    "entropy": lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "extrema": lambda x: (x.amax(-1), x.argmin(-1), x.std(-1)),
    "scan": lambda x: x.cumsum(-1) * torch.softmax(x, -1),
    "rotated": rotated,
    "every second row": lambda x: torch.softmax(x[::2], -1),
    "in place": lambda x: torch.softmax(x * 2, -1).mul(3).softmax(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("length", [2, 5, 10, 16, 21, 31])
@pytest.mark.parametrize("rows", [64, 67, 200])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sample(16, every_value=True)
def test_values(name: str, rows: int, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(PROGRAMS[name], torch.randn(rows, length).to(dtype))


@pytest.mark.parametrize("rows", [64, 101])
def test_nan_and_infinities(rows: int) -> None:
    x = torch.randn(rows, 10)
    x[0, 3], x[1, 9], x[2, 0], x[-1], x[5, 5] = float("nan"), float("inf"), -float("inf"), -float("inf"), -0.0
    for fn in (PROGRAMS["log-softmax"], PROGRAMS["extrema"]):
        check(fn, x)


@pytest.mark.parametrize("rows", [64, 90])
def test_gradients(rows: int) -> None:
    check_gradients(lambda x: torch.log_softmax(x, -1) * torch.softmax(x, -1), torch.randn(rows, 10))


def test_memory_beyond_the_rows_is_not_written() -> None:
    """Lanes beyond the last row repeat it: they neither read nor write what follows."""
    whole = torch.full((75, 10), float("nan"))
    whole[3:70] = torch.randn(67, 10)

    def fn(x: T) -> T:
        x.copy_(torch.softmax(x, -1))
        return x.sum()

    mine = whole.clone()
    got, want = compiled(fn)(mine[3:70]), fn(whole[3:70])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, whole, equal_nan=True)


def test_lanes_are_used(tmp_path: Path) -> None:
    compiled(PROGRAMS["log-softmax"], debug_dir=str(tmp_path), cache_graphs=False)(torch.randn(200, 10))
    text = "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))
    assert "for (int64_t k = 0; k < " in text
