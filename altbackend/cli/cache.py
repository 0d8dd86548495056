"""`python -m altbackend cache`: list, check, carry and remove the compiled graphs of the cache folder."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from altbackend.config.resolve import resolve
from altbackend.disk_cache import eviction
from altbackend.disk_cache.storage import Store, open_store
from altbackend.errors import AltError
from altbackend.graph_cache import archive, entry_files
from altbackend.graph_cache.key import versions
from altbackend.graph_cache.lookup import miss_reason

FOLDERS = {
    "graphs": "compiled graphs",
    "host": "host programs",
    "cpp": "C++ libraries",
    "cubin": "GPU kernels",
    "autotune": "measured times",
}
SEALED = (".graph", ".parts", ".so", ".cubin", ".code")
EXPLAINED = 10  # graphs that explain-miss lists
MIB = float(1 << 20)


def run(action: str, file: str = "") -> int:
    """Run one action on the cache folder that the options name. Return 1 if a file is damaged or the action fails."""
    try:
        store = open_store(resolve())
        match action:
            case "stats":
                return stats(store)
            case "verify":
                return verify(store.own)
            case "clear":
                return clear(store.own)
            case "explain-miss":
                return explain(store)
            case "export":
                return export(store, Path(file))
            case _:
                return import_(store, Path(file))
    except (AltError, OSError) as cause:
        print(f"error: {cause}")
        return 1


def stats(store: Store) -> int:
    """Print counts and sizes."""
    sealing = "sealed with a secret" if store.secret else "sealed without a secret"
    print(f"{store.folder}: {len(entry_files.entry_paths(store.own))} graphs, {sealing}")
    for source in (*store.read_only, *filter(None, [store.shared])):
        print(f"also read: {source}")
    total = 0
    for name, what in FOLDERS.items():
        files, size = eviction.size(store.folder / name)
        total += size
        print(f"  {what:16} {files:7} files {size / MIB:9.1f} MiB")
    limit = f"{store.most_bytes / MIB:.0f} MiB" if store.most_bytes else "none"
    print(f"  {'total':16} {'':13} {total / MIB:9.1f} MiB; limit {limit}")
    return 0


def verify(store: Store) -> int:
    """Read every file. Return 1 if one is damaged or sealed in another way."""
    names = [p.relative_to(store.folder).as_posix() for p in sorted(store.folder.rglob("*")) if p.suffix in SEALED]
    damaged = [name for name in names if store.sealed(name) is None]
    for name in damaged:
        print(f"damaged: {store.path(name)} (it is compiled again when it is needed)")
    print(f"{len(names) - len(damaged)} of {len(names)} files are undamaged")
    return 1 if damaged else 0


def clear(store: Store) -> int:
    """Remove all compiled code, and no other file of the folder."""
    count = len(entry_files.entry_paths(store))
    for name in FOLDERS:
        shutil.rmtree(store.folder / name, ignore_errors=True)
    left = len(entry_files.entry_paths(store))
    print(f"{store.folder}: {count - left} graphs removed" + (f", {left} could not be" if left else ""))
    return 1 if left else 0


def explain(store: Store) -> int:
    """Print why the latest compiled graphs were not found: how the closest graph with the same calls differs."""
    files = [(store.path(p.parts_name), p) for p in entry_files.entry_paths(store)]
    latest = sorted(((path.stat().st_mtime, p.key, p) for path, p in files if path.exists()), reverse=True)
    for when, _, entry in latest[:EXPLAINED]:
        parts = entry_files.parts(entry)
        reason = "its key cannot be read" if parts is None else miss_reason(parts, entry, before=when)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))} {entry.key[:12]}: {reason}")
    if not latest:
        print(f"{store.folder}: it holds no graphs")
    return 0


def export(store: Store, file: Path) -> int:
    """Write every graph, with the files that it needs, into one archive."""
    contents = archive.write(store, file)
    print(f"{file}: {contents.graphs} graphs in {len(contents.names)} files, {file.stat().st_size / MIB:.1f} MiB")
    return 0


def import_(store: Store, file: Path) -> int:
    """Add the graphs of an archive to the store, if all of its files are undamaged."""
    with file.open("rb") as f:
        contents = archive.unpack(store, f, str(file))
    print(f"{store.folder}: {contents.graphs} graphs in {len(contents.names)} files added")
    for name, own_version in versions().items():
        version = contents.versions.get(name)
        if version != own_version:
            print(f"note: made with {name} {version}, this installation has {own_version} and does not find its graphs")
    return 0
