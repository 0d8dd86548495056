"""`python -m altbackend minify FILE`: find a smaller graph that fails in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from altbackend.minify.shrink import NoFailure, minify


def run(file: str, modules: Sequence[str], seconds: float, most_trials: int) -> int:
    """Print the result. Return 1 if the file does not fail or cannot be read."""
    try:
        shrunk = minify(Path(file), modules, seconds, most_trials)
    except NoFailure as cause:
        print(f"{file} does not fail here: {cause}")
        return 1
    except (OSError, SyntaxError, KeyError) as cause:
        print(f"error: {file} is not a repro file: {type(cause).__name__}: {cause}")
        return 1
    print(f"{shrunk.verdict}")
    print(f"{shrunk.path}: {shrunk.calls} of {shrunk.calls_before} nodes remain, after {shrunk.trials} trials")
    return 0
