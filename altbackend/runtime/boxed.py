"""The calling convention of AOTAutograd: a compiled graph takes one list of inputs, which it empties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Args = list[Any]  # the inputs of one call: tensors and numbers
Values = Sequence[Any]  # inputs or results, traced or real: tensors, numbers and None
BoxedCall = Callable[[Args], Values]
Function = Callable[..., Any]  # takes its inputs one by one
C = TypeVar("C", bound=Callable[..., object])


def boxed(call: C) -> C:
    """Mark `call` as taking its inputs as one list, so that AOTAutograd does not unpack them, and return it.

    The mark lies in the instance's own `__dict__`, since wrappers of a call copy that.
    """
    vars(call)["_boxed_call"] = True
    return call
