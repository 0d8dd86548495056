"""`altbackend.aot_package`: libraries of one or several models in a `.pt2` that torch's loaders and ours read."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.export import ExportedProgram

from ..compat import pt2
from ..config.resolve import resolve
from ..errors import BadGraph, BadOptionValue
from . import manifest, text
from .compile import Library, build

PROGRAMS = "alt/programs/"


def aot_package(
    path: str | os.PathLike[str],
    models: ExportedProgram | Mapping[str, ExportedProgram],
    *,
    options: Mapping[str, object] | None = None,
    share_weights: bool = False,
    programs: bool = True,
) -> str:
    """Compile exported programs into a package and return its path.

    `models`: one program, then called "model", or several by name. `share_weights`: weights of one storage lie in the
    package once, and the loader binds them to every model (`aot_load`, or torch's `load_pt2` with
    `load_weights_from_disk=True`). `programs`: also keep each ExportedProgram, so that a machine for which no library
    fits can compile it. Raise as `aot_compile`.
    """
    named = {"model": models} if isinstance(models, ExportedProgram) else dict(models)
    wrong = [name for name, program in named.items() if not isinstance(program, ExportedProgram)]
    if wrong or not named:
        raise BadGraph(f"the models {wrong}", "a package holds exported programs", "pass torch.export.export(...)")
    asked = resolve(None, options or {})
    if asked.aot_format != "shared" or asked.aot_prefix:
        name, value = ("aot_prefix", asked.aot_prefix) if asked.aot_prefix else ("aot_format", asked.aot_format)
        raise BadOptionValue(name, value, "loaders of packages look for a shared library without a prefix")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".altbackend-", dir=target.parent) as folder:
        libraries = {name: _library(name, p, Path(folder), options or {}, share_weights) for name, p in named.items()}
        whole = Path(folder) / "package.pt2"
        _write(whole, named, libraries, share_weights, programs)
        os.replace(whole, target)
    return str(target)


def _library(name: str, program: ExportedProgram, folder: Path, options: Mapping[str, object], share: bool) -> Library:
    own = folder / name
    own.mkdir(parents=True)
    placed = {**options, "aot_output_path": str(own / "model.wrapper.so")}
    return build(program, (), {}, {**placed, "aot_constants": "external"} if share else placed)


def _write(
    path: Path, models: Mapping[str, ExportedProgram], libraries: Mapping[str, Library], share: bool, programs: bool
) -> None:
    entries = {name: _entry(name, library, programs) for name, library in libraries.items()}
    files = {name: [*map(str, (*library.files, *_metadata(library)))] for name, library in libraries.items()}
    shared = {name: {w.name: w.tensor for w in library.captured.weights} for name, library in libraries.items()}
    pt2.write_package(path, files, shared if share else {}, {manifest.NAME: manifest.dumps(entries)})
    if programs:
        _append_programs(path, models)


def _entry(name: str, library: Library, programs: bool) -> manifest.Entry:
    description = text.describe(library.captured, library.programs)
    entry = manifest.entry(library.path, library.files, library.target, library.storage, description)
    architectures = [(a.capability, a.ptx) for a in library.architectures]
    device = library.programs.device.type
    return replace(
        entry, device=device, architectures=architectures, program=f"{PROGRAMS}{name}.pt2" if programs else ""
    )


def _metadata(library: Library) -> tuple[Path, Path]:
    """Write what torch's loader reads: the device of the library, in a file that torch 2.11 finds by that of a text."""
    path, source = (library.path.with_name(f"model.wrapper{end}") for end in ("_metadata.json", ".cpp"))
    source.write_text("// The library beside this file is compiled already.\n")
    path.write_text(f'{{"AOTI_DEVICE_KEY": "{library.programs.device.type}"}}\n')
    return path, source


def _append_programs(path: Path, models: Mapping[str, ExportedProgram]) -> None:
    """Add the exported programs as files that torch's loaders leave alone."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        root = archive.namelist()[0].split("/")[0]
        for name, program in models.items():
            saved = io.BytesIO()
            torch.export.save(program, saved)
            archive.writestr(zipfile.ZipInfo(f"{root}/{PROGRAMS}{name}.pt2"), saved.getvalue())
