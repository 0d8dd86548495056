"""Random programs with state agree with eager; `python -m test.stateful.machine` runs more of them."""

from __future__ import annotations

import pytest

from altbackend.runtime import page_guard
from test.stateful import machine

PROGRAMS = {"auto": 20, "counters": 10, "refused": 10, "frozen": 8, "never": 8, "interpreted": 5}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", PROGRAMS)
def test_random_programs(way: str) -> None:
    calls = 0
    for seed in (1, 2, 3):  # what a seed draws depends on the modules that are loaded; some draw few calls
        calls += machine.run(way, PROGRAMS[way], 8, seed, shrink=False)
        if calls > PROGRAMS[way]:
            break
    assert calls > PROGRAMS[way]


@pytest.mark.timeout(300)
@pytest.mark.skipif(isinstance(page_guard.pages(), str), reason="the kernel guards no memory here")
def test_a_guard_that_sees_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_guard.Guard, "unchanged", lambda *_: True)
    with pytest.raises(BaseException) as found:  # noqa: PT011  # an assertion, or a group of several
        machine.run("auto", 60, 8, 6, shrink=False)
    assert "off by" in "".join(map(str, getattr(found.value, "exceptions", [found.value])))
