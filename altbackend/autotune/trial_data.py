"""The form of a trial, plain data in JSON that the process which measures reads."""

from __future__ import annotations

from typing import TypedDict


class ViewData(TypedDict):
    """A strided view of a buffer: sizes, strides and offset in elements."""

    buffer: str
    sizes: list[int]
    strides: list[int]
    offset: int


class StepData(TypedDict, total=False):
    """A launch of a kernel, or a library call if `operator` is given.

    `buffers` names the parameters of a kernel, or the buffers of a call. `cubin` is machine code in base64, `out` the
    buffer of the call's result. `args` holds a `ViewData` for each tensor, and numbers.
    """

    buffers: list[str]
    grid: int
    cubin: str
    shared: int
    warps: int
    name: str
    operator: str
    args: list[ViewData | float]
    kwargs: dict[str, object]
    out: str


class Trial(TypedDict):
    """Buffers, each a dtype and a number of elements, and steps that run on them one after the other."""

    buffers: dict[str, tuple[str, int]]
    steps: list[StepData]
