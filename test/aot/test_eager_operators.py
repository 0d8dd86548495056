"""A sample of the operators of `benchmarks.eager`, and overrides of a registration, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks import eager as table

from .test_eager import _run

SAMPLE = ("full_like (dtype, layout, device)", "mul.out")
_SAMPLE = """
import sys
from benchmarks import eager as table
for case in table.CASES:
    if case.name in {names!r}:
        outcomes = [f(case) for f in (table.stored, table.registered)]
        assert not any(outcomes), (case.name, outcomes)
"""
_OVERRIDE = """
import torch, warnings
def check():  # assert_close would add a number, which is a build
    assert float((case.op(*args, **kwargs) - want).abs().max()) < 1e-6 * float(want.abs().max())
case = next(c for c in table.CASES if c.name == "add.Tensor (alpha, broadcast)")
args, kwargs = table._made(case)
want = args[0] + 2.5 * args[1]
table.eager.register([case.op])  # again, on top of itself
for _ in range(3):
    check()
warnings.simplefilter("ignore")
with torch.library._scoped_library("aten", "IMPL") as own:
    own.impl("add.Tensor", lambda x, y, alpha: x - y, "CPU", allow_override=True)
    assert torch.equal(case.op(*args, **kwargs), args[0] - args[1])
check()
print("all equal")
"""


def test_the_table_has_operators_of_thirty_kinds() -> None:
    names = [case.name for case in table.CASES]
    assert len(names) == len(set(names)) >= 40
    assert len({str(case.op).split(".")[1] for case in table.CASES}) >= 30
    assert set(SAMPLE) <= set(names)


def test_a_sample_of_operators_and_overrides_of_a_registration(folder: Path) -> None:
    assert _run(_SAMPLE.format(names=SAMPLE) + _OVERRIDE, folder) == "all equal"
