"""One exported model of the page of `benchmarks.fx`: fewer calls, equal results."""

from __future__ import annotations

import pytest

from benchmarks import fx as table


def test_an_exported_model_has_fewer_calls_and_equal_results() -> None:
    pytest.importorskip("transformers")
    rows = {row.function: row for row in table.rows_of("vit")}
    assert set(rows) == set(table.FUNCTIONS)
    assert all(row.difference <= 1e-6 for row in rows.values())
    assert all(row.after < row.before for row in rows.values())
    assert rows["freeze_module"].after <= rows["optimize"].after <= rows["peephole"].after
    text = table.page(list(rows.values()))
    assert f"| vit | {rows['inline'].before} |" in text
