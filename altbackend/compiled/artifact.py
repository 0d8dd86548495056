"""The compiled artifact of a graph as data: program texts, their constants, and facts about running them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

import torch

from altbackend.lazy_dataclass import dataclass

from ..compile_pool.cuda import Job
from ..runtime.cpp_host import HostForm
from ..runtime.layouts import Layouts
from .replay import Facts


@dataclass(frozen=True)
class HostText:
    """A host program in C++. `steps`: its runs of kernels and library calls; of the former there are `segments`."""

    text: str
    form: HostForm
    segments: int
    steps: int


@dataclass(frozen=True)
class Code:
    """A compiled graph whose kernels remain to be built and whose host program `python` remains to be loaded.

    `cpp` is the translation unit of the CPU kernels, or "". `jobs` holds a Triton job per launch on a GPU.
    `constants` is the host program's `const`: tensors, and call targets that torch.ops has no name for.
    `names_lines` says whether errors of a call can name lines of the user. `recording` is None on a CPU.

    `weight_prologue`, if any, takes the graph's inputs numbered `prologue_inputs`. The host program takes the inputs
    numbered `main_inputs`, then the results of the prologue. `subgraphs` are called by library calls. `layouts`
    holds the traced strides of parameters where torch does not guard them. `host` is the host program in C++, if any.
    """

    device: torch.device
    python: str
    kernels: int
    library_calls: int
    cpp: str = ""
    jobs: tuple[Job, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    names_lines: bool = False
    recording: Facts | None = None
    main_inputs: tuple[int, ...] = ()
    prologue_inputs: tuple[int, ...] = ()
    weight_prologue: torch.fx.GraphModule | None = None
    subgraphs: tuple[Subgraph, ...] = ()
    layouts: Layouts = ()
    host: HostText | None = None

    def with_subgraphs(self) -> Iterator[Code]:
        """Yield this code and that of all subgraphs, nested ones included."""
        yield self
        for s in self.subgraphs:
            yield from s.code.with_subgraphs()

    def kernel_text(self) -> str:
        """Return the text of the kernels, each kernel once."""
        return self.cpp or "\n".join(dict.fromkeys(j.source for j in self.jobs))


@dataclass(frozen=True)
class Subgraph:
    """A compiled graph that library calls of another take. `const` holds it under each of `names`."""

    names: tuple[str, ...]
    code: Code
