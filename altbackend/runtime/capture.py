"""Capture of a call's GPU work as one CUDA graph, on a stream of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..compat.torch_api import unannotated, without_gc
from .boxed import BoxedCall, Values
from .cuda import empty_cuda

Replay = Callable[[], None]
Result = TypeVar("Result")


class CudaCapture:
    """Records calls on one device. Replays are ordered one after the other, also across streams."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.last: torch.cuda.Stream | None = None
        self.anchor: torch.cuda.CUDAGraph | None = None

    @functools.cached_property
    def side(self) -> torch.cuda.Stream:
        """Return the stream that records: a device's default stream cannot."""
        return unannotated(torch.cuda.Stream)(self.device)

    def pool(self) -> object:
        """Return a new memory pool that neither other pools nor eager code use."""
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def shared(self) -> object:
        """Return the pool of graphs that leave nothing in it between calls."""
        pool = self.pool()
        self.anchor = self._smallest(pool)  # torch frees a pool with its last graph
        return pool

    def busy(self) -> bool:
        """Return whether the current stream is already recording."""
        return torch.cuda.is_current_stream_capturing()

    def empty(self, t: torch.Tensor) -> torch.Tensor:
        """Return memory like `t`'s from the general allocator, outside every pool."""
        return empty_cuda(tuple(t.size()), t.stride(), t.dtype)

    def record(self, call: BoxedCall, args: list[object], pool: object) -> tuple[Replay, Values]:
        """Record `call(args)` without running it. Return the function that replays it, and its results in the pool.

        Errors of the call and the driver are raised, and nothing stays recorded.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        try:
            # freeing a collected tensor or graph would make driver calls that a recording does not allow
            with torch.cuda.stream(self.side), without_gc():
                outputs = _capture(graph, lambda: call(args), pool)
        except BaseException:
            self._smallest(None)
            raise
        current.wait_stream(self.side)
        return functools.partial(self._replay, graph), outputs

    def _smallest(self, pool: object) -> torch.cuda.CUDAGraph:
        """Return a graph of one kernel. Recording it also resets torch's generator after a failed recording."""
        graph, t = torch.cuda.CUDAGraph(), torch.empty(1, device=f"cuda:{self.device}")
        with torch.cuda.stream(self.side), without_gc():
            _capture(graph, t.zero_, pool)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last != current:
            current.wait_stream(self.last)
        graph.replay()
        self.last = current


def _capture(graph: torch.cuda.CUDAGraph, work: Callable[[], Result], pool: Any) -> Result:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = work()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is invalid, and the first error says why
            graph.capture_end()
        raise
    graph.capture_end()
    return result


@functools.cache
def of_device(device: int) -> CudaCapture:
    """Return the only `CudaCapture` of a device."""
    return CudaCapture(device)
