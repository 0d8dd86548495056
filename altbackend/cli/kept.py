"""`python -m altbackend cache`: what is kept of compiled graphs."""

from __future__ import annotations

import shutil
from pathlib import Path

from altbackend import folders
from altbackend.cache import store
from altbackend.config import resolve


def run(action: str) -> int:
    """`stats` counts the kept graphs, `verify` reads them all, `clear` removes them; 1 if any is damaged."""
    folder = folders.cache_folder(resolve()) / "graphs"
    if action == "clear":
        return _clear(folder)
    places = store.places(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {len(places)} graphs, {size / 2**20:.1f} MiB")
    if action == "stats":
        return 0
    damaged = [place.entry for place in places if store.read(place) is None]
    for path in damaged:
        print(f"damaged: {path} (it is compiled anew when it is needed)")
    print(f"{len(places) - len(damaged)} graphs are whole")
    return 1 if damaged else 0


def _clear(folder: Path) -> int:
    count = len(store.places(folder))
    shutil.rmtree(folder, ignore_errors=True)
    left = len(store.places(folder))
    print(f"{folder}: {count - left} graphs removed" + (f", {left} could not be" if left else ""))
    return 1 if left else 0
