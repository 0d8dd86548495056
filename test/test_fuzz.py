"""A few random programs in every run; `python -m test.fuzz` for long ones."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from altbackend.lowering.registry import LOWERINGS
from test.fuzz import Case, Step, Way, disagreement, program, refused, shrink, way_of
from test.fuzz_operators import OPERATORS, make_input

NUMBER = st.integers(0, 63)
STEP = st.builds(Step, st.sampled_from(sorted(OPERATORS)), st.tuples(NUMBER, NUMBER, NUMBER, NUMBER))
CASE = st.builds(
    Case,
    st.lists(st.integers(0, 999), min_size=1, max_size=3).map(tuple),
    st.lists(STEP, min_size=2, max_size=7).map(tuple),
    st.integers(0, 1),
    st.sampled_from(("eager", "fast")),
)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


# `python -m test.fuzz` shrinks what it finds; here a failure is reported as it is
@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=SLOW, phases=[Phase.generate])
@given(CASE)
@pytest.mark.timeout(110)
def test_random_programs(case: Case) -> None:
    assert disagreement(case) == "", case


# What the fuzzer has found; each is a program that once differed from eager.
FOUND: dict[str, Case] = {
    "scan split by a reshape": Case(
        (3572,), (Step("reshape", (36, 25, 37, 56)), Step("cumsum", (59, 33, 34, 29)), Step("sub", (15, 12, 22, 53)))
    ),
    "number into a slice": Case((6801,), (Step("set slice", (25, 10, 4, 9)),)),
    "gather then pad": Case((7793, 3529, 5524), (Step("gather", (28, 25, 56, 26)), Step("pad", (10, 23, 46, 7)))),
    "slice added to, then transposed": Case((5004,), (Step("add to slice", (10, 23, 32, 57)),)),
    "amax of bool": Case((7235,), (Step("less", (54, 48, 22, 56)), Step("amax", (37, 44, 22, 34)))),
    "argmax of one": Case(
        (17, 11), (Step("reshape", (3, 0, 1, 0)), Step("argmax", (2, 0, 0, 0)), Step("scale", (1, 2, 0, 0)))
    ),
    "product of a flipped input": Case((7,), (Step("flip", (0, 1, 0, 0)), Step("linear", (1, 0, 0, 0))), 0, "fast"),
}

# The same, compiled for any size.
FOUND_DYNAMIC: dict[str, Case] = {
    # of at most one element along a dimension, by the sizes' bounds: returned as a copy, with the offset of none
    "diagonal of a part": Case((9444,), (Step("chunk", (0, 0, 0, 0)), Step("diagonal", (1, 0, 0, 0)))),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_found_before(name: str) -> None:
    assert disagreement(FOUND[name], {"threads": 2, "parallel_threshold": 0}) == ""


@pytest.mark.parametrize("name", list(FOUND_DYNAMIC))
def test_found_before_for_any_size(name: str) -> None:
    assert disagreement(FOUND_DYNAMIC[name], way=Way(flat=False, dynamic=True)) == ""


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: an operator that is lowered to another one."""
    aten = torch.ops.aten
    importlib.import_module("altbackend.backend")  # registers all: what does later overwrites the change
    monkeypatch.setitem(LOWERINGS, aten.neg.default, LOWERINGS[aten.abs.default])
    case = Case((5,), (Step("neg", (0, 0, 0, 0)),))
    assert "result of step 0" in disagreement(case)


def test_ways_of_a_program() -> None:
    """Training, and any size with a second call of other sizes."""
    steps = (Step("add", (0, 0, 0, 0)), Step("norm", (2, 0, 0, 0)), Step("sum all", (3, 0, 0, 0)))
    assert disagreement(Case((8, 21), steps, grads=True)) == ""
    assert disagreement(Case((8, 21), steps), way=Way(flat=False, dynamic=True)) == ""
    assert disagreement(Case((8, 21), steps), way=Way(triton=True)) == ""


def test_programs_of_a_seed_do_not_depend_on_where_a_run_begins() -> None:
    assert program(3, 17) == program(3, 17) != program(3, 18)
    cases = [program(0, k) for k in range(64)]
    assert {c.grads for c in cases} == {True, False}
    assert {c.numerics for c in cases} == {"eager", "fast"}
    assert sum(refused(c) for c in cases) < 8
    assert sum(way_of(k).dynamic for k in range(64)) == 8


def test_what_roundings_move_is_no_disagreement() -> None:
    """The sum of a normalised row is next to nothing, whatever the order of its additions."""
    case = Case((244,), (Step("norm", (0, 1, 0, 0)), Step("sum kept", (1, 1, 0, 0))))
    assert disagreement(case) == ""


def test_shrinking_leaves_what_is_needed() -> None:
    steps = tuple(Step(op, (k, 0, 0, 0)) for k, op in enumerate(("add", "neg", "exp", "sum", "tanh")))
    small = shrink(Case((1, 2, 3), steps, 1), lambda c: any(s.op == "sum" for s in c.steps) and 2 in c.inputs)
    assert [s.op for s in small.steps] == ["sum"]
    assert small.inputs == (2,)


def test_inputs_follow_from_their_seed() -> None:
    kinds = {(make_input(k).dtype, make_input(k).dim(), make_input(k).is_contiguous()) for k in range(200)}
    assert len(kinds) > 30
    assert make_input(7).equal(make_input(7))
