"""What the schedule knows about the machine that a kernel runs on."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS_PER_SM = 8  # resident programs that hide memory latency
MOST_OPERATORS = 400  # Triton's time grows with their square: 1,000 in one kernel take it a minute
REGISTER_ROW = 16384  # elements of one row that a program of 16 warps keeps in registers


@dataclass(frozen=True)
class Target:
    """`kind`: "cpu" or "cuda". `parallel`: threads, or how many programs fill the device.

    A CPU keeps a row in its cache, where any point of it can be read again. A GPU program keeps it in registers: at
    most `row_limit` elements (longer rows are read again by every pass), and a value is found only at the point where
    it was computed (`registers`).
    """

    kind: str
    parallel: int
    row_limit: int = 0
    registers: bool = False
    one: str = "thread"  # what a kernel of a single row runs on
    fast: bool = True  # cheap functions where 16-bit rounding hides their errors
    most_operators: int = 0  # of a fused kernel, 0 for any number


def cpu(threads: int) -> Target:
    return Target("cpu", threads)


def cuda(multiprocessors: int = 132, fast: bool = True) -> Target:
    """A GPU of so many streaming multiprocessors."""
    programs = multiprocessors * PROGRAMS_PER_SM
    return Target("cuda", programs, REGISTER_ROW, True, one="program", fast=fast, most_operators=MOST_OPERATORS)
