"""A part of torch's operator database that moves on every day: after some months each case has been met once.

`ALTBACKEND_TEST_ROTATION` is the number of the day (`test/conftest.py` sets it, UTC), and picks the part; a failure is
met again with the number that the test's name has.
"""

from __future__ import annotations

import os
import random

import pytest

from benchmarks.opinfo import BROKEN, Case, Settings, cases_of, check, database
from test.conftest import ROTATION

DTYPES = ("float32", "bfloat16", "int64", "float64", "bool")
A_DAY = 16
# what was wrong once and is not in another test: met every day
ALWAYS = (Case("sgn", "float32", "backward"), Case("_native_batch_norm_legit", "float32", "forward"))


def every_case() -> list[Case]:
    """All cases in an order that mixes operators and dtypes, the same in every process."""
    directions = ("forward", "backward")
    found = [
        c
        for name in sorted(database())
        for op in database()[name]
        for d in DTYPES
        for c in cases_of(op, d, "cpu", directions)
    ]
    unique = list(dict.fromkeys(found))
    random.Random(0).shuffle(unique)
    return unique


def part(day: int, cases: list[Case]) -> list[Case]:
    """The cases of a day: A_DAY neighbours, those of the next day follow."""
    begin = day * A_DAY % len(cases)
    return [*cases[begin:], *cases[:begin]][:A_DAY]


DAY = int(os.environ[ROTATION])
CASES = every_case()


def test_every_case_has_its_day() -> None:
    days = -(-len(CASES) // A_DAY)
    met = {c for day in range(DAY, DAY + days + 1) for c in part(day, CASES)}
    assert met == set(CASES)
    assert set(part(DAY, CASES)).isdisjoint(part(DAY + 1, CASES))
    assert set(ALWAYS) <= set(CASES)


@pytest.mark.parametrize("case", [*part(DAY, CASES), *ALWAYS], ids=lambda c: f"{DAY}-{c.op}-{c.dtype}-{c.direction}")
def test_operator(case: Case) -> None:
    found = check(case, Settings("cpu", 3))
    assert found.status not in BROKEN, found.detail
