"""A part of torch's operator database. `ALTBACKEND_TEST_ROTATION` picks another part by its number, or "all" cases.

The part is the same from day to day, so that a test fails for a change of the code alone.
"""

from __future__ import annotations

import os
import random

import pytest

from benchmarks.opinfo import BROKEN, Case, Settings, cases_of, check, database

DTYPES = ("float32", "bfloat16", "int64", "float64", "bool")
A_PART = 16
EVERY = "all"
ROTATION = "ALTBACKEND_TEST_ROTATION"
# what was wrong once and is not in another test
ALWAYS = (
    Case("sgn", "float32", "backward"),
    Case("_native_batch_norm_legit", "float32", "forward"),
    Case("nn.functional.embedding_bag", "bfloat16", "backward"),
)
# custom operators whose fake kernel gives another dtype than they return: an error of ours that names the operator
WRONG_FAKES = (
    Case("custom_op.NumpyCubeCustomOp", "bool", "forward"),
    Case("custom_op.NumpyMulScalarCustomOp", "bool", "forward"),
    Case("custom_op.NumpyMulScalarCustomOp", "int64", "forward"),
)


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


def part(number: str, cases: list[Case]) -> list[Case]:
    """The cases of a part: A_PART neighbours, those of the next part follow; or all cases."""
    if number == EVERY:
        return cases
    begin = int(number) * A_PART % len(cases)
    return [*cases[begin:], *cases[:begin]][:A_PART]


PART = os.environ.get(ROTATION, "0")
CASES = [c for c in every_case() if c not in WRONG_FAKES]


def test_parts_cover_every_case() -> None:
    parts = -(-len(CASES) // A_PART)
    met = {c for k in range(parts) for c in part(str(k), CASES)}
    assert met == set(CASES) == set(part(EVERY, CASES))
    assert set(part("0", CASES)).isdisjoint(part("1", CASES))
    assert set(ALWAYS) <= set(CASES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [*part(PART, CASES), *ALWAYS], ids=lambda c: f"{PART}-{c.op}-{c.dtype}-{c.direction}")
def test_operator(case: Case) -> None:
    found = check(case, Settings("cpu", 3))
    assert found.status not in BROKEN, found.detail
