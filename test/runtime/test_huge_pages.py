"""Large new memory of CPU graphs is advised to be in huge pages, and no other memory is."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from altbackend.compat.pt2 import Runner
from altbackend.runtime import host, huge_pages
from altbackend.runtime.isa import INCLUDE_DIR
from test.aot.models import check, module
from test.torch_versions import no_check_of_custom_operators

LEAST = huge_pages.LEAST_BYTES
PAGE = mmap.PAGESIZE
ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")

Span = tuple[int, int]  # first address, and one past the last


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """Record the advised spans in place of a kernel that refuses all advice."""
    spans: list[Span] = []

    def refuse(address: int, nbytes: int, _: int) -> int:
        spans.append((address, address + nbytes))
        return -1

    monkeypatch.setattr(huge_pages, "_madvise", refuse)
    return spans


def storage(t: Tensor) -> Span:
    memory = t.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes()


def within(spans: list[Span], t: Tensor) -> list[Span]:
    """Return the spans that share more memory with a tensor than a page that neighbours are in."""
    begin, end = storage(t)
    return [s for s in spans if min(s[1], end) - max(s[0], begin) > PAGE]


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="alt", options={"strict": True, "host": "python", **options})


# --- which memory is advised ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never", True), ("[always] madvise never", False), ("always madvise [never]", False)],
)
def test_advice_counts_only_where_the_switch_says_so(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "enabled").write_text(text + "\n")
    assert huge_pages.is_on_advice(str(tmp_path / "enabled")) is expected


def test_a_system_without_the_switch(tmp_path: Path) -> None:
    assert not huge_pages.is_on_advice(str(tmp_path / "enabled"))


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (1, 0), (64, 0), (0, PAGE - 1), (PAGE - 1, PAGE + 5)])
def test_the_pages_of_the_memory_and_no_others(advised: list[Span], before: int, behind: int) -> None:
    base = 1000 * PAGE
    huge_pages.advise(base + before, LEAST + behind)
    ((begin, end),) = advised
    assert begin % PAGE == end % PAGE == 0
    assert begin <= base + before < begin + PAGE
    assert end - PAGE < base + before + LEAST + behind <= end


def test_small_memory_is_not_advised(advised: list[Span]) -> None:
    huge_pages.advise(PAGE, LEAST - 1)
    host.empty_large((LEAST // 4 - 1,), (1,), torch.float32)
    host.empty_large((0, LEAST), (1, 1), torch.float32)
    assert advised == []


@pytest.mark.parametrize("strides", [(1024, 1), (1, 2048), (1040, 1)])
def test_a_large_tensor_is_advised_as_a_whole(advised: list[Span], strides: tuple[int, int]) -> None:
    t = host.empty_large((2048, 1024), strides, torch.float32)
    ((begin, end),) = advised
    assert t.stride() == strides
    assert begin <= storage(t)[0] < begin + PAGE
    assert end - PAGE < storage(t)[1] <= end


def test_a_large_workspace_is_advised(advised: list[Span]) -> None:
    def layout(n: int) -> tuple[list[host.Block], list[host.Window]]:
        return [((0,), n, 0, 0)], []

    spaces = host.Workspaces(layout, 1, {}, reuse=True, keep=True)
    small, large = spaces.take(LEAST // 2), spaces.take(2 * LEAST)
    assert len(advised) == len(within(advised, large.arena)) == 1
    assert within(advised, small.arena) == []


@linux
def test_an_error_of_the_kernel_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    function, codes = ctypes.CDLL(None).madvise, list[int]()
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    monkeypatch.setattr(huge_pages, "_madvise", lambda *args: codes.append(function(*args)))
    huge_pages.advise(1 << 62, LEAST)  # beyond the addresses of a process
    assert codes == [-1]


# --- host programs in Python ------------------------------------------------------------------------------------------


def test_a_large_result_is_advised_and_inputs_are_not(advised: list[Span]) -> None:
    x = torch.randn(1024, 2048)
    y = compiled(lambda x: torch.sin(x) + 1)(x)
    torch.testing.assert_close(y, torch.sin(x) + 1)
    assert len(advised) == len(within(advised, y)) == 1
    assert within(advised, x) == []


def test_a_small_graph_does_not_ask_for_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("the size of this result is static and small")

    monkeypatch.setattr(host, "empty_large", fail)
    x = torch.randn(64, 64)
    torch.testing.assert_close(compiled(lambda x: torch.sin(x) - 1.5)(x), torch.sin(x) - 1.5)
    with pytest.raises(AssertionError, match="static and small"):
        compiled(lambda x: torch.sin(x) - 1.5)(torch.randn(1024, 2048))


def test_calls_decide_about_dynamic_sizes(advised: list[Span]) -> None:
    f = torch.compile(lambda x: torch.cos(x) + 2, backend="alt", dynamic=True, options={"host": "python"})
    for rows, count in ((3, 0), (1024, 1), (5, 1), (2048, 2)):
        x = torch.randn(rows, 2048)
        torch.testing.assert_close(f(x), torch.cos(x) + 2)
        assert len(advised) == count


def test_gradients_and_saved_values_are_advised(advised: list[Span]) -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
    x = torch.randn(1024, 1024)
    saved: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        compiled(model)(x).square().mean().backward()
    given = [x, *(p.data for p in model.parameters())]
    assert not any(within(advised, t) for t in given)
    new = [t for t in saved if t.nbytes >= LEAST and storage(t) not in map(storage, given)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.nbytes >= LEAST]
    assert new
    assert len(gradients) == 2
    assert all(within(advised, t) for t in (*new, *gradients))


# --- host programs in C++ ---------------------------------------------------------------------------------------------

PROBE = """
#include <sys/mman.h>
#include <cstddef>
static unsigned long long first, bytes;
static int refuse(void* at, size_t n, int) { first = (unsigned long long)at; bytes = n; return -1; }
#define madvise refuse
#include <altbackend/aot/huge_pages.h>
extern "C" unsigned long long advised(void* at, long long n, unsigned long long* length) {
  first = bytes = 0;
  alt::aot::advise_huge_pages(at, n);
  *length = bytes;
  return first;
}
extern "C" long long least() { return alt::aot::kLeastAdvised; }
"""


@linux
def test_the_header_advises_what_python_advises(tmp_path: Path, advised: list[Span]) -> None:
    (tmp_path / "probe.cpp").write_text(PROBE)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{INCLUDE_DIR}", "probe.cpp", "-o", "probe.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    probe = ctypes.CDLL(str(tmp_path / "probe.so"))
    probe.advised.restype = ctypes.c_ulonglong
    assert probe.least() == LEAST
    for address, nbytes in ((PAGE, LEAST - 1), (PAGE, LEAST), (PAGE + 64, LEAST + 7), (3 * PAGE - 1, 9 * LEAST + PAGE)):
        advised.clear()
        length = ctypes.c_ulonglong()
        begin = probe.advised(ctypes.c_void_p(address), ctypes.c_longlong(nbytes), ctypes.byref(length))
        huge_pages.advise(address, nbytes)
        on = huge_pages.is_on_advice(huge_pages._SWITCH)
        expected = advised if on else []
        assert ([(begin, begin + length.value)] if begin else []) == expected


ROWS = 10_240  # of 1,024 elements, 40 MiB: malloc maps so much anew, and gives it back to the system


def mappings() -> Iterator[tuple[int, int, list[str]]]:
    """Yield first address, end and flags of each mapping of this process; "hg" is advice to use huge pages."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(head[1], 16), int(head[2], 16)
        elif line.startswith("VmFlags:"):
            yield begin, end, line.split()[1:]


