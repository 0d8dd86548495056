"""Calls that another callable comes to serve, and callers that follow them."""

from __future__ import annotations

from typing import Any

import torch

from altbackend.runtime.boxed import BoxedCall, Values
from altbackend.runtime.layouts import with_traced_strides
from altbackend.runtime.successor import Successor, follow


def returning(value: object) -> BoxedCall:
    def call(args: list[Any]) -> Values:
        return [value, len(args)]

    return call


def followed(call: BoxedCall) -> list[BoxedCall]:
    calls: list[BoxedCall] = []
    follow(call, calls.append)
    return calls


def test_a_plain_call_is_followed_at_once() -> None:
    call = returning(1)
    assert followed(call) == [call]


def test_a_follower_gets_the_successor_of_a_successor() -> None:
    first, second = Successor(returning(1)), Successor(returning(2))
    outer, inner, last = first.call(), second.call(), returning(3)
    calls = followed(outer)
    assert calls == [outer]
    assert outer([0]) == [1, 1]
    first.become(inner)
    assert calls == [outer, inner]
    assert outer([0]) == [2, 1]
    second.become(last)
    assert calls == [outer, inner, last]
    assert outer([0, 0]) == inner([0, 0]) == [3, 2]


def test_a_late_follower_gets_the_present_callable() -> None:
    successor, last = Successor(returning(1)), returning(2)
    call = successor.call()
    successor.become(last)
    assert followed(call) == [call, last]


def test_inputs_are_laid_out_for_a_successor_too() -> None:
    def strides(args: list[Any]) -> Values:
        return args[0].stride()

    successor = Successor(returning(1))
    call = with_traced_strides(successor.call(), ((0, (1, 4), False),))
    assert call([torch.randn(4, 4)]) == [1, 1]
    successor.become(strides)
    assert call([torch.randn(4, 4)]) == (1, 4)
