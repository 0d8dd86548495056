"""`python -m altbackend minify FILE`: a smaller graph that fails in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from altbackend.minify.shrink import NoFailure, minify


def run(file: str, modules: Sequence[str], seconds: float, most_trials: int) -> int:
    """Prints what remains; 1 if the file does not fail or cannot be read."""
    try:
        found = minify(Path(file), modules, seconds, most_trials)
    except NoFailure as cause:
        print(f"{file} does not fail here: {cause}")
        return 1
    except (OSError, SyntaxError, KeyError) as cause:
        print(f"error: {file} is no file that rebuilds a graph: {type(cause).__name__}: {cause}")
        return 1
    print(f"{found.verdict}")
    print(f"{found.path}: {found.calls} of {found.calls_before} nodes remain, after {found.trials} trials")
    return 0