def is_advised(t: Tensor) -> bool:
    """Return whether the kernel lists the middle of a tensor as advised."""
    middle = sum(storage(t)) // 2
    (flags,) = [flags for begin, end, flags in mappings() if begin <= middle < end]
    return "hg" in flags


def advised_bytes() -> int:
    return sum(end - begin for begin, end, flags in mappings() if "hg" in flags)


@linux
@pytest.mark.parametrize("way", ["python", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_kernel_knows_of_a_large_result(way: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "cpp":
        monkeypatch.setattr(huge_pages, "_madvise", None)  # Python advises nothing then
    x = torch.randn(ROWS, 1024)
    f = torch.compile(lambda x: torch.tan(x), backend="alt", dynamic=dynamic, options={"host": way, "strict": True})
    with no_check_of_custom_operators():
        y = f(x)
    torch.testing.assert_close(y, torch.tan(x), rtol=1e-4, atol=1e-4)
    assert is_advised(y) == huge_pages.is_on_advice(huge_pages._SWITCH)


def growth_by_a_workspace() -> int:
    """Return how many bytes more are advised after a call of a C++ host program with a large workspace."""
    huge_pages._madvise = None  # Python advises nothing then
    x, w, v = torch.randn(ROWS, 16), torch.randn(16, 1024), torch.randn(1024, 8)

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.sin(x @ w) @ v

    f, before = compiled(fn, host="cpp"), advised_bytes()
    with no_check_of_custom_operators():
        torch.testing.assert_close(f(x, w, v), fn(x, w, v), rtol=1e-3, atol=1e-3)
    return advised_bytes() - before


@linux
def test_cpp_advises_its_workspace() -> None:
    """In a process of its own: memory of earlier tests that is freed meanwhile would hide the workspace."""
    code = "from test.runtime.test_huge_pages import growth_by_a_workspace; print(growth_by_a_workspace())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    large = ROWS * 1024 * 4
    assert (int(done.stdout) > large // 2) == huge_pages.is_on_advice(huge_pages._SWITCH)


@linux
def test_a_library_advises_its_results() -> None:
    x = torch.randn(ROWS, 1024)
    path = check(module(lambda x: torch.sinh(x / 8) + 1), (x,))
    (y,) = Runner(path).run([x])
    assert is_advised(y) == huge_pages.is_on_advice(huge_pages._SWITCH)
