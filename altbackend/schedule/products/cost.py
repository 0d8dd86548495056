"""Predicted times of matrix products on a GPU, in microseconds: the library's, the templates', a separate kernel's.

A product runs in waves of one tile per multiprocessor: `start + waves * (per_wave + per_term * depth)`, not faster than
the device's sustained rate. Of few results with long sums the library computes parts of the sums side by side (split
K), at a time near that of the arithmetic or of reading the operands. The constants are fitted to times measured on one
H200 with `benchmarks.matmul_fit`, 16-bit operands, calls in a row on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...config.options import Config
from ...ir import expr as ex
from ...ir import value as va
from ...ir.loops import Program
from ..deps import Deps
from ..loop_mapping import Refusal
from ..tiling.gpu.pressure import alive_at_once
from .epilogue import Candidate, Choose
from .matmul import PRODUCT, Matmul, Tiles, fits

CAPABILITY = 90  # of the GPU that the constants are fitted to; others take templates by measurement only
MULTIPROCESSORS = 132
BYTES_PER_US = 4.2e6
LAUNCH_US = 2.0
FLOPS_PER_US = 760e6  # sustained, 16-bit operands
GAIN = 0.9  # of the separate kernels' time, below which a template is taken
SAVED_US = 20.0  # what a template must save a call: it takes the compiler seconds, where another kernel takes tenths
SPLIT_START_US, SPLIT_SHARE = 8.5, 0.9  # before the parts of sums, and of the bound by arithmetic or memory reached
# Values of an epilogue's tiles per thread, beyond which the compiler keeps some in memory. It computes several results
# at a time, not value by value, so that about half of them need a register of the 255.
MOST_VALUES = 320
EPILOGUE_US = 0.1  # a wave of 128x128 tiles, per float addition of the epilogue


@dataclass(frozen=True)
class Rate:
    """Times of tiles of `rows` x `columns`: before the first, each, and each per term of the sums; in microseconds."""

    rows: int
    columns: int
    start: float
    per_wave: float
    per_term: float


LIBRARY = Rate(128, 256, -6.6, 4.564, 0.00869)
TEMPLATES: dict[Tiles, Rate] = {
    Tiles(128, 128, 64, 8, 4, persistent=True, descriptors=True): Rate(128, 128, 3.14, 0.769, 0.00614),
    Tiles(128, 256, 64, 8, 3): Rate(128, 256, -0.9, -0.245, 0.01468),
    Tiles(128, 128, 64, 8, 4): Rate(128, 128, -0.36, 0.141, 0.00839),
    Tiles(128, 128, 64, 4, 3): Rate(128, 128, 0.27, -0.186, 0.00782),
    Tiles(64, 128, 64, 4, 4): Rate(64, 128, 0.71, 0.033, 0.00464),
    Tiles(64, 64, 64, 4, 4): Rate(64, 64, -0.07, -0.068, 0.0032),
}
# what max_autotune measures: these, and other sizes, warps and pipelines
SEARCH: tuple[Tiles, ...] = (
    *TEMPLATES,
    Tiles(128, 128, 64, 8, 3),
    Tiles(128, 128, 64, 4, 4),
    Tiles(128, 128, 32, 4, 5),
    Tiles(128, 256, 64, 8, 4),
    Tiles(64, 256, 64, 4, 4),
    Tiles(64, 128, 64, 4, 3),
    Tiles(128, 64, 64, 4, 4),
    Tiles(64, 64, 64, 4, 5),
    Tiles(128, 128, 64, 8, 4, persistent=True),
    Tiles(128, 256, 64, 8, 3, persistent=True),
    Tiles(128, 256, 64, 8, 3, persistent=True, descriptors=True),
    Tiles(128, 256, 64, 8, 4, persistent=True, descriptors=True),
    Tiles(128, 128, 64, 4, 3, persistent=True, descriptors=True),
    Tiles(128, 128, 64, 4, 3, descriptors=True),
    Tiles(128, 256, 64, 8, 3, descriptors=True),
)


@dataclass(frozen=True)
class Prediction:
    """Microseconds of the library call followed by the reader's kernel, and of one kernel of the best `tiles`."""

    separate: float
    fused: float
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.fused:.0f} us predicted, {self.separate:.0f} us apart"


