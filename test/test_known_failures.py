"""The tables of operators known to fail may only shrink: an entry that passes must go, and none may be added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.coverage import KNOWN, known_failures
from benchmarks.opinfo import BROKEN, Case, Settings, check, database

MOST = {"cpu": 0, "cuda": 0}  # lower it with every entry that goes
TABLES = {way: Path(name) for way, name in KNOWN.items() if name}


def entries(way: str) -> list[Case]:
    return sorted(known_failures(TABLES[way]), key=str)


@pytest.mark.parametrize("way", TABLES)
def test_the_table_names_operators_and_reasons_and_does_not_grow(way: str) -> None:
    found = entries(way)
    assert len(found) <= MOST[way], f"{TABLES[way]} has grown: mend the operator instead"
    assert all(c.op in database() and hasattr(torch, c.dtype) for c in found)
    assert all(c.direction in ("forward", "backward") for c in found)
    rows = [r for r in TABLES[way].read_text().splitlines() if r and not r.startswith("#")]
    assert all(row.partition("#")[2].strip() for row in rows), "every entry has a reason"


@pytest.mark.parametrize("case", entries("cpu"), ids=str)
def test_what_is_listed_fails_still_on_a_cpu(case: Case) -> None:
    found = check(case, Settings("cpu", 3))
    assert found.status in BROKEN, f"{case.op} is {found.status} now: remove it from {TABLES['cpu']}, and lower MOST"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", entries("cuda"), ids=str)
def test_what_is_listed_fails_still_on_a_gpu(case: Case) -> None:
    found = check(case, Settings("cuda", 3))
    assert found.status in BROKEN, f"{case.op} is {found.status} now: remove it from {TABLES['cuda']}, and lower MOST"
