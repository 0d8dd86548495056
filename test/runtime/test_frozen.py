"""The weight prologue runs again only after a parameter was written, and is guarded again after a pause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from altbackend.runtime.boxed import Args, boxed
from altbackend.runtime.frozen import LONGEST_PAUSE, MOST_CHANGES, Frozen, Versions


class Doubling:
    """A graph that returns x + 2 * weight, whose prologue counts its runs."""

    def __init__(self, in_place: bool = False) -> None:
        self.runs = 0
        self.call = Frozen(boxed(self._main), self._prologue, (0,), (1,), Versions, in_place=in_place)

    def _main(self, args: Args) -> Sequence[object]:
        x, twice = args
        assert isinstance(x, torch.Tensor)
        return [x + twice]

    def _prologue(self, weight: torch.Tensor) -> Sequence[object]:
        self.runs += 1
        return (weight * 2,)

    def is_right(self, weight: torch.Tensor) -> bool:
        x = torch.ones(4)
        (result,) = self.call([x, weight])
        return torch.equal(result, x + weight * 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_prologue_runs_once_for_parameters_that_nobody_writes(in_place: bool) -> None:
    graph, weight = Doubling(in_place), torch.randn(4)
    for _ in range(10):
        assert graph.is_right(weight)
    assert graph.runs == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_each_write_is_seen(in_place: bool) -> None:
    graph, weight = Doubling(in_place), torch.randn(4)
    for _ in range(100):
        assert graph.is_right(weight)
        weight.add_(1)


def test_results_are_cached_again_after_many_writes_in_a_row() -> None:
    graph, weight = Doubling(), torch.randn(4)
    for _ in range(MOST_CHANGES + 20):
        weight.add_(1)
        assert graph.is_right(weight)
    for _ in range(LONGEST_PAUSE + 2):  # the pause ends within these calls
        assert graph.is_right(weight)
    before = graph.runs
    for _ in range(2 * LONGEST_PAUSE):
        assert graph.is_right(weight)
    assert graph.runs == before


def test_parameters_that_change_between_all_calls_are_rarely_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, weight, guards = Doubling(), torch.randn(4), 0

    def watch(sources: Sequence[torch.Tensor]) -> Versions:
        nonlocal guards
        guards += 1
        return Versions(sources)

    monkeypatch.setattr(graph.call, "watch", watch)
    for _ in range(10 * LONGEST_PAUSE):
        weight.add_(1)
        assert graph.is_right(weight)
    assert 1 < guards < 20


def test_a_refresh_that_frees_a_parameter_drops_its_results() -> None:
    """A guard holds the only reference to its parameter: with the guard, the results of that parameter go."""
    held: list[torch.Tensor] = []

    class Holding(Versions):
        def __init__(self, sources: Sequence[torch.Tensor]) -> None:
            super().__init__(sources)
            self.held = [held.pop()]

    graph = Doubling()
    graph.call.watch = Holding
    for _ in range(3):
        weight = torch.randn(4)
        held.append(weight)
        assert graph.is_right(weight)
        del weight
    assert len(graph.call.sets) == 3
    graph.call.refresh()
    assert not graph.call.sets


def test_a_guard_that_another_thread_renews_does_not_vouch_for_old_results() -> None:
    """The other thread has renewed the guard, and has no new results yet, when this one asks the guard."""
    graph, weight, renewing = Doubling(), torch.randn(4), False

    class Shared(Versions):
        def unchanged(self, sources: Sequence[torch.Tensor]) -> bool:
            nonlocal renewing
            if renewing:
                renewing = False
                (cached,) = graph.call.sets.values()
                graph.call._new_guard(cached, sources)
            return super().unchanged(sources)

    graph.call.watch = Shared
    for _ in range(3):
        assert graph.is_right(weight)
    weight.add_(1)
    renewing = True
    assert graph.is_right(weight)
