"""Compiled graphs in one file, to carry to another folder or machine: entries with the machine code they need.

An archive is a zip file of the store's sealed files and of `bundle.json`, which lists them. All files are checked
before the first one is written; nothing is unpickled or run.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from altbackend.lazy_dataclass import dataclass

from ..disk_cache import seal
from ..disk_cache.storage import Store
from ..errors import BadBundle
from .entry_files import EntryPath, entry_paths, read
from .key import versions

FORMAT = "altbackend-bundle-1"
LIST = "bundle.json"
MOST_BYTES = 16 << 30  # after decompression
# Errors that the readers of zip files and of JSON raise for damaged bytes.
DAMAGED = (ValueError, EOFError, NotImplementedError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error)
# Binaries come first and entries last, so that an interrupted import leaves no entry without its binaries.
KINDS = (
    re.compile(r"cpp/[0-9a-f]{2}/[0-9a-f]{40}\.so"),
    re.compile(r"cubin/[0-9a-f]{2}/[0-9a-f]{40}\.cubin"),
    re.compile(r"host/[0-9a-f]{2}/[0-9a-f]{40}\.code"),
    re.compile(r"graphs/(traced-)?[0-9a-f]{16}/[0-9a-f]{64}\.parts"),
    re.compile(r"graphs/(traced-)?[0-9a-f]{16}/[0-9a-f]{64}\.graph"),
)


@dataclass(frozen=True)
class Contents:
    """The files of an archive, in the order to write them, and the versions of the software that made them."""

    names: tuple[str, ...]
    versions: dict[str, str]

    @property
    def graphs(self) -> int:
        return sum(kind_of(name) == len(KINDS) - 1 for name in self.names)


def kind_of(name: str) -> int:
    """Return the index in KINDS of a file's name, or -1 for a name that no store has."""
    return next((k for k, pattern in enumerate(KINDS) if pattern.fullmatch(name)), -1)


def write(store: Store, file: Path) -> Contents:
    """Write all undamaged graphs of a store into a file. Raise OSError."""
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        with temporary.open("wb") as out:
            contents = pack(entry_paths(store), out)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return contents


def pack(graphs: Iterable[EntryPath], out: IO[bytes]) -> Contents:
    """Write an archive of some graphs, without files that are damaged or gone."""
    packed: dict[str, None] = {}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, store in _files(graphs):
            if name not in packed and (content := store.sealed(name)) is not None:
                archive.writestr(name, content)
                packed[name] = None
        contents = Contents(tuple(sorted(packed, key=kind_of)), versions())
        archive.writestr(LIST, json.dumps({"format": FORMAT, "files": contents.names, "versions": contents.versions}))
    return contents


def _files(graphs: Iterable[EntryPath]) -> Iterator[tuple[str, Store]]:
    for path in graphs:
        stored = read(path)
        if stored is not None:
            for name in (*stored["binaries"], path.parts_name, path.name):
                yield name, path.store


def unpack(store: Store, file: IO[bytes], called: str) -> Contents:
    """Write the files of an archive into a store. Raise OSError, or BadBundle before any file is written.

    `called` names the archive in the error.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            contents = _contents(archive)
            for name in contents.names:
                _check(name, archive.read(name), store.secret)
            for name in contents.names:
                store.put(name, archive.read(name))
    except (_Bad, KeyError) as cause:
        raise BadBundle(called, str(cause)) from None
    except DAMAGED as cause:
        raise BadBundle(called, f"it is damaged ({type(cause).__name__}: {cause})") from None
    return contents


class _Bad(Exception):
    """Raised for a malformed archive; the message says why."""


def _contents(archive: zipfile.ZipFile) -> Contents:
    infos = archive.infolist()
    if sum(i.file_size for i in infos) > MOST_BYTES:
        raise _Bad(f"it would unpack to more than {MOST_BYTES >> 30} GiB")
    if not {i.compress_type for i in infos} <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise _Bad("it uses a compression method that bundles do not use")
    if LIST not in archive.namelist():
        raise _Bad("it holds no list of its files, so it is not a bundle")
    listed: object = json.loads(archive.read(LIST))
    if not isinstance(listed, dict) or listed.get("format") != FORMAT:
        raise _Bad(f"its format is not {FORMAT}")
    names, made_by = listed.get("files"), listed.get("versions")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or not isinstance(made_by, dict):
        raise _Bad("its list cannot be read")
    if sorted([LIST, *names]) != sorted(i.filename for i in infos):
        raise _Bad("it does not hold the files that it lists")
    for name in names:
        if kind_of(name) < 0:
            raise _Bad(f"{name!r:.200} is not the name of a compiled file")
    return Contents(tuple(sorted(names, key=kind_of)), {str(k): str(v) for k, v in made_by.items()})


def _check(name: str, sealed: bytes, secret: bytes) -> None:
    if seal.is_valid(name, sealed, secret):
        return
    if secret and not seal.is_keyed(sealed):
        raise _Bad(f"{name} was sealed without a secret, and the option cache_key_file asks for one")
    if seal.is_keyed(sealed) and not secret:
        raise _Bad(f"{name} was sealed with a secret, and the option cache_key_file names none")
    raise _Bad(f"{name} is damaged" + (" or was sealed with another secret" if secret else ""))
