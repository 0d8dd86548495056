"""A compiled graph as data: texts, what they name, and what must be known to run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compile_pool.cuda import Job
from ..runtime.layouts import Layouts
from .replay import Facts


@dataclass(frozen=True)
class Code:
    """All that is left to do is to build the kernels and to load the host program `python`.

    `cpp`: translation unit of a CPU's kernels, "" without one. `jobs`: machine code per launch on a GPU. `bound`: what
    the host program finds in `const`: constants, and call targets that torch.ops has no name for. `names_lines`: errors
    that a call can raise name lines of the user. `recording`: on a GPU.

    `prologue`, if any, takes the inputs numbered `watched`; the host program takes those numbered `kept`, then what the
    prologue returned. `bodies`: graphs that library calls take. `layouts`: of parameters, where torch guards none.
    """

    device: torch.device
    python: str
    kernels: int
    library_calls: int
    cpp: str = ""
    jobs: tuple[Job, ...] = ()
    bound: Mapping[str, Any] = field(default_factory=dict)
    names_lines: bool = False
    recording: Facts | None = None
    kept: tuple[int, ...] = ()
    watched: tuple[int, ...] = ()
    prologue: torch.fx.GraphModule | None = None
    bodies: tuple[Body, ...] = ()
    layouts: Layouts = ()

    def whole(self) -> Iterator[Code]:
        """This code and that of all bodies, theirs included."""
        yield self
        for b in self.bodies:
            yield from b.code.whole()

    def kernel_text(self) -> str:
        """The kernels' text, each once."""
        return self.cpp or "\n".join(dict.fromkeys(j.source for j in self.jobs))


@dataclass(frozen=True)
class Body:
    """A graph that library calls of another take: it is in `const` under each of its names, taking its operands."""

    names: tuple[str, ...]
    code: Code
