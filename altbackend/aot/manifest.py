"""The manifest of a package: what each of its libraries needs, so that a misfit is found before anything is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat.pt2 import EXTRA_FOLDER, LIBRARY_FOLDER
from ..compat.stable_abi import TARGET
from ..disk_cache.json_object import JsonObject
from ..errors import AltError, BadPackage
from ..runtime import isa
from .machine_code import ONE_ALONE

NAME = "alt/manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """A model of a package. `files`: name -> (bytes, sha256). `program`: the ExportedProgram beside it, or "".

    `architectures`: of GPUs, (compute capability, whether it is PTX).
    """

    device: str
    machine: str
    isa: str
    features: tuple[str, ...]
    storage: str
    files: dict[str, tuple[int, str]]
    program: str
    description: JsonObject
    architectures: Sequence[tuple[int, bool]] = ()


@dataclass(frozen=True)
class Misfit:
    """A reason why a model of a package cannot run here, and what to do."""

    model: str
    reason: str
    todo: str

    def __str__(self) -> str:
        return f"model {self.model}: {self.reason}\n  What to do: {self.todo}"


def entry(path: Path, files: tuple[Path, ...], target: str, storage: str, description: JsonObject) -> Entry:
    """Return the entry of a library that was built on this machine for the instruction set `target`."""
    sizes = {f.name: (f.stat().st_size, digest_of(f)) for f in files}
    assert path.name in sizes
    return Entry("cpu", platform.machine(), target, isa.required_features(target), storage, sizes, "", description)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def dumps(models: dict[str, Entry]) -> str:
    """Return the manifest as JSON; equal entries give equal text."""
    torch_versions = {"least": ".".join(map(str, TARGET)), "built": torch.__version__}
    content = {"format": FORMAT, "torch": torch_versions, "models": {k: asdict(m) for k, m in sorted(models.items())}}
    return json.dumps(content, indent=1, sort_keys=True)


# the errors of zipfile for a damaged archive, RuntimeError for one that seems encrypted
UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, LookupError, RuntimeError)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise BadPackage where the body meets a damaged archive."""
    try:
        yield
    except AltError:
        raise
    except UNREADABLE as cause:
        todo = "check the path, or copy or package the file again"
        raise BadPackage(str(path), f"it is no readable package: {cause}", todo) from cause


def read(path: Path) -> JsonObject:
    """Return the manifest of a package. Raise BadPackage."""
    with readable(path), zipfile.ZipFile(path) as archive:
        name = next((n for n in archive.namelist() if n.endswith(EXTRA_FOLDER + NAME)), None)
        if name is None:
            others = any(LIBRARY_FOLDER in n for n in archive.namelist())
            reason = "it has no manifest of altbackend" + (": another compiler has made it" if others else "")
            raise BadPackage(str(path), reason, "load it with torch's own loader, or package the model again")
        manifest = json.loads(archive.read(name))
        _require_form(path, manifest)
    return dict(manifest)


def _require_form(path: Path, manifest: object) -> None:
    """Raise BadPackage unless the manifest has the fields that this version reads."""
    models = manifest.get("models") if isinstance(manifest, dict) else None
    if isinstance(manifest, dict) and manifest.get("format") not in (None, FORMAT):
        reason = f"its format is {manifest['format']}, and this version of altbackend reads format {FORMAT}"
        raise BadPackage(str(path), reason, "use the version that wrote it, or package the model again")
    needed = {f: t for f, t in Entry.__annotations__.items() if f not in ("program", "architectures")}
    whole = isinstance(models, dict) and all(isinstance(m, dict) and needed.keys() <= m.keys() for m in models.values())
    if not whole or not models:
        raise BadPackage(str(path), "its manifest is damaged", "copy or package the file again")


def misfits(path: Path, model: str | None = None) -> list[Misfit]:
    """Return why the models of a package, or one of them, cannot run here. Raise BadPackage for an unreadable one."""
    manifest = read(path)
    out: list[Misfit] = []
    least = tuple(int(n) for n in str(manifest.get("torch", {}).get("least", "0")).split("."))
    here = tuple(int(n) for n in torch.__version__.split(".")[:2])
    present = isa.cpu_flags(_cpuinfo())
    for name, facts in manifest["models"].items():
        if model not in (None, name):
            continue
        if here < least:
            reason = f"it needs torch {'.'.join(map(str, least))}, and this is torch {torch.__version__}"
            out.append(Misfit(name, reason, "install a newer torch"))
        if facts["machine"] != platform.machine():
            reason = f"it was compiled for {facts['machine']}, and this machine is {platform.machine()}"
            out.append(Misfit(name, reason, _again(facts)))
        elif missing := sorted(set(facts["features"]) - present if present else ()):
            reason = f"it was compiled for {facts['isa']}, and this CPU has no {', '.join(missing)}"
            out.append(Misfit(name, reason, _again(facts)))
        if facts["device"] == "cuda" and (reason := _gpu_misfit(facts.get("architectures", ()))):
            out.append(Misfit(name, reason, "compile it for this GPU: options={'aot_architectures': ...}"))
        out += _damaged(path, name, facts)
    return out


def _gpu_misfit(architectures: Sequence[tuple[int, bool]]) -> str:
    """Return why no GPU of this machine runs code for the architectures, or ""."""
    shown = ", ".join(f"{c // 10}.{c % 10}{' as PTX' * ptx}" for c, ptx in architectures)
    if not torch.cuda.is_available():
        return f"it was compiled for GPUs of architecture {shown}, and torch finds no GPU here"
    here = sorted({10 * a + b for a, b in map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))})
    if any(runs_on(c, ptx, gpu) for c, ptx in architectures for gpu in here):
        return ""
    gpus = ", ".join(f"{c // 10}.{c % 10}" for c in here)
    return f"it was compiled for GPUs of architecture {shown}, and the GPUs here are {gpus}"


def runs_on(capability: int, ptx: bool, gpu: int) -> bool:
    """Return whether code for an architecture runs on a GPU; the library decides by the same rule (`gpu_model.h`)."""
    if capability >= ONE_ALONE:
        return capability == gpu
    return capability <= gpu and (ptx or capability // 10 == gpu // 10)


def _again(facts: JsonObject) -> str:
    here = "altbackend.aot_load(path, recompile=True)" if facts.get("program") else "compile it on this machine"
    return f"{here}; or package it with options={{'aot_isa': 'generic'}}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _damaged(path: Path, model: str, facts: JsonObject) -> list[Misfit]:
    """Return the files of a model that the package lacks or that differ from the manifest."""
    out = []
    with zipfile.ZipFile(path) as archive:
        names = {n.partition("/")[2]: n for n in archive.namelist()}
        for file, (size, digest) in facts["files"].items():
            stored = names.get(f"{LIBRARY_FOLDER}{model}/{file}")
            reason = "is missing" if stored is None else ""
            if stored is not None:
                try:
                    content = archive.read(stored)
                    reason = (
                        "is damaged" if (len(content), hashlib.sha256(content).hexdigest()) != (size, digest) else ""
                    )
                except UNREADABLE as cause:
                    reason = f"is damaged: {cause}"
            if reason:
                out.append(Misfit(model, f"its file {file} {reason}", "copy or package the file again"))
    return out
