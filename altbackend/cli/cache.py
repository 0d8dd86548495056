"""`python -m altbackend cache`: what is kept of compiled graphs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from altbackend.config.options import resolve
from altbackend.disk_cache import eviction
from altbackend.disk_cache.storage import Store, open_store
from altbackend.errors import AltError
from altbackend.graph_cache import archive, entry_files
from altbackend.graph_cache.key import versions
from altbackend.graph_cache.lookup import why_missed

FOLDERS = {
    "graphs": "compiled graphs",
    "host": "host programs",
    "cpp": "C++ libraries",
    "cubin": "GPU kernels",
    "autotune": "measured times",
}
SEALED = (".graph", ".parts", ".so", ".cubin", ".code")
EXPLAINED = 10  # graphs
MIB = float(1 << 20)


def run(action: str, file: str = "") -> int:
    """Runs one action on the cache folder that the options name; 1 if something is damaged or cannot be done."""
    try:
        kept = open_store(resolve())
        match action:
            case "stats":
                return stats(kept)
            case "verify":
                return verify(kept.own)
            case "clear":
                return clear(kept.own)
            case "explain-miss":
                return explain(kept)
            case "export":
                return export(kept, Path(file))
            case _:
                return import_(kept, Path(file))
    except (AltError, OSError) as cause:
        print(f"error: {cause}")
        return 1


def stats(kept: Store) -> int:
    """Counts and sizes."""
    sealing = "sealed with a secret" if kept.secret else "sealed without a secret"
    print(f"{kept.folder}: {len(entry_files.places(kept.own))} graphs, {sealing}")
    for elsewhere in (*kept.beneath, *filter(None, [kept.shared])):
        print(f"also read: {elsewhere}")
    total = 0
    for name, what in FOLDERS.items():
        files, size = eviction.size(kept.folder / name)
        total += size
        print(f"  {what:16} {files:7} files {size / MIB:9.1f} MiB")
    limit = f"{kept.most_bytes / MIB:.0f} MiB" if kept.most_bytes else "none"
    print(f"  {'together':16} {'':13} {total / MIB:9.1f} MiB; limit {limit}")
    return 0


def verify(kept: Store) -> int:
    """Reads every file; 1 if one is damaged or sealed in another way."""
    names = [p.relative_to(kept.folder).as_posix() for p in sorted(kept.folder.rglob("*")) if p.suffix in SEALED]
    damaged = [name for name in names if kept.sealed(name) is None]
    for name in damaged:
        print(f"damaged: {kept.path(name)} (it is made anew when it is needed)")
    print(f"{len(names) - len(damaged)} of {len(names)} files are whole")
    return 1 if damaged else 0


def clear(kept: Store) -> int:
    """Removes what is kept, and nothing else that the folder may hold."""
    count = len(entry_files.places(kept))
    for name in FOLDERS:
        shutil.rmtree(kept.folder / name, ignore_errors=True)
    left = len(entry_files.places(kept))
    print(f"{kept.folder}: {count - left} graphs removed" + (f", {left} could not be" if left else ""))
    return 1 if left else 0


def explain(kept: Store) -> int:
    """Why the graphs that were compiled last were not found: what differs from the closest one of the same calls."""
    stamped = [(kept.path(p.parts_name), p) for p in entry_files.places(kept)]
    found = sorted(((path.stat().st_mtime, p.key, p) for path, p in stamped if path.exists()), reverse=True)
    for when, _, place in found[:EXPLAINED]:
        parts = entry_files.parts(place)
        reason = "what it depends on cannot be read" if parts is None else why_missed(parts, place, before=when)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))} {place.key[:12]}: {reason}")
    if not found:
        print(f"{kept.folder}: no graph is kept")
    return 0


def export(kept: Store, file: Path) -> int:
    """Writes every graph, with what it needs, into one file."""
    contents = archive.write(kept, file)
    print(f"{file}: {contents.graphs} graphs in {len(contents.names)} files, {file.stat().st_size / MIB:.1f} MiB")
    return 0


def import_(kept: Store, file: Path) -> int:
    """Adds the graphs of such a file to those that are kept, if all of it is whole."""
    with file.open("rb") as f:
        contents = archive.unpack(kept, f, str(file))
    print(f"{kept.folder}: {contents.graphs} graphs in {len(contents.names)} files added")
    for name, mine in versions().items():
        theirs = contents.versions.get(name)
        if theirs != mine:
            print(f"note: made with {name} {theirs}, here is {mine}: its graphs are not found by this installation")
    return 0
