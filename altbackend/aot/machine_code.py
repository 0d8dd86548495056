"""Machine code of a library's kernels on GPUs: the architectures that it is made for, and where it lies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..compile_pool import cuda as compile_cuda
from ..compile_pool.cuda import Job
from ..config.options import Config
from ..errors import BadOptionValue
from ..runtime.cuda import Cubin

_ARCHITECTURE = re.compile(r"(\d+)\.(\d)(\+PTX)?")
ONE_ALONE = 90  # from 9.0 on, Triton's code runs on its own architecture alone
ALIGN = 64  # bytes


@dataclass(frozen=True)
class Architecture:
    """An architecture by its compute capability, 90 for 9.0. `ptx`: text that the driver compiles for newer GPUs."""

    capability: int
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.capability // 10}.{self.capability % 10}" + ("+PTX" if self.ptx else "")


def architectures(cfg: Config, device: torch.device) -> tuple[Architecture, ...]:
    """Return the architectures that option `aot_architectures` names, or that of the GPU. Raise BadOptionValue."""
    if not cfg.aot_architectures:
        return (Architecture(int(torch_api.cuda_properties(device)["capability"])),)
    selected: list[Architecture] = []
    for word in re.split(r"[;,\s]+", cfg.aot_architectures.strip()):
        match = _ARCHITECTURE.fullmatch(word)
        capability = 10 * int(match[1]) + int(match[2]) if match else 0
        if match is None or not 70 <= capability < 200:
            raise BadOptionValue(
                "aot_architectures", cfg.aot_architectures, f"{word!r} is no architecture: name some, as in 8.0+PTX;9.0"
            )
        if match[3] and capability >= ONE_ALONE:
            reason = f"code for {word} runs on that architecture alone: add PTX to an older one, as in 8.0+PTX;9.0"
            raise BadOptionValue("aot_architectures", cfg.aot_architectures, reason)
        selected.append(Architecture(capability))
        if match[3]:
            selected.append(Architecture(capability, ptx=True))
    return tuple(dict.fromkeys(selected))


@dataclass(frozen=True)
class MachineCode:
    """The machine code of kernels, in one block of bytes: (offset, shared memory) for each job and architecture."""

    architectures: tuple[Architecture, ...]
    places: Mapping[Job, tuple[tuple[int, int], ...]]
    block: bytes


NONE = MachineCode((), {}, b"")


def build(jobs: Sequence[Job], wanted: Sequence[Architecture], cfg: Config) -> MachineCode:
    """Compile kernels for all architectures, side by side. Raise CompilerFailed or Unsupported."""
    distinct = tuple(dict.fromkeys(jobs))
    futures = {
        (job, a): compile_cuda.submit(replace(job, capability=a.capability, ptx=a.ptx), cfg)
        for job in distinct
        for a in wanted
    }
    block = bytearray()
    places = {}
    for job in distinct:
        images = []
        for a in wanted:
            cubin: Cubin = futures[job, a].result()
            images.append((len(block), cubin.shared))
            content = cubin.code + b"\0"  # the driver reads PTX up to its end
            block += content.ljust(-(-len(content) // ALIGN) * ALIGN, b"\0")
        places[job] = tuple(images)
    return MachineCode(tuple(wanted), places, bytes(block))
