"""Linear + cross-entropy in chunks: eager's loss and gradients, no whole logits, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend import backend as backend_module
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import loss_chunks
from altbackend.fx_passes.context import Context
from test.compare import check_gradients, compiled

T = torch.Tensor
ROWS, WIDTH, WORDS = 24, 8, 100
TARGETS = torch.arange(ROWS) * 37 % WORDS


def plain(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h, w), TARGETS)


def shifted(h: T, w: T) -> T:
    """The usual loss of a language model: the next token, in float32, without padding."""
    logits = F.linear(h.view(2, ROWS // 2, WIDTH), w).float()
    labels = TARGETS.view(2, -1)[:, 1:].masked_fill(TARGETS.view(2, -1)[:, 1:] < 20, -100)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, WORDS), labels.reshape(-1)) * 2


def smoothed(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h.sin(), w, w.sum(1)), TARGETS, ignore_index=37, label_smoothing=0.1)


def summed(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h, w).reshape(-1, WORDS), TARGETS, reduction="sum").exp().log()


def nothing_counted(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h, w), torch.full_like(TARGETS, -100))


def operands() -> tuple[T, T]:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH), torch.randn(WORDS, WIDTH)


class Rewritten:
    """A backend that runs the pass over a captured graph and returns the graph, for autograd to differentiate."""

    def __init__(self, chunks: int) -> None:
        self.cfg, self.verdicts = resolve(options={"loss_chunks": chunks}), list[str]()

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        trace = Trace("captured", self.cfg)
        loss_chunks.run(gm, Context(self.cfg, trace))
        self.verdicts += [d.verdict for d in trace.decisions]
        return gm.forward


def check_rewritten(fn: Callable[..., T], chunks: int, *inputs: T, dynamic: bool = False) -> list[str]:
    """Compare the rewritten graph with eager, gradients included; return the pass's verdicts."""
    backend = Rewritten(chunks)
    run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    results = []
    for call in (fn, run):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        loss = call(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves[:2])])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    return backend.verdicts


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("fn", [plain, shifted, smoothed, summed, nothing_counted], ids=lambda f: f.__name__)
def test_loss_and_gradients_are_eagers(fn: Callable[..., T], chunks: int) -> None:
    assert check_rewritten(fn, chunks, *operands()) == [f"in {chunks} chunks"]


def test_low_precision_through_the_whole_backend() -> None:
    h, w = operands()
    check_gradients(shifted, h.bfloat16(), w.bfloat16(), loss_chunks=4)


@pytest.mark.parametrize("rows", [24, 17, 3])
def test_a_number_of_rows_that_varies(rows: int) -> None:
    def fn(h: T, w: T, t: T) -> T:
        return F.cross_entropy(F.linear(h, w), t)

    h, w = operands()
    assert check_rewritten(fn, 4, h[:rows], w, TARGETS[:rows], dynamic=True) == ["in 4 chunks"]


def test_no_tensor_of_all_logits_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    split = backend_module.split_joint

    def watched(*args: Any) -> Any:
        halves = split(*args)
        for half in halves:
            vals = [n.meta.get("val") for n in half.graph.nodes]
            largest.append(
                max(v.numel() for v in vals if isinstance(v, T) and v.shape[-1:] == (WORDS,) and v.shape[0] != WIDTH)
            )
        return halves

    monkeypatch.setattr(backend_module, "split_joint", watched)
    h, w = operands()
    compiled(plain, loss_chunks=4)(h.requires_grad_(), w).backward()
    assert largest == [ROWS * WORDS // 4] * 2


def read_twice(h: T, w: T) -> T:
    logits = F.linear(h, w)
    return F.cross_entropy(logits, TARGETS) + logits.sum()


def weighted(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h, w), TARGETS, weight=torch.ones(WORDS, dtype=h.dtype))


def scaled(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h, w) * 2, TARGETS)


def chosen_after_regrouping(h: T, w: T) -> T:
    return F.cross_entropy(F.linear(h.view(2, -1, WIDTH), w).view(-1, WORDS)[:-4], TARGETS[:-4])


def written_between(h: T, w: T) -> T:
    g = h.detach().clone()
    logits = F.linear(h, w)
    g.mul_(2)
    return F.cross_entropy(logits, TARGETS) + g.sum()


@pytest.mark.parametrize(
    "fn", [read_twice, weighted, scaled, chosen_after_regrouping, written_between], ids=lambda f: f.__name__
)
def test_losses_that_stay_whole(fn: Callable[..., T]) -> None:
    assert check_rewritten(fn, 4, *operands()) == ["whole"]
