"""Processes of one host that share a cold cache: one compiles a graph for all, and none waits for a dead one."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import pipeline
from altbackend.compiled.load import Job
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace

PROCESSES = 8
LIMIT = 120.0  # seconds, on a machine with other work; less than the bound of the lock would be no proof


def compile_and_run(folder: Path, before: Callable[[], object]) -> tuple[float, int]:
    """Compile a small graph; return its result and how many graphs this process has translated."""
    count, translate = 0, pipeline.translate

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        before()
        return translate(*args, **kwargs)

    torch.set_num_threads(1)
    cfg = resolve(options={"cache_dir": str(folder), "cache_graphs": True, "strict": True})
    graph = make_fx(lambda x: [(x.sin() + 1).sum()], tracing_mode="fake")(torch.ones(64))
    with patch.object(pipeline, "translate", counted):
        call = pipeline.compile_graph(graph, cfg, Trace("graph", cfg), Job("inference"))
    (result,) = call([torch.ones(64)])
    return result.item(), count


def member(folder: Path, start: Barrier, results: Any) -> None:
    start.wait(LIMIT)
    results.put(compile_and_run(folder, lambda: time.sleep(0.3)))


def dying(folder: Path, holds: Event, end: Event) -> None:
    def die() -> None:
        holds.set()
        end.wait(LIMIT)
        os._exit(1)

    compile_and_run(folder, die)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["altbackend.backend", "pytest", "torch.fx.experimental.proxy_tensor"])
    return context


def test_a_cold_start_compiles_each_graph_once(tmp_path: Path, processes: ForkServerContext) -> None:
    start, results = processes.Barrier(PROCESSES), processes.Queue()
    members = [processes.Process(target=member, args=(tmp_path, start, results)) for _ in range(PROCESSES)]
    for p in members:
        p.start()
    found = [results.get(timeout=LIMIT) for _ in members]
    for p in members:
        p.join(LIMIT)
    assert sum(count for _, count in found) == 1
    assert len({value for value, _ in found}) == 1


def test_a_process_that_dies_while_it_compiles_does_not_hold_others_up(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    holds, end, results = processes.Event(), processes.Event(), processes.Queue()
    first = processes.Process(target=dying, args=(tmp_path, holds, end))
    first.start()
    assert holds.wait(LIMIT)
    alone = processes.Barrier(1)
    second = processes.Process(target=member, args=(tmp_path, alone, results))
    second.start()
    with pytest.raises(queue.Empty):  # it waits for the lock
        results.get(timeout=2)
    begin = time.monotonic()
    end.set()
    value, count = results.get(timeout=LIMIT)
    first.join(LIMIT)
    assert (count, first.exitcode) == (1, 1)
    assert value == pytest.approx(64 * 1.8414709848)
    assert time.monotonic() - begin < LIMIT
    second.join(LIMIT)
