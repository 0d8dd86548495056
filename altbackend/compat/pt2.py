"""Names of torch's package format and of its runner of libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch.export.pt2_archive import _package
from torch.export.pt2_archive._package_weights import TensorProperties, Weights

LIBRARY_FOLDER = "data/aotinductor/"
WEIGHTS_FOLDER = "data/weights/"
EXTRA_FOLDER = "extra/"


def write_package(
    path: str | os.PathLike[str],
    files: Mapping[str, Sequence[str]],
    shared: Mapping[str, Mapping[str, torch.Tensor]],
    extra: Mapping[str, str],
) -> None:
    """Write a package: the files of each model, weights that models share by name, and further texts.

    Tensors of `shared` that are one storage lie in the package once.
    """
    contents: dict[str, list[str | Weights]] = {name: list(paths) for name, paths in files.items()}
    for name, weights in shared.items():
        contents[name].append(Weights({k: (t, TensorProperties(t)) for k, t in weights.items()}))
    _package.package_pt2(os.fspath(path), aoti_files=contents, extra_files=dict(extra))


class Runner:
    """Runs a library through torch's own runner of the container interface, on "cpu" or on a GPU, "cuda:0"."""

    def __init__(self, library: Path, device: str = "cpu") -> None:
        aoti: ModuleType = torch._C._aoti
        if device == "cpu":
            self.runner = aoti.AOTIModelContainerRunnerCpu(str(library), 1)
        else:
            self.runner = aoti.AOTIModelContainerRunnerCuda(str(library), 1, device)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model on its tensor inputs. Raise RuntimeError."""
        results: list[torch.Tensor] = self.runner.run(list(inputs))
        return results

    def update(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        inactive: bool = False,
        complete: bool = False,
        shared: bool = False,
    ) -> None:
        """Replace weights, in copies or in the caller's memory (`shared`). Raise RuntimeError."""
        self.runner.update_constant_buffer(dict(weights), inactive, complete, shared)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the active weights by name; they stay the library's. Raise RuntimeError."""
        return dict(self.runner.extract_constants_map(False))

    def swap(self) -> None:
        """Make the inactive set of weights the active one. Raise RuntimeError."""
        self.runner.swap_constant_buffer()

    def specs(self) -> tuple[str, str]:
        """Return the trees of arguments and results as text."""
        arguments, results = self.runner.get_call_spec()
        return arguments, results
