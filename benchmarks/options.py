"""Command-line pieces that the benchmark and the check share."""

import argparse
import contextlib
from typing import Any

from benchmarks.cases import Case, Mode

WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def names(text: str) -> list[str]:
    """Text a,b -> ["a", "b"], without empty or repeated names."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def positive(text: str) -> int:
    """An integer above 0; argparse's error otherwise."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def backend_options(text: str) -> dict[str, dict[str, Any]]:
    """Text of k=v or backend:k=v with commas between -> options by backend; alt's unless a backend is named.

    Values become bool, None, int or float where they read as one, else stay text.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in names(text):
        key, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form name=value")
        backend, colon, name = key.rpartition(":")
        found.setdefault(backend if colon else "alt", {})[name.strip()] = _value(value.strip())
    return found


def case_mode(case: Case, asked: Mode) -> Mode:
    """The mode a case runs in: its own where it has one."""
    return case.mode or asked


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text
