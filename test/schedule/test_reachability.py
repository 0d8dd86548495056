"""Dependencies between kernels that grow, against a search through everything."""

import random

import pytest

from altbackend.schedule.reachability import Reachability


def _depends(needs: dict[int, set[int]], start: int, goal: int) -> bool:
    return start == goal or any(_depends(needs, n, goal) for n in needs[start])


@pytest.mark.parametrize("seed", range(30))
def test_paths_are_those_of_a_full_search(seed: int) -> None:
    rng = random.Random(seed)
    reachability = Reachability()
    needs: dict[int, set[int]] = {}
    for number in range(18):
        needs[number] = set(rng.sample(range(number), min(number, rng.randint(0, 2))))
        reachability.add(number, needs[number])
    answers = set()
    for _ in range(60):
        a, b = rng.sample(sorted(needs), 2)
        forward, backward = _depends(needs, a, b), _depends(needs, b, a)
        assert (reachability.path([a, b], b) == a) is forward
        assert reachability.path([a], a) is None
        answers.add(forward)
        if not backward and rng.random() < 0.4:  # a kernel gains something that it needs
            needs[a].add(b)
            reachability.add(a, [b])
        elif forward and len(needs) > 6 and not any(_depends(needs, n, b) for n in needs[a] - {b}):
            _join(needs, b, a)
            reachability.join(b, a)
    assert answers == {True, False}


def _join(needs: dict[int, set[int]], early: int, late: int) -> None:
    gained = needs.pop(early)
    for n in needs:
        if early in needs[n]:
            needs[n] = needs[n] - {early} | {late}
    needs[late] = (needs[late] | gained) - {early, late}
