"""The device that kernels are scheduled for: the numbers of a CPU or a GPU on which schedules depend."""

from __future__ import annotations

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api

PROGRAMS_PER_SM = 8  # resident programs that hide memory latency
MOST_IN_L1 = 1 << 12  # elements of a row that may come from L1
LINE_FLOATS = 16  # float32 numbers in one cache line of 64 bytes


@dataclass(frozen=True)
class Cpu:
    """A CPU that runs `threads` threads.

    `vector_lanes`: float32 numbers in one vector. `l1`, `l2`: bytes of the data caches that one core has to itself.
    """

    threads: int
    vector_lanes: int = 16
    l1: int = 32 << 10
    l2: int = 1 << 20

    @property
    def parallelism(self) -> int:
        """Return how many kernel rows run at the same time."""
        return self.threads

    @property
    def scratch_bytes(self) -> int:
        """Return the most bytes that one row may keep in scratch between its loops."""
        return 8 * min(self.l2, 1 << 20)

    @property
    def stream_elements(self) -> int:
        """Return the elements from which on a row exceeds L1; the wait for memory then hides float64 additions."""
        return min(MOST_IN_L1, self.l1 // 8)

    @property
    def tile_side(self) -> int:
        """Return the side of a transposing tile in elements: a cache line of float32, at least one vector."""
        return max(LINE_FLOATS, self.vector_lanes)


@dataclass(frozen=True)
class Gpu:
    """A GPU with `sms` streaming multiprocessors.

    `registers` (32 bits each) and `threads_per_sm` count for one multiprocessor. `shared_memory`: bytes that one
    program may have. `l2`: bytes of the L2 cache. `capability`: compute capability, 90 for 9.0.
    """

    sms: int
    registers: int
    threads_per_sm: int
    shared_memory: int
    l2: int
    capability: int

    @property
    def parallelism(self) -> int:
        """Return the number of programs that fill the GPU."""
        return self.sms * PROGRAMS_PER_SM

    @property
    def row_limit(self) -> int:
        """Return the most elements of a row that one program keeps in registers: a quarter of those of an SM.

        Longer rows are read again by every pass.
        """
        return self.registers // 4

    @property
    def streaming_bytes(self) -> int:
        """Return the size from which a tensor read once pushes everything else out of L2 (64 MiB on an H200)."""
        return self.l2 * 16 // 15

    @property
    def cached_row_bytes(self) -> int:
        """Return the bytes of rows under way that L2 still holds when they are read again (24 MiB on an H200)."""
        return self.l2 * 2 // 5


Device = Cpu | Gpu

# The GPU on which this package's constants were measured; tests and tools schedule for it without a GPU.
H200 = Gpu(sms=132, registers=65536, threads_per_sm=2048, shared_memory=232448, l2=60 << 20, capability=90)


@dataclass(frozen=True)
class ScheduleContext:
    """A device, and whether kernels may use `fast_math`: functions whose error a rounding to 16 bits hides."""

    device: Device
    fast_math: bool = True


def read_device(device: torch.device, threads: int | None = None) -> Device:
    """Return the numbers that torch reports for `device`; a CPU runs `threads` threads, by default torch's number."""
    if device.type == "cuda":
        return Gpu(**torch_api.cuda_properties(device))
    return Cpu(threads or torch.get_num_threads(), **torch_api.cpu_properties())
