"""`altbackend.aot_load`: a library or package as a callable, with its weights bound; and checks before loading."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from altbackend.lazy_dataclass import dataclass

from ..compat import export
from ..compat.pt2 import LIBRARY_FOLDER, WEIGHTS_FOLDER, Runner
from ..config.resolve import resolve
from ..disk_cache.json_object import JsonObject
from ..disk_cache.storage import open_store
from ..errors import BadCall, BadPackage
from . import manifest, safetensors
from .compile import aot_compile
from .package import PROGRAMS

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]
Rename = Callable[[str], str]


class AotModel:
    """A loaded library: call it like the module that was compiled. object number of threads may do so at once."""

    def __init__(self, library: Path, shown: str, device: str = "") -> None:
        self.path = shown
        self.shared_weights: tuple[torch.Tensor, ...] = ()  # weights that other models may share
        self._library = _opened(library)
        self.description = _description(library, self._library)
        try:
            self._runner = Runner(library, device or self._default_device(shown))
        except (RuntimeError, OSError) as cause:
            raise BadPackage(shown, f"it cannot be loaded: {self._reason(cause)}", "compile the model again") from cause
        in_spec, out_spec = self._runner.specs()
        self._in_spec, self._out_spec = pytree.treespec_loads(in_spec), pytree.treespec_loads(out_spec)

    def _default_device(self, shown: str) -> str:
        """Return the device for which the library was made: the CPU, or torch's current GPU. Raise BadPackage."""
        if self.description.get("device", "cpu") == "cpu":
            return "cpu"
        if not torch.cuda.is_available():
            todo = "load it on a machine with a GPU, or compile the model for the CPU"
            raise BadPackage(shown, "it was compiled for a GPU, and torch finds none here", todo)
        return f"cuda:{torch.cuda.current_device()}"

    @property
    def weights(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and shape of each weight by name."""
        return {name: (dtype, tuple(shape)) for name, (dtype, shape) in self.description["weights"].items()}

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model. Raise BadCall for arguments that it was not compiled for."""
        leaves, spec = pytree.tree_flatten((args, export.reordered(kwargs, self._in_spec)))
        if spec != self._in_spec:
            raise BadCall(self.path, f"the arguments have the tree {spec}, and the library takes {self._in_spec}")
        tensors = [x for x, leaf in zip(leaves, self.description["leaves"], strict=True) if self._is_tensor(x, leaf)]
        try:
            results = self._runner.run(tensors)
        except RuntimeError as cause:
            raise BadCall(self.path, self._reason(cause)) from cause
        kinds = self.description["outputs"]
        return pytree.tree_unflatten([_result(r, k) for r, k in zip(results, kinds, strict=True)], self._out_spec)

    def _is_tensor(self, x: object, leaf: JsonObject) -> bool:
        """Return whether a leaf of the arguments is passed on; the others must have the value of the compilation."""
        if "input" in leaf:
            if not isinstance(x, torch.Tensor):
                raise BadCall(
                    self.path, f"the argument {leaf['name']} is {type(x).__name__}, and a tensor was compiled"
                )
            return True
        same = repr(x) == leaf["text"] if "text" in leaf else type(x) is type(leaf["value"]) and x == leaf["value"]
        if not same:
            compiled = leaf.get("text", repr(leaf.get("value")))
            raise BadCall(self.path, f"the argument {leaf['name']} is {x!r}; the library was compiled for {compiled}")
        return False

    def _reason(self, cause: BaseException) -> str:
        """Return the library's own message of this thread's last call, which some versions of torch drop."""
        text: bytes = self._library.altbackend_last_error()
        return text.decode(errors="replace") or str(cause).split("\nException raised from")[0]

    def update_weights(
        self, weights: Weights, *, inactive: bool = False, complete: bool = False, rename: Rename | None = None
    ) -> None:
        """Replace weights by name with copies: of all, or of some unless `complete`.

        `inactive`: in the set that `swap_weights` makes the active one. `rename`: from a weight's name in the library
        to its name in `weights`. Raise BadCall.
        """
        self._bind(weights, inactive=inactive, complete=complete, shared=False, rename=rename)

    def bind_weights(self, weights: Weights, *, rename: Rename | None = None) -> None:
        """Let the library read the caller's memory: tensors by name, or a safetensors file, without a copy.

        Raise BadCall.
        """
        self._bind(weights, inactive=False, complete=True, shared=True, rename=rename)

    def current_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights that calls use now, by name. Raise BadCall."""
        try:
            return {name: t.detach().clone() for name, t in self._runner.weights().items()}
        except RuntimeError as cause:
            raise BadCall(self.path, self._reason(cause)) from cause

    def swap_weights(self) -> None:
        """Make the inactive set of weights the active one. Calls that are running keep theirs. Raise BadCall."""
        try:
            self._runner.swap()
        except RuntimeError as cause:
            raise BadCall(self.path, self._reason(cause)) from cause

    def _bind(self, weights: Weights, *, inactive: bool, complete: bool, shared: bool, rename: Rename | None) -> None:
        given = safetensors.load(weights) if isinstance(weights, (str, os.PathLike)) else weights
        own = self.description["weights"]
        if rename is None:
            chosen = {
                name: t for name, t in given.items() if name in own or not isinstance(weights, (str, os.PathLike))
            }
        else:
            chosen = {name: given[rename(name)] for name in own if rename(name) in given}
        for name, same in self.description["same"].items():  # files hold tied weights once
            if name not in chosen and same in chosen:
                chosen[name] = chosen[same]
        if complete and (missing := sorted(set(own) - set(chosen))):
            raise BadCall(self.path, f"the weights lack {', '.join(missing[:5])} ({len(missing)} in all)")
        try:
            self._runner.update(
                {k: t.detach() for k, t in chosen.items()}, inactive=inactive, complete=complete, shared=shared
            )
        except RuntimeError as cause:
            raise BadCall(self.path, self._reason(cause)) from cause


def aot_load(
    path: str | os.PathLike[str],
    model: str = "model",
    *,
    weights: Weights | None = None,
    rename: Rename | None = None,
    recompile: bool = False,
) -> AotModel:
    """Load a library (`aot_compile`) or a model of a package (`aot_package`).

    `weights`: bind these, a mapping of tensors or a safetensors file, without a copy; `rename` maps a weight's name in
    the library to its name there. `recompile`: compile the package's ExportedProgram if its library does not fit
    this machine. Raise BadPackage, which says what does not fit and what to do.
    """
    file = Path(path)
    if zipfile.is_zipfile(file):
        loaded = _from_package(file, model, recompile)
    else:
        if not file.exists():
            raise BadPackage(str(file), "there is no such file", "check the path")
        loaded = AotModel(file, str(file))
    if weights is not None:
        loaded.bind_weights(weights, rename=rename)
    return loaded


def check_package(path: str | os.PathLike[str]) -> list[manifest.Misfit]:
    """Return what keeps the models of a package from running here, empty if nothing; nothing is loaded.

    Raise BadPackage for a file that is no package of altbackend.
    """
    return manifest.misfits(Path(path))


def describe(library: Path) -> JsonObject:
    """Return the description that a library holds. Raise BadPackage."""
    return _description(library, _opened(library))


def _opened(library: Path) -> ctypes.CDLL:
    try:
        dll = ctypes.CDLL(str(library))
        for function in (dll.altbackend_describe, dll.altbackend_last_error):
            function.restype = ctypes.c_char_p
    except (OSError, AttributeError) as cause:
        raise BadPackage(str(library), f"it is no library of altbackend: {cause}", "compile the model again") from cause
    return dll


def _description(library: Path, dll: ctypes.CDLL) -> JsonObject:
    try:
        return dict(json.loads(dll.altbackend_describe()))
    except ValueError as cause:
        raise BadPackage(str(library), f"its description is damaged: {cause}", "compile the model again") from cause


# --- packages --------------------------------------------------------------------------------------------------------


def _from_package(path: Path, model: str, recompile: bool) -> AotModel:
    facts = manifest.read(path)["models"]
    if model not in facts:
        raise BadPackage(str(path), f"it has no model {model!r}; it has {', '.join(facts)}", "name one of them")
    if misfits := manifest.misfits(path, model):
        if recompile and facts[model].get("program"):
            return _recompiled(path, model)
        raise BadPackage(str(path), "; ".join(m.reason for m in misfits), misfits[0].todo)
    with manifest.readable(path):
        library = _unpacked(path, model, facts[model])
    loaded = AotModel(library, f"{path}:{model}")
    if facts[model]["storage"] == "external":
        with manifest.readable(path), zipfile.ZipFile(path) as archive:
            weights = _shared_weights(archive, model)
        if weights:
            loaded.bind_weights(weights.views)
            loaded.shared_weights = weights.owners
    return loaded


def _unpacked(path: Path, model: str, facts: JsonObject) -> Path:
    """Return the library in a folder of the cache that its content names; another process may have unpacked it."""
    digests = "".join(digest for _, (_, digest) in sorted(facts["files"].items()))
    folder: Path = open_store(resolve()).folder / "aot" / "packages" / hashlib.sha256(digests.encode()).hexdigest()
    library: Path = next(folder / name for name in facts["files"] if name.endswith(".so"))
    whole = all(
        (folder / n).is_file() and (folder / n).stat().st_size == size for n, (size, _) in facts["files"].items()
    )
    if whole:
        return library
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder.parent) as temporary,
        zipfile.ZipFile(path) as archive,
    ):
        root = archive.namelist()[0].split("/")[0]
        folder.mkdir(exist_ok=True)
        for name in facts["files"]:
            out = Path(temporary) / name
            with archive.open(f"{root}/{LIBRARY_FOLDER}{model}/{name}") as source, out.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            os.replace(out, folder / name)
    return library


@dataclass(frozen=True)
class _Shared:
    """Weights by name, and the tensors that own their memory."""

    views: dict[str, torch.Tensor]
    owners: tuple[torch.Tensor, ...]


def _shared_weights(archive: zipfile.ZipFile, model: str) -> _Shared | None:
    """Return the weights that the models of a package share, in the form in which torch stores them."""
    root = archive.namelist()[0].split("/")[0]
    config = f"{root}/{LIBRARY_FOLDER}{model}/weights_config.json"
    if config not in archive.namelist():
        return None
    table = json.loads(archive.read(config))
    identity = (str(archive.filename), os.stat(str(archive.filename)).st_mtime_ns)
    files = dict.fromkeys(file for file, *_ in table.values())
    tensors = {file: _tensor(archive, f"{root}/{WEIGHTS_FOLDER}{file}", identity) for file in files}
    views = {name: tensors[file].as_strided(n, s, offset) for name, (file, n, s, offset) in table.items()}
    return _Shared(views, tuple(tensors.values()))


_held: weakref.WeakValueDictionary[tuple[str, int, str], torch.Tensor] = weakref.WeakValueDictionary()


def _tensor(archive: zipfile.ZipFile, name: str, identity: tuple[str, int]) -> torch.Tensor:
    """Return a tensor of a package; the models that this process has loaded from the package share it."""
    key = (*identity, name)
    tensor = _held.get(key)
    if tensor is None:
        loaded: torch.Tensor = torch.load(io.BytesIO(archive.read(name)), weights_only=True)
        tensor = _held[key] = loaded
    return tensor


def _recompiled(path: Path, model: str) -> AotModel:
    with manifest.readable(path), zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
        program = torch.export.load(io.BytesIO(archive.read(f"{root}/{PROGRAMS}{model}.pt2")))
    return AotModel(Path(aot_compile(program)), f"{path}:{model}, compiled again")


def _result(value: torch.Tensor | None, kind: str) -> torch.Tensor | float | None:
    if kind == "none":
        return None
    return value if kind == "tensor" or value is None else value.item()
