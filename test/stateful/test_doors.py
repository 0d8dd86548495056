"""Nothing that was computed from a parameter or buffer is used after its source was written, through whichever door."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import altbackend
from altbackend.runtime import frozen, page_guard
from test import fresh
from test.stateful.doors import DOORS, UNSEEN, Small, image

STRICT = {"strict": True}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system whose kernel guards no memory."""
    monkeypatch.setattr(page_guard, "pages", lambda: "refused by a test")


needs_guard = pytest.mark.skipif(isinstance(page_guard.pages(), str), reason="the kernel guards no memory here")


def check(model: nn.Module, compiled: Any, what: str) -> None:
    """Equal twice: the second call may use what the first has kept."""
    for call in ("first", "second"):
        x = image()
        with torch.no_grad():
            want, got = model(x), compiled(x)
        assert (got - want).norm() <= 1e-5 * want.norm(), f"{what}: {call} call after it"


def assert_never_stale(freezing: Any, left_out: frozenset[str] = frozenset()) -> None:
    torch.manual_seed(0)
    model = Small().eval()
    for p in model.buffers():
        if p.is_floating_point():
            p.uniform_(0.5, 1.5)
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": freezing})
    check(model, compiled, "nothing")
    for name, write in DOORS.items():
        if name not in left_out:
            write(model)
            check(model, compiled, name)


@needs_guard
def test_guarded_by_the_kernel() -> None:
    assert_never_stale("auto")


@pytest.mark.usefixtures("refused")
def test_without_a_guard_nothing_is_kept() -> None:
    assert_never_stale("auto")


def test_freezing_where_memory_is_guarded() -> None:
    assert_never_stale(True)


@pytest.mark.usefixtures("refused")
def test_freezing_where_only_counters_guard() -> None:
    assert_never_stale(True, UNSEEN)


def test_no_freezing() -> None:
    assert_never_stale(False)


@pytest.mark.usefixtures("refused")
def test_memory_that_python_code_holds_is_not_frozen() -> None:
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": True})
    check(model, compiled, "nothing")
    array = model.last.weight.detach().numpy()
    for _ in range(3):
        array *= 1.5
        check(model, compiled, "a NumPy array that is kept")
    del array


@pytest.mark.parametrize("freezing", ["auto", True, False])
def test_the_next_model_at_the_same_address(freezing: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(512, 512), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x)))

    @torch.compile(backend="alt", options={**STRICT, "freezing": freezing})
    def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x)

    for seed in range(6):
        torch.manual_seed(seed)
        m, x = Two().eval(), torch.randn(2, 512)
        with torch.no_grad():
            torch.testing.assert_close(run(m, x), m(x), rtol=1e-4, atol=1e-5)
        del m


@needs_guard
def test_equal_blocks_keep_results_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    made = frozen.Frozen.__init__

    def counted(self: frozen.Frozen, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        prologue = self.prologue

        def counting(*a: Any) -> Any:
            runs.append(1)
            return prologue(*a)

        self.prologue = counting

    monkeypatch.setattr(frozen.Frozen, "__init__", counted)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval() for _ in range(12)]
    compiled = [torch.compile(b, backend="alt", options={**STRICT, "freezing": "auto"}) for b in blocks]
    x = torch.randn(4, 64)
    with torch.no_grad():
        for _ in range(3):
            want = got = x
            for b, c in zip(blocks, compiled, strict=True):
                want, got = b(want), c(got)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(runs) == 12


@needs_guard
def test_results_go_with_their_model() -> None:
    torch._dynamo.reset()
    gc.collect()
    before = {id(f) for f in frozen._alive}
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": "auto"})
    check(model, compiled, "nothing")
    (made,) = (f for f in frozen._alive if id(f) not in before)
    assert len(made.sets) == 1
    model.last.weight = nn.Parameter(torch.randn(48, 512))
    gc.collect()
    assert not made.sets


@needs_guard
def test_a_fork_guards_its_own_memory() -> None:
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": "auto"})
    check(model, compiled, "nothing")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads are the parent's
            model.last.weight.data.mul_(2.0)
            with torch.no_grad():
                x = image()
                for _ in range(2):
                    want, got = model(x), compiled(x)
                    assert (got - want).norm() <= 1e-5 * want.norm()
                    model.wide.weight.data.mul_(-2.0)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    check(model, compiled, "a fork that wrote its own copy")


def test_memory_that_processes_share_is_read_in_each_call() -> None:
    model = Small().eval().share_memory()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": "auto"})
    check(model, compiled, "nothing")
    pid = os.fork()
    if pid == 0:
        model.last.weight.data.mul_(2.0)
        os._exit(0)
    os.waitpid(pid, 0)
    check(model, compiled, "another process wrote")


@needs_guard
def test_a_model_moved_to_shared_memory_later() -> None:
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": "auto"})
    check(model, compiled, "nothing")
    model.share_memory()
    check(model, compiled, "shared")
    model.wide.weight.data.mul_(0.5)
    check(model, compiled, "shared and written")


@needs_guard
def test_threads_that_write_between_calls() -> None:
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": "auto"})
    for k in range(4):
        writer = threading.Thread(target=lambda k=k: model.wide.weight.data.add_(k))
        writer.start()
        writer.join()
        check(model, compiled, f"thread {k}")


def test_refresh_forgets() -> None:
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": True})
    check(model, compiled, "nothing")
    altbackend.refresh()
    check(model, compiled, "refresh")


RANK = """
import sys, torch, torch.distributed as dist
from torch import nn
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(32, 300), nn.GELU(), nn.Linear(300, 8)).eval()
compiled = torch.compile(model, backend="alt", options={"strict": True})
x = torch.randn(3, 32)
with torch.no_grad():
    compiled(x), compiled(x)
    for write in (lambda p: dist.broadcast(p, 0), lambda p: dist.all_reduce(p), lambda p: p.data.mul_(0.5)):
        for p in model.parameters():
            write(p)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_collectives_write_parameters(tmp_path: Path) -> None:
    ranks = [fresh.Fresh(["-c", RANK, str(k), str(tmp_path / "store")]) for k in (0, 1)]
    errors = [r.communicate(100)[1] for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0], errors