def waves(tiles: int) -> float:
    """How many tiles a multiprocessor computes; of many, the last wave overlaps with the one before."""
    return -(-tiles // MULTIPROCESSORS) if tiles < 8 * MULTIPROCESSORS else tiles / MULTIPROCESSORS


def product_us(m: Matmul, rate: Rate) -> float:
    """The product alone. float32 operands as TF32 take twice the time of 16 bits."""
    tiles = m.batch * -(-m.rows // rate.rows) * -(-m.columns // rate.columns)
    slow = 2 if m.dtype == torch.float32 else 1
    return max(
        rate.start + waves(tiles) * (rate.per_wave + slow * rate.per_term * m.depth), slow * m.flops / FLOPS_PER_US
    )


def library_us(m: Matmul) -> float:
    """The library's product alone, in tiles of the whole sums or of parts of them."""
    operands = m.batch * m.depth * (m.rows + m.columns) * m.dtype.itemsize
    bound = max((2 if m.dtype == torch.float32 else 1) * m.flops / FLOPS_PER_US, operands / BYTES_PER_US)
    return min(product_us(m, LIBRARY), SPLIT_START_US + bound / SPLIT_SHARE)


def room_for(tiles: Tiles, alive: float) -> bool:
    """Whether a thread's registers hold what an epilogue keeps: `alive` numbers for each of its results."""
    return alive * tiles.rows * tiles.columns / (32 * tiles.warps) <= MOST_VALUES


@dataclass(frozen=True)
class Model:
    """Chooses without measuring, for a device whose programs have `shared` bytes of shared memory.

    `always`: the best tiles, whatever the library would take.
    """

    shared: int
    always: bool = False

    def choose(self, p: Program, deps: Deps, c: Candidate) -> tuple[Tiles, str] | Refusal:
        """Tiles where one kernel is predicted to be clearly faster."""
        if c.matmul.vectors and not self.always:
            return Refusal(c.matmul.vectors)
        found = self.predict(p, deps, c)
        if isinstance(found, Refusal) or self.always:
            return found if isinstance(found, Refusal) else (found.tiles, f"matmul_templates='on': {found}")
        if found.fused > min(GAIN * found.separate, found.separate - SAVED_US):
            return Refusal(f"no clear gain: {found}")
        return found.tiles, str(found)

    def predict(self, p: Program, deps: Deps, c: Candidate) -> Prediction | Refusal:
        m = c.matmul
        fitting = [t for t in TEMPLATES if fits(p, deps.writers, m, t, self.shared)]
        if not fitting:
            return Refusal(f"no tiles fit in {self.shared} bytes of shared memory")
        alive = alive_at_once(c.fused.mapped, PRODUCT)
        roomy = [t for t in fitting if room_for(t, alive)]
        if not roomy and not self.always:
            return Refusal(f"its {alive:g} numbers for every result do not fit in the registers")
        own = {m.out, *c.reader.writes}
        others = sum(_bytes(p, b) for b in c.reader.reads - own)
        stored = sum(_bytes(p, b) for b in c.reader.writes)
        apart = library_us(m) + LAUNCH_US + (_bytes(p, m.out) + others + stored) / BYTES_PER_US
        work = sum(va.flops(q.value) for q in c.fused.mapped)
        epilogue = EPILOGUE_US * work * m.points / (MULTIPROCESSORS * 128 * 128) + others / BYTES_PER_US
        tiles = min(roomy or fitting, key=lambda t: product_us(m, TEMPLATES[t]))
        return Prediction(apart, product_us(m, TEMPLATES[tiles]) + epilogue, tiles)


def chooser(cfg: Config, shared: int, capability: int) -> Choose | None:
    """Who decides without measuring: nobody where templates are off, or the constants are of another kind of GPU."""
    if cfg.matmul_templates == "on":
        return Model(shared, always=True).choose
    return Model(shared).choose if cfg.matmul_templates == "auto" and capability == CAPABILITY else None


def _bytes(p: Program, b: str) -> int:
    held = p.buffers[b]
    return ex.bounds(held.numel)[1] * held.dtype.itemsize if not ex.syms_of(held.numel) else 0
