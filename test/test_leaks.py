"""Resources of a process do not grow with graphs that it has compiled and dropped; a benchmark measures memory."""

from __future__ import annotations

import gc
import linecache
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from altbackend.compile_pool import cpp, cuda
from altbackend.compile_pool.children import Child
from altbackend.config.resolve import resolve
from altbackend.runtime.host import Library
from benchmarks.leaks import Held, children, held, report, rounds

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what /proc lists"),
    pytest.mark.timeout(300),
]
ROUNDS = 10


@pytest.mark.parametrize("again", [False, True], ids=["compiled", "from the cache"])
def test_rounds_leave_no_descriptor_process_thread_or_library(tmp_path: Path, again: bool) -> None:
    first, last = rounds("alt", ROUNDS, ROUNDS, tmp_path, again)
    assert (first.rounds, last.rounds) == (0, ROUNDS)
    assert replace(last, rounds=0, resident=first.resident, objects=first.objects) == first
    assert len(list(tmp_path.rglob("*.so"))) >= (5 if again else ROUNDS)


def test_the_counts_see_what_is_held(tmp_path: Path) -> None:
    before = held(0, tmp_path)
    library = cpp.load('extern "C" int x() { return 1; }', resolve(None, {"cache_dir": str(tmp_path)}))
    reader, writer = os.pipe()
    child = Child(["cat"])
    now = held(1, tmp_path)
    assert now.libraries == before.libraries + 1
    assert now.descriptors >= before.descriptors + 2
    assert now.children == before.children + 1 == children(os.getpid())
    child.end()
    os.close(reader)
    os.close(writer)
    del library
    assert replace(held(0, tmp_path), resident=before.resident, objects=before.objects) == before


def test_a_library_stays_as_long_as_one_of_its_functions(tmp_path: Path) -> None:
    source = 'extern "C" __attribute__((visibility("default"))) void nothing(void**, long*, int, int* e) { *e = 7; }'
    before = held(0, tmp_path).libraries
    library = cpp.load(source, resolve(None, {"cache_dir": str(tmp_path)}))
    function, alive = library.fn("nothing"), weakref.ref(library.dll)
    assert isinstance(library, Library)
    del library
    gc.collect()
    assert held(0, tmp_path).libraries == before + 1
    told = torch.zeros(1, dtype=torch.int32)
    function(None, None, 1, told.data_ptr())
    assert told.item() == 7
    del function
    gc.collect()
    assert alive() is None
    assert held(0, tmp_path).libraries == before


def test_the_text_of_a_graph_goes_with_it() -> None:
    before = set(linecache.cache)  # an earlier test may still hold a graph of its own
    call = torch.compile(lambda x: x * 3 + 1, backend="alt")
    assert call(torch.ones(3)).tolist() == [4, 4, 4]
    texts = {name for name in set(linecache.cache) - before if str(name).startswith("<altbackend graph")}
    assert texts
    del call
    torch._dynamo.reset()
    gc.collect()
    assert not texts & set(linecache.cache)


def test_kernels_leave_no_process_and_no_descriptor(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    cfg = resolve(None, {"cache_dir": str(tmp_path), "compile_threads": 1})
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x):\n    tl.store(x, {})\n"
    jobs = [cuda.Job(text.format(n), (("x", "*fp32"),), (), (0,), 4, 1, 90, "one") for n in range(12)]
    counts = []
    for n, job in enumerate(jobs):
        assert cuda.submit(job, cfg).result(timeout=100).code
        if n in (3, 11):
            counts.append(replace(held(0, tmp_path), resident=0, objects=0))
    assert counts[0] == counts[1]


def test_the_report_is_of_the_second_half() -> None:
    rows = [Held(n, n * 2048 + 10**6 * (n == 0), 3 * n, 5, 0, 2, n) for n in (0, 100, 200)]
    last = report(rows).splitlines()[-1]
    assert last.startswith("a round since round 100: 2.0 KiB, 3.00 objects, 0.00 descriptors")
    assert last.endswith("1.00 libraries")
