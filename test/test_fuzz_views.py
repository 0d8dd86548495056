"""A few random programs of views and writes in every run; `python -m test.fuzz_views` for many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from altbackend.ir.loops import View
from altbackend.lowering import results
from test import fuzz_views, ways
from test.fuzz import Step
from test.fuzz_views import Case, Given, case_of, inputs_of, program_of, programs, wrong_here

SAMPLE = "programs(0,0,10)"


@pytest.mark.timeout(110)
@pytest.mark.filterwarnings("ignore::altbackend.errors.FallbackWarning")
def test_random_programs(tmp_path: Path) -> None:
    noted = ways.everywhere(f"test.fuzz_views:{SAMPLE}", tmp_path)
    sample = ways.programs_of(f"test.fuzz_views:{SAMPLE}")
    assert len(sample) > 5
    wrong = {p.name: text for p in sample if (text := noted.wrong(p)) and not fuzz_views.by_aot_eager(p)}
    assert not wrong
    assert any(verdict == "hit" for found in noted.verdicts.values() for verdict, _ in found)


def place(at: int) -> tuple[int, ...]:
    return (at,) * fuzz_views.CALLS


PLAIN, NEGATIVE = (False,) * fuzz_views.CALLS, (True,) * fuzz_views.CALLS

# Programs that once differed from eager.
FOUND: dict[str, Case] = {
    # training reads a written input through a copy, which had lost the bit
    "negative input that training writes": Case(
        (
            Given((4, 4), torch.float32, "transposed", place(3), NEGATIVE),
            Given((4,), torch.float32, "gaps", place(1), PLAIN, grad=True),
        ),
        (Step("permute", (0, 0, 0, 0)), Step("neg_", (0, 0, 0, 2)), Step("add_ other", (0, 0, 0, 1))),
        (4,),
        grad=True,
    ),
    # the gradient of such a result was traced with the bit, and comes without
    "part of a negative input as a result of training": Case(
        (Given((1, 5), torch.float32, "dense", place(1), NEGATIVE, grad=True),),
        (Step("chunk", (1, 0, 0, 0)),),
        (1, 0),
        grad=True,
    ),
    # turning around one element is nothing, so the view was one of the input
    "negative view of what is no copy": Case(
        (Given((1, 5), torch.float32, "gaps", place(1), PLAIN),),
        (Step("flip", (0, 0, 0, 0)), Step("expand", (0, 0, 0, 1)), Step("negated", (0, 0, 0, 2))),
        (3, 3, 1),
    ),
    "complex views of what is no copy": Case(
        (Given((1, 5), torch.complex64, "gaps", place(1), PLAIN),),
        (
            Step("flip", (0, 0, 0, 0)),
            Step("conj", (0, 0, 0, 1)),
            Step("real", (2, 0, 0, 1)),
            Step("negated", (0, 0, 0, 1)),
        ),
        (2, 3, 4, 1),
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_found_before(name: str) -> None:
    assert wrong_here(FOUND[name]) == ""


def test_a_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: views of computed values that begin one element further."""
    subview = results._subview
    monkeypatch.setattr(results, "_subview", lambda *args: View(*shifted(subview(*args))))
    case = Case((Given((12,), torch.float32, "dense", place(0), PLAIN),), (Step("times", (0, 0, 0, 0)),) * 1, (1,))
    steps = (*case.steps, Step("dtype", (1, 0, 0, 1)), Step("slice", (0, 1, 0, 1)))
    assert wrong_here(Case(case.inputs, steps, (1, 2, 3)))


def shifted(v: View) -> tuple[Any, ...]:
    return v.buffer, v.sizes, v.strides, 1, v.dtype


def test_inputs_follow_from_the_case_and_the_call() -> None:
    cases = [case_of(1, k) for k in range(150)]
    assert case_of(1, 7) == cases[7] != cases[8]
    assert {c.grad for c in cases} == {c.dynamic for c in cases} == {True, False}
    made = [inputs_of(c, n) for c in cases for n in range(fuzz_views.CALLS)]
    held = [x for xs in made for x in xs]
    assert {x.is_neg() for x in held} == {x.is_conj() for x in held} == {True, False}
    assert {x.requires_grad for x in held} == {True, False}
    assert len({x.storage_offset() for x in held}) > 4
    assert any(len({x.untyped_storage().data_ptr() for x in xs}) < len(xs) for xs in made)
    assert [p.name for p in programs(1, 3, 4)] == [p.name for p in programs(1, 3, 4)]
    program = program_of("", cases[0])
    assert ways.disagreement(ways.notes(program, program.fn), ways.notes(program, program.fn)) == ""
