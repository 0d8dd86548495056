"""Texts of graphs on one GPU without the number of that GPU, so that all ranks of a host share their entries.

A graph on a single GPU runs on any GPU of the same model. Its key and its entry name that GPU `cuda:own`; a hit puts
the number at hand back. A graph over several GPUs keeps all numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NUMBERED = re.compile(r"(\bcuda:|\btype='cuda', index=)(\d+)\b")
_OWN = re.compile(r"(\bcuda:|\btype='cuda', index=)own\b")


def number_in(texts: object) -> int | None:
    """Return the number of the only GPU that texts name, in a JSON value; None for no GPU or several."""
    numbers = {int(m[2]) for text in _strings(texts) if "cuda" in text for m in _NUMBERED.finditer(text)}
    return numbers.pop() if len(numbers) == 1 else None


def without_number(texts: object, number: int | None) -> Any:
    """Return a JSON value whose texts name GPU `number` as the graph's own. None changes nothing."""
    return texts if number is None else _replaced(texts, _NUMBERED, "own")


def with_number(texts: object, number: int | None) -> Any:
    """Return a JSON value whose texts name the graph's own GPU by its number. None changes nothing."""
    return texts if number is None else _replaced(texts, _OWN, str(number))


def _replaced(x: object, pattern: re.Pattern[str], number: str) -> object:
    if isinstance(x, str):
        return pattern.sub(rf"\g<1>{number}", x) if "cuda" in x else x
    if isinstance(x, Mapping):
        return {_replaced(k, pattern, number): _replaced(v, pattern, number) for k, v in x.items()}
    return [_replaced(v, pattern, number) for v in x] if isinstance(x, (list, tuple)) else x


def _strings(x: object) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, Mapping):
        for k, v in x.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(x, (list, tuple)):
        for v in x:
            yield from _strings(v)
