"""FlexAttention on a CPU: tiles of scores give eager's values, in memory that does not grow with their number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import block_masks
from altbackend.fx_passes.context import Context
from test.compare import check, compiled
from test.graphs import trace

pytestmark = pytest.mark.sample(3)

T = torch.Tensor


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch has no gradient of it on a CPU; no advice to compile."""
    monkeypatch.setattr(flex, "_warn_once", lambda *a, **k: None)
    with torch.no_grad():
        yield


def r(*sizes: int) -> T:
    return torch.randn(sizes)


def causal(b: T, h: T, q: T, k: T) -> T:
    return q >= k


def decisions(fn: Any, *inputs: T, tmp_path: Path) -> str:
    compiled(fn, debug_dir=str(tmp_path))(*inputs)
    return "\n".join(p.read_text() for p in tmp_path.rglob("decisions.txt"))


def test_functions_of_positions() -> None:
    mask = create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)

    def fn(q: T, k: T, v: T) -> tuple[T, T]:
        biased = flex_attention(q * 2, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1)
        return biased.sin(), flex_attention(q, k, v, block_mask=mask)

    check(fn, *(r(2, 3, 32, 16) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_that_fit_no_tile(dtype: torch.dtype) -> None:
    """Grouped heads, one batch of keys for all, values of another size, and a head that sees nothing."""

    def window(b: T, h: T, q: T, k: T) -> T:
        return (q >= k) & (q - k < 40) & (h != 1)

    mask = create_block_mask(window, 2, 4, 130, 150, device="cpu", BLOCK_SIZE=(48, 24))

    def fn(q: T, k: T, v: T) -> Any:
        out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    check(fn, *(x.to(dtype) for x in (r(2, 4, 130, 24), r(1, 2, 150, 24), r(1, 2, 150, 40))))


def test_captured_tensors() -> None:
    """Functions read tensors at positions, also from the end; operands are read where they lie."""
    documents = torch.randint(0, 3, (70,)).sort().values
    bias, slopes, places = r(2, 3, 70, 70), r(3), torch.randint(-3, 3, (70,))
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), None, None, 70, 70, device="cpu", BLOCK_SIZE=32
    )

    def score(s: T, b: T, h: T, i: T, j: T) -> T:
        return 20 * torch.tanh((s + bias[b, h, i, j]) / 20) + slopes[places[j]]

    def fn(q: T, k: T, v: T) -> T:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=0.3)

    check(fn, *(r(2, 70, 3, 24) for _ in range(3)))


def test_constant_positions() -> None:
    """Positions that a function writes as numbers are constants of its graph."""
    bias = r(1, 2, 40, 40)

    def fn(q: T, k: T, v: T) -> T:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[0, 1, i, j])

    check(fn, *(r(1, 2, 40, 16) for _ in range(3)))


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, i, j: s * 0 + h,
        lambda s, b, h, i, j: s * torch.exp(-(i - j).abs() * 0.1) + torch.rsqrt(1.0 + j) + torch.sigmoid(s),
        lambda s, b, h, i, j: s + torch.where(j % 3 == 0, -1.0, 1.0) * (i // 7),
    ],
    ids=["of the head", "of distances", "of integers"],
)
def test_scores(score: Any) -> None:
    check(lambda q, k, v: flex_attention(q, k, v, score_mod=score), *(r(1, 2, 40, 16) for _ in range(3)))


@pytest.mark.parametrize(
    "mask",
    [lambda b, h, q, k: h < 0, lambda b, h, q, k: h < 1, lambda b, h, q, k: k < 33],
    ids=["nothing", "a head", "columns"],
)
def test_masks(mask: Any) -> None:
    blocks = create_block_mask(mask, None, 2, 40, 70, device="cpu", BLOCK_SIZE=32)
    check(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks), *(r(1, 2, n, 16) for n in (40, 70, 70)))


def test_sizes_that_vary() -> None:
    def fn(q: T, k: T, v: T) -> T:
        n = q.shape[2]
        mask = create_block_mask(causal, None, None, n, n, device="cpu", BLOCK_SIZE=32)
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j + n), block_mask=mask)

    f = compiled(fn, dynamic=True)
    for n in (70, 33, 128):
        inputs = [r(1, 2, n, 16) for _ in range(3)]
        torch.testing.assert_close(f(*inputs), fn(*inputs))


def test_position_out_of_range() -> None:
    table = r(60)

    def fn(q: T, k: T, v: T) -> T:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i])

    with pytest.raises(IndexError):
        compiled(fn)(*(r(1, 2, 70, 16) for _ in range(3)))


def test_garbage_in_lists() -> None:
    """Counts and blocks that no mask has lead to no access outside the tensors."""
    mask = create_block_mask(causal, None, None, 70, 70, device="cpu", BLOCK_SIZE=16)
    mask.kv_num_blocks.fill_(1 << 30)
    mask.kv_indices.copy_(torch.tensor([1 << 30, -(1 << 30), 7, -7, 0]).expand_as(mask.kv_indices))
    f = compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))
    assert f(*(r(1, 2, 70, 16) for _ in range(3))).isfinite().all()


def test_special_values() -> None:
    """Rows whose scores are infinite or not a number are so in eager's places."""

    def fn(q: T, k: T, v: T) -> T:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i == 3, s / 0, s))

    q, k, v = (r(1, 2, 40, 16) for _ in range(3))
    q[0, 1, 5, 2] = float("nan")
    check(fn, q, k, v)


def test_decisions(tmp_path: Path) -> None:
    """A call without a block mask builds none; what the kernel does not take stays with torch's, with the reason."""
    inputs = [r(1, 2, 40, 16) for _ in range(3)]
    taken = decisions(flex_attention, *inputs, tmp_path=tmp_path / "taken")
    assert "flex_attention: kernel" in taken
    assert "block masks: without unread lists" in taken
    refused = decisions(flex_attention, *(x.double() for x in inputs), tmp_path=tmp_path / "refused")
    assert "operands of torch.float64" in refused


def test_lists_that_nothing_reads() -> None:
    """The forward reads the blocks by rows; without a block mask it reads none."""
    mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    (gm,) = trace(
        lambda q, k, v: flex_attention(q, k, v) + flex_attention(q, k, v, block_mask=mask),
        *(r(1, 2, 64, 16) for _ in range(3)),
    )
    cfg = resolve()
    assert block_masks.run(gm, Context(cfg, Trace("masks", cfg))) == 2
    assert block_masks.run(gm, Context(cfg, Trace("masks", cfg))) == 0
    gm.graph.eliminate_dead_code()
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    lists = [[x for x in n.args[4][2:-3] if x is not None] for n in calls]
    assert [len(x) for x in lists] == [0, 4]
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.stable)


def peak() -> int:
    """The most bytes of memory that this process has held since the last reset."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset")
def test_memory() -> None:
    """4096 rows by 4096 columns of 4 heads are 268 MB of scores, which never all exist."""
    f = compiled(flex_attention, dynamic=True)
    f(*(r(1, 4, 64, 16) for _ in range(3)))
    inputs = [r(1, 4, 4096, 16) for _ in range(3)]
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    f(*inputs)
    assert peak() - before < 100e6
