"""Predict times of matrix products on a GPU in microseconds: by the library, by templates, by a separate kernel.

A product runs in waves of one tile per multiprocessor: `start + waves * (per_wave + per_term * depth)`, not faster than
the device's sustained rate. For few results with long sums the library computes parts of the sums in parallel (split
K). This takes about the time of the arithmetic, or of reading the operands. The constants are fitted to times measured
on one H200 with `benchmarks.matmul_fit`, 16-bit operands, calls in a row on one stream.
"""

from __future__ import annotations

import torch

from altbackend.lazy_dataclass import dataclass

from ...config.options import Config
from ...ir import expr as ex
from ...ir import value as va
from ...ir.loops import Program
from ...ir.ops import LOW_PRECISION
from ..deps import Deps
from ..device import Gpu
from ..loop_mapping import Refusal
from ..tiling.gpu.pressure import alive_at_once
from .epilogue import Candidate, Choose
from .matmul import PRODUCT, Matmul, Tiles, fits

CAPABILITY = 90  # of the GPU to which the constants are fitted; others take templates by measurement only
BYTES_PER_US = 4.2e6
LAUNCH_US = 2.0
FLOPS_PER_US = 760e6  # sustained, 16-bit operands
# depth and width from which times were measured: four million rows by 16x16 took 7 times as long as the library
LEAST_SIDE = 64
GAIN = 0.9  # a template runs where it takes less than this part of the separate kernels' time
SAVED_US = 20.0  # a template must save so much a call: it compiles for seconds, another kernel for tenths
SPLIT_START_US, SPLIT_SHARE = 8.5, 0.9  # a constant, and the part that is reached of the bound by arithmetic or memory
# Values of an epilogue's tiles per thread from which the compiler spills registers. It computes several results at a
# time, not value by value, so that about half of the values need one of the 255 registers.
MOST_VALUES = 320
EPILOGUE_US = 0.1  # a wave of 128x128 tiles, per float addition of the epilogue


@dataclass(frozen=True)
class Rate:
    """Microseconds of tiles of `rows` x `columns`: a constant, for each wave, and for each term of the sums."""

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
# max_autotune measures these, and other sizes, warps and pipelines
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
    """Microseconds of the library call and the reader's kernel (`separate`), and of one kernel of the best `tiles`."""

    separate: float
    fused: float
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.fused:.0f} us predicted, {self.separate:.0f} us apart"


def waves(tiles: int, sms: int) -> float:
    """Return how many tiles each of `sms` multiprocessors computes; of many, the last two waves overlap."""
    return -(-tiles // sms) if tiles < 8 * sms else tiles / sms


def product_us(m: Matmul, rate: Rate, sms: int) -> float:
    """Return the microseconds of the product alone. float32 operands as TF32 take twice the time of 16 bits."""
    tiles = m.batch * -(-m.rows // rate.rows) * -(-m.columns // rate.columns)
    slow = 2 if m.dtype == torch.float32 else 1
    return max(
        rate.start + waves(tiles, sms) * (rate.per_wave + slow * rate.per_term * m.depth), slow * m.flops / FLOPS_PER_US
    )


def library_us(m: Matmul, sms: int) -> float:
    """Return the microseconds of the library's product alone, in tiles of complete sums or of parts of them."""
    operands = m.batch * m.depth * (m.rows + m.columns) * m.dtype.itemsize
    bound = max((2 if m.dtype == torch.float32 else 1) * m.flops / FLOPS_PER_US, operands / BYTES_PER_US)
    return min(product_us(m, LIBRARY, sms), SPLIT_START_US + bound / SPLIT_SHARE)


def room_for(tiles: Tiles, alive: float) -> bool:
    """Return whether a thread's registers hold an epilogue's values: `alive` numbers for each of its results."""
    return alive * tiles.rows * tiles.columns / (32 * tiles.warps) <= MOST_VALUES


@dataclass(frozen=True)
class Model:
    """Chooses tiles for a GPU without measuring. `always`: take the best tiles, even where the library is faster."""

    device: Gpu
    always: bool = False

    def choose(self, p: Program, deps: Deps, c: Candidate) -> tuple[Tiles, str] | Refusal:
        """Return the tiles of one kernel where it is predicted to be clearly faster, and the reason; else a refusal."""
        if c.matmul.vectors and not self.always:
            return Refusal(c.matmul.vectors)
        prediction = self.predict(p, deps, c)
        if isinstance(prediction, Refusal):
            return prediction
        if self.always:
            return prediction.tiles, f"matmul_templates='on': {prediction}"
        if c.matmul.dtype not in LOW_PRECISION:
            return Refusal(f"known are times of 16-bit operands; max_autotune measures others ({prediction})")
        if min(c.matmul.depth, c.matmul.columns) < LEAST_SIDE:
            return Refusal(f"its depth and width are not known to suit tiles of {LEAST_SIDE}: {prediction}")
        if prediction.fused > min(GAIN * prediction.separate, prediction.separate - SAVED_US):
            return Refusal(f"no clear gain: {prediction}")
        return prediction.tiles, str(prediction)

    def predict(self, p: Program, deps: Deps, c: Candidate) -> Prediction | Refusal:
        """Return the predicted times of a candidate, or a refusal where no tiles fit."""
        m, sms = c.matmul, self.device.sms
        fitting = [t for t in TEMPLATES if fits(p, deps.writers, m, t, self.device.shared_memory)]
        if not fitting:
            return Refusal(f"no tiles fit in {self.device.shared_memory} bytes of shared memory")
        alive = alive_at_once(c.fused.mapped, PRODUCT)
        roomy = [t for t in fitting if room_for(t, alive)]
        if not roomy and not self.always:
            return Refusal(f"its {alive:g} numbers for every result do not fit in the registers")
        others = sum(_bytes(p, b) for b in c.reader.reads - {m.out, *c.reader.writes})
        stored = sum(_bytes(p, b) for b in c.reader.writes)
        separate = library_us(m, sms) + LAUNCH_US + (_bytes(p, m.out) + others + stored) / BYTES_PER_US
        work = sum(va.flops(q.value) for q in c.fused.mapped)
        epilogue = EPILOGUE_US * work * m.points / (sms * 128 * 128) + others / BYTES_PER_US
        tiles = min(roomy or fitting, key=lambda t: product_us(m, TEMPLATES[t], sms))
        return Prediction(separate, product_us(m, TEMPLATES[tiles], sms) + epilogue, tiles)


def chooser(cfg: Config, device: Gpu) -> Choose | None:
    """Return the choice without measuring; None where templates are off, or the constants are of another GPU."""
    if cfg.matmul_templates == "on":
        return Model(device, always=True).choose
    return Model(device).choose if cfg.matmul_templates == "auto" and device.capability == CAPABILITY else None


def _bytes(p: Program, b: str) -> int:
    buffer = p.buffers[b]
    return ex.bounds(buffer.numel)[1] * buffer.dtype.itemsize if not ex.syms_of(buffer.numel) else 0
