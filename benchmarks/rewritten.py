"""Time library calls on a GPU beside the calls that passes put in their place.

    python -m benchmarks.rewritten {images,channels,filters,products} [--dtypes bfloat16,float32] [--most N]

`images` has convolutions of small images, plain, channels-last, and as products of whole images. A product's time is
without the kernels around it. `channels` has convolutions with channels and filters as they are, in both layouts. Its
last column is channels-last with both as multiples of eight. Each has three times: of the result and of both gradients.
`filters` has few channels and filters by the library and compiled by us, plain and channels-last. Each has two times,
of the result and of the weight's gradient. `products` has batches of small matrices with rows as they are, and padded
to 32 bytes. Times are microseconds, medians of three times four calls; TF32 is allowed. `--most` limits the elements of
an operand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from altbackend import alt

from .groups import microseconds

T = torch.Tensor
Function = Callable[[], object]
Timer = Callable[[Function], float]
VECTOR, SECTOR = 8, 32  # channels of fast convolutions, bytes that rows are padded to
FORMATS = (torch.contiguous_format, torch.channels_last)


class Convolution(NamedTuple):
    """Channels, filters, the sides of the window and of the image, and the stride; padding is half a window."""

    channels: int
    filters: int
    window: int
    side: int
    stride: int = 1


IMAGES = tuple(
    Convolution(c, k, window, side)
    for c, k, side, window in (
        *((3, 16, 4, 7), (16, 32, 4, 7), (192, 48, 5, 5), (32, 32, 4, 3), (128, 128, 4, 3), (64, 64, 7, 3)),
        *((3, 16, 7, 3), (16, 16, 7, 3), (96, 96, 3, 5), (256, 64, 2, 3), (16, 16, 5, 5), (8, 64, 6, 5)),
        *((64, 64, 7, 5), (3, 64, 8, 3), (3, 64, 8, 7), (64, 64, 7, 7), (32, 64, 10, 7), (512, 512, 2, 3)),
    )
)
CHANNELS = tuple(
    Convolution(*sizes)
    for sizes in (
        *((3, 64, 7, 224, 2), (3, 32, 3, 224, 2), (3, 3, 3, 52), (3, 8, 3, 52), (3, 16, 5, 64), (3, 64, 3, 64)),
        *((4, 16, 3, 64), (6, 32, 3, 64), (12, 24, 3, 56), (20, 20, 3, 56), (10, 40, 5, 56), (8, 3, 3, 64)),
        *((64, 3, 3, 64), (30, 50, 3, 56), (9, 32, 3, 56), (36, 36, 3, 56)),
    )
)
FILTERS = tuple(
    Convolution(*sizes)
    for sizes in (
        *((3, 3, 3, 52), (3, 8, 3, 52), (3, 16, 3, 52), (4, 4, 3, 52), (6, 6, 3, 52), (8, 3, 3, 52), (2, 8, 3, 52)),
        *((16, 1, 3, 52), (1, 16, 3, 52), (3, 3, 3, 408), (3, 3, 5, 64), (3, 3, 7, 64), (3, 3, 1, 64), (16, 3, 1, 64)),
    )
)
PRODUCTS = (
    *((10, 128, 10), (9, 32, 9), (9, 16, 9), (17, 64, 17), (33, 64, 33), (50, 64, 50), (65, 64, 65), (100, 64, 99)),
    *((197, 64, 197), (250, 32, 250), (10, 9, 32), (33, 33, 64), (50, 50, 64), (197, 197, 64), (64, 50, 64)),
    *((10, 384, 10), (10, 10, 384), (10, 10, 64), (25, 25, 256), (7, 7, 128), (50, 50, 384), (3, 10, 384)),
)


class Setting(NamedTuple):
    """Hold where tensors are, their dtype, the most elements of an operand, and what times a call."""

    device: str
    dtype: torch.dtype
    most: int
    timer: Timer

    def random(self, *sizes: int) -> T:
        """Return random numbers."""
        return torch.randn(sizes, device=self.device, dtype=self.dtype)


def as_it_is(function: Function) -> Function:
    """Return a function that library calls compute."""
    return function


def compiled(function: Function) -> Function:
    """Return a function that generated kernels compute where our rules choose them."""
    wrapped: Function = torch.compile(function, backend=alt, dynamic=False)
    return wrapped


def convolved(
    s: Setting, c: Convolution, memory_format: torch.memory_format, wrap: Callable[[Function], Function] = as_it_is
) -> list[float]:
    """Return the times of a convolution and of the gradients of its image and of its weight."""
    batch = max(1, s.most // (c.channels * c.side**2))
    x = s.random(batch, c.channels, c.side, c.side).to(memory_format=memory_format)
    w = s.random(c.filters, c.channels, c.window, c.window).to(memory_format=memory_format)
    how = [c.stride] * 2, [c.window // 2] * 2, [1, 1], False, [0, 0], 1
    aten = torch.ops.aten
    g = torch.randn_like(aten.convolution(x, w, None, *how))
    masks = [True, False, False], [False, True, False]
    result = wrap(lambda: aten.convolution(x, w, None, *how))
    gradients = [wrap(lambda m=m: aten.convolution_backward(g, x, w, None, *how, m)) for m in masks]  # type: ignore[misc]
    return [s.timer(call) for call in (result, *gradients)]


def of_images(s: Setting) -> Iterator[str]:
    """Yield the lines of small images."""
    for c in IMAGES:
        batch, side = max(1, s.most // (c.channels * c.side**2)), c.side + 2 * (c.window // 2) - c.window + 1
        x, y = s.random(batch, c.channels * c.side**2), s.random(batch, c.filters * side**2)
        m = s.random(x.shape[1], y.shape[1])
        calls: tuple[Callable[[], object], ...] = (lambda: x @ m, lambda: y @ m.t(), lambda: x.t() @ y)  # noqa: B023
        columns = [*(convolved(s, c, f) for f in FORMATS), [s.timer(call) for call in calls]]
        yield _line(f"{batch} of {c.channels}x{c.side}x{c.side}, {c.filters} filters of {c.window}", columns)


def of_channels(s: Setting) -> Iterator[str]:
    """Yield the lines of numbers of channels."""
    for c in CHANNELS:
        wide = c._replace(channels=-(-c.channels // VECTOR) * VECTOR, filters=-(-c.filters // VECTOR) * VECTOR)
        columns = [*(convolved(s, c, f) for f in FORMATS)]
        more = s._replace(most=max(1, s.most // c.channels) * wide.channels)  # as many images
        columns.append(convolved(more, wide, torch.channels_last))
        yield _line(f"{c.channels} to {c.filters}, {c.window}x{c.window}, side {c.side}, stride {c.stride}", columns)


def of_filters(s: Setting) -> Iterator[str]:
    """Yield the lines of few channels and filters."""
    for c in FILTERS:
        torch.compiler.reset()
        times = [convolved(s, c, f, wrap) for wrap in (as_it_is, compiled) for f in FORMATS]
        name = f"{c.channels} to {c.filters}, {c.window}x{c.window}, side {c.side}"
        yield _line(name, [[result, weight] for result, _, weight in times])


def of_products(s: Setting) -> Iterator[str]:
    """Yield the lines of batched products."""
    unit = SECTOR // s.dtype.itemsize
    for rows, depth, width in PRODUCTS:
        batch = max(1, s.most // max(rows * depth, depth * width, rows * width))
        a, b = s.random(batch, rows, depth), s.random(batch, depth, width)
        deeper, wider = F.pad(a, (0, -depth % unit)), F.pad(b, (0, -width % unit, 0, -depth % unit))
        times = [s.timer(lambda a=a, b=b: a @ b), s.timer(lambda a=deeper, b=wider: a @ b)]  # type: ignore[misc]
        yield _line(f"{batch} of {rows}x{depth}x{width}", [[t] for t in times])


def _line(name: str, columns: Sequence[Sequence[float]]) -> str:
    return " | ".join([name, *(", ".join(f"{us:.0f}" for us in column) for column in columns)])


TABLES: dict[str, Callable[[Setting], Iterator[str]]] = {
    "images": of_images,
    "channels": of_channels,
    "filters": of_filters,
    "products": of_products,
}


def main() -> None:
    """Print a table for each dtype."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", choices=TABLES)
    p.add_argument("--dtypes", default="bfloat16,float32")
    p.add_argument("--most", type=int, default=8_000_000)
    args = p.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    for name in args.dtypes.split(","):
        for line in TABLES[args.table](Setting("cuda", getattr(torch, name), args.most, microseconds)):
            print(name, line, flush=True)


if __name__ == "__main__":
    main()
