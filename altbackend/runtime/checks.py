"""Checks in a host program of numbers that data or the user decides; they raise the errors that eager raises."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.host_functions import bits_of as bits_of
from ..ir.host_functions import indexed_size as indexed_size
from ..ir.host_functions import position as position
from ..ir.host_functions import slice_begin as slice_begin


def failed(message: str, values: Mapping[str, object]) -> None:
    """Raise RuntimeError with `message` and the values that violate it."""
    values_text = ", ".join(f"{name} = {value}" for name, value in values.items())
    raise RuntimeError(f"{message} ({values_text})" if values_text else message)


def require(holds: bool, message: str) -> None:
    """Raise RuntimeError with `message` unless `holds`: a check in the traced program itself."""
    if not holds:
        raise RuntimeError(message)


def require_index(holds: bool, message: str) -> None:
    """Raise IndexError with `message` unless `holds`."""
    if not holds:
        raise IndexError(message)
