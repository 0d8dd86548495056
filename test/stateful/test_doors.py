"""Nothing that was computed from a parameter or buffer is used after its source was written, through whichever door."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
WAYS: dict[str, Any] = {"guarded": "auto", "refused": "auto", "frozen": True, "counters": True, "never": False}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    """A value of `freezing`, where the kernel guards memory or refuses."""
    name: str = request.param
    if name in ("refused", "counters"):
        request.getfixturevalue("refused")
    return name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A forked child has no threads of OpenMP; another number of threads would compile the graph again."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compile_(model: nn.Module, way: str) -> Any:
    return torch.compile(model, backend="alt", options={**STRICT, "freezing": WAYS[way]})


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


def test_views_from_before_the_first_call(way: str) -> None:
    model = Small().eval()
    array = model.last.weight.detach().numpy()
    view = torch.utils.dlpack.from_dlpack(model.wide.weight.detach())
    compiled = compile_(model, way)
    check(model, compiled, "nothing")
    for name, write in (("NumPy", lambda: np.negative(array, out=array)), ("DLPack", lambda: view[3:].mul_(1.5))):
        write()
        if way == "counters":  # which see no such write
            altbackend.refresh()
        check(model, compiled, name)


def test_the_next_model_at_the_same_address(way: str) -> None:
    memory = [bytearray(4 * 512 * 512) for _ in range(2)]  # outlives each model's storages

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = (torch.frombuffer(m, dtype=torch.float32).view(512, 512).normal_() for m in memory)
            self.a, self.b = (nn.Parameter(w) for w in weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(torch.relu(nn.functional.linear(x, self.a)), self.b)

    @torch.compile(backend="alt", options={**STRICT, "freezing": WAYS[way]})
    def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x)

    for seed in range(6):
        torch.manual_seed(seed)
        m, x = Two().eval(), torch.randn(2, 512)
        with torch.no_grad():
            torch.testing.assert_close(run(m, x), m(x), rtol=1e-4, atol=1e-3)
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


@pytest.mark.usefixtures("one_thread")
def test_a_fork_guards_its_own_memory(way: str) -> None:
    """The child calls after its parent wrote, and must leave the kernel's notes of that write."""
    model = Small().eval()
    compiled = compile_(model, way)
    check(model, compiled, "nothing")
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.read(wait, 1)
            model.last.weight.data.mul_(2.0)
            for _ in range(3):
                check(model, compiled, "a child")
                model.wide.weight.data.mul_(-2.0)
            status = 0
        finally:
            os._exit(status)
    model.last.weight.data[20:30].mul_(30.0)
    os.write(go, b".")
    assert os.waitpid(pid, 0)[1] == 0
    check(model, compiled, "a write before a fork's call")
    os.close(wait)
    os.close(go)


def test_memory_that_processes_share_is_read_in_each_call(way: str) -> None:
    model = Small().eval().share_memory()
    compiled = compile_(model, way)
    check(model, compiled, "nothing")
    model.wide.weight.data.mul_(0.5)
    check(model, compiled, "this process wrote")
    if WAYS[way] is True:
        return  # the user asks for results that no other process's write can change
    pid = os.fork()
    if pid == 0:
        model.last.weight.data.mul_(2.0)
        os._exit(0)
    os.waitpid(pid, 0)
    check(model, compiled, "another process wrote")


@pytest.mark.sample(2)
@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_a_file_is_mapped_to_is_read_in_each_call(shared: bool, way: str, tmp_path: Path) -> None:
    """A write to the file is one to memory, in a private mapping as long as nobody has written the page."""
    path, values = tmp_path / "weights", np.random.default_rng(0).standard_normal((48, 512), dtype=np.float32)
    values.tofile(path)
    model = Small().eval()
    model.last.weight = nn.Parameter(torch.from_file(str(path), shared, 48 * 512).view(48, 512))
    compiled = compile_(model, way)
    check(model, compiled, "nothing")
    if WAYS[way] is not True:
        with path.open("r+b") as file:
            file.write((values * 3).tobytes())
        check(model, compiled, "the file was written")
        assert torch.equal(model.last.weight.detach(), torch.from_numpy(values * 3))
    model.last.weight.data.mul_(-2.0)
    check(model, compiled, "the parameter was written")


HUGE_PAGE, MADV_DONTNEED, MADV_HUGEPAGE = 1 << 21, 4, 14


def zeroed(memory: mmap.mmap, at: int) -> None:
    ctypes.memset(at + 3 * HUGE_PAGE, 0, 4096)


def given_back(memory: mmap.mmap, at: int) -> None:
    memory.madvise(MADV_DONTNEED, HUGE_PAGE, 1 << 16)


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
@pytest.mark.parametrize("write", [zeroed, given_back])
def test_huge_pages_and_pages_that_are_given_back(write: Any, way: str) -> None:
    memory = mmap.mmap(-1, 4 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(MADV_HUGEPAGE)
    model = nn.Linear(2048, 1024, bias=False).eval()
    model.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(1024, 2048).normal_())
    compiled, x = compile_(model, way), torch.randn(3, 2048)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-3)
        write(memory, model.weight.data_ptr())
        if way == "counters":  # which see no such write
            altbackend.refresh()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-3)


@needs_guard
@pytest.mark.parametrize("step", ["register", "protect"])
@pytest.mark.parametrize("freezing", ["auto", True])
def test_a_kernel_that_refuses_some_memory(freezing: Any, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse as beyond the limit on mappings."""
    calls = []

    def refuse(*_: object) -> None:
        calls.append(step)
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(page_guard.Pages, step, refuse)
    model = Small().eval()
    compiled = torch.compile(model, backend="alt", options={**STRICT, "freezing": freezing})
    check(model, compiled, "nothing")
    for name in ("in place", "data of one element", "foreach on data", "SGD, fused"):
        DOORS[name](model)
        check(model, compiled, name)
    assert calls


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


@pytest.mark.usefixtures("refused")
def test_refresh_forgets() -> None:
    model = Small().eval()
    compiled = compile_(model, "counters")
    check(model, compiled, "nothing")
    for name in UNSEEN:
        DOORS[name](model)
        altbackend.refresh()
        check(model, compiled, name)


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
