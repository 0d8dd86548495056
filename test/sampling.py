"""Run a part of the cases of tests that have many alike.

A module says `pytestmark = pytest.mark.sample(3)`: of every three cases of a test, one runs, and at least one of each
test. The choice depends on the cases' names alone. `--all-cases` runs all of them.

Tests with several parameters say `sample(8, every_value=True)`: each value of each parameter is in a case that runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import pytest

ALL_CASES = "--all-cases"


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that are not in the sample."""
    if config.getoption(ALL_CASES) or any("::" in argument for argument in config.args):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    left = {id(item) for group in groups.values() for item in _outside(group)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def _outside(cases: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """Return all cases of a test but one in so many, those whose names have the least checksums."""
    mark = cases[0].get_closest_marker("sample")
    assert mark is not None
    (every,) = mark.args
    ordered = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    showing = _showing_every_value(ordered) if mark.kwargs.get("every_value") else []
    rest = [case for case in ordered if case not in showing]
    return rest[max(0, -(-len(cases) // every) - len(showing)) :]


def _showing_every_value(ordered: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return few cases in which each value of each parameter occurs: first those that show most that is new."""
    values: dict[pytest.Item, set[tuple[str, int]]] = {case: _values(case) for case in ordered}
    left, showing = set[tuple[str, int]]().union(*values.values()), list[pytest.Item]()
    while left:
        showing.append(max(ordered, key=lambda case: len(values[case] & left)))
        left -= values[showing[-1]]
    return showing


def _values(case: pytest.Item) -> set[tuple[str, int]]:
    """Return the values of a case's parameters, which need not be hashable, by their identity."""
    assert isinstance(case, pytest.Function)
    return {(name, id(value)) for name, value in case.callspec.params.items()}
