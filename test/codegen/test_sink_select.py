"""Choices between numbers of a row: the same values, with the work of an element done once a row."""

from __future__ import annotations

import torch

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.value import Value
from altbackend.schedule.tiling.gpu.sink_select import sink_selects

ROW, COLUMN = ex.var("o", 8), ex.var("i", 64)
ROW_NUMBER = va.load("row", ex.ix(ROW), torch.float32)
ELEMENT = va.load("x", ex.add(ex.mul(64, ex.ix(ROW)), ex.ix(COLUMN)), torch.float32)
HERE = va.apply("eq", va.index(ex.ix(COLUMN)), va.load("target", ex.ix(ROW), torch.int64))


def axes(v: Value) -> frozenset[str]:
    return frozenset(a.key for a in v.vars)


def number(x: float) -> Value:
    return va.const(x, torch.float32)


def test_what_follows_a_choice_is_computed_for_both_sides() -> None:
    selection = va.where(HERE, number(-1.0), number(0.0))
    product = va.cast(va.cast(va.apply("mul", selection, ROW_NUMBER), torch.bfloat16), torch.float32)
    last = sink_selects(product, axes)
    assert last.op == "where"
    assert last.args[0] is HERE
    assert all("i" not in axes(side) for side in last.args[1:])


def test_what_differs_by_element_stays() -> None:
    for tree in (
        va.apply("mul", va.where(HERE, number(-1.0), number(0.0)), ELEMENT),
        va.apply("mul", va.where(HERE, ELEMENT, number(0.0)), ROW_NUMBER),
        va.apply("add", ELEMENT, ROW_NUMBER),
    ):
        assert sink_selects(tree, axes) is tree


def test_a_choice_by_row_is_no_choice_of_elements() -> None:
    ignored = va.apply("ne", va.load("target", ex.ix(ROW), torch.int64), va.const(-100, torch.int64))
    scale = va.where(ignored, ROW_NUMBER, number(0.0))
    last = sink_selects(va.apply("mul", va.where(HERE, number(-1.0), number(0.0)), scale), axes)
    assert last.op == "where"
    assert last.args[0] is HERE
