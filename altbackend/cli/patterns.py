"""`python -m altbackend patterns`: the traced patterns, and the files that hold them."""

from __future__ import annotations

from pathlib import Path

import altbackend
from altbackend.fx_passes.pattern.serial import module_of
from altbackend.fx_passes.traced import attention, gelu

FOLDER = Path(altbackend.__file__).parent / "fx_passes" / "serialized"
SOURCES = {"attention": attention.FORMS, "gelu": gelu.FORMS}


def run(write: bool) -> int:
    """Print the names of all patterns; with `write`, trace them and write their files. Return 1 if one is stale."""
    stale = False
    for name, forms in SOURCES.items():
        path = FOLDER / f"{name}.py"
        text = text_of(name)
        if write:
            path.write_text(text, encoding="utf-8")
        fresh = path.exists() and path.read_text(encoding="utf-8") == text
        stale |= not fresh
        print(f"{name}: {len(forms)} patterns, {'up to date' if fresh else 'stale; run with --write'}")
        for form in forms:
            print(f"  {form.name}")
    return int(stale)


def text_of(name: str) -> str:
    """Trace the forms of a family and return the text of their file."""
    return module_of(f"fx_passes/traced/{name}.py", {form.name: form.traced() for form in SOURCES[name]})
