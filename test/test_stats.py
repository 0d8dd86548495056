"""Totals of compiled graphs."""

from __future__ import annotations

import threading

from altbackend.report import stats
from altbackend.report.stats import GraphStats, Totals


def test_records_add_up_and_subtract() -> None:
    totals = Totals()
    totals.record(kernels=2, library_calls=1, compile_seconds=0.5)
    before = totals.snapshot()
    totals.record(kernels=3, library_calls=0, compile_seconds=0.25)
    assert totals.snapshot() == GraphStats(2, 5, 1, 0.75)
    assert totals.snapshot() - before == GraphStats(1, 3, 0, 0.25)
    totals.reset()
    assert totals.snapshot() == GraphStats()


def test_many_threads_lose_no_record() -> None:
    totals = Totals()

    def work() -> None:
        for _ in range(500):
            totals.record(kernels=1, library_calls=2, compile_seconds=1.0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals.snapshot() == GraphStats(4000, 4000, 8000, 4000.0)


def test_the_process_keeps_one_count() -> None:
    before = stats.snapshot()
    stats.record(kernels=1, library_calls=1, compile_seconds=1.0)
    assert stats.snapshot() - before == GraphStats(1, 1, 1, 1.0)
