"""Join neighbouring passes over long rows where one pass computes both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...kernel import Stage
from .online_position import OnlinePosition, online_position
from .online_softmax import OnlineSoftmax, online_softmax

Joined: TypeAlias = OnlineSoftmax | OnlinePosition
"""Two stages that one pass over a long row computes."""


def joined_passes(stages: Sequence[Stage], long: Sequence[Stage], stored: frozenset[str]) -> list[Stage | Joined]:
    """Return the passes of a kernel; neighbouring stages of `long` are one pass where a method for that exists."""
    passes: list[Stage | Joined] = []
    for s in stages:
        last = passes[-1] if passes else None
        joined = _join(last, s, stored) if isinstance(last, Stage) and last in long and s in long else None
        if joined is None:
            passes.append(s)
        else:
            passes[-1] = joined
    return passes


def _join(first: Stage, second: Stage, stored: frozenset[str]) -> Joined | None:
    return online_softmax(first, second, stored) or online_position(first, second, stored)
