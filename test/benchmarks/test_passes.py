"""The table of passes: what it records, and the graph on which the matcher is timed. No test asserts a time."""

from __future__ import annotations

import pytest

from benchmarks import passes
from benchmarks.cases import find


def test_passes_are_recorded() -> None:
    pytest.importorskip("transformers")
    spent, seconds = passes.measured(find("bert"), "tiny")
    assert spent["normalise"].fired > 0
    assert spent["oneDNN"].removed != 0 or spent["simplify"].fired > 0
    assert seconds > 0


def test_rules_fire_on_the_large_graph() -> None:
    rules, gm = passes.many_rules(100), passes.large_graph(500)
    before = len(gm.graph.nodes)
    done = rules.apply(gm)
    assert done
    assert len(gm.graph.nodes) == before - 2 * len(done)
