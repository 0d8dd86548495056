"""Time the library's convolutions of images in groups: plain, channels-last, and with zeros for wider groups.

    python -m benchmarks.groups [--dtypes float32,bfloat16] [--windows 3,5,1] [--widths 12,24] [--stride 1]
        [--training] [--seconds 60]

A row names the dtype, the window, the side of the image, the groups and their channels, and those of padded groups.
Then come the microseconds of each layout on the GPU, medians of three times four calls. With `--training`, a layout has
three: of the convolution and of both gradients. TF32 is allowed. `altbackend/aten/narrow_groups.py` has the rules that
such tables gave.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

T = torch.Tensor
FAST = (4, 8, 16, 32, 64, 128)  # channels of a group with kernels of tensor cores
GROUPS, WIDTHS = (2, 4, 8), (12, 24, 48, 6, 20, 40, 96, 112)
IMAGES = ((14, 4_000_000), (56, 8_000_000), (4, 8_000_000), (140, 24_000_000))  # sides, and elements of all images


@dataclass(frozen=True)
class Case:
    """A convolution of `batch` square images, with padding of half a window."""

    dtype: torch.dtype
    window: int
    side: int
    groups: int
    width: int
    batch: int
    stride: int

    @property
    def wide(self) -> int:
        """Return the channels of a padded group."""
        return next(n for n in FAST if n > self.width)


def cases(dtypes: list[torch.dtype], windows: list[int], widths: list[int], stride: int) -> Iterator[Case]:
    """Yield all cases; `widths`: channels of a group."""
    sizes = itertools.product(dtypes, windows, IMAGES, GROUPS, widths)
    for dtype, window, (side, elements), groups, width in sizes:
        batch = max(1, elements // (groups * width * side * side))
        yield Case(dtype, window, side, groups, width, batch, stride)


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU."""
    call()
    call()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 250)
    return statistics.median(times)


def times_of(c: Case, width: int, memory_format: torch.memory_format, training: bool) -> list[float]:
    """Return the times of a convolution, and in training of the gradients of its image and of its weight."""
    channels = c.groups * width
    x = torch.randn(c.batch, channels, c.side, c.side, device="cuda", dtype=c.dtype).to(memory_format=memory_format)
    w = torch.randn(channels, width, c.window, c.window, device="cuda", dtype=c.dtype).to(memory_format=memory_format)
    how = [c.stride] * 2, [c.window // 2] * 2, [1, 1], False, [0, 0], c.groups
    aten = torch.ops.aten
    calls: list[Callable[[], object]] = [lambda: aten.convolution(x, w, None, *how)]
    if training:
        g = torch.randn_like(aten.convolution(x, w, None, *how))
        calls.append(lambda: aten.convolution_backward(g, x, w, None, *how, [True, False, False]))
        calls.append(lambda: aten.convolution_backward(g, x, w, None, *how, [False, True, False]))
    return list(map(microseconds, calls))


def main() -> None:
    """Print a row for each case, until the time is over."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dtypes", default="float32,bfloat16")
    p.add_argument("--windows", default="3,5,1")
    p.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    p.add_argument("--stride", type=int, default=1)
    p.add_argument("--training", action="store_true")
    p.add_argument("--seconds", type=float, default=60)
    args = p.parse_args()
    torch.backends.cudnn.allow_tf32 = True
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    ends = time.monotonic() + args.seconds
    windows, widths = ([int(n) for n in text.split(",")] for text in (args.windows, args.widths))
    for c in cases(dtypes, windows, widths, args.stride):
        if time.monotonic() > ends:
            print("the time is over")
            return
        layouts = ((c.width, torch.contiguous_format), (c.width, torch.channels_last), (c.wide, torch.channels_last))
        rows = [times_of(c, width, memory_format, args.training) for width, memory_format in layouts]
        text = " | ".join(", ".join(f"{us:.0f}" for us in row) for row in rows)
        name = str(c.dtype).removeprefix("torch.")
        print(f"{name} {c.window}x{c.window} {c.side} | {c.groups}x{c.width} -> {c.wide} | {text}", flush=True)


if __name__ == "__main__":
    main()
